"""Mutations of the JSON files of the package: each entry missing, of another type, out of range or without measure."""

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 1e308, 10**30, -(10**30), math.nan, math.inf, -math.inf),
    *("", "x", "exact", "logits", "torch.float32", "\ud800", "a\0b", "../../etc/passwd"),
    *([], [[]], [None], ["x"], [-1], [1 << 62, 4], [[[[0]]]], {}, {"x": 1}, {"kind": "x"}, {"name": []}),
)


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with one entry changed, and what was changed."""
    for path in _paths(value):
        *parents, key = path
        for change in _changes(_at(value, path)):
            changed = copy.deepcopy(value)
            parent = _at(changed, parents)
            if change is _MISSING:
                del parent[key]
            else:
                parent[key] = change
            yield f"{'.'.join(map(str, path))} -> {'missing' if change is _MISSING else repr(change)[:40]}", changed
        if isinstance(key, str):
            changed = copy.deepcopy(value)
            parent = _at(changed, parents)
            parent["\udcff" + key] = parent.pop(key)
            yield f"{'.'.join(map(str, path))} renamed", changed


def sampled(value: Any, count: int, seed: int = 0) -> list[tuple[str, Any]]:
    """Some of the mutations, which differ from seed to seed."""
    found = list(mutations(value))
    return random.Random(seed).sample(found, min(count, len(found)))


def damaged_texts(text: bytes) -> dict[str, bytes]:
    """The text of a JSON object, damaged as no writer of JSON would."""
    record = json.loads(text)
    first = next(iter(record), "x")
    double = text.rstrip()[:-1] + f', "{first}": null}}'.encode()
    return {
        "not UTF-8": text.replace(b'"', b'"\xff\xfe', 1),
        "a key twice": double,
        "cut": text[: len(text) // 2],
        "empty": b"",
        "null": b"null",
        "a list": b"[" + text + b"]",
        "UTF-16": text.decode().encode("utf-16"),
        "NaN": text.replace(b":", b': NaN, "x":', 1),
        "huge": text.replace(b":", b": " + b"9" * 5000 + b', "x":', 1),
    }


_MISSING = object()


def _changes(own: Any) -> Iterator[Any]:
    yield _MISSING
    yield from (value for value in VALUES if repr(value) != repr(own))
    if isinstance(own, bool):
        yield not own
    elif isinstance(own, int | float):
        yield from (-own, own + 1, own * 2, float(own), str(own), [own])
    elif isinstance(own, str):
        yield from (own + "x", own[:-1], [own])
    elif isinstance(own, list) and own:
        yield from (own[:-1], [*own, own[0]], own[::-1], own * 2, [own], dict(enumerate(map(str, own))))


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*before, key)
        yield from _paths(entry, (*before, key))


def _at(value: Any, path: Any) -> Any:
    for key in path:
        value = value[key]
    return value

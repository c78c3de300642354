"""JSON files of the package with one entry missing, of another type or out of range: usable, or one clear error."""

import copy
import functools
import json
import math
import operator
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import epk_gp as epk
from epk_gp.storage.files import PartialSums, checksum, checksum_json, checksummed_json, read_checksummed_json
from epk_gp.storage.schema import read_header
from loops import data, mlp, sgd
from stored_runs import record

COUNT = 60  # of each file; all of some 4000 were tried once
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 1e308, 10**30, -(10**30), math.nan, math.inf, -math.inf),
    *("", "x", "exact", "logits", "torch.float32", "\ud800", "a\0b", "../../etc/passwd"),
    *([], [[]], [None], ["x"], [-1], [1 << 62, 4], [[[[0]]]], {}, {"x": 1}, {"kind": "x"}, {"name": []}),
)


_MISSING, _RENAMED = object(), object()


def edits(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Every entry of a value, by its path, with each of its changes."""
    return [(path, change) for path, old in _entries(value) for change in _changes(old, path[-1])]


def edited(value: Any, path: tuple[Any, ...], change: Any) -> tuple[str, Any]:
    changed, key = copy.deepcopy(value), path[-1]
    parent = functools.reduce(operator.getitem, path[:-1], changed)
    if change in (_MISSING, _RENAMED):
        old = parent.pop(key)
        parent.update({"\udcff" + key: old} if change is _RENAMED else {})
    else:
        parent[key] = change
    done = "missing" if change is _MISSING else "renamed" if change is _RENAMED else repr(change)[:40]
    return f"{'.'.join(map(str, path))} -> {done}", changed


def damaged_texts(text: bytes) -> dict[str, bytes]:
    """The text of a JSON object, damaged as no writer of JSON would."""
    first = next(iter(json.loads(text)), "x")
    return {
        "not UTF-8": text.replace(b'"', b'"\xff\xfe', 1),
        "a key twice": text.rstrip()[:-1] + f', "{first}": null}}'.encode(),
        "cut": text[: len(text) // 2],
        "empty": b"",
        "null": b"null",
        "a list": b"[" + text + b"]",
        "UTF-16": text.decode().encode("utf-16"),
        "NaN": text.replace(b":", b': NaN, "x":', 1),
        "huge": text.replace(b":", b": " + b"9" * 5000 + b', "x":', 1),
    }


def _changes(old: Any, key: Any) -> list[Any]:
    own: list[Any] = []
    if isinstance(old, int | float):
        own = [-old, old + 1, old * 2, float(old), str(old), [old]]
    elif isinstance(old, str):
        own = [old + "x", old[:-1], [old]]
    elif isinstance(old, list) and old:
        own = [old[:-1], [*old, old[0]], old[::-1], old * 2, [old], dict(enumerate(map(str, old)))]
    of_key = [_MISSING, _RENAMED] if isinstance(key, str) else []
    return [*of_key, *(value for value in VALUES if repr(value) != repr(old)), *own]


def _entries(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*before, key), entry
        yield from _entries(entry, (*before, key))


def outcomes(file, load, count=COUNT):
    """How many mutations were read, and how many refused; any other error fails."""
    original = file.read_bytes()
    entries = read_checksummed_json(original, "")
    entries.pop("blake2b", None)
    chosen = random.Random(0).sample(edits(entries), count)
    contents = [(name, checksummed_json(changed)) for name, changed in (edited(entries, *edit) for edit in chosen)]
    read = refused = 0
    for name, content in [*contents, *damaged_texts(original).items()]:
        file.write_bytes(content)
        try:
            load()
            read += 1
        except (ValueError, FileNotFoundError):
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")
    return read, refused


def test_a_run_s_header(tmp_path):
    record(tmp_path / "run", steps=2)
    read, refused = outcomes(tmp_path / "run" / "run.json", lambda: read_header(tmp_path / "run"))
    assert read
    assert refused > COUNT / 3


@pytest.mark.slow
def test_a_run_s_header_and_what_it_is_opened_for(tmp_path):
    record(tmp_path / "run", steps=2)

    def use():
        run = epk.load_trajectory(tmp_path / "run", mlp())
        assert epk.attribute(run, run.inputs[:1]).samples.isfinite().all()

    outcomes(tmp_path / "run" / "run.json", use, COUNT // 4)


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_groups_of_a_header_are_refused_or_give_the_influence_of_before_or_no_certificate(tmp_path):
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), steps=2, folder=tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    entries = read_checksummed_json(file.read_bytes(), "")
    expected = epk.influence(epk.load_trajectory(tmp_path / "run", mlp()), X[:1]).values

    def use():
        effect = epk.influence(epk.load_trajectory(tmp_path / "run", mlp()), X[:1])
        if effect.certified:
            torch.testing.assert_close(effect.values, expected)

    for name, changed in (edited(entries["groups"], *edit) for edit in edits(entries["groups"])):
        if any(part in name for part in ("names -> []", "betas -> 'x'", "betas.1 -> None", "eps -> {}", "rule -> ''")):
            file.write_bytes(checksummed_json(entries | {"groups": changed}))
            with suppress(ValueError):
                use()


@pytest.fixture(scope="module", params=["exact", 64])
def saved_classifier(request, tmp_path_factory):
    """A folder with a classifier, and a function that loads it and compares what it says with what it said."""
    net, (X, _) = mlp(), data(20)
    y = X[:, :3].argmax(1)
    run = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    model = epk.UncertainClassifier(run, nodes=2, features=request.param).fit(X + 0.1, y)
    folder = tmp_path_factory.mktemp("classifier") / "model"
    model.save(folder)
    expected = said(model, X + 0.3)

    def use(**tolerance):
        actual = said(epk.UncertainClassifier.load(folder, mlp()), X + 0.3)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, **tolerance)

    return folder, use


def said(model, X):
    return model.predict_proba(X), model.uncertainty(X, 4).std, model.predict_set(X), model.predict(X)


def test_a_classifier_with_edited_entries_is_refused_or_predicts_as_before(saved_classifier):
    folder, use = saved_classifier
    file = folder / "classifier.json"
    original = file.read_bytes()
    _, refused = outcomes(file, lambda: use(rtol=1e-5, atol=1e-6))
    file.write_bytes(original)
    assert refused >= COUNT


def test_a_classifier_with_edited_tensors_is_refused_or_predicts_as_before(saved_classifier):
    """Scores and their labels are not computed again; what the process does not depend on may change."""
    folder, use = saved_classifier
    file, description = folder / "classifier.safetensors", folder / "classifier.json"
    tensors, entries = load(file.read_bytes()), read_checksummed_json(description.read_bytes(), "")
    del entries["tensor_blake2b"]
    read = []
    for name in tensors.keys() - {"scores", "score_labels"}:
        value = tensors[name]
        for change in (value + 1, value[:-1], value * math.nan, value.flip(0)):
            content = save(tensors | {name: change.contiguous()})
            file.write_bytes(content)
            described = entries | {"tensor_bytes": len(content)}
            described["tensor_blake2b"] = checksum(content, checksum_json(described))
            description.write_bytes(checksummed_json(described))
            with suppress(ValueError):
                use(rtol=1e-3, atol=1e-3)
                read.append(name)
    assert set(read) == tensors.keys() & {"targets", "process_targets"}


def test_a_checkpoint_s_manifest(tmp_path):
    PartialSums(tmp_path / "sums", "1")
    file = tmp_path / "sums" / "checkpoint.json"
    for name, content in damaged_texts(file.read_bytes()).items():
        if name == "UTF-16":  # which JSON may be
            continue
        file.write_bytes(content)
        with pytest.raises(ValueError, match="of this very computation"):
            PartialSums(tmp_path / "sums", "1")

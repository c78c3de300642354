"""Rows of tables that are saved one by one, so that a run that was stopped goes on and the others need not wait."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS_VARIABLE = "EPK_GP_ROWS"  # folder of saved rows; nothing is saved if it is not set
ONLY_VARIABLE = "EPK_GP_ROWS_ONLY"  # regular expression: other rows are read if they are saved, and else left out

WAITING = "not computed yet"  # why a row is left out that is neither saved nor asked for

Row = dict[str, Any]


def row_file(name: str, key: Row) -> Path | None:
    """Return the file of a row, whose name has the digest of everything on which the row depends."""
    folder = os.environ.get(ROWS_VARIABLE)
    if not folder:
        return None
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(folder) / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}-{digest}.json"


def saved_row(name: str, key: Row) -> Row | None:
    """Read a saved row."""
    file = row_file(name, key)
    return json.loads(file.read_text())["row"] if file is not None and file.is_file() else None


def asked_for(name: str) -> bool:
    """Return whether a row that is not saved should be computed."""
    return re.search(os.environ.get(ONLY_VARIABLE, ""), name) is not None


def save_row(name: str, key: Row, row: Row) -> None:
    """Save a row whole or not at all."""
    file = row_file(name, key)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"name": name, "key": key, "row": row}, allow_nan=False) + "\n")
        part.replace(file)


def row_of(name: str, key: Row, compute: Callable[[], Row]) -> Row | None:
    """Return a row: the saved one, or a computed one, or None if it is not asked for."""
    row = saved_row(name, key)
    if row is None and asked_for(name):
        row = compute()
        save_row(name, key, row)
    return row


def reasons_once(reasons: list[str]) -> list[str]:
    """List every reason why rows were left out once, and the number of those that are not computed yet."""
    waiting = sum(reason == WAITING for reason in reasons)
    return [
        *dict.fromkeys(reason for reason in reasons if reason != WAITING),
        *[f"{waiting} rows: {WAITING}"][:waiting],
    ]


def rounded(value: Any, digits: int = 5) -> Any:
    """Round the numbers of a row, so that many rows stay small."""
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value

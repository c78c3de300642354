"""Rows of the benchmark, saved one by one: a run that was stopped goes on, and tables can be written at any time."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WAITING = "not computed yet"

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """A folder of rows.

    Attributes:
        folder: The folder.
        only: Regular expression: rows that are not saved are computed if it is found in their name, else left out.
    """

    folder: Path
    only: str = ""

    def asked_for(self, name: str) -> bool:
        """Return whether a row that is not saved should be computed."""
        return re.search(self.only, name) is not None

    def saved(self, name: str, key: Row) -> Row | None:
        """Read a saved row."""
        file = self._file(name, key)
        return torch.load(file, weights_only=True) if file.is_file() else None

    def get(self, name: str, key: Row, compute: Callable[[], Row]) -> Row | None:
        """Return a row: the saved one, or a computed one, or None if it is not asked for.

        A row that says "failure" is not saved, because its reason may be gone the next time.
        """
        row = self.saved(name, key)
        if row is None and self.asked_for(name):
            row = compute()
            if "failure" in row:
                return row
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self._file(name, key)
            part = file.with_suffix(f".{os.getpid()}.part")
            torch.save(row, part)
            part.replace(file)
        return row

    def _file(self, name: str, key: Row) -> Path:
        """Return the file of a row, whose name has the digest of everything on which the row depends."""
        digest = hashlib.blake2b(json.dumps({"name": name, **key}, sort_keys=True).encode(), digest_size=6).hexdigest()
        return self.folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}-{digest}.pt"

"""Partial sums on disk: a killed computation resumes from its last save and gives the same bytes."""

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from torch import Tensor

import epk_gp
from epk_gp.core.step import tensor_bytes
from epk_gp.storage.files import atomic_write, checksum, open_tensors, tensor_file

SECONDS = 30.0  # between saves of an unfinished sum: a kill loses at most this, and a save takes far less
_MANIFEST = "checkpoint.json"


class PartialSums:
    """A folder with the partial sums of one computation, each with its number of terms."""

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str, *, is_durable: bool = True) -> None:
        """Open a new folder, or one with partial sums of the same computation.

        Args:
            folder: The folder; it is created if it does not exist.
            fingerprint: Fingerprint of everything that the result depends on.
            is_durable: Whether sums must survive a power failure; not needed if the folder is always removed.

        Raises:
            ValueError: The folder holds partial sums of another computation, or other files.
        """
        self.folder, self.identity, self.is_durable = Path(folder), fingerprint, is_durable
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest, content = self.folder / _MANIFEST, json.dumps({"identity": fingerprint}).encode()
        if manifest.is_file():
            if manifest.stat().st_size != len(content) or manifest.read_bytes() != content:
                raise ValueError(f"checkpoint {folder} must be of this very computation: it is of another.")
        elif any(self.folder.iterdir()):
            raise ValueError(f"checkpoint must be a new or empty folder: {self.folder} holds something.")
        else:
            atomic_write(manifest, content)
        self._last_save = time.monotonic()

    @property
    def should_save(self) -> bool:
        """Whether `SECONDS` have passed since the last save, so that an unfinished sum should be saved."""
        return time.monotonic() - self._last_save >= SECONDS

    def has(self, name: str) -> bool:
        """Return whether a partial sum was saved."""
        return self._file(name).is_file()

    def remove(self, names: Iterable[str]) -> None:
        """Delete partial sums if they exist."""
        for name in names:
            self._file(name).unlink(missing_ok=True)

    def remove_torn(self) -> None:
        """Delete incomplete files of killed writers."""
        for file in self.folder.glob("*.part"):
            file.unlink(missing_ok=True)

    def count(self, name: str) -> int:
        """Return the number of terms of a partial sum without reading its content; 0 if it was never saved.

        Raises:
            ValueError: The file is damaged.
        """
        if not self.has(name):
            return 0
        with self._opened(name) as stored:
            return int(stored.metadata()["count"])

    def load(self, name: str) -> tuple[dict[str, Tensor], int]:
        """Return a partial sum and its number of terms; no tensors and 0 if it was never saved.

        Raises:
            ValueError: The file is damaged.
        """
        if not self.has(name):
            return {}, 0
        with self._opened(name) as stored:
            metadata = stored.metadata()
            # Copies: the next save replaces the file, which Windows refuses while tensors are mapped from it.
            tensors = {key: stored.get_tensor(key).clone() for key in stored.keys()}  # noqa: SIM118
            if metadata["checksum"] != _checksum(tensors, metadata["count"]):
                raise ValueError("its content does not have the checksum that it was saved with")
            return tensors, int(metadata["count"])

    def save(self, name: str, tensors: dict[str, Tensor], count: int) -> None:
        """Replace a partial sum and its number of terms, atomically."""
        values = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        metadata = {"count": str(count), "checksum": _checksum(values, str(count)), "of": self._owner(name)}
        # a worker that was believed dead may still write the same sum
        writer = uuid4().hex[:8]
        atomic_write(self._file(name), tensor_file(values, metadata), writer=writer, is_durable=self.is_durable)
        self._last_save = time.monotonic()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        file = self._file(name)
        try:
            with open_tensors(file, str(file)) as stored:
                if stored.metadata()["of"] != self._owner(name):
                    raise ValueError("it is that of another computation or piece, or of another version")
                yield stored
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} must be a partial sum of this version: delete it ({error}).") from error

    def _owner(self, name: str) -> str:
        """Return the key that ties a file to its computation, its piece and the version of the package."""
        return checksum(self.identity.encode(), f" {name} {epk_gp.__version__}")

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _checksum(tensors: dict[str, Tensor], count: str) -> str:
    """Return a 32-bit checksum against damage; it takes a fifth of the time of a checksum that identifies sums."""
    value = zlib.crc32(count.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode(), value)
        value = zlib.crc32(tensor_bytes(tensor), value)
    return f"{value:08x}"

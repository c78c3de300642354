"""Partial sums on disk: a computation that was killed goes on where it last saved, to the same bytes."""

import json
import os
import time
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from epk_gp.storage.atomic_files import atomic_write

SECONDS = 30.0  # between saves of an unfinished sum


class PartialSums:
    """A folder of partial sums of one computation, each with a count of what it holds."""

    def __init__(self, folder: str | os.PathLike[str], identity: str) -> None:
        """Open a folder, new or of the same computation.

        Args:
            folder: Made if it is not there.
            identity: Digest of everything that the result depends on.

        Raises:
            ValueError: The folder belongs to another computation, or is none of ours.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "checkpoint.json"
        if note.is_file():
            found = _read_note(note)
            if found != identity:
                raise ValueError(
                    f"checkpoint {self.folder} must be of this very computation (run, points, rule, memory budget): it "
                    "is of another. Choose another folder, or delete this one."
                )
        elif any(self.folder.iterdir()):
            raise ValueError(
                f"checkpoint must be a new or empty folder: {self.folder} holds something. Choose another."
            )
        else:
            atomic_write(note, json.dumps({"identity": identity}).encode())
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time to save an unfinished sum again."""
        return time.monotonic() - self._last >= SECONDS

    def load(self, name: str) -> tuple[dict[str, Tensor], int]:
        """Read a partial sum and its count; nothing and 0 if there is none.

        Raises:
            ValueError: The file is damaged.
        """
        file = self.folder / f"{name}.safetensors"
        if not file.is_file():
            return {}, 0
        try:
            with safe_open(file, framework="pt") as stored:
                about = stored.metadata()
                return {key: stored.get_tensor(key) for key in stored.keys()}, int(about["count"])  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} must be a partial sum: it is damaged. Delete it, and its part starts anew."
            ) from error

    def save(self, name: str, tensors: dict[str, Tensor], count: int) -> None:
        """Replace a partial sum, atomically."""
        content = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        atomic_write(self.folder / f"{name}.safetensors", save(content, {"count": str(count)}))
        self._last = time.monotonic()


def _read_note(note: Path) -> object:
    try:
        found = json.loads(note.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found.get("identity") if isinstance(found, dict) else None

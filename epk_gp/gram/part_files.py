"""Parts of Gram blocks as files: written atomically, and verified when they are read."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.step import fingerprint_tensors
from epk_gp.distributed.job import Place
from epk_gp.gram.block_parts import GramPart, Share
from epk_gp.storage.files import atomic_write, checksum, open_tensors, tensor_file

_FORMAT = "epk_gp.gram_part.1"
_SUM, _INTEGRALS = "sum.", "of_rule."


@dataclass(frozen=True)
class StoredSums(Mapping[Place, Float[Tensor, "K n ..."]]):
    """The sums of a part on disk, each read, and verified, when it is asked for.

    Attributes:
        file: The file.
        checksums: Checksum by name of the tensor.
    """

    file: Path
    checksums: Mapping[str, str]

    def __getitem__(self, place: Place) -> Float[Tensor, "K n ..."]:
        """Read the sum of a piece.

        Raises:
            KeyError: The part has no such piece.
            ValueError: The file is damaged.
        """
        name = _name(place)
        if name not in self.checksums:
            raise KeyError(place)
        with open_tensors(self.file, str(self.file)) as tensors:
            return _verified(tensors, name, self.checksums[name], self.file)

    def __iter__(self) -> Iterator[Place]:
        """Go through the places of the pieces."""
        for name in self.checksums:
            if name.startswith(_SUM):
                yield tuple(int(number) for number in name.removeprefix(_SUM).split("."))

    def __len__(self) -> int:
        """Count the pieces."""
        return sum(1 for _ in self)


def write_gram_part(file: Path, part: GramPart) -> None:
    """Write a part of a block to a file, which exists with its full content or not at all.

    Args:
        file: The file, .safetensors.
        part: The part.
    """
    tensors = {_name(place): total for place, total in part.sums.items()}
    tensors |= {_INTEGRALS + name: value for name, value in part.integrals.items()}
    for side, points in (("rows", part.a), ("columns", part.b)):
        tensors[f"{side}.inputs"] = points.X.clone()  # both sides may be the same points
        tensors[f"{side}.is_train"] = points.mask.clone()
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    share = None if part.share is None else [part.share.number, part.share.count]
    record = json.dumps(
        {
            "description": dict(part.description),
            "notes": dict(part.notes),
            "share": share,
            "checksums": {name: fingerprint_tensors(value) for name, value in tensors.items()},
        }
    )
    metadata = {"format": _FORMAT, "record": record, "checksum": checksum(record.encode())}
    atomic_write(file, tensor_file(tensors, metadata))


def read_gram_part(file: Path) -> GramPart:
    """Read a part of a block; its sums stay on disk until they are needed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or it is no part of a block.
    """
    if not file.exists():
        raise FileNotFoundError(f"a part of a block must exist: {file} does not.")
    try:
        with open_tensors(file, str(file)) as tensors:
            metadata = tensors.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{file} must be a part of a Gram block (epk-gp gram --part): it is another file.")
            if metadata["checksum"] != checksum(metadata["record"].encode()):
                raise _damaged(file)
            record = json.loads(metadata["record"])
            sums = StoredSums(file, record["checksums"])
            small = {name: value for name, value in sums.checksums.items() if not name.startswith(_SUM)}
            read = {name: _verified(tensors, name, expected, file) for name, expected in small.items()}
        a, b = (Points(read[f"{side}.inputs"], read[f"{side}.is_train"]) for side in ("rows", "columns"))
        integrals = {name.removeprefix(_INTEGRALS): t for name, t in read.items() if name.startswith(_INTEGRALS)}
        description: dict[str, Any] = record["description"]
        share = None if record["share"] is None else Share(*record["share"])
        return GramPart(description, a, b, sums, integrals, share, str(file), record["notes"])
    except (KeyError, TypeError) as error:
        raise _damaged(file) from error


def _verified(tensors: Any, name: str, expected: str, file: Path) -> Tensor:
    """Read a tensor of an open file, and compare its checksum."""
    value: Tensor = tensors.get_tensor(name)
    if fingerprint_tensors(value) != expected:
        raise _damaged(file)
    return value


def _damaged(file: Path) -> ValueError:
    return ValueError(
        f"{file} must hold the part that was written: it is damaged, for its content does not have its checksum. "
        "Compute the part again."
    )


def _name(place: Place) -> str:
    return _SUM + ".".join(map(str, place))

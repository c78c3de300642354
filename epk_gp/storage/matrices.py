"""The matrices of matrix preconditioners (`LinearStep.left`, `LinearStep.right`) in a chunk."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.storage.index import Chunk, opened_chunk
from epk_gp.storage.schema import SAFETENSORS_DTYPES, ChunkSchema

SIDES = ("left", "right")


def matrices_of(update: UpdateCoefficients) -> dict[tuple[str, int], Tensor]:
    """Return the matrices of a step by side and position of the parameter."""
    return {(side, k): Q for side in SIDES for k, Q in sorted(getattr(update, side, {}).items())}


def matrix_bytes(update: UpdateCoefficients) -> int:
    """Return how many bytes the matrices of a step take."""
    return sum(Q.nbytes for Q in matrices_of(update).values())


def matrix_name(side: str, k: int) -> str:
    """Return the name on disk of the matrices of a parameter."""
    return f"update.{side}.{k}"


def steps_with_matrices(path: str | os.PathLike[str], chunks: Sequence[Chunk]) -> dict[tuple[str, int], list[int]]:
    """Return the steps of a verified run in which each side of each parameter has a matrix."""
    steps: dict[tuple[str, int], list[int]] = {}
    for chunk in chunks:
        with opened_chunk(path, chunk) as tensors:
            for key in _keys(tensors):
                rows = tensors.get_tensor(f"{matrix_name(*key)}.steps")
                steps.setdefault(key, []).extend((rows + max(chunk.first - 1, 0)).tolist())
    return dict(sorted(steps.items()))


def matrix_tensors(updates: Sequence[UpdateCoefficients]) -> dict[str, Tensor]:
    """Return the tensors that hold the matrices of consecutive steps, by their names on disk."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for row, update in enumerate(updates):
        for (side, k), Q in matrices_of(update).items():
            found.setdefault(matrix_name(side, k), []).append((row, Q))
    tensors = {}
    for name, rows in found.items():
        tensors[name] = torch.stack([Q.detach().cpu() for _, Q in rows])
        tensors[f"{name}.steps"] = torch.tensor([row for row, _ in rows], dtype=torch.int64)
    return tensors


def read_matrices(tensors: Any, row: int) -> dict[str, dict[int, Tensor]]:
    """Read the matrices of one step of an open chunk, as the arguments of `UpdateCoefficients`; none if it has none."""
    found: dict[str, dict[int, Tensor]] = {}
    for side, k in _keys(tensors):
        steps = tensors.get_tensor(f"{matrix_name(side, k)}.steps")
        if len(place := (steps == row).nonzero()):
            found.setdefault(side, {})[k] = tensors.get_slice(matrix_name(side, k))[int(place[0])].clone()
    return found


def expected_matrices(
    actual: Mapping[str, tuple[tuple[int, ...], str]], schema: ChunkSchema
) -> dict[str, tuple[tuple[int, ...] | None, str]]:
    """Return shape (None for one dimension of any length) and dtype that each tensor of matrices must have.

    A matrix is square, and its side divides its parameter's number of weights. There are as many as `.steps` names.
    """
    expected: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for k, size in enumerate(schema.sizes) if schema.version >= 3 else ():
        for name in (matrix_name(side, k) for side in SIDES):
            if not actual.keys() & {name, f"{name}.steps"}:
                continue
            shape, dtype = actual.get(name, ((), ""))
            sides = {r for r in shape[1:] if r and size % r == 0}
            n, r = (shape[0] if shape else 0), max(sides, default=1)
            dtype = dtype if dtype in ("F32", "F64") else SAFETENSORS_DTYPES[schema.dtype]
            expected |= {name: ((n, r, r), dtype), f"{name}.steps": ((n,), "I64")}
    return expected


def validate_steps_of_matrices(tensors: Any, num_steps: int, where: str) -> None:
    """Raise if the matrices of an open chunk are not those of different steps of it.

    Raises:
        ValueError: A step is none of the chunk's, or the steps are not in their order.
    """
    for key in _keys(tensors):
        name = f"{matrix_name(*key)}.steps"
        steps = tensors.get_tensor(name)
        if not len(steps) or steps.min() < 0 or steps.max() >= num_steps or (steps.diff() <= 0).any():
            raise ValueError(f"{where} must hold {name!r} in the order of its {num_steps} steps: it does not.")


def _keys(tensors: Any) -> list[tuple[str, int]]:
    """Return side and position of the parameter of each tensor of matrices in an open chunk."""
    parts = [name.split(".") for name in tensors.keys()]  # noqa: SIM118  # not a mapping
    return sorted((p[1], int(p[2])) for p in parts if len(p) == 3 and p[1] in SIDES and p[2].isdecimal())

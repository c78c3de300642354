"""Chunks of a run: the tensors that hold consecutive weight states and the steps that led to them."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.update_law import CompactUpdate, compact_update
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.files import SAFETENSORS_DTYPES, parse_json
from epk_gp.storage.journal import Chunk, opened_chunk
from epk_gp.storage.passes import pass_tables, pass_tensors, validate_tables
from epk_gp.storage.schema import ChunkSchema, Count, GroupOptions, Record, validated

SIDES = ("left", "right")  # of matrices
GROUPS = "groups"  # the tensor of parameter groups


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
    for k, size in enumerate(schema.sizes):
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


def step_tensors(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the tensors that hold learning rates and batches of consecutive steps, without passes, by name on disk."""
    batches = [step.batch.cpu() for step in steps if step.batch is not None]
    weights = [step.sample_weights.cpu() for step in steps if step.sample_weights is not None]
    return {
        "sizes": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights).double() if weights else torch.zeros(0, dtype=torch.float64),
        **_groups_tensor(steps),
    }


def _groups_tensor(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the parameter groups of the steps from which on they are others, as JSON, if there are any."""
    changed = [(k, step.groups) for k, step in enumerate(steps) if step.groups is not None]
    names = list(dict.fromkeys(group.names for _, groups in changed for group in groups))
    changes = [
        {"step": k, "groups": [{**g.to_json(), "names": names.index(g.names)} for g in groups]} for k, groups in changed
    ]
    text = json.dumps({"names": names, "changes": changes})
    return {GROUPS: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)} if changed else {}


class _ChunkGroup(GroupOptions):
    """A parameter group, its names as a number in `_ChunkGroups.names`."""

    names: Count


class _Change(Record):
    """The parameter groups from a step of the chunk on."""

    step: Count
    groups: list[_ChunkGroup]


class _ChunkGroups(Record):
    """The parameter groups of a chunk, where they change."""

    names: list[list[str]]
    changes: list[_Change]


def read_groups(content: UInt8[Tensor, " bytes"], count: int, where: str) -> dict[int, tuple[OptimizerGroup, ...]]:
    """Return the parameter groups that a chunk of so many steps holds, by the step in the chunk.

    Raises:
        ValueError: The tensor is not what `step_tensors` makes.
    """
    message = f"{where} must hold {GROUPS!r} that describe the optimizers' parameter groups"
    held = validated(_ChunkGroups, parse_json(bytes(tensor_bytes(content)), message), message)
    numbers = [group.names for change in held.changes for group in change.groups]
    if any(change.step >= count for change in held.changes) or any(number >= len(held.names) for number in numbers):
        raise ValueError(f"{message}: they are those of other steps or parameters.")
    return {
        change.step: tuple(OptimizerGroup(g.rule, tuple(held.names[g.names]), g.options) for g in change.groups)
        for change in held.changes
    }


def chunk_tensors(
    states: Sequence[Tensor],
    steps: Sequence[Step],
    updates: Sequence[UpdateCoefficients | CompactUpdate],
    schema: ChunkSchema,
    statistics: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """Return the tensors of a chunk by their names on disk.

    Args:
        states: Consecutive weight states; of a run that keeps every k-th state those of them that it keeps.
        steps: The steps that led to them; none leads to state 0.
        updates: Coefficients of these steps, which a run that keeps every k-th state holds compactly.
        schema: The schema of the run's chunks.
        statistics: The moving statistics of all consecutive states, for a network that has any.

    Raises:
        TypeError: A tensor of a pass has a dtype that cannot be stored.
        ValueError: Statistics or passes are not those of this run.
    """
    count = (len(steps) or 1) if schema.thins else len(states)
    if [value.shape for value in statistics] != [(schema.num_statistics,)] * count * bool(schema.num_statistics):
        raise ValueError(
            f"a run of {schema.num_statistics} moving statistics must have them with each of {count} states: got "
            f"{len(statistics)}."
        )
    held = [state.cpu() for state in states]
    tensors = {"states": torch.stack(held) if held else torch.empty(0, schema.num_weights, dtype=schema.dtype)}
    if statistics:
        tensors["statistics"] = torch.stack([value.cpu() for value in statistics])
    tensors |= step_tensors(steps)
    if passes := pass_tensors(steps):
        layout = {name: (tuple(value.shape), SAFETENSORS_DTYPES[value.dtype]) for name, value in passes.items()}
        validate_tables(pass_tables(passes), layout, steps, schema, "a chunk")
        tensors |= passes
    compact = [_compact(update, schema) for update in updates]
    held_updates, columns = [own.update for own in compact], []
    for name in FIELDS if held_updates else ():
        values = [getattr(update, name).cpu() for update in held_updates]
        diagonals = [value for value in values if len(value) != len(schema.sizes)]
        if diagonals:
            tensors[f"update.{name}"] = torch.stack(
                [broadcast_to_params(value, schema.sizes, diagonals[0]) for value in values]
            )
            values = [torch.zeros(len(schema.sizes), dtype=torch.float64) for _ in held_updates]
        columns.append(torch.stack(values).double())
        if any(name in own.places for own in compact):
            shared = torch.full((len(schema.sizes),), -1)
            tensors[f"update.{name}.at"] = torch.stack([own.places.get(name, shared) for own in compact])
    tensors |= matrix_tensors(held_updates)
    if columns:
        tensors["update"] = torch.stack(columns, dim=1)
    return tensors


def _compact(update: UpdateCoefficients | CompactUpdate, schema: ChunkSchema) -> CompactUpdate:
    if isinstance(update, CompactUpdate):
        return update
    return compact_update(update, schema.scaled, schema.sizes) if schema.thins else CompactUpdate(update)


def read_row(tensors: Any, name: str, row: int) -> Shaped[Tensor, "..."]:
    """Copy a row of a tensor of an open chunk: one that stays mapped would change with a file that is written again."""
    value: Tensor = tensors.get_slice(name)[row].clone()
    return value


def read_update(tensors: Any, row: int) -> UpdateCoefficients:
    """Read the coefficients of one step of an open chunk."""
    stored, numbers = set(tensors.keys()), read_row(tensors, "update", row)
    values = [
        read_row(tensors, f"update.{name}", row) if f"update.{name}" in stored else numbers[number]
        for number, name in enumerate(FIELDS)
    ]
    matrices: Mapping[str, Any] = read_matrices(tensors, row)
    return UpdateCoefficients(*values, **matrices)


def read_places(tensors: Any, row: int) -> dict[str, Int64[Tensor, " L"]]:
    """Read of which weight of each parameter an open chunk holds the coefficients that a preconditioner scales."""
    stored = set(tensors.keys())
    places = {name: read_row(tensors, f"update.{name}.at", row) for name in FIELDS if f"update.{name}.at" in stored}
    return {name: at for name, at in places.items() if bool((at >= 0).any())}

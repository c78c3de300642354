"""The forward passes of steps in a chunk: tensors by name, each pass read when it is indexed.

The tensors of one part of all passes (`PARTS`) are stacked along their first dimension, those of another dtype or row
shape in a group of their own; equal ones are held once. `passes.PART.at` says where those of each pass are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from epk_gp.core.step import ForwardPass, Passes, SeenRows, Step, tensor_bytes
from epk_gp.storage.files import SAFETENSORS_DTYPES
from epk_gp.storage.journal import Chunk, chunk_file, opened_chunk
from epk_gp.storage.schema import ChunkSchema

# The parts of a pass that are tensors.
_VECTORS = {
    "modes": (torch.bool,),
    "random_state": (torch.uint8,),
    "device_random_state": (torch.uint8,),
    "statistics": (torch.float32, torch.float64),
    "statistics_after": (torch.float32, torch.float64),
    "memory_order": (torch.int64,),
}
_SEEN = ("inputs", "targets")
PARTS = (*_VECTORS, *(f"{name}.{kind}" for name in _SEEN for kind in ("index", "values")))
_DTYPES = tuple(SAFETENSORS_DTYPES)  # a dtype is stored as its place in this list
_MAX_RANDOM_BYTES = 1 << 16  # torch's state has 5056 bytes on the CPU, 16 on CUDA
_MAX_DIMENSIONS = 16

Layout = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor of a chunk, by its name


@dataclass(frozen=True, eq=False)
class PassTables:
    """Which tensors the p passes of j consecutive steps consist of.

    Attributes:
        counts: Number of passes of each step.
        rows: Number of rows of each pass.
        autocast: Its dtype of automatic mixed precision, by its place in `SAFETENSORS_DTYPES`, or -1.
        places: Group, first row and number of rows of each part of each pass; group -1 stands for None.
    """

    counts: Int64[Tensor, " j"]
    rows: Int64[Tensor, " p"]
    autocast: Int64[Tensor, " p"]
    places: Mapping[str, Int64[Tensor, "p 3"]]


def part_of(forward: ForwardPass, part: str) -> Tensor | None:
    """Return a tensor of a pass by its name in `PARTS`."""
    name, _, kind = part.partition(".")
    value = getattr(forward, name)
    return None if value is None else getattr(value, kind) if kind else value


def pass_bytes(passes: Passes) -> int:
    """Return how many bytes the tensors of passes take in memory."""
    values = [part_of(forward, part) for forward in passes for part in PARTS]
    return sum(value.nbytes for value in values if value is not None)


def pass_tensors(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the tensors that hold the passes of consecutive steps, by name; none if there is no pass."""
    passes = [forward for step in steps for forward in step.passes]
    if not passes:
        return {}
    autocast = [-1 if forward.autocast is None else _DTYPES.index(forward.autocast) for forward in passes]
    tensors = {
        "passes.counts": torch.tensor([len(step.passes) for step in steps]),
        "passes.rows": torch.tensor([forward.num_rows for forward in passes]),
        "passes.autocast": torch.tensor(autocast),
    }
    for part in PARTS:
        values = [part_of(forward, part) for forward in passes]
        if any(value is not None for value in values):
            tensors |= _stacked(f"passes.{part}", values)
    return tensors


def _stacked(name: str, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    groups: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
    held: dict[tuple[int, bytes], tuple[int, int, int]] = {}
    ends: list[int] = []
    places = []
    for value in values:
        if value is None:
            places.append((-1, 0, 0))
            continue
        members = groups.setdefault((value.dtype, value.shape[1:]), [])
        number = list(groups).index((value.dtype, value.shape[1:]))
        ends += [0] * (len(groups) - len(ends))
        content = (number, bytes(tensor_bytes(value)))
        if content not in held:
            held[content] = (number, ends[number], len(value))
            ends[number] += len(value)
            members.append(value.detach().cpu())
        places.append(held[content])
    stacks = {f"{name}.{number}": torch.cat(members) for number, members in enumerate(groups.values())}
    return {f"{name}.at": torch.tensor(places), **stacks}


class StoredPasses(Sequence[ForwardPass]):
    """The forward passes of one step on disk; each is read, and checked, when it is indexed.

    Any number of threads may read at once. Nothing is kept: who needs a pass twice keeps it.
    """

    def __init__(self, path: Path, chunk: Chunk, tables: PassTables, step: int) -> None:
        """Describe the passes of a step of a chunk, by its number in the tables."""
        self._path, self._chunk, self._tables = path, chunk, tables
        self._first, self._count = int(tables.counts[:step].sum()), int(tables.counts[step])

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, which is found from any working directory."""
        return {**self.__dict__, "_path": self._path.absolute()}

    def __len__(self) -> int:
        """Return the number of passes."""
        return self._count

    @overload
    def __getitem__(self, number: int) -> ForwardPass: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[ForwardPass, ...]: ...

    def __getitem__(self, number: int | slice) -> ForwardPass | tuple[ForwardPass, ...]:
        """Read a pass, or several.

        Raises:
            IndexError: The step has no such pass.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened, or does not hold a forward pass.
        """
        if isinstance(number, slice):
            return tuple(self[n] for n in range(*number.indices(self._count)))
        if not -self._count <= number < self._count:
            raise IndexError(f"pass must lie in 0..{self._count - 1}: got {number}.")
        tables, row = self._tables, self._first + number % self._count
        with opened_chunk(self._path, self._chunk) as tensors:
            values = {}
            for part, places in tables.places.items():
                group, first, count = places[row].tolist()
                if group >= 0:
                    values[part] = tensors.get_slice(f"passes.{part}.{group}")[first : first + count].clone()
        seen: dict[str, Any] = {
            name: SeenRows(values[f"{name}.index"], values[f"{name}.values"])
            for name in _SEEN
            if f"{name}.index" in values
        }
        vectors = {name: values[name] for name in _VECTORS if name in values}
        autocast = None if tables.autocast[row] < 0 else _DTYPES[tables.autocast[row]]
        forward = ForwardPass(int(tables.rows[row]), **vectors, **seen, autocast=autocast)
        try:
            validate_pass(forward)
        except ValueError as error:
            where = chunk_file(self._path, self._chunk)[1]
            raise ValueError(f"{where}: pass {number % self._count} of a step: {error}") from error
        return forward

    def __repr__(self) -> str:
        """Describe the passes in words."""
        return f"StoredPasses({self._count} forward passes)"


def stored_steps(path: Path, chunk: Chunk, steps: Sequence[Step]) -> Sequence[Step]:
    """Return steps that were committed with a chunk, with their passes read from there; the others as they are."""
    if not any(step.passes for step in steps):
        return steps
    with opened_chunk(path, chunk) as tensors:
        tables = read_tables(tensors)
    return with_stored_passes(steps, tables, path, chunk)


def with_stored_passes(steps: Sequence[Step], tables: PassTables, path: Path, chunk: Chunk) -> list[Step]:
    """Return the steps of a chunk with the passes that tables describe; a step without any has an empty tuple."""
    return [
        replace(step, passes=StoredPasses(path, chunk, tables, k) if tables.counts[k] else ())
        for k, step in enumerate(steps)
    ]


def pass_tables(tensors: Mapping[str, Tensor]) -> PassTables:
    """Return the tables of the passes of a chunk."""
    places = {part: tensors[f"passes.{part}.at"] for part in PARTS if f"passes.{part}.at" in tensors}
    return PassTables(tensors["passes.counts"], tensors["passes.rows"], tensors["passes.autocast"], places)


def read_tables(tensors: Any) -> PassTables:
    """Read the tables of the passes of an open chunk: copies, which do not keep the file mapped."""
    names = ("passes.counts", "passes.rows", "passes.autocast", *(f"passes.{part}.at" for part in PARTS))
    return pass_tables({name: tensors.get_tensor(name).clone() for name in tensors.keys() if name in names})  # noqa: SIM118


def _groups(layout: Layout, part: str) -> Iterator[str]:
    """Yield the names of the groups of a part of the passes of a chunk."""
    number = 0
    while f"passes.{part}.{number}" in layout:
        yield f"passes.{part}.{number}"
        number += 1


def expected_pass_tensors(layout: Layout, num_steps: int) -> dict[str, tuple[tuple[int, ...] | None, str]]:
    """Return shape (None for one dimension of any length) and dtype that each tensor of passes must have."""
    if not any(name.startswith("passes.") for name in layout):
        return {}
    count = next(iter(layout.get("passes.rows", ((), ""))[0]), 0)
    expected: dict[str, tuple[tuple[int, ...] | None, str]] = {
        "passes.counts": ((num_steps,), "I64"),
        "passes.rows": (None, "I64"),
        "passes.autocast": ((count,), "I64"),
    }
    for part in PARTS:
        groups = list(_groups(layout, part))
        if groups or f"passes.{part}.at" in layout:
            expected[f"passes.{part}.at"] = ((count, 3), "I64")
        allowed = _VECTORS.get(part, (torch.int64,) if part.endswith("index") else _DTYPES)
        names = [SAFETENSORS_DTYPES[dtype] for dtype in allowed]
        for name in groups:
            shape, dtype = layout[name]
            is_vector = not part.endswith("values")
            expected[name] = (None if is_vector or not shape else shape, dtype if dtype in names else names[-1])
    return expected


def validate_tables(tables: PassTables, layout: Layout, steps: Sequence[Step], schema: ChunkSchema, where: str) -> None:
    """Raise if tables do not describe the passes of steps, before anything that they point to is read.

    What the tensors of a pass hold is checked when it is indexed: they are too many to be read with every run.

    Args:
        tables: Tables of which only dtypes and shapes are known to be right.
        layout: Shape and dtype of each tensor of the chunk.
        steps: The steps.
        schema: The schema of the run's chunks.
        where: Name of the file in error messages.

    Raises:
        ValueError: The tables do not describe forward passes of these steps.
    """
    batch_sizes = [schema.num_points if step.batch is None else len(step.batch) for step in steps]
    problem = _problem_of_counts(tables, batch_sizes) or _problem_of_places(tables, layout, schema)
    if problem:
        raise ValueError(f"{where} must hold the forward passes of its steps: {problem}.")


def _problem_of_counts(tables: PassTables, batch_sizes: Sequence[int]) -> str:
    counts, rows = tables.counts, tables.rows
    if (counts < 0).any() or (counts > len(rows)).any() or int(counts.sum()) != len(rows):
        return "their numbers of passes are not those of the passes that it holds"
    if (rows < 1).any() or (rows > max(batch_sizes, default=0)).any():
        return "a pass has no row, or more than a batch"
    sums = [int(own.sum()) for own in rows.split(counts.tolist())]
    if any(count and total != size for count, total, size in zip(counts, sums, batch_sizes, strict=True)):
        return "the rows of a step's passes are not as many as its batch has"
    floats = torch.tensor([-1, *(number for number, dtype in enumerate(_DTYPES) if dtype.is_floating_point)])
    if not torch.isin(tables.autocast, floats).all():
        return "the dtype of automatic mixed precision is none"
    return ""


def _problem_of_places(tables: PassTables, layout: Layout, schema: ChunkSchema) -> str:
    lengths = {
        "modes": (schema.num_modules, schema.num_modules),
        "random_state": (1, _MAX_RANDOM_BYTES),
        "device_random_state": (1, _MAX_RANDOM_BYTES),
        "statistics": (schema.num_statistics, schema.num_statistics),
        "statistics_after": (schema.num_statistics, schema.num_statistics),
        "memory_order": (2, _MAX_DIMENSIONS),
    }
    for part, places in tables.places.items():
        sizes = torch.tensor([layout[name][0][0] for name in _groups(layout, part)] + [0])  # the last: of group -1
        group, first, count = places.unbind(1)
        if (group < -1).any() or (group >= len(sizes) - 1).any():
            return f"{part!r} of a pass lies in no tensor"
        if (
            (first < 0).any()
            or (count < 0).any()
            or (first > sizes[group]).any()
            or (count > sizes[group] - first).any()
        ):
            return f"{part!r} of a pass lies outside of its tensor"
        least, most = lengths.get(part, (0, 1 << 62))
        if ((group >= 0) & ((count < least) | (count > most))).any():
            return f"{part!r} of a pass must have {least} to {most} entries: it has others"
    nothing = torch.full((len(tables.rows), 3), -1)
    for name in _SEEN:
        index, values = (tables.places.get(f"{name}.{kind}", nothing) for kind in ("index", "values"))
        is_there, others = index[:, 0] >= 0, values[:, 0] >= 0
        if (is_there != others).any() or (is_there & (index[:, 2] != values[:, 2])).any():
            return f"{name!r} of a pass must have one row per index"
        if (is_there & (index[:, 2] > tables.rows)).any():
            return f"{name!r} of a pass must have no more rows than the pass"
    return ""


def validate_pass(forward: ForwardPass) -> None:
    """Raise if a pass is not as `ForwardPass` says, or cannot be stored.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
        ValueError: A shape, dtype or index is wrong, or a number is not finite.
    """
    if type(forward.num_rows) is not int or forward.num_rows < 1:
        raise ValueError(f"a forward pass must have at least one row: got {forward.num_rows!r}.")
    for name in _SEEN:
        if (seen := getattr(forward, name)) is not None:
            _validate_seen(name, seen, forward.num_rows)
    for name, dtypes in _VECTORS.items():
        value = getattr(forward, name)
        if value is None:
            continue
        if value.ndim != 1 or value.dtype not in dtypes:
            raise ValueError(f"{name} must be a vector of {dtypes[-1]}: got {tuple(value.shape)} of {value.dtype}.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{name} must hold finite numbers: it holds NaN or infinity.")
        if "random" in name and not 0 < len(value) <= _MAX_RANDOM_BYTES:
            raise ValueError(f"{name} must have 1 to {_MAX_RANDOM_BYTES} bytes: got {len(value)}.")
    order = forward.memory_order
    if order is not None and sorted(order.tolist()) != list(range(len(order))):
        raise ValueError(f"memory_order must hold each dimension once: got {order.tolist()}.")
    if forward.random_state is not None:
        _validate_random_state(forward.random_state)
    if forward.autocast is not None and not (forward.autocast in _DTYPES and forward.autocast.is_floating_point):
        raise ValueError(f"autocast must be a floating-point dtype: got {forward.autocast}.")


def _validate_random_state(state: UInt8[Tensor, " n"]) -> None:
    try:
        torch.Generator().set_state(state.cpu())
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"random_state must be one of torch's random numbers on the CPU: {reason}.") from error


def _validate_seen(name: str, seen: SeenRows, num_rows: int) -> None:
    index, values = seen.index, seen.values
    if index.ndim != 1 or index.dtype != torch.int64 or values.ndim < 1 or len(values) != len(index):
        raise ValueError(
            f"{name} must have one row per index: got index {tuple(index.shape)} of {index.dtype}, values "
            f"{tuple(values.shape)}."
        )
    if values.dtype not in SAFETENSORS_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_DTYPES)
        raise TypeError(f"{name} must be of one of the dtypes {names} to be recorded: got {values.dtype}.")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
        raise ValueError(
            f"{name} must be rows of the pass, 0..{num_rows - 1}: got {int(index.min())}..{int(index.max())}."
        )
    if len(index.unique()) != len(index):
        raise ValueError(f"{name} must give each row once: an index occurs twice.")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError(f"{name} must hold finite numbers: they hold NaN or infinity.")

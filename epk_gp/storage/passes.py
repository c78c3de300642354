"""The forward passes of steps, packed: in memory, or read from a chunk when they are indexed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from epk_gp.core.step import ForwardPass, Passes, SeenRows, Step, tensor_bytes
from epk_gp.storage.index import Chunk, opened_chunk
from epk_gp.storage.packing import DTYPES, Packed, pack_tensor, unpack_tensor
from epk_gp.storage.pass_tables import CONTENT, MAX_RANDOM_BYTES, PARTS, PassTables, as_numbers


@dataclass(frozen=True, eq=False)
class ContentInMemory:
    """Packed tensors in memory."""

    content: UInt8[Tensor, " n"]
    where = "the recorded step"

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy the bytes of each span (start, length)."""
        return [bytes(tensor_bytes(self.content[start : start + length])) for start, length in spans]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pickled form, without the block of memory that the bytes are a part of."""
        return ContentInMemory, (self.content.clone(),)


@dataclass(frozen=True)
class ContentOnDisk:
    """Packed tensors in a chunk of a run."""

    path: Path
    chunk: Chunk

    @property
    def where(self) -> str:
        """Name of the file in error messages."""
        return f"{self.path / self.chunk.file} ({self.chunk.description})"

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read the bytes of each span (start, length).

        Raises:
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened.
        """
        with opened_chunk(self.path, self.chunk) as tensors:
            content = tensors.get_slice(CONTENT)
            return [bytes(tensor_bytes(content[start : start + length])) for start, length in spans]


_BLOCK = 1 << 22  # bytes of an export that are in memory at a time
Content = ContentInMemory | ContentOnDisk  # the bytes that packed tensors lie in


class PackedPasses(Sequence[ForwardPass]):
    """The forward passes of one step; each is unpacked, and checked, when it is indexed.

    Any number of threads may read at once. Nothing is kept: who needs a pass twice keeps it.

    Attributes:
        tables: Where its packed tensors are.
        content: The bytes that the tables point into.
    """

    def __init__(self, tables: PassTables, content: Content, step: int, first: int) -> None:
        """Describe the passes of a step.

        Args:
            tables: Tables of this step and perhaps of others.
            content: What the tables point into.
            step: Number of the step in the tables.
            first: Number of its first pass in the tables.
        """
        self.tables, self.content, self._first = tables, content, first
        self._count = int(tables.counts[step])

    def __len__(self) -> int:
        """Return the number of passes."""
        return self._count

    @overload
    def __getitem__(self, number: int) -> ForwardPass: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[ForwardPass, ...]: ...

    def __getitem__(self, number: int | slice) -> ForwardPass | tuple[ForwardPass, ...]:
        """Unpack a pass, or several.

        Raises:
            IndexError: The step has no such pass.
            ValueError: The packed bytes are not those of a forward pass.
        """
        if isinstance(number, slice):
            return tuple(self[n] for n in range(*number.indices(self._count)))
        if not -self._count <= number < self._count:
            raise IndexError(f"pass must lie in 0..{self._count - 1}: got {number}.")
        forward = self._first + number % self._count
        try:
            values = {name: unpack_tensor(part) for name, part in self._packed_parts(forward).items()}
            result = ForwardPass(
                num_rows=int(self.tables.rows[forward]),
                modes=values.get("modes"),
                inputs=_seen_rows(values, "inputs"),
                targets=_seen_rows(values, "targets"),
                random_state=values.get("random_state"),
                device_random_state=values.get("device_random_state"),
                statistics=values.get("statistics"),
                statistics_after=values.get("statistics_after"),
                memory_order=values.get("memory_order"),
                autocast=None if self.tables.autocast[forward] < 0 else DTYPES[self.tables.autocast[forward]],
            )
            validate_pass(result)
        except ValueError as error:
            raise ValueError(f"{self.content.where}: pass {number % self._count} of a step: {error}") from error
        return result

    def __repr__(self) -> str:
        """Describe the passes in words."""
        return f"PackedPasses({self._count} forward passes of {self.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """Bytes that the passes take, packed; a tensor that several of them share counts for each."""
        parts = self.tables.parts[self._first : self._first + self._count]
        return int(self.tables.lengths[parts[parts >= 0]].sum()) + 8 * (parts.size + 2 * self._count)

    def packed(self) -> Iterator[tuple[int, int, dict[str, Packed]]]:
        """Return number of rows, autocast and packed tensors of each pass, as they are."""
        for forward in range(self._first, self._first + self._count):
            rows, autocast = int(self.tables.rows[forward]), int(self.tables.autocast[forward])
            yield rows, autocast, self._packed_parts(forward)

    def _packed_parts(self, forward: int) -> dict[str, Packed]:
        tables = self.tables
        numbers = {name: int(n) for name, n in zip(PARTS, tables.parts[forward], strict=True) if n >= 0}
        contents = self.content.read([(int(tables.starts[n]), int(tables.lengths[n])) for n in numbers.values()])
        return {
            name: Packed(DTYPES[tables.kinds[n, 0]], tables.shape(n), int(tables.kinds[n, 1]), content)
            for (name, n), content in zip(numbers.items(), contents, strict=True)
        }


def packed_steps(steps: Sequence[Step], tables: PassTables, content: Content) -> list[Step]:
    """Return consecutive steps with the passes that tables describe; a step without any has an empty tuple."""
    ends = np.cumsum(tables.counts)
    return [
        replace(s, passes=PackedPasses(tables, content, k, int(ends[k] - tables.counts[k]))) if tables.counts[k] else s
        for k, s in enumerate(steps)
    ]


def pack_step(step: Step, store: Callable[[Tensor], Tensor] = lambda content: content) -> Step:
    """Return a step with its passes packed in memory.

    Args:
        step: The step.
        store: Function that takes the packed bytes of the passes and returns the tensor in which they are kept.

    Raises:
        TypeError: A tensor of a pass has a dtype that cannot be stored.
        ValueError: A pass is not as `ForwardPass` says, or holds NaN or infinity.
    """
    if not step.passes or isinstance(step.passes, PackedPasses):
        return step
    tables, content = pack_passes([step])
    return packed_steps([step], tables, ContentInMemory(store(content)))[0]


def content_blocks(passes: PackedPasses) -> Iterator[bytes]:
    """Read the packed tensors of all steps that share the tables of these passes, a block at a time."""
    size = int(passes.tables.lengths.sum())
    for start in range(0, size, _BLOCK):
        yield from passes.content.read([(start, min(_BLOCK, size - start))])


def packed_bytes(step: Step) -> int:
    """Return how many bytes the packed passes of a step take; 0 if it has none, or they are not packed."""
    return step.passes.num_bytes if isinstance(step.passes, PackedPasses) else 0


def pack_passes(steps: Iterable[Step]) -> tuple[PassTables, UInt8[Tensor, " n"]]:
    """Pack the passes of consecutive steps, with equal tensors stored once.

    Raises:
        TypeError: A tensor of a pass has a dtype that cannot be stored.
        ValueError: A pass is not as `ForwardPass` says, or holds NaN or infinity.
    """
    counts: list[int] = []
    passes: list[tuple[int, int, list[int]]] = []
    numbers: dict[Packed, int] = {}
    for step in steps:
        counts.append(len(step.passes))
        for rows, autocast, parts in _packed(step.passes):
            columns = [numbers.setdefault(parts[name], len(numbers)) if name in parts else -1 for name in PARTS]
            passes.append((rows, autocast, columns))
    values = list(numbers)
    tables = PassTables(
        counts=as_numbers(counts),
        rows=as_numbers([rows for rows, _, _ in passes]),
        autocast=as_numbers([autocast for _, autocast, _ in passes]),
        parts=as_numbers([columns for _, _, columns in passes]).reshape(-1, len(PARTS)),
        kinds=as_numbers([(DTYPES.index(v.dtype), v.encoding, len(v.shape)) for v in values]).reshape(-1, 3),
        shapes=as_numbers([n for value in values for n in value.shape]),
        lengths=as_numbers([len(value.content) for value in values]),
    )
    content = bytearray(b"".join(value.content for value in values))
    return tables, torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def validate_pass(forward: ForwardPass) -> None:
    """Raise if a pass is not as `ForwardPass` says.

    Raises:
        ValueError: A shape, dtype or index is wrong, or a number is not finite.
    """
    if type(forward.num_rows) is not int or forward.num_rows < 1:
        raise ValueError(f"a forward pass must have at least one row: got {forward.num_rows!r}.")
    for name, seen in (("inputs", forward.inputs), ("targets", forward.targets)):
        if seen is not None:
            _validate_seen(name, seen, forward.num_rows)
    for name, value, dtypes in (
        ("modes", forward.modes, (torch.bool,)),
        ("random_state", forward.random_state, (torch.uint8,)),
        ("device_random_state", forward.device_random_state, (torch.uint8,)),
        ("statistics", forward.statistics, (torch.float32, torch.float64)),
        ("statistics_after", forward.statistics_after, (torch.float32, torch.float64)),
        ("memory_order", forward.memory_order, (torch.int64,)),
    ):
        if value is None:
            continue
        if value.ndim != 1 or value.dtype not in dtypes:
            raise ValueError(f"{name} must be a vector of {dtypes[-1]}: got {tuple(value.shape)} of {value.dtype}.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{name} must hold finite numbers: it holds NaN or infinity.")
        if "random" in name and not 0 < len(value) <= MAX_RANDOM_BYTES:
            raise ValueError(f"{name} must have 1 to {MAX_RANDOM_BYTES} bytes: got {len(value)}.")
    order = forward.memory_order
    if order is not None and sorted(order.tolist()) != list(range(len(order))):
        raise ValueError(f"memory_order must hold each dimension once: got {order.tolist()}.")
    if forward.random_state is not None:
        _validate_random_state(forward.random_state)
    if forward.autocast is not None and not (forward.autocast in DTYPES and forward.autocast.is_floating_point):
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
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
        raise ValueError(
            f"{name} must be rows of the pass, 0..{num_rows - 1}: got {int(index.min())}..{int(index.max())}."
        )
    if len(index.unique()) != len(index):
        raise ValueError(f"{name} must give each row once: an index occurs twice.")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError(f"{name} must hold finite numbers: they hold NaN or infinity.")


def _packed(passes: Passes) -> Iterator[tuple[int, int, dict[str, Packed]]]:
    if isinstance(passes, PackedPasses):
        yield from passes.packed()
        return
    for forward in passes:
        validate_pass(forward)
        values = {
            "modes": forward.modes,
            "random_state": forward.random_state,
            "device_random_state": forward.device_random_state,
            "statistics": forward.statistics,
            "statistics_after": forward.statistics_after,
            "memory_order": forward.memory_order,
        }
        for name, seen in (("inputs", forward.inputs), ("targets", forward.targets)):
            if seen is not None:
                values |= {f"{name}.index": seen.index, f"{name}.values": seen.values}
        autocast = -1 if forward.autocast is None else DTYPES.index(forward.autocast)
        parts = {name: pack_tensor(value) for name, value in values.items() if value is not None}
        yield forward.num_rows, autocast, parts


def _seen_rows(values: dict[str, Tensor], name: str) -> SeenRows | None:
    index = values.get(f"{name}.index")
    return None if index is None else SeenRows(index, values[f"{name}.values"])

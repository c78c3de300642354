"""The forward passes of steps in a chunk: the tensors of each pass packed together, and read when it is indexed.

`passes` and `passes.at` are the packed tensors (`files.pack`) of all passes of the chunk; `passes.counts` holds the
number of passes of each step, and `passes.rows` the number of rows of each pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.storage.files import SAFETENSORS_DTYPES, pack, unpack, validate_places
from epk_gp.storage.schema import Chunk, ChunkSchema, chunk_file, opened_chunk

# The fields of a pass that are tensors.
_VECTORS = {
    "modes": (torch.bool,),
    "random_state": (torch.uint8,),
    "device_random_state": (torch.uint8,),
    "statistics": (torch.float32, torch.float64),
    "statistics_after": (torch.float32, torch.float64),
    "memory_order": (torch.int64,),
    "weights": (torch.float32, torch.float64),
    "settings": (torch.float64,),
}
_SEEN = ("inputs", "targets", "cotangents")
PARTS = (*_VECTORS, *(f"{name}.{kind}" for name in _SEEN for kind in ("index", "values")))
_DTYPES = tuple(SAFETENSORS_DTYPES)  # a dtype is stored as its index in this list
_MAX_RANDOM_BYTES = 1 << 16  # torch's state has 16 bytes on CUDA
_MAX_DIMENSIONS = 16
PASSES, COUNTS, _ROWS = "passes", "passes.counts", "passes.rows"
PASS_LAYOUT = {PASSES: "U8", f"{PASSES}.at": "I64", COUNTS: "I64", _ROWS: "I64"}


def pass_tensors(steps: Sequence[Step], schema: ChunkSchema) -> dict[str, Tensor]:
    """Return the tensors with the passes of consecutive steps, by name; empty if there is no pass.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
        ValueError: A pass does not fit this run.
    """
    passes = [forward for step in steps for forward in step.passes]
    if not passes:
        return {}
    rows = []
    for forward in passes:
        validate_pass(forward, schema)
        row = {name: value for name in _VECTORS if (value := getattr(forward, name)) is not None}
        for name in _SEEN:
            if (seen := getattr(forward, name)) is not None:
                row |= {f"{name}.index": seen.index, f"{name}.values": seen.values}
        if forward.autocast is not None:
            row["autocast"] = torch.tensor(_DTYPES.index(forward.autocast))
        rows.append(row)
    tensors = {
        COUNTS: torch.tensor([len(step.passes) for step in steps]),
        _ROWS: torch.tensor([forward.num_rows for forward in passes]),
        **pack(PASSES, rows),
    }
    _validate_counts(tensors, steps, schema, "a chunk")
    return tensors


class StoredPasses(Sequence[ForwardPass]):
    """The forward passes of one step on disk; each is read and checked when it is indexed.

    Any number of threads may read at once. Nothing is cached: keep a pass that is needed twice.
    """

    def __init__(self, path: Path, chunk: Chunk, schema: ChunkSchema, first: int, rows: Sequence[int]) -> None:
        """Store the number of the step's first pass in the chunk, and the number of rows of each pass."""
        self._path, self._chunk, self._schema, self._first, self._rows = path, chunk, schema, first, rows

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, with an absolute path that works from any working directory."""
        return {**self.__dict__, "_path": self._path.absolute()}

    def __len__(self) -> int:
        """Return the number of passes."""
        return len(self._rows)

    def __getitem__(self, number: int) -> ForwardPass:  # type: ignore[override]  # one pass at a time
        """Read a pass.

        Raises:
            IndexError: The step has no such pass.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened, or does not hold a forward pass.
        """
        count = len(self._rows)
        if not -count <= number < count:
            raise IndexError(f"pass must lie in 0..{count - 1}: got {number}.")
        number %= count
        where = f"{chunk_file(self._path, self._chunk)[1]}: pass {number} of a step"
        with opened_chunk(self._path, self._chunk) as tensors:
            values = unpack(tensors, PASSES, self._first + number, where)
        try:
            if unknown := values.keys() - {"autocast", *PARTS}:
                raise ValueError(f"a pass has no {min(unknown)!r}")
            parts: dict[str, Any] = {name: values[name] for name in _VECTORS if name in values}
            for name in _SEEN:
                if f"{name}.index" in values or f"{name}.values" in values:
                    parts[name] = SeenRows(values[f"{name}.index"], values[f"{name}.values"])
            if "autocast" in values:
                parts["autocast"] = dict(enumerate(_DTYPES))[int(values["autocast"])]
            forward = ForwardPass(self._rows[number], **parts)
            validate_pass(forward, self._schema)
        except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: not a single number
            raise ValueError(f"{where}: {error}") from error
        return forward

    def __repr__(self) -> str:
        """Describe the passes in words."""
        return f"StoredPasses({len(self)} forward passes)"


def with_stored_passes(path: Path, chunk: Chunk, schema: ChunkSchema, steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a chunk with its passes; a step without passes has an empty tuple.

    The content of a pass is checked when it is indexed: reading all passes at every opening is too slow.

    Raises:
        ValueError: Numbers of passes or rows do not fit the steps, or offsets lie outside the file's tensor.
    """
    with opened_chunk(path, chunk) as tensors:
        tables = {name: tensors.get_tensor(name) for name in PASS_LAYOUT if name != PASSES}
        size, where = tensors.get_slice(PASSES).get_shape()[0], chunk_file(path, chunk)[1]
    _validate_counts(tables, steps, schema, where)
    validate_places(tables[f"{PASSES}.at"], size, PASSES, where)
    stored, first, rows = list[Step](), 0, tables[_ROWS].tolist()
    for step, count in zip(steps, tables[COUNTS].tolist(), strict=True):
        passes = StoredPasses(path, chunk, schema, first, rows[first : first + count]) if count else ()
        stored.append(replace(step, passes=passes))
        first += count
    return stored


def _validate_counts(tensors: Mapping[str, Tensor], steps: Sequence[Step], schema: ChunkSchema, where: str) -> None:
    counts, rows = tensors[COUNTS], tensors[_ROWS]
    sizes = torch.tensor([schema.num_points if step.batch is None else len(step.batch) for step in steps])
    is_sound = (
        len(counts) == len(sizes)
        and bool(((counts >= 0) & (counts <= len(rows))).all())
        and int(counts.sum()) == len(rows) == len(tensors[f"{PASSES}.at"])
        and bool(((rows >= 1) & (rows <= sizes.max())).all())
        and all(
            not count or int(own.sum()) == size
            for count, own, size in zip(counts.tolist(), rows.split(counts.tolist()), sizes.tolist(), strict=True)
        )
    )
    if not is_sound:
        raise ValueError(f"{where} must hold the forward passes of its steps, with as many rows as their batches have.")


def validate_pass(forward: ForwardPass, schema: ChunkSchema | None = None) -> None:
    """Raise if a pass does not follow `ForwardPass`, cannot be stored, or does not fit a run with this schema.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
        ValueError: A shape, dtype or index is wrong, or a number is not finite.
    """
    if type(forward.num_rows) is not int or forward.num_rows < 1:
        raise ValueError(f"a forward pass must have at least one row: got {forward.num_rows!r}.")
    for name in _SEEN:
        if (seen := getattr(forward, name)) is not None:
            _validate_seen(name, seen, forward.num_rows)
    lengths = {"device_random_state": (1, _MAX_RANDOM_BYTES), "memory_order": (2, _MAX_DIMENSIONS)}
    if schema is not None:
        lengths["modes"] = (schema.num_modules, schema.num_modules)
        lengths["statistics"] = lengths["statistics_after"] = (schema.num_statistics, schema.num_statistics)
        lengths["weights"] = (schema.num_weights, schema.num_weights)
    for name, dtypes in _VECTORS.items():
        value = getattr(forward, name)
        if value is None:
            continue
        if value.ndim != 1 or value.dtype not in dtypes:
            raise ValueError(f"{name} must be a vector of {dtypes[-1]}: got {tuple(value.shape)} of {value.dtype}.")
        least, most = lengths.get(name, (0, len(value)))
        if not least <= len(value) <= most:
            raise ValueError(f"{name} must have {least} to {most} entries: got {len(value)}.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{name} must hold finite numbers: it holds NaN or infinity.")
    order = forward.memory_order
    if order is not None and sorted(order.tolist()) != list(range(len(order))):
        raise ValueError(f"memory_order must hold each dimension once: got {order.tolist()}.")
    if forward.random_state is not None:
        try:
            torch.Generator().set_state(forward.random_state.cpu().clone())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"random_state must be one of torch's random numbers: {str(error)[:80]!r}.") from error
    if forward.autocast is not None and not (forward.autocast in _DTYPES and forward.autocast.is_floating_point):
        raise ValueError(f"autocast must be a floating-point dtype: got {forward.autocast}.")


def _validate_seen(name: str, seen: SeenRows, num_rows: int) -> None:
    index, values = seen.index, seen.values
    is_numbers = name != "cotangents" or (values.ndim == 2 and values.is_floating_point())
    if index.ndim != 1 or index.dtype != torch.int64 or values.ndim < 1 or len(values) != len(index) or not is_numbers:
        raise ValueError(f"{name} must have one row per index: got {tuple(index.shape)} and {tuple(values.shape)}.")
    if values.dtype not in SAFETENSORS_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_DTYPES)
        raise TypeError(f"{name} must be of one of the dtypes {names} to be recorded: got {values.dtype}.")
    if not (index.unique().numel() == len(index) and bool(((index >= 0) & (index < num_rows)).all())):
        raise ValueError(f"{name} must be different rows of the pass, 0..{num_rows - 1}: got {index.tolist()[:20]}.")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError(f"{name} must hold finite numbers: they hold NaN or infinity.")

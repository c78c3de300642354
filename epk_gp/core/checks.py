"""Checks of arguments that many functions share, and the options of a computation."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.utils._pytree import tree_map_only

D = TypeVar("D", bound=Callable[..., Any])


def door(function: D) -> D:
    """Let a function, or the methods of a class, work under `torch.inference_mode` as it does under `torch.no_grad`.

    Tensors made in inference mode can never have derivatives, so those among the arguments are copied.
    """
    if isinstance(function, type):
        for name, method in [*vars(function).items()]:
            if isinstance(method, FunctionType) and (name in ("__init__", "__call__") or not name.startswith("_")):
                setattr(function, name, door(method))
        return cast(D, function)

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                return outside(*args, **kwargs)
        if _has_inference_tensor(args) or _has_inference_tensor(kwargs):
            args, kwargs = tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, (args, kwargs))
        return function(*args, **kwargs)

    return cast(D, outside)


def _has_inference_tensor(value: Any) -> bool:
    """Return whether a value is a tensor made in inference mode, or a tuple, list or dict that contains one."""
    if isinstance(value, Tensor):
        return value.is_inference()
    return isinstance(value, (tuple, list, dict)) and any(
        map(_has_inference_tensor, value.values() if isinstance(value, dict) else value)
    )


def validate_integer(value: object, name: str, words: str = "a whole number") -> None:
    """Raise if a value is not an integer. NumPy integers count as integers, booleans do not.

    Raises:
        TypeError: The value is not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {words}: got {value!r}.")


def validate_number(value: object, name: str, words: str = "a number") -> None:
    """Raise if a value is not a real number. NumPy numbers count as numbers, booleans do not.

    Raises:
        TypeError: The value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {words}: got {value!r}.")


def validate_positive(value: Any, name: str) -> None:
    """Raise if a value is not a positive, finite number.

    Raises:
        TypeError: The value is not a real number.
        ValueError: The value is zero, negative, infinite or NaN.
    """
    validate_number(value, name, "a positive number")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be positive and finite: got {value}.")


def validate_count(value: Any, name: str, *, minimum: int = 1) -> None:
    """Raise if a value is not an integer of at least `minimum`.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is below the minimum.
    """
    validate_integer(value, name, f"a whole number, at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}: got {value}.")


def validate_generator(value: object) -> None:
    """Raise if a value is neither a `torch.Generator` nor None.

    Raises:
        TypeError: The value is another kind of object.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator: got {value!r}. Make one with torch.Generator().")


def validate_tensor(value: object, name: str, *, ndim: int | None = None, floating: bool = False) -> None:
    """Raise if a value is not a dense tensor of real numbers.

    Args:
        value: The value.
        name: Name of the value in the error message.
        ndim: Number of dimensions that it must have; any by default.
        floating: Whether its entries must be float32 or float64.

    Raises:
        TypeError: The value is not a tensor, or its entries are of another kind.
        ValueError: It is sparse, lies on the device "meta", or has another number of dimensions.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor.")
    validate_has_values(value, name)
    if floating and value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64: got {value.dtype}.")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s'[: ndim != 1]}: got shape {tuple(value.shape)}.")


def validate_has_values(value: Tensor, name: str) -> None:
    """Raise if the entries of a tensor cannot be read one by one.

    Raises:
        ValueError: The tensor is sparse, or on the device "meta".
    """
    if value.is_meta:
        raise ValueError(f"{name} must hold values: got a tensor on the device 'meta'.")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be dense: got a tensor of layout {value.layout}. Call to_dense().")


def validate_labels(labels: object, count: int, num_classes: int | None = None, *, name: str = "labels") -> None:
    """Raise if a value is not one class index per point.

    Args:
        labels: The value.
        count: Number of points.
        num_classes: Number C of classes; by default, the range of the indices is not checked.
        name: Name of the value in the error message.

    Raises:
        TypeError: The value is not a tensor of integers.
        ValueError: It has another shape than (count,), or an index is out of range.
    """
    validate_tensor(labels, name)
    values = cast(Tensor, labels)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be class indices: got {values.dtype}. Use torch.int64.")
    if values.shape != (count,):
        raise ValueError(f"{name} must have one entry per point: got shape {tuple(values.shape)} for {count} points.")
    if num_classes is not None and count and not 0 <= int(values.min()) <= int(values.max()) < num_classes:
        low, high = int(values.min()), int(values.max())
        raise ValueError(f"{name} must lie in 0..{num_classes - 1}: got {low}..{high}.")


def parse_indices(values: Any, count: int, name: str, device: torch.device | None = None) -> Int64[Tensor, " n"]:
    """Return distinct indices of `count` points, at least one, as a tensor of int64.

    Raises:
        TypeError: The value is not a list or tensor of whole numbers.
        ValueError: An index is out of range or repeated, or there are none.
    """
    message = f"{name} must be a list or tensor of indices of points: got {values!r}."
    if not isinstance(values, Tensor | Sequence | np.ndarray):
        raise TypeError(message)
    try:
        indices = as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(message) from error
    if indices.numel() and (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool):
        raise TypeError(f"{name} must be indices: got {indices.dtype}. Turn a mask into mask.nonzero()[:, 0].")
    indices = indices.long()
    if indices.ndim != 1 or not len(indices):
        raise ValueError(f"{name} must be a list of at least one index: got shape {tuple(indices.shape)}.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= count:
        raise ValueError(f"{name} must lie in 0..{count - 1}: got {low}..{high}.")
    if repeated := len(indices) - len(indices.unique()):
        raise ValueError(f"{name} must not repeat: got {repeated} repeated indices. Use unique().")
    return indices


def is_finite(x: Shaped[Tensor, "..."]) -> bool:
    """Return whether all numbers of a tensor are finite; it looks at the sum first, which costs a tenth."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(torch.stack(x.aminmax())).all())


def validate_finite(X: Shaped[Tensor, "n ..."], name: str, advice: str = "Remove or repair that point.") -> None:
    """Raise if a tensor holds NaN or infinity, and name the first such row. Integers are always finite.

    Args:
        X: Rows of numbers.
        name: Name of the tensor in the error message.
        advice: Last sentence of the error message.

    Raises:
        ValueError: A row holds NaN or infinity.
    """
    if X.is_floating_point() and not is_finite(X):
        row = int((~torch.isfinite(X.reshape(X.shape[0], -1))).any(dim=1).nonzero()[0])
        raise ValueError(f"{name} must be finite: row {row} holds NaN or infinity. {advice}")


def allclose(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors agree up to the square root of eps, relative to the largest entry of b."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())


BLOCK_BYTES = 4 << 20  # bytes of rows that are read together


def blocks_of(*columns: Shaped[Tensor, "M ..."]) -> Iterator[tuple[Shaped[Tensor, "n ..."], ...]]:
    """Yield aligned blocks of rows of tensors that may not fit into memory; the first tensor sets the block size."""
    size = max(1, BLOCK_BYTES * len(columns[0]) // max(1, columns[0].nbytes))
    return zip(*(column.split(size) for column in columns), strict=True)


def as_tensor(value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Return `torch.as_tensor` of a value. An array is copied: torch needs this if it is reversed or read-only."""
    if isinstance(value, np.ndarray):
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value, dtype=dtype, device=device)


def validate_texts(texts: Iterable[str], name: str) -> None:
    """Raise if a text cannot be written or printed because it holds half of a surrogate pair.

    Raises:
        ValueError: One of the texts holds half of a surrogate pair.
    """
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(f"{name} must be text that can be written: got {text!r}, with half of a surrogate pair.")


def validate_new_folder(path: str | os.PathLike[str], name: str) -> None:
    """Raise if a path cannot be a folder to which files are written.

    Raises:
        TypeError: The value is not a path.
        ValueError: The name cannot be written, or the path is a file or lies inside one.
        PermissionError: The folder, or its parent, is not writable.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a folder: got {path!r}.")
    folder = Path(path).absolute()
    place = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not place.is_dir():
        raise ValueError(f"{name} must be a folder: {place} is a file. Choose another name.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{name} must be a folder that can be written: {place} cannot. Choose another.")


@runtime_checkable
class SupportsSubmit(Protocol):
    """Any executor: `concurrent.futures.Executor`, `dask.distributed.Client`, `mpi4py.futures.MPIPoolExecutor`."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function on a worker; the result has the methods of a `concurrent.futures.Future`."""


MEMORY_BUDGET = 1 << 30


@dataclass(frozen=True)
class ComputeOptions:
    """Options of a long computation: memory, progress, checkpoint, accumulation and executor.

    Only `accumulate` changes the numbers beyond rounding; the budget and the checkpoint change the order of the sums.

    Every long call takes these fields as keyword arguments: `gram_block(..., memory_budget=1 << 28, progress=True)`.

    Attributes:
        memory_budget: Bytes for everything except the inputs and the result.
        progress: Show a progress bar.
        checkpoint: Folder for partial sums. If a call is killed, repeat it with the same arguments and number of
            threads, and it resumes from there and returns the same bytes. Delete the folder when the result is safe.
        accumulate: `torch.float64` sums the steps in float64 when the points, and so all products, are float32.
        executor: Executor whose workers compute: a `concurrent.futures.Executor`, a `dask.distributed.Client`, or
            another with a method `submit`. The problem alone, not the number of workers, determines the pieces: any
            number of workers with one thread each gives the bytes of None with one thread. The workers must see the
            checkpoint's folder; without one, they use a temporary folder of this machine.
    """

    memory_budget: int = MEMORY_BUDGET
    progress: bool = False
    checkpoint: str | os.PathLike[str] | None = None
    accumulate: torch.dtype | None = None
    executor: SupportsSubmit | None = None

    def __post_init__(self) -> None:
        """Raise if a field cannot be used.

        Raises:
            TypeError: The memory budget is not an integer, or the executor has no `submit`.
            ValueError: The memory budget is below 1 MiB, or `accumulate` is another dtype than float64; or the
                checkpoint is a file.
            PermissionError: The checkpoint cannot be written.
        """
        validate_integer(self.memory_budget, "memory_budget", "a whole number of bytes")
        if self.memory_budget < 1 << 20:  # the smallest that the tests of the memory plan cover
            raise ValueError(f"memory_budget must be at least 1 MiB ({1 << 20} bytes): got {self.memory_budget}.")
        if self.accumulate not in (None, torch.float32, torch.float64):
            raise ValueError(f"accumulate must be torch.float64 or None: got {self.accumulate}.")
        executor: object = self.executor
        if isinstance(executor, type) or not isinstance(executor, SupportsSubmit | None):
            got = executor.__name__ if isinstance(executor, type) else f"an object of type {type(executor).__name__}"
            raise TypeError(
                f"executor must have a method submit(function, *args), as a concurrent.futures.Executor and a "
                f"dask.distributed.Client have: got {got}. Make one with ProcessPoolExecutor(2)."
            )
        if self.checkpoint is not None:
            validate_new_folder(self.checkpoint, "checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ComputeOptions":
        """Return the options themselves: they are immutable, and kernels are copied while executors cannot be."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled form without the executor, which belongs to this process."""
        return {**self.__dict__, "executor": None}

    @property
    def settings(self) -> "ComputeSettings":
        """The fields that are set, as keyword arguments of another call."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        unset = {field.name: field.default for field in fields(self)}
        return cast(ComputeSettings, {name: value for name, value in given.items() if value != unset[name]})


class ComputeSettings(TypedDict, total=False):
    """The fields of `ComputeOptions` as keyword arguments."""

    memory_budget: int
    progress: bool
    checkpoint: str | os.PathLike[str] | None
    accumulate: torch.dtype | None
    executor: SupportsSubmit | None


def parse_options(call: str, unsupported: tuple[str, ...] = (), **settings: Unpack[ComputeSettings]) -> ComputeOptions:
    """Return the options that were passed to a call as keyword arguments.

    Args:
        call: Name of the function that was called.
        unsupported: Fields that have no meaning for it.
        settings: Keyword arguments of the call.

    Raises:
        TypeError: The call does not have one of the keyword arguments.
        ValueError: See `ComputeOptions`.
    """
    keys = [field.name for field in fields(ComputeOptions) if field.name not in unsupported]
    for key in settings:
        if key not in keys:
            raise TypeError(f"{call}() got an unexpected keyword argument {key!r}. It takes {', '.join(keys)} as well.")
    return ComputeOptions(**settings)


_INDEXED = " A loader over epk_gp.callbacks.IndexedDataset(data) gives the indices of its rows."


def parse_batch(indices: Any, num_points: int, index: int, least: int) -> Int64[Tensor, " B"]:
    """Return the indices of a step's batch as a tensor of int64; none may be below `least`."""
    try:
        batch = as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{indices!r:.60}"
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {got}.{_INDEXED}") from error
    if batch.ndim != 1 or (batch.numel() == 0 and least < 0):
        no_rows = " With loss=None, leave out batch() and optimizer.step() where no rows were drawn."
        advice = no_rows if batch.ndim == 1 else _INDEXED
        raise ValueError(f"step {index}: a batch must be a list of indices: got shape {tuple(batch.shape)}.{advice}")
    if batch.numel() and (batch.is_floating_point() or batch.dtype == torch.bool):
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {batch.dtype}.{_INDEXED}")
    low, high = (int(index) for index in batch.aminmax()) if batch.numel() else (0, 0)
    if low < least or high >= num_points:
        advice = " -1, for a row that is no training point, needs Recorder(..., loss=None)." if low == -1 else ""
        raise ValueError(
            f"step {index}: batch indices must lie in 0..{num_points - 1}: got {low}..{high}. IndexedDataset of a "
            f"Subset gives the numbers of the whole data set: pass the recorder X and y of the whole one.{advice}"
        )
    return batch.detach().to(torch.int64).clone()


def parse_weight(weight: Any, num_rows: int, index: int) -> float | Tensor:
    """Return the weight of a batch's loss, or the weight of each row, as a number or as float64."""
    if type(weight) is float and math.isfinite(weight):
        return weight
    if not isinstance(weight, Tensor):
        validate_number(weight, f"step {index}: weight")
    factor = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
    if factor.ndim and factor.shape != (num_rows,):
        raise ValueError(f"step {index}: weight must have one entry per row: got {tuple(factor.shape)} of {num_rows}.")
    if not factor.isfinite().all():
        raise ValueError(f"step {index}: the weight of a batch, or of its rows, must be finite: got {weight}.")
    return factor if factor.ndim else float(factor)

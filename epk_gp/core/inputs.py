"""What goes into a network and comes out.

Graphs, several tensors packed into one, points that are training or test copies.

The engine's points are then node numbers, (n, 1) or (n,): an output is a function of the weights and of its number
alone, although it is computed from the whole graph.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Bool, Int64, Integer, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_finite, validate_has_values
from epk_gp.core.plans import TensorSpec


def tensors_of(returned: Any) -> Iterator[Tensor]:
    """Yield the tensors that a network returned, in order."""
    if isinstance(returned, Tensor):
        yield returned
    for part in _parts(returned).values():
        yield from tensors_of(part)


def select_rows(returned: Any, rows: slice | Integer[Tensor, " n"], num_rows: int) -> Any:
    """Return what a network returned for some rows of its inputs; what has no such rows stays as it is.

    Args:
        returned: What it returned for all of them.
        rows: The rows to keep.
        num_rows: Number of rows that there are.
    """
    if isinstance(returned, Tensor):
        return returned[rows] if returned.ndim and len(returned) == num_rows else returned
    parts = {key: select_rows(part, rows, num_rows) for key, part in _parts(returned).items()}
    if not parts:
        return returned
    if isinstance(returned, tuple | list):
        values = list(parts.values())
        return type(returned)(*values) if hasattr(returned, "_fields") else type(returned)(values)
    if isinstance(returned, Mapping):  # Hugging Face's outputs are data classes too, made of their fields
        return type(returned)(**parts) if dataclasses.is_dataclass(returned) else parts
    result = copy.copy(returned)
    for name, part in parts.items():
        object.__setattr__(result, name, part)  # a data class may be frozen
    return result


def _parts(returned: Any) -> dict[Any, Any]:
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list):
        return dict(enumerate(returned))
    if isinstance(returned, Tensor) or callable(returned):
        return {}
    own = [field.name for field in dataclasses.fields(returned)] if dataclasses.is_dataclass(returned) else []
    return {name: getattr(returned, name) for name in own} | dict(getattr(returned, "__dict__", {}))


@dataclass(frozen=True, eq=False, init=False)
class Graph:
    """What a network takes that computes all nodes of a graph in one forward pass: net(*args, **kwargs).

    The network returns one row of outputs per node; points are node numbers.

    Attributes:
        args: The tensors that it takes by position, such as node features and edges.
        kwargs: Those that it takes by keyword.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]

    def __init__(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Keep the tensors, which are copied where a recording begins.

        Raises:
            TypeError: An argument is no tensor of real numbers.
            ValueError: There is no tensor; or one is sparse, holds NaN or infinity, or is of floating-point numbers and
                not contiguous.
        """
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", dict(kwargs))
        if not self.tensors:
            raise ValueError("a graph must have at least one tensor, such as its nodes' features: got none.")
        for key, value in self.tensors.items():
            label = f"tensor {key!r} of the graph"
            _validate_dense(value, label)
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise ValueError(f"{label} must be finite: it holds NaN or infinity.")
            if value.is_floating_point() and not value.is_contiguous():
                raise ValueError(f"{label} must be contiguous, for dropout draws in memory order: call contiguous().")

    @property
    def tensors(self) -> dict[int | str, Tensor]:
        """The tensors by position or keyword."""
        return dict([*enumerate(self.args), *self.kwargs.items()])

    def __repr__(self) -> str:
        """Describe the tensors in one line."""
        parts = [f"{key}: {tuple(value.shape)} of {value.dtype}" for key, value in self.tensors.items()]
        return f"Graph({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class RecordedGraph:
    """The graph of a run, as its network is called with it.

    Attributes:
        tensors: Its tensors by position or keyword; those by position come first.
        num_nodes: Number N of nodes.
    """

    tensors: Mapping[int | str, Shaped[Tensor, "..."]]
    num_nodes: int

    @property
    def nodes(self) -> Int64[Tensor, "N 1"]:
        """All node numbers, on the graph's device."""
        return torch.arange(self.num_nodes, device=next(iter(self.tensors.values())).device)[:, None]

    @property
    def graph(self) -> Graph:
        """The graph as it was given."""
        graph: Graph = _with_arguments(Graph, self.tensors)
        return graph

    def call(self, function: Callable[..., Any], nodes: Shaped[Tensor, "n ..."], spec: TensorSpec | None) -> Any:
        """Call a network with the whole graph, and keep what it returns for some nodes.

        Args:
            function: The network.
            nodes: Node numbers.
            spec: Dtype of floating-point tensors, and device of all; as recorded by default.
        """
        tensors = self.tensors if spec is None else {key: spec.cast(value) for key, value in self.tensors.items()}
        return select_rows(_with_arguments(function, tensors), nodes.reshape(-1), self.num_nodes)

    def parse_nodes(self, X: object, name: str = "X") -> Int64[Tensor, "n 1"]:
        """Return points as a column of node numbers: those of a tensor, or all of them for the graph itself.

        Raises:
            TypeError: They are neither whole numbers nor a graph.
            ValueError: A number is out of range, or the graph is another one than the recorded one.
        """
        if isinstance(X, Graph):
            difference = self.difference(X.tensors)
            if difference is not None:
                raise ValueError(f"{name} must be the recorded graph, or numbers of its nodes: {difference}.")
            return self.nodes
        if not isinstance(X, Tensor):
            raise TypeError(f"{name} must be a tensor of node numbers, or the graph: got {type(X).__name__}.")
        if X.dtype == torch.bool or X.is_floating_point() or X.is_complex():
            advice = f" Pass {name}.nonzero().squeeze(1)." if X.dtype == torch.bool else ""
            raise TypeError(f"{name} must hold node numbers, which are integers: got {X.dtype}.{advice}")
        if X.ndim == 0 or X.shape[1:].numel() != 1:
            raise ValueError(f"{name} must have shape (n,), one number per node: got {tuple(X.shape)}.")
        validate_has_values(X, name)
        if len(X) and not 0 <= int(X.min()) <= int(X.max()) < self.num_nodes:
            got = f"{int(X.min())}..{int(X.max())}"
            raise ValueError(f"{name} must hold node numbers in 0..{self.num_nodes - 1}: got {got}.")
        return X.detach().to(torch.int64).reshape(-1, 1)

    def difference(self, tensors: Mapping[int | str, object]) -> str | None:
        """Return in words where given tensors differ from the recorded ones; None if they do not."""
        if list(tensors) != list(self.tensors):
            return f"it consists of the tensors {list(self.tensors)}, got {list(tensors)}"
        for key, recorded in self.tensors.items():
            value = tensors[key]
            expected, got = (_described(z) for z in (recorded, value))
            if got != expected:
                return f"tensor {key!r} has {expected}, got {got}"
            if not torch.equal(cast(Tensor, value).to(recorded.device), recorded):
                return f"tensor {key!r} holds other numbers"
        return None


def _with_arguments(function: Callable[..., Any], tensors: Mapping[int | str, Tensor]) -> Any:
    """Call a function with tensors by position or keyword."""
    args = [value for key, value in tensors.items() if isinstance(key, int)]
    return function(*args, **{key: value for key, value in tensors.items() if isinstance(key, str)})


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {tuple(value.shape)}, {value.dtype}, {value.layout}"


def _validate_dense(value: object, label: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{label} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor, or leave it "
            "out and set it inside the network."
        )
    validate_has_values(value, label)


# Inputs of n points: one tensor, or several with one first dimension, as the network takes them: net(*X), net(**X).
# The nodes of a graph are points too: the graph stands for all of them.
Inputs = Shaped[Tensor, "n ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = {str(dtype): dtype for dtype in (*_FLOATS, *_INTEGERS, torch.bool)}


@dataclass(frozen=True)
class InputTensor:
    """One of the tensors of which inputs consist.

    Attributes:
        key: Its position in the call of the network, or its keyword.
        shape: Shape of one point.
        dtype: Its dtype at recording.
    """

    key: int | str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of entries of one point."""
        return torch.Size(self.shape).numel()

    @property
    def kind(self) -> str:
        """What its entries are."""
        if self.dtype == torch.bool:
            return "bool"
        return "floating-point" if self.dtype.is_floating_point else "integer"


@dataclass(frozen=True)
class InputLayout:
    """Where the tensors of which inputs consist lie in the packed inputs (n, D), side by side.

    Attributes:
        tensors: The tensors; those of a dictionary in the order of their sorted keys.
    """

    tensors: tuple[InputTensor, ...]

    @property
    def is_mapping(self) -> bool:
        """Whether the network is called with keywords."""
        return isinstance(self.tensors[0].key, str)

    @property
    def width(self) -> int:
        """Number D of entries of one point."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the packed inputs.

        The dtype of the tensors if they share one; else that of the floating-point ones; else int64.
        """
        dtypes = {tensor.dtype for tensor in self.tensors}
        if len(dtypes) > 1:
            dtypes = {dtype for dtype in dtypes if dtype.is_floating_point} or {torch.int64}
        return reduce(torch.promote_types, dtypes)

    def columns(self) -> list[tuple[InputTensor, int]]:
        """Return each tensor with the first of its columns."""
        ends = accumulate((tensor.size for tensor in self.tensors), initial=0)
        return list(zip(self.tensors, ends, strict=False))


def pack_inputs(X: Sequence[Tensor] | Mapping[str, Tensor] | Graph, name: str = "X") -> tuple[Tensor, InputLayout]:
    """Return several tensors as one, (n, D), and where they lie in it.

    Args:
        X: Tensors with one first dimension; those of a dictionary lie in the order of the sorted keys, so that any
            order gives the same.
        name: Name of the inputs in an error message.

    Raises:
        TypeError: X is neither a sequence nor a dictionary, or a part is no dense tensor of real numbers.
        ValueError: X is empty, or parts differ in their first dimension or device, or hold NaN or infinity, or integers
            that the dtype of the other parts cannot represent.
    """
    if isinstance(X, Graph):
        raise TypeError(f"{name} must be numbers of the graph's nodes, an int64 tensor (n,): got the graph itself.")
    items = _items(X, name)
    for label, value in items:
        _validate_dense(value, label)
        if str(value.dtype) not in DTYPES:
            raise TypeError(f"{label} must hold real numbers: got {value.dtype}. Convert it first.")
        if value.ndim == 0:
            raise ValueError(f"{label} must have one row per point: got a scalar.")
        validate_finite(value, label)
    (first_label, first), values = items[0], [value for _, value in items]
    for label, value in items[1:]:
        if (len(value), value.device) != (len(first), first.device):
            raise ValueError(
                f"all tensors of {name} must have one row per point: {first_label} has {len(first)} rows, {label} has "
                f"{len(value)}; and be on one device: got {first.device} and {value.device}."
            )
    keys: Iterable[Any] = sorted(X) if isinstance(X, Mapping) else range(len(X))
    layout = InputLayout(
        tuple(InputTensor(key, tuple(value.shape[1:]), value.dtype) for key, value in zip(keys, values, strict=True))
    )
    if layout.width == 0:
        raise ValueError(f"{name} must hold at least one number per point: got none.")
    if layout.dtype.is_floating_point:
        limit = 2.0 / torch.finfo(layout.dtype).eps
        for label, value in items:
            if not value.is_floating_point() and value.numel() and float(value.to(torch.float64).abs().max()) > limit:
                raise ValueError(
                    f"{label} must hold integers up to {limit:.0f} beside tensors of {layout.dtype}, which cannot "
                    "represent larger ones: got a larger one. Use float64."
                )
    return side_by_side(values, layout.dtype), layout


def validate_same_layout(recorded: InputLayout, given: InputLayout, name: str = "X") -> None:
    """Raise if inputs do not consist of the tensors that a run was recorded with.

    Raises:
        TypeError: A tensor holds numbers of another kind.
        ValueError: A tensor is missing, or there is one too many, or one has another shape.
    """
    keys, got = ([tensor.key for tensor in layout.tensors] for layout in (recorded, given))
    if keys != got:
        raise ValueError(f"{name} must consist of the tensors of the training inputs, {keys}: got {got}.")
    for before, now in zip(recorded.tensors, given.tensors, strict=True):
        label = f"{name}[{before.key!r}]"
        if before.shape != now.shape:
            expected, shown = (", ".join(map(str, ("n", *own.shape))) for own in (before, now))
            raise ValueError(f"{label} must have shape ({expected}) like the training inputs: got ({shown}).")
        if before.kind != now.kind:
            raise TypeError(f"{label} must be of the training inputs' kind ({before.dtype}): got {now.dtype}.")


def validate_packed(layout: InputLayout, X: Shaped[Tensor, "n D"], name: str = "X") -> None:
    """Raise if packed inputs hold a number that the tensor in its place cannot have.

    Raises:
        ValueError: An integer has a fractional part or is out of range, or a Boolean is neither 0 nor 1.
    """
    for tensor, first in layout.columns():
        part = X.detach()[:, first : first + tensor.size]
        if tensor.dtype.is_floating_point or part.dtype == tensor.dtype:
            continue
        if not torch.equal(part.to(tensor.dtype).to(part.dtype), part):
            raise ValueError(f"{name}[{tensor.key!r}] must hold whole numbers ({tensor.dtype}), as in training.")


def _items(X: Any, name: str) -> list[tuple[str, Any]]:
    """Return the parts of inputs with what an error calls them."""
    is_several = isinstance(X, Sequence | Mapping) and not isinstance(X, str)
    if not is_several or (isinstance(X, Sequence) and len(X) and not any(isinstance(part, Tensor) for part in X)):
        raise TypeError(
            f"{name} must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.as_tensor, or pass several "
            "tensors as a tuple or dict."
        )
    if len(X) == 0:
        raise ValueError(f"{name} must hold at least one tensor: got an empty {type(X).__name__}.")
    if not isinstance(X, Mapping):
        return [(f"{name}[{number}]", value) for number, value in enumerate(X)]
    for key in X:
        if not isinstance(key, str):
            raise TypeError(f"the keys of {name} must be keywords of the network's forward(): got {key!r}.")
    return [(f"{name}[{key!r}]", X[key]) for key in sorted(X)]


def side_by_side(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return tensors of n rows as one, (n, D), without checks."""
    return torch.cat([value.reshape(len(value), value.shape[1:].numel()).to(dtype) for value in values], dim=1)


def layout_from_json(entries: object) -> InputLayout:
    """Return the layout that a run's header describes.

    Raises:
        ValueError: The description is damaged.
    """
    try:
        listed = entries if isinstance(entries, list) else []
        tensors = tuple(InputTensor(entry["key"], tuple(entry["shape"]), DTYPES[entry["dtype"]]) for entry in listed)
        keys = [tensor.key for tensor in tensors]
        kinds, sizes = {type(key) for key in keys}, [size for tensor in tensors for size in tensor.shape]
        is_valid = (kinds == {int} and keys == list(range(len(keys)))) or (kinds == {str} and keys == sorted(set(keys)))
        is_valid = is_valid and all(type(size) is int and 0 <= size < 1 << 40 for size in sizes)
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"the header's 'signature' must describe the network's input tensors: got {entries!r}.")
    return InputLayout(tensors)


@dataclass(frozen=True, eq=False, init=False)
class Points:
    """Points of H x {0, 1} (Definition 3.4, Bell et al. 2023).

    Attributes:
        X: n inputs, packed into one tensor if they are several.
        is_train: Whether they are training copies (gradient frozen at the step's start) or test copies; one for all,
            or (n,).
        layout: Of which tensors the inputs consist, if they are several.
    """

    X: Shaped[Tensor, "n ..."]
    is_train: bool | Bool[Tensor, " n"]
    layout: InputLayout | None

    def __init__(self, X: Inputs, is_train: bool | Bool[Tensor, " n"]) -> None:
        """Pack the inputs, and raise if the copy mask does not fit.

        Raises:
            TypeError: `X` is neither a tensor nor a tuple or dict of tensors, or `is_train` is neither a bool nor a
                bool tensor.
            ValueError: `is_train` has another length than X, or several inputs do not go together.
        """
        packed, layout = (X, None) if isinstance(X, Tensor) else pack_inputs(X)
        for name, value in (("X", packed), ("is_train", is_train), ("layout", layout)):
            object.__setattr__(self, name, value)
        if isinstance(is_train, bool):
            return
        if not isinstance(is_train, Tensor) or is_train.dtype != torch.bool:
            got = getattr(is_train, "dtype", type(is_train).__name__)
            raise TypeError(f"is_train must be a bool or a bool tensor: got {got}. Convert it with .bool().")
        if is_train.shape != packed.shape[:1]:
            raise ValueError(
                f"is_train must have one entry per point: got shape {tuple(is_train.shape)} for {len(packed)} points."
            )

    def __len__(self) -> int:
        """Count the points."""
        return len(self.X)

    @property
    def mask(self) -> Bool[Tensor, " n"]:
        """Whether each point is a training copy."""
        if isinstance(self.is_train, bool):
            return torch.full((len(self),), self.is_train, device=self.X.device)
        return self.is_train

    def copies(self, is_train: bool) -> Tensor:
        """List the indices of the points of one copy."""
        return (self.mask == is_train).nonzero().squeeze(1).to(self.X.device)


def validate_points(points: object, name: str) -> None:
    """Raise if an object does not tell which copies it holds.

    Raises:
        TypeError: The object is not `Points`.
    """
    if not isinstance(points, Points):
        got = type(points).__name__
        raise TypeError(f"{name} must be epk_gp.Points(X, is_train=...), which says what copies they are: got {got}.")

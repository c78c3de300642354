"""Results of networks, and inputs that are not a tensor of rows: graphs, and rows of unequal lengths.

The points of a graph are node numbers, (n, 1) or (n,): an output is a function of the weights and of the node number
alone, although it is computed from the whole graph. Rows of unequal lengths are padded to one tensor, and rebuilt for
each call of the network. One row of a batch must be one sample; this does not hold for a flat tensor with offsets, a
nested tensor or a packed sequence.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float, Int64, Integer, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from epk_gp.core.checks import door, validate_has_values, validate_tensor
from epk_gp.core.plans import TensorSpec

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = {str(dtype): dtype for dtype in (*_FLOATS, *_INTEGERS, torch.bool)}

# The requirement on networks whose batch is the second dimension, such as recurrent ones.
ROWS_FIRST = "in the first dimension (batch_first=True, or a module whose forward() transposes inputs and outputs)"


def tensors_of(returned: Any) -> Iterator[Tensor]:
    """Yield the tensors in a network's result, in order."""
    if isinstance(returned, Tensor):
        yield returned
        return
    for part in _parts(returned).values():
        yield from tensors_of(part)


def rows_of(returned: Any, num_rows: int) -> Float[Tensor, "n D"]:
    """Return all floating-point numbers of a network's result side by side, with one row per input.

    Raises:
        ValueError: No tensor has these rows.
    """
    tensors = [z for z in tensors_of(returned) if has_rows(z, num_rows)]
    if not tensors:
        got = ", ".join(f"{tuple(z.shape)}" for z in tensors_of(returned)) or type(returned).__name__
        raise ValueError(f"the network must return a row for each of {num_rows} inputs {ROWS_FIRST}: got {got}.")
    return torch.cat([z.reshape(num_rows, z.shape[1:].numel()) for z in tensors], dim=1)


def has_rows(z: Tensor, num_rows: int) -> bool:
    """Return whether a tensor of a network's result has one row of floating-point numbers per input."""
    return z.is_floating_point() and z.ndim > 0 and z.shape[0] == num_rows


def select_rows(returned: Any, rows: slice | Integer[Tensor, " n"], num_rows: int) -> Any:
    """Return some rows of a network's result; tensors without one row per input stay unchanged.

    Args:
        returned: The network's result for all inputs.
        rows: The rows to keep.
        num_rows: Number of inputs.
    """
    return map_tensors(returned, lambda z: z[rows] if z.ndim and len(z) == num_rows else z)


def map_tensors(returned: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a network's result with each tensor replaced by its `change`, in the order of `tensors_of`."""
    if isinstance(returned, Tensor):
        return change(returned)
    parts = {key: map_tensors(part, change) for key, part in _parts(returned).items()}
    if not parts:
        return returned
    if isinstance(returned, tuple | list):
        values = list(parts.values())
        return type(returned)(*values) if hasattr(returned, "_fields") else type(returned)(values)
    if isinstance(returned, Mapping):  # Hugging Face's outputs are dataclasses too
        return type(returned)(**parts) if dataclasses.is_dataclass(returned) else parts
    result = copy.copy(returned)
    for name, part in parts.items():
        object.__setattr__(result, name, part)  # a dataclass may be frozen
    return result


def _parts(returned: Any) -> dict[Any, Any]:
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list):
        return dict(enumerate(returned))
    if isinstance(returned, Tensor) or callable(returned):
        return {}
    names = [field.name for field in dataclasses.fields(returned)] if dataclasses.is_dataclass(returned) else []
    return {name: getattr(returned, name) for name in names} | dict(getattr(returned, "__dict__", {}))


@dataclass(frozen=True, eq=False, init=False)
class Graph:
    """Arguments of a network that computes all nodes of a graph in one forward pass: net(*args, **kwargs).

    The network returns one row of outputs per node; points are node numbers.

    Attributes:
        args: The positional arguments, tensors such as node features and edges.
        kwargs: The keyword arguments, also tensors.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]

    @door
    def __init__(self, *args: Tensor, **kwargs: Tensor) -> None:
        """Store the tensors; they are copied when a recording begins.

        Raises:
            TypeError: An argument is not a tensor of real numbers.
            ValueError: There is no tensor; or a tensor is sparse, holds NaN or infinity, or holds floating-point
                numbers and is not contiguous.
        """
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", dict(kwargs))
        if not self.tensors:
            raise ValueError("a graph must have at least one tensor, such as its nodes' features: got none.")
        for key, value in self.tensors.items():
            label = f"tensor {key!r} of the graph"
            validate_tensor(value, label)
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
    """The graph of a run, in the form in which the network is called.

    Attributes:
        tensors: The graph's tensors by position or keyword; positional ones come first.
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
        """The graph as the user passed it."""
        graph: Graph = _with_arguments(Graph, self.tensors)
        return graph

    def call(self, function: Callable[..., Any], nodes: Shaped[Tensor, "n ..."], spec: TensorSpec | None) -> Any:
        """Call a network with the whole graph, and select the rows of some nodes from its result.

        Args:
            function: The network.
            nodes: Node numbers.
            spec: Dtype of floating-point tensors, and device of all tensors; by default as recorded.
        """
        tensors = self.tensors if spec is None else {key: spec.cast(value) for key, value in self.tensors.items()}
        return select_rows(_with_arguments(function, tensors), nodes.reshape(-1), self.num_nodes)

    def parse_nodes(self, X: object, name: str = "X") -> Int64[Tensor, "n 1"]:
        """Return points as a column of node numbers: the numbers in a tensor, or all nodes if X is the graph itself.

        Raises:
            TypeError: X holds no whole numbers and is not a graph.
            ValueError: A number is out of range, or the graph differs from the recorded one.
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
        """Describe the difference between given tensors and the recorded ones; None if there is none."""
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


def graph_from_json(entries: object, data: Mapping[str, Tensor]) -> RecordedGraph:
    """Return the graph that a run's header describes, built from the stored tensors.

    Raises:
        ValueError: The description is damaged, a tensor is missing or differs, or the run's inputs are not the numbers
            of all nodes.
    """
    tensors: dict[int | str, Tensor] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        described: dict[str, Any] = entry if isinstance(entry, dict) else {}
        key, dtype = described.get("key"), DTYPES.get(str(described.get("dtype")))
        is_key = isinstance(key, str) or (type(key) is int and key == len(tensors))
        value = data.get(f"graph.{key}")
        if not is_key or value is None or value.dtype != dtype or list(value.shape) != described.get("shape"):
            raise ValueError(f"the run must hold the tensor of its graph that the header describes by {entry!r}.")
        tensors[described["key"]] = value
    inputs = data.get("inputs")
    graph = RecordedGraph(tensors, 0 if inputs is None else len(inputs))
    if inputs is None or not torch.equal(inputs, graph.nodes):
        raise ValueError("the inputs of a run on a graph must be the numbers of all nodes: they are others.")
    return graph


RaggedCall = Literal["offsets", "nested", "packed", "list"]


@door
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal lengths, and the form in which a network takes a batch of them.

    Attributes:
        rows: One tensor (length, ...) per point.
        call: The form of the call: "offsets" for net(values, offsets), as `EmbeddingBag` takes them; "nested" for a
            jagged nested tensor, "packed" for a `PackedSequence`, "list" for a list of tensors. Nested tensors and
            packed sequences may also be passed directly.
        longest: Largest length of a row in the run, if it is larger than here.
    """

    rows: Sequence[Tensor]
    call: RaggedCall
    longest: int = 0

    def padded(self) -> tuple[Int64[Tensor, " n"], Shaped[Tensor, "n L ..."]]:
        """Return the lengths, and the rows padded with zeros.

        Raises:
            ValueError: There are no rows, they differ in more than their length, or the form is unknown.
        """
        kinds = {(row.shape[1:], row.dtype) if isinstance(row, Tensor) and row.ndim else None for row in self.rows}
        if len(kinds) != 1 or None in kinds or self.call not in get_args(RaggedCall):
            raise ValueError(
                "Ragged(rows, call) must hold tensors (length, ...) of one dtype that differ in their length alone, "
                f"and a call among {', '.join(get_args(RaggedCall))}: got {self.call!r} and rows of {len(kinds)} kinds."
            )
        X = pad_sequence(list(self.rows), batch_first=True)
        lengths = torch.tensor([len(row) for row in self.rows], device=X.device)
        room = max(0, self.longest - X.shape[1])
        return lengths, F.pad(X, (*[0, 0] * (X.ndim - 2), 0, room))


def as_ragged(X: Any, call: RaggedCall | None = None, longest: int = 0) -> Ragged | None:
    """Return inputs, or the arguments of a network's call, as ragged rows; None if they are not ragged.

    Args:
        X: A `Ragged`, a jagged nested tensor or a `PackedSequence`; or the arguments of the form `call`: values and
            offsets, or a list.
        call: The form in which the network takes them.
        longest: Largest length of a row.
    """
    if isinstance(X, Ragged):
        return Ragged(X.rows, call or X.call, max(longest, X.longest))
    if isinstance(X, PackedSequence):
        padded, lengths = pad_packed_sequence(X, batch_first=True)
        return Ragged([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)], "packed", longest)
    if isinstance(X, Tensor) and X.layout == torch.jagged:
        return Ragged(list(X.unbind()), "nested", longest)
    if call == "offsets" and isinstance(X, list | tuple) and all(isinstance(v, Tensor) and v.ndim for v in X):
        ends = [0] if len(X) != 2 or X[1].is_floating_point() else [*X[1].flatten().tolist(), len(X[0])]
        if ends[0] == 0 < len(ends) - 1 and ends == sorted(ends):
            return Ragged(X[0].split([end - start for start, end in pairwise(ends)]), "offsets", longest)
    return Ragged(list(X), "list", longest) if call == "list" and isinstance(X, list | tuple) else None


def call_ragged(
    function: Callable[..., Any], call: str, lengths: Int64[Tensor, " n"], padded: Shaped[Tensor, "n L ..."]
) -> Any:
    """Call a network with ragged rows in the form that it takes."""
    if call == "packed":
        return function(pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False))
    if call == "list":
        return function([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)])
    values = padded[torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]]
    ends = lengths.cumsum(0)
    if call == "offsets":
        return function(values, ends - lengths)
    return function(torch.nested.nested_tensor_from_jagged(values, F.pad(ends, (1, 0))))

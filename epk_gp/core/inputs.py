"""Inputs and outputs of a network: several inputs packed into one tensor, outputs of any structure.

The engine sees one tensor X of n rows. A tuple or dictionary of tensors is packed into X at the public functions, and
unpacked right before the network is called (`Signature.call`). For a graph the rows are node numbers, and the network
is called with the whole graph.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import Any, get_args

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from epk_gp.core.checks import door, validate_finite, validate_tensor
from epk_gp.core.graphs import DTYPES, Graph, Ragged, RaggedCall, RecordedGraph, as_ragged, call_ragged, graph_from_json
from epk_gp.core.plans import EVALUATED_ROWS, TensorSpec

# Inputs of n points: one tensor, or several with the same first dimension, called as net(*X) or net(**X). The nodes
# of a graph are points too: the `Graph` stands for all of them.
Inputs = Shaped[Tensor, "n ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Graph | Ragged


@dataclass(frozen=True)
class InputTensor:
    """One of the tensors that make up the inputs.

    Attributes:
        key: Its position or keyword in the network's call.
        shape: Shape of one point.
        dtype: Dtype at recording.
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
        """The kind of its entries: floating-point numbers, integers or Booleans."""
        if self.dtype == torch.bool:
            return "bool"
        return "floating-point" if self.dtype.is_floating_point else "integer"


@dataclass(frozen=True)
class InputLayout:
    """Positions of several input tensors, side by side in the packed inputs (n, D).

    Attributes:
        tensors: The tensors; for a dictionary, in the order of the sorted keys.
        ragged: The form in which the network takes rows of unequal lengths, packed as lengths and padded rows. None for
            other inputs.
    """

    tensors: tuple[InputTensor, ...]
    ragged: RaggedCall | None = None

    @property
    def longest(self) -> int:
        """The largest length of a ragged row."""
        return self.tensors[1].shape[0]

    @property
    def width(self) -> int:
        """Number D of entries of one point."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the packed inputs.

        The dtype of the tensors if they share one; otherwise the floating-point dtype; otherwise int64.
        """
        dtypes = {tensor.dtype for tensor in self.tensors}
        if len(dtypes) > 1:
            dtypes = {dtype for dtype in dtypes if dtype.is_floating_point} or {torch.int64}
        return reduce(torch.promote_types, dtypes)

    def of_width(self, width: int) -> "InputLayout":
        """Return the layout for rows of another length, such as a batch padded to its own longest row.

        The tensors that get shorter or longer are the longest vectors: tokens, attention mask and token types.

        Args:
            width: Number of entries of such a row, over all tensors.
        """
        vectors = [tensor.shape for tensor in self.tensors if len(tensor.shape) == 1]
        if width == self.width or not vectors:
            return self
        own = (max(vectors)[0] + (width - self.width) // vectors.count(max(vectors)),)
        return InputLayout(tuple(replace(t, shape=own) if t.shape == max(vectors) else t for t in self.tensors))

    def ends(self, rows: Shaped[Tensor, "n D"], width: int) -> list[Shaped[Tensor, "n E"]]:
        """Return two lists of packed rows whose longest vectors lack their last, or their first, entries."""
        pairs = list(zip(self.columns(), self.of_width(width).tensors, strict=True))
        first = [rows[:, start : start + own.size] for (_, start), own in pairs]
        last = [rows[:, start + tensor.size - own.size : start + tensor.size] for (tensor, start), own in pairs]
        return [torch.cat(parts, dim=1) for parts in (first, last)]

    def columns(self) -> list[tuple[InputTensor, int]]:
        """Return each tensor with its first column."""
        ends = accumulate((tensor.size for tensor in self.tensors), initial=0)
        return list(zip(self.tensors, ends, strict=False))


def pack_inputs(X: Inputs, name: str = "X") -> tuple[Tensor, InputLayout]:
    """Pack several tensors into one, (n, D), and return it with its layout.

    Args:
        X: Tensors with the same first dimension; the tensors of a dictionary lie in the order of the sorted keys, so
            that its order does not matter.
        name: Name of the inputs in error messages.

    Raises:
        TypeError: X is neither a sequence nor a dictionary, or an item is not a dense tensor of real numbers.
        ValueError: X is empty, or its tensors differ in their first dimension or device, hold NaN or infinity, or hold
            integers that the dtype of the others cannot represent.
    """
    if isinstance(X, Graph):
        raise TypeError(f"{name} must be numbers of the graph's nodes, an int64 tensor (n,): got the graph itself.")
    if (ragged := as_ragged(X)) is not None:
        packed, layout = pack_inputs(ragged.padded(), name)
        return packed, replace(layout, ragged=ragged.call)
    items = _items(X, name)
    for label, value in items:
        validate_tensor(value, label)
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
    keys: Iterable[Any] = sorted(X) if isinstance(X, Mapping) else range(len(items))
    tensors = [InputTensor(key, tuple(value.shape[1:]), value.dtype) for key, value in zip(keys, values, strict=True)]
    layout = InputLayout(tuple(tensors))
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
    """Raise if inputs do not consist of the same tensors as the recorded inputs.

    Raises:
        TypeError: A tensor holds numbers of another kind.
        ValueError: A tensor is missing, superfluous, or has another shape.
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
    """Raise if packed inputs hold a number that their tensor's dtype cannot represent.

    Raises:
        ValueError: An integer has a fractional part or is out of range, or a Boolean is neither 0 nor 1.
    """
    for tensor, first in layout.columns():
        part = X.detach()[:, first : first + tensor.size]
        holds_any = tensor.dtype.is_floating_point or part.dtype == tensor.dtype
        if not holds_any and not torch.equal(part.to(tensor.dtype).to(part.dtype), part):
            raise ValueError(f"{name}[{tensor.key!r}] must hold whole numbers ({tensor.dtype}), as in training.")


def _items(X: Any, name: str) -> list[tuple[str, Any]]:
    """List the tensors of inputs with their names in error messages."""
    is_several = isinstance(X, Sequence | Mapping) and not isinstance(X, str)
    if not is_several or (isinstance(X, Sequence) and len(X) and not any(isinstance(part, Tensor) for part in X)):
        raise TypeError(
            f"{name} must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.tensor(np.asarray(X)), "
            "or pass several tensors as a tuple or dict."
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
    """Concatenate tensors of n rows to one, (n, D), without checks."""
    return torch.cat([value.reshape(len(value), value.shape[1:].numel()).to(dtype) for value in values], dim=1)


def layout_from_json(entries: object, ragged: Any = None) -> InputLayout:
    """Return the layout that a run's header describes; `ragged` is the form of ragged rows.

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
        is_valid = is_valid and (ragged is None or (ragged in get_args(RaggedCall) and len(tensors[1].shape) > 0))
    except (KeyError, TypeError, IndexError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"the header's 'signature' must describe the network's input tensors: got {entries!r}.")
    return InputLayout(tensors, ragged)


@dataclass(frozen=True)
class Signature:
    """The call of a network, and the map from its result to outputs (n, C).

    Attributes:
        layout: The input tensors; None if the network takes one tensor, which is then passed unchanged.
        output: Maps the network's result to outputs (n, C); None if the result is the outputs, (n, C), or (n,) if C is
            1.
        graph: The graph that the network takes; the inputs are then node numbers. None for other inputs.
        rows_per_call: Largest number of rows in one call.
    """

    layout: InputLayout | None = None
    output: Callable[[Any], Tensor] | None = None
    graph: RecordedGraph | None = None
    rows_per_call: int = EVALUATED_ROWS

    @property
    def takes_them_as_returned(self) -> bool:
        """Whether the network's result is the outputs."""
        return self.output is None

    def pack(self, X: Inputs, name: str = "X") -> Shaped[Tensor, "n ..."]:
        """Pack inputs of the recorded structure into one tensor; a single tensor is taken as packed already.

        Raises:
            TypeError: An item of the inputs is not a tensor, or holds numbers of another kind than recorded.
            ValueError: An item is missing, has another shape than recorded, or another first dimension than the others;
                or a node number does not exist, or the graph differs.
        """
        if self.graph is not None:
            return self.graph.parse_nodes(X, name)
        if isinstance(X, Tensor) and X.layout != torch.jagged:
            return X
        if self.layout is not None and self.layout.ragged is not None:
            X = as_ragged(X, self.layout.ragged, self.layout.longest) or X
        if self.layout is None or isinstance(X, Graph):
            raise TypeError(f"{name} must be a torch.Tensor: got {type(X).__name__}. Use torch.tensor(np.asarray(X)).")
        packed, layout = pack_inputs(X, name)
        validate_same_layout(self.layout, layout, name)
        return packed

    def call(
        self,
        function: Callable[..., Any],
        rows: Shaped[Tensor, "n ..."],
        spec: TensorSpec | None = None,
        mark: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Any:
        """Call a network with packed inputs, and return its result.

        Args:
            function: The network.
            rows: Packed inputs, in the dtype and on the device of the computation.
            spec: Dtype and device of the computation, which node numbers cannot tell; by default those of the
                recording.
            mark: Function applied to each tensor with one row per point.
        """
        if self.graph is not None:
            return self.graph.call(function, rows, spec)
        args, kwargs = self.unpack(rows)
        args, kwargs = tuple(map(mark, args)), {name: mark(value) for name, value in kwargs.items()}
        if self.layout is not None and self.layout.ragged is not None:
            return call_ragged(function, self.layout.ragged, *args)
        return function(*args, **kwargs)

    def unpack(self, rows: Shaped[Tensor, "n ..."]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and keyword arguments of the network's call, for inputs other than a graph.

        Floating-point tensors have the dtype of the rows, as a single input has the dtype of the computation; integers
        and Booleans keep their own dtypes.
        """
        if self.layout is None:
            return (rows,), {}
        parts = {}
        for tensor, first in self.layout.of_width(rows.shape[1]).columns():
            part = rows[:, first : first + tensor.size]
            part = part.unflatten(1, tensor.shape) if tensor.shape else part.squeeze(1)
            follows_rows = tensor.dtype.is_floating_point and tensor.dtype == self.layout.dtype
            # contiguous, as in training: forward() may call view(), and dropout draws by memory layout
            parts[str(tensor.key)] = (part if follows_rows else part.to(tensor.dtype)).contiguous()
        return ((), parts) if isinstance(self.layout.tensors[0].key, str) else (tuple(parts.values()), {})

    def length(self, rows: Shaped[Tensor, "n ..."]) -> int:
        """Return the number of positions of packed inputs, the length of their longest vectors; 0 if there are none."""
        if rows.ndim != 2 or self.layout is None:
            return rows.shape[1] if rows.ndim == 2 else 0
        return max((t.shape[0] for t in self.layout.of_width(rows.shape[1]).tensors if len(t.shape) == 1), default=0)

    def structure(self, rows: Shaped[Tensor, "n ..."]) -> Inputs:
        """Return packed inputs in the recorded structure: a tensor, a tuple, a dictionary, or node numbers."""
        if self.graph is not None:
            return rows.reshape(-1)
        args, kwargs = self.unpack(rows)
        if self.layout is not None and self.layout.ragged is not None:
            lengths, padded = args
            values = [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]
            return Ragged(values, self.layout.ragged, padded.shape[1])
        return kwargs or (rows if self.layout is None else args)

    def outputs(self, returned: Any) -> Any:
        """Return the outputs in a network's result, without checks; one value per point becomes (n, 1)."""
        outputs = returned if self.output is None else self.output(returned)
        return outputs.unsqueeze(1) if isinstance(outputs, Tensor) and outputs.ndim == 1 else outputs

    def pack_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Any = None) -> Tensor | None:
        """Pack the arguments of a network's call into one tensor; None if they are not inputs of this structure.

        Other arguments are ignored.

        Args:
            args: Positional arguments of the call.
            kwargs: Its keyword arguments.
            forward: The network's forward function. It matches a positional argument to a keyword of the layout, or the
                reverse.
        """
        if self.layout is None:
            given = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
            return given if isinstance(given, Tensor) and given.ndim else None
        keys = [tensor.key for tensor in self.layout.tensors]
        form = self.layout.ragged
        expected = keys if form in (None, "offsets") else keys[:1]
        values: Sequence[Any] = arguments_of_call(expected, args, kwargs, forward) or ()
        if form is not None and values:
            rows = as_ragged(values if form == "offsets" else values[0], form, self.layout.longest)
            values = () if rows is None else rows.padded()
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        if len(tensors) < len(keys) or len({len(value) for value in tensors}) > 1:
            return None
        given = [InputTensor(0, tuple(value.shape[1:]), value.dtype) for value in tensors]
        layout = self.layout.of_width(sum(tensor.size for tensor in given))
        if any((a.shape, a.kind) != (b.shape, b.kind) for a, b in zip(given, layout.tensors, strict=True)):
            return None
        return side_by_side(tensors, self.layout.dtype)

    def to_json(self) -> dict[str, Any] | None:
        """Return the entry of a run's header; None if the network takes one tensor and returns the outputs.

        The function `output` cannot be stored; the entry says only whether there is one.
        """
        if self.layout is None and self.output is None and self.graph is None:
            return None
        tensors = () if self.layout is None else self.layout.tensors
        described = [{"key": t.key, "shape": list(t.shape), "dtype": str(t.dtype)} for t in tensors]
        entry: dict[str, Any] = {"inputs": described or None, "has_output": self.output is not None}
        if self.layout is not None and self.layout.ragged is not None:
            entry["ragged"] = self.layout.ragged
        if self.graph is not None:  # other headers have no such entry, as before graphs existed
            parts = self.graph.tensors.items()
            entry["graph"] = [{"key": k, "shape": list(v.shape), "dtype": str(v.dtype)} for k, v in parts]
        return entry

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the graph by their names on disk."""
        return {} if self.graph is None else {f"graph.{key}": value for key, value in self.graph.tensors.items()}


ONE_TENSOR = Signature()  # for a network that takes one tensor and returns its outputs


def signature_from_json(
    entry: object, output: Callable[[Any], Tensor] | None = None, data: Mapping[str, Tensor] | None = None
) -> Signature:
    """Return the signature that an entry of a run's header describes (`Signature.to_json`).

    Args:
        entry: The entry; None for a network that takes one tensor and returns its outputs.
        output: The function that the run was recorded with.
        data: The run's data, with the tensors of its graph (`Signature.stored_tensors`) and the node numbers.

    Raises:
        TypeError: `output` is not a function.
        ValueError: The entry is damaged, or `output` is missing.
    """
    validate_output(output)
    if entry is None:
        return Signature(None, output)
    if not isinstance(entry, dict) or not isinstance(entry.get("has_output"), bool) or "inputs" not in entry:
        raise ValueError(f"the header's 'signature' must say which tensors the network takes: got {entry!r}.")
    if entry["has_output"] and output is None:
        raise ValueError("the run was recorded with output=, a map of what the network returns: pass it as output=.")
    layout = None if entry["inputs"] is None else layout_from_json(entry["inputs"], entry.get("ragged"))
    graph = None if entry.get("graph") is None else graph_from_json(entry["graph"], data or {})
    return Signature(layout, output, graph)


def validate_output(output: object) -> None:
    """Raise if an object cannot be the function that maps a network's result to its outputs.

    Raises:
        TypeError: It cannot be called.
    """
    if output is not None and not callable(output):
        raise TypeError(f"output must map what the network returns to a tensor (n, C), or be None: got {output!r}.")


def parse_signature(X: Inputs, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Signature]:
    """Pack training inputs into one tensor, and return it with the network's signature.

    Raises:
        TypeError, ValueError: As in `pack_inputs`.
    """
    if isinstance(X, Tensor) and X.layout != torch.jagged:
        return X, Signature(None, output)
    packed, layout = pack_inputs(X)
    return packed, Signature(layout, output)


def parse_graph(graph: Graph, num_nodes: int, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Signature]:
    """Return the numbers of a graph's nodes, and the signature of a network that takes a copy of the graph.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
    """
    for key, value in graph.tensors.items():
        if str(value.dtype) not in DTYPES:
            raise TypeError(f"tensor {key!r} of the graph must hold real numbers: got {value.dtype}. Convert it first.")
    copies = {key: value.detach().clone().contiguous() for key, value in graph.tensors.items()}
    recorded = RecordedGraph(copies, num_nodes)
    return recorded.nodes, Signature(None, output, recorded)


def arguments_of_call(
    keys: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any], forward: Callable[..., Any]
) -> list[Any] | None:
    """Return the arguments of a call for the given positions and keywords; None if one is missing.

    Args:
        keys: Positions, from 0 on, and keywords.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
        forward: The network's forward function. It matches a positional argument to a keyword in `keys`, or the
            reverse.
    """
    positions = tuple(key for key in keys if isinstance(key, int))
    keywords = {key: key for key in keys if isinstance(key, str)}
    try:
        expected, given = (_by_parameter(forward, *call) for call in ((positions, keywords), (args, kwargs)))
    except TypeError:
        return None
    parameter_of = {key: parameter for parameter, key in expected.items()}
    return [given.get(parameter_of[key]) for key in keys]


def _by_parameter(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Return the arguments of a call, keyed by position and by parameter name."""
    signature, result = inspect.signature(forward), dict[int | str, Any]()
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            result.update(enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            result.update(value)
        else:
            result[name] = value
    return result


@dataclass(frozen=True, eq=False, init=False)
class Points:
    """Points of H x {0, 1} (Definition 3.4, Bell et al. 2023).

    Attributes:
        X: n inputs, packed into one tensor if there are several.
        is_train: Whether each point is a training copy (gradient frozen at the start of the step) or a test copy; one
            bool for all points, or (n,).
        layout: Layout of the packed tensor if there are several input tensors.
    """

    X: Shaped[Tensor, "n ..."]
    is_train: bool | Bool[Tensor, " n"]
    layout: InputLayout | None

    @door
    def __init__(self, X: Inputs, is_train: bool | Bool[Tensor, " n"]) -> None:
        """Pack the inputs, and raise if the copy mask does not fit.

        Raises:
            TypeError: `X` is neither a tensor nor a tuple or dict of tensors, or `is_train` is neither a bool nor a
                bool tensor.
            ValueError: `is_train` has another length than X, or the input tensors do not fit together.
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


def memory_order(x: Tensor) -> Tensor | None:
    """Return the dimensions of a dense tensor by their strides, largest first; None if they are in this order."""
    if x.is_contiguous() or x.ndim < 2:
        return None
    strides = list(x.stride())
    order = sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))
    return torch.tensor(order) if order != list(range(x.ndim)) else None

"""What a network is called with and what it returns: several inputs packed into one tensor, outputs of any structure.

The engine sees one tensor X of n rows. Inputs that are a tuple or a dictionary of tensors are packed into it where they
enter, and unpacked right before the network is called (`Signature.call`). Of a graph the rows are node numbers, and the
network is called with the whole graph.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.inputs import (
    DTYPES,
    Graph,
    InputLayout,
    Inputs,
    InputTensor,
    RecordedGraph,
    layout_from_json,
    pack_inputs,
    side_by_side,
    validate_same_layout,
)
from epk_gp.core.plans import TensorSpec


@dataclass(frozen=True)
class Signature:
    """How a network is called, and how its outputs (n, C) are taken from what it returns.

    Attributes:
        layout: The tensors that it takes; None where it takes one tensor, which is then not changed in any way.
        output: Maps what the network returns to outputs (n, C); None where it returns them, or (n,) where C is 1.
        graph: The graph that it takes, of which the inputs are node numbers; None where inputs are inputs.
    """

    layout: InputLayout | None = None
    output: Callable[[Any], Tensor] | None = None
    graph: RecordedGraph | None = None

    def pack(self, X: Inputs, name: str = "X") -> Shaped[Tensor, "n ..."]:
        """Return inputs of the recorded structure as one tensor; a tensor is taken for packed inputs.

        Raises:
            TypeError: A part of the inputs is no tensor, or of another kind than recorded.
            ValueError: A part is missing, or has another shape than recorded, or another first dimension than the
                others; or there is no node of a number, or the graph is another one.
        """
        if self.graph is not None:
            return self.graph.parse_nodes(X, name)
        if isinstance(X, Tensor):
            return X
        if self.layout is None or isinstance(X, Graph):
            raise TypeError(f"{name} must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.as_tensor.")
        packed, layout = pack_inputs(X, name)
        validate_same_layout(self.layout, layout, name)
        return packed

    def call(self, function: Callable[..., Any], rows: Shaped[Tensor, "n ..."], spec: TensorSpec | None = None) -> Any:
        """Call a network with packed inputs, and return what it returns for them.

        Args:
            function: The network.
            rows: Packed inputs, in the dtype and on the device of the computation.
            spec: This dtype and device, which node numbers do not tell; by default those of the recording.
        """
        if self.graph is not None:
            return self.graph.call(function, rows, spec)
        args, kwargs = self.unpack(rows)
        return function(*args, **kwargs)

    def unpack(self, rows: Shaped[Tensor, "n ..."]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the arguments and the keywords that the network is called with, where it takes no graph.

        Floating-point tensors have the dtype of the rows, as a single input has that of the computation; integers and
        Booleans have their own.
        """
        if self.layout is None:
            return (rows,), {}
        parts = self._parts(self.layout, rows)
        if self.layout.is_mapping:
            return (), {str(tensor.key): part for tensor, part in zip(self.layout.tensors, parts, strict=True)}
        return tuple(parts), {}

    def structure(self, rows: Shaped[Tensor, "n ..."]) -> Inputs:
        """Return packed inputs in the structure that they had: a tensor, a tuple or a dictionary; or node numbers."""
        if self.graph is not None:
            return rows.reshape(-1)
        args, kwargs = self.unpack(rows)
        return kwargs or (rows if self.layout is None else args)

    def outputs(self, returned: Any) -> Any:
        """Return the outputs that belong to what the network returned, not checked: one value per point is (n, 1)."""
        outputs = returned if self.output is None else self.output(returned)
        return outputs.unsqueeze(1) if isinstance(outputs, Tensor) and outputs.ndim == 1 else outputs

    def pack_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
    ) -> Tensor | None:
        """Return what a network was called with as one tensor, or None if the call was not one with these inputs.

        Arguments that are not part of the inputs are left out.

        Args:
            args: Positional arguments of the call.
            kwargs: Its keyword arguments.
            forward: The network's forward function, by which a position is recognised that is a keyword in the layout,
                or the reverse.
        """
        if self.layout is None:
            given = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
            return given if isinstance(given, Tensor) and given.ndim else None
        keys = [tensor.key for tensor in self.layout.tensors]
        values = arguments_of_call(keys, args, kwargs, forward)
        if values is None:
            return None
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        if len(tensors) < len(keys) or len({len(value) for value in tensors}) > 1:
            return None
        pairs = list(zip(self.layout.tensors, tensors, strict=True))
        if any(
            tuple(value.shape[1:]) != tensor.shape or InputTensor(0, (), value.dtype).kind != tensor.kind
            for tensor, value in pairs
        ):
            return None
        return side_by_side([value for _, value in pairs], self.layout.dtype)

    def to_json(self) -> dict[str, Any] | None:
        """Return the entry of a run's header; None where a network takes one tensor and returns the outputs.

        A function cannot be stored: only whether there is one.
        """
        if self.layout is None and self.output is None and self.graph is None:
            return None
        tensors = () if self.layout is None else self.layout.tensors
        described = [{"key": t.key, "shape": list(t.shape), "dtype": str(t.dtype)} for t in tensors]
        entry = {"inputs": described or None, "has_output": self.output is not None}
        if self.graph is None:  # without the entry, headers are those of runs before there were graphs
            return entry
        parts = self.graph.tensors.items()
        return entry | {"graph": [{"key": k, "shape": list(v.shape), "dtype": str(v.dtype)} for k, v in parts]}

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the graph by their names on disk."""
        return {} if self.graph is None else {f"graph.{key}": value for key, value in self.graph.tensors.items()}

    @staticmethod
    def _parts(layout: InputLayout, rows: Tensor) -> list[Tensor]:
        parts = []
        for tensor, first in layout.columns():
            part = rows[:, first : first + tensor.size]
            part = part.unflatten(1, tensor.shape) if tensor.shape else part.squeeze(1)
            follows_rows = tensor.dtype.is_floating_point and tensor.dtype == layout.dtype
            # contiguous, as the user's own: forward() may call view(), and dropout draws by memory layout
            parts.append((part if follows_rows else part.to(tensor.dtype)).contiguous())
        return parts


ONE_TENSOR = Signature()  # of a network that takes one tensor and returns its outputs


def signature_from_json(
    entry: object, output: Callable[[Any], Tensor] | None = None, data: Mapping[str, Tensor] | None = None
) -> Signature:
    """Return the signature that an entry of a run's header describes (`Signature.to_json`).

    Args:
        entry: The entry; None for a network that takes one tensor and returns its outputs.
        output: The function that the run was recorded with.
        data: The run's data, with the tensors of its graph (`Signature.stored_tensors`) and the node numbers.

    Raises:
        TypeError: `output` is no function.
        ValueError: The entry is damaged, or `output` must be given and is not.
    """
    validate_output(output)
    if entry is None:
        return Signature(None, output)
    if not isinstance(entry, dict) or not isinstance(entry.get("has_output"), bool) or "inputs" not in entry:
        raise ValueError(f"the header's 'signature' must say which tensors the network takes: got {entry!r}.")
    if entry["has_output"] and output is None:
        raise ValueError(
            "the run was recorded with output=, a function from what the network returns to (n, C): pass it as output=."
        )
    layout = None if entry["inputs"] is None else layout_from_json(entry["inputs"])
    graph = None if entry.get("graph") is None else _graph_from_json(entry["graph"], data or {})
    return Signature(layout, output, graph)


def _graph_from_json(entries: object, data: Mapping[str, Tensor]) -> RecordedGraph:
    """Return the graph that a header describes, from the tensors stored with a run.

    Raises:
        ValueError: The description is damaged, or a tensor is missing or another one, or the run's inputs are not the
            numbers of all nodes.
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


def validate_output(output: object) -> None:
    """Raise if an object cannot be the function from what a network returns to its outputs.

    Raises:
        TypeError: It cannot be called.
    """
    if output is not None and not callable(output):
        raise TypeError(
            f"output must be a function from what the network returns to a tensor (n, C), or None: got {output!r}."
        )


def parse_signature(X: Inputs, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Signature]:
    """Return training inputs as one tensor, with the signature of a network that takes them.

    Raises:
        TypeError, ValueError: As `pack_inputs`; or `output` is no function.
    """
    validate_output(output)
    if isinstance(X, Tensor):
        return X, Signature(None, output)
    packed, layout = pack_inputs(X)
    return packed, Signature(layout, output)


def parse_graph(graph: Graph, num_nodes: int, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Signature]:
    """Return the numbers of a graph's nodes, with the signature of a network that takes it; its tensors are copied.

    Raises:
        TypeError: `output` is no function, or a tensor is of a dtype that cannot be stored.
    """
    validate_output(output)
    for key, value in graph.tensors.items():
        if str(value.dtype) not in DTYPES:
            raise TypeError(f"tensor {key!r} of the graph must hold real numbers: got {value.dtype}. Convert it first.")
    copies = {key: value.detach().clone().contiguous() for key, value in graph.tensors.items()}
    recorded = RecordedGraph(copies, num_nodes)
    return recorded.nodes, Signature(None, output, recorded)


def arguments_of_call(
    keys: Sequence[int | str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forward: Callable[..., Any] | None = None,
) -> list[Any] | None:
    """Return the arguments of a call that stand for given positions and keywords; None if it is no such call.

    Args:
        keys: Positions, from 0 on, and keywords.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
        forward: The network's forward function, by which a position is recognised that is a keyword in `keys`, or the
            reverse.
    """
    positions = tuple(key for key in keys if isinstance(key, int))
    keywords = {key: key for key in keys if isinstance(key, str)}
    try:
        expected, found = (_by_parameter(forward, *call) for call in ((positions, keywords), (args, kwargs)))
    except TypeError:
        return None
    parameter_of = {key: parameter for parameter, key in expected.items()}
    return [found.get(parameter_of[key]) for key in keys]


def _by_parameter(
    forward: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int | str, Any]:
    """Return the arguments of a call by the parameters that take them."""
    if forward is None:
        return dict([*enumerate(args), *kwargs.items()])
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

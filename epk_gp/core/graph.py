"""Graphs: the inputs of one forward pass that gives one row of outputs per node.

The engine's points are then node numbers, (n, 1) or (n,): an output is a function of the weights and of its number
alone, although it is computed from the whole graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.core.plans import TensorSpec
from epk_gp.core.inputs import select_rows
from epk_gp.core.checks import validate_has_values


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
            _validate_tensor(value, key)

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
    _cast: dict[TensorSpec, dict[int | str, Tensor]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[type["RecordedGraph"], tuple[Mapping[int | str, Tensor], int]]:
        """Return the tensors alone as the pickled form."""
        return RecordedGraph, (self.tensors, self.num_nodes)

    @property
    def nodes(self) -> Int64[Tensor, "N 1"]:
        """All node numbers, on the graph's device."""
        return torch.arange(self.num_nodes, device=next(iter(self.tensors.values())).device)[:, None]

    @property
    def graph(self) -> Graph:
        """The graph as it was given."""
        args, kwargs = self._arguments(self.tensors)
        return Graph(*args, **kwargs)

    def call(self, function: Callable[..., Any], nodes: Shaped[Tensor, "n ..."], spec: TensorSpec | None) -> Any:
        """Call a network with the whole graph, and keep what it returns for some nodes.

        Args:
            function: The network.
            nodes: Node numbers.
            spec: Dtype of floating-point tensors, and device of all; as recorded by default.
        """
        args, kwargs = self._arguments(self.tensors if spec is None else self._tensors_for(spec))
        return select_rows(function(*args, **kwargs), nodes.reshape(-1), self.num_nodes)

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
        if X.is_floating_point() or X.is_complex() or X.dtype == torch.bool:
            advice = f" Pass {name}.nonzero().squeeze(1)." if X.dtype == torch.bool else ""
            raise TypeError(f"{name} must hold node numbers, which are integers: got {X.dtype}.{advice}")
        if X.ndim == 0 or X.shape[1:].numel() != 1:
            raise ValueError(f"{name} must have shape (n,), one number per node: got {tuple(X.shape)}.")
        validate_has_values(X, name)
        if len(X) and not 0 <= int(X.min()) <= int(X.max()) < self.num_nodes:
            raise ValueError(
                f"{name} must hold node numbers in 0..{self.num_nodes - 1}: got {int(X.min())}..{int(X.max())}."
            )
        return X.detach().to(torch.int64).reshape(-1, 1)

    def difference(self, tensors: Mapping[int | str, object]) -> str | None:
        """Return in words where given tensors differ from the recorded ones; None if they do not."""
        if list(tensors) != list(self.tensors):
            return f"it consists of the tensors {list(self.tensors)}, got {list(tensors)}"
        for key, recorded in self.tensors.items():
            value = tensors[key]
            if not isinstance(value, Tensor):
                return f"tensor {key!r} is {type(value).__name__}"
            if value.shape != recorded.shape or value.dtype != recorded.dtype or value.layout != recorded.layout:
                expected, got = (f"{tuple(z.shape)} of {z.dtype}" for z in (recorded, value))
                return f"tensor {key!r} has shape {expected}, got {got}"
            if not torch.equal(value.to(recorded.device), recorded):
                return f"tensor {key!r} holds other numbers"
        return None

    def _tensors_for(self, spec: TensorSpec) -> dict[int | str, Tensor]:
        if spec not in self._cast:
            self._cast[spec] = {key: spec.cast(value) for key, value in self.tensors.items()}
        return self._cast[spec]

    @staticmethod
    def _arguments(tensors: Mapping[int | str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        args = [value for key, value in tensors.items() if isinstance(key, int)]
        return args, {key: value for key, value in tensors.items() if isinstance(key, str)}


def _validate_tensor(value: object, key: int | str) -> None:
    label = f"tensor {key!r} of the graph"
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{label} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor, or leave it "
            "out and set it inside the network."
        )
    validate_has_values(value, label)
    if not value.is_floating_point():
        return
    if not torch.isfinite(value).all():
        raise ValueError(f"{label} must be finite: it holds NaN or infinity.")
    if not value.is_contiguous():
        raise ValueError(f"{label} must be contiguous, for dropout draws in memory order: call contiguous() on it.")

"""The forward passes of a network that takes a graph: which graph they saw, and what they hold of a batch's nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.core.inputs import RecordedGraph
from epk_gp.core.signature import arguments_of_call
from epk_gp.recording.observer import CapturedForward
from epk_gp.recording.causes import StepMismatchError


@dataclass(eq=False)
class GraphCalls:
    """Compares what a network is called with with the recorded graph.

    A tensor that was compared before is not compared again as long as torch counts no change of it. An edit past that
    count shows in the check of the step, for which the recorded graph is used.

    Attributes:
        graph: The recorded graph.
        forward: The network's forward function.
    """

    graph: RecordedGraph
    forward: Callable[..., Any]
    _known: dict[int | str, tuple[Tensor, int]] = field(default_factory=dict)

    def difference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return in words how a call differs from one with the recorded graph; None if it is one."""
        keys = list(self.graph.tensors)
        values = arguments_of_call(keys, args, kwargs, self.forward)
        if values is None:
            return "it was called with other arguments"
        given = dict(zip(keys, values, strict=True))
        if all(self._is_known(key, value) for key, value in given.items()):
            return None
        difference = self.graph.difference(given)
        if difference is None:
            self._known = {key: (v, v._version) for key, v in given.items() if not v.is_inference()}
        return difference

    def _is_known(self, key: int | str, value: object) -> bool:
        tensor, version = self._known.get(key, (None, 0))
        return isinstance(value, Tensor) and value is tensor and value._version == version


def of_nodes(index: int, forward: CapturedForward, nodes: Int64[Tensor, " B"]) -> CapturedForward:
    """Return what a pass of the whole graph holds of a batch's nodes.

    Args:
        index: Number of the step, for the error message.
        forward: The pass.
        nodes: The nodes, each as often as it occurs; such a node's gradient is split evenly.

    Raises:
        StepMismatchError: The pass saw another graph, or the loss read nodes that are not in the batch.
    """
    if forward.difference is not None:
        raise StepMismatchError(
            f"step {index}: the network must be called with the recorded graph: {forward.difference}. Change features "
            "and edges (DropEdge, masked features) inside the network's forward()."
        )
    rows = nodes.to(forward.inputs.device)
    outputs, gradient = forward.outputs, forward.output_gradient
    if outputs is not None and gradient is not None and len(gradient) == len(forward.inputs):
        is_outside = torch.ones(len(gradient), dtype=torch.bool, device=rows.device).index_fill(0, rows, False)
        read = (is_outside & gradient.flatten(1).any(dim=1)).nonzero().squeeze(1)
        if len(read):
            raise StepMismatchError(
                f"step {index}: recorder.batch() must get all nodes whose outputs the loss reads: it reads node "
                f"{int(read[0])} ({len(read)} nodes in all), which the batch does not hold. A loss over several sets "
                "of nodes is one batch: recorder.batch(torch.cat(sets), weight=...) with a weight per row."
            )
        counts = rows.bincount(minlength=len(gradient))[rows].to(gradient.dtype)
        gradient = gradient[rows] / counts.view(-1, *[1] * (gradient.ndim - 1))
        outputs = outputs[rows]
    return replace(forward, inputs=forward.inputs[rows], outputs=outputs, output_gradient=gradient)

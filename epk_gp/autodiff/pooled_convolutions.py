"""Convolutions whose outputs are seen through a max-pool alone: most of their positions have no gradient.

A max-pool hands each gradient to one position of its window, the same for all outputs of the network. The layer's
gradient is therefore a sum over the pool's windows in place of all positions, of gradients of the pool's output times
what the convolution sees at the largest position. No gradient goes back through the pool, nor through a ReLU between.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from epk_gp.autodiff.layer_builder import LayerIO

_POOLS = ("MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0")
_RELU = "ReluBackward0"

Users = defaultdict[Node, list[tuple[Node, int]]]


@dataclass(frozen=True, eq=False)
class PoolWindows:
    """The windows of a max-pool over a convolution's output.

    Attributes:
        edge: Where the gradient with respect to the pool's output can be taken.
        positions: The largest position of each window, counted through the convolution's output, (E, channels,
            *windows).
        relu: What a ReLU between both returned, (E, channels, *positions); None without one.
    """

    edge: GradientEdge
    positions: Int64[Tensor, "E channels ..."]
    relu: Float[Tensor, "E channels ..."] | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the pool's output."""
        return self.positions.shape

    def patches(self, x: Float[Tensor, "E n_in L"]) -> Float[Tensor, "E channels n_in W"]:
        """Take what each channel's windows see of a convolution's patches; zeros where the ReLU returned zero."""
        positions, n_in = self.positions.flatten(2), x.shape[1]
        E, channels, W = positions.shape
        spread = x.unsqueeze(1).expand(E, channels, -1, -1)
        taken = spread.gather(3, positions.unsqueeze(2).expand(E, channels, n_in, W))
        if self.relu is None:
            return taken
        is_zero = self.relu.flatten(2).gather(2, positions) <= 0
        return taken.masked_fill_(is_zero.unsqueeze(2), 0)


def sum_over_windows(
    patches: Float[Tensor, "E channels n_in W"], grads: Float[Tensor, "K E channels W"]
) -> Float[Tensor, "K E P"]:
    """Write a convolution's gradients out: one product per point and channel, for all cotangents."""
    product = grads.permute(1, 2, 0, 3) @ patches.mT  # E channels K n_in
    return product.permute(2, 0, 1, 3).flatten(2)


def users_of_nodes(outputs: Tensor) -> Users:
    """Find who takes the outputs of each node of a graph: the node and the number of the output, for each use."""
    users: Users = defaultdict(list)
    waiting = [] if outputs.grad_fn is None else [outputs.grad_fn]
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        for source, number in node.next_functions:
            if source is None:
                continue
            users[source].append((node, number))
            if source not in found:
                found.add(source)
                waiting.append(source)
    return users


def pool_windows(users: Users, call: LayerIO) -> PoolWindows | None:
    """Find the max-pool that alone sees a convolution's output, or the output of a ReLU that alone sees it.

    Args:
        users: Of the nodes of the graph.
        call: The convolution.
    """
    relu, pool = None, _only_user(users, call.edge.node)
    if pool is not None and pool.name() == _RELU:
        relu, pool = pool, _only_user(users, pool)
    if pool is None or pool.name() not in _POOLS:
        return None
    # torch's names for what nodes keep: under other names, verification finds that windows cannot be had
    positions: Tensor = pool._saved_result1  # type: ignore[attr-defined]
    if positions.dim() != len(call.shape):
        return None
    outputs: Tensor | None = None if relu is None else relu._saved_result.detach()  # type: ignore[attr-defined]
    return PoolWindows(GradientEdge(pool, 0), positions, outputs)


def _only_user(users: Users, node: Node) -> Node | None:
    """Return the node that takes a node's first output, if nothing else takes any."""
    of_node = users[node]
    return of_node[0][0] if len(of_node) == 1 and of_node[0][1] == 0 else None

"""Layer Jacobians by parameter: written into columns of flat weights, and multiplied with adjoints.

A layer's Jacobian contains the gradients in a weight and in its bias together. Adjoints are processed for some columns
of the flat weights at a time: they are multiplied by the gradients in some rows of one parameter, so that no array
holds all gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.representations import DenseJacobian, LayerJacobian, NodeWeights, OuterProductJacobian
from epk_gp.autodiff.uses import EmbeddingJacobian

_ALL = slice(None)
_AVERAGED = 1 << 19  # numbers averaged at a time: 4 MiB in float64, which stay in the cache


@dataclass(frozen=True, eq=False)
class ParameterGradients:
    """The gradients of K outputs at E points in one parameter.

    Attributes:
        jacobian: The Jacobian of its layer.
        width: Numbers in a row of the layer's weight.
        has_bias: Whether the layer has a bias, whose gradients follow those of each row of the weight.
        is_bias: Whether the parameter is that bias.
    """

    jacobian: LayerJacobian
    width: int
    has_bias: bool = False
    is_bias: bool = False

    @property
    def unit(self) -> int:
        """Numbers in a row of the parameter."""
        return 1 if self.is_bias else self.width

    def written(self, rows: slice = _ALL) -> Float[Tensor, "K E size"]:
        """Return the dense gradients in some rows of the parameter; the rows of a bias are its entries."""
        if isinstance(self.jacobian, EmbeddingJacobian):
            return self.jacobian.written(rows)
        if type(self.jacobian) is OuterProductJacobian:
            inputs, delta = self.jacobian.inputs, self.jacobian.output_grads[..., rows]  # E L n_in, K E L n_out
            if self.is_bias:
                return delta.sum(dim=2)
            is_single = inputs.shape[1] == 1
            return (delta.squeeze(2).unsqueeze(3) * inputs if is_single else delta.mT @ inputs).flatten(2)
        by_row: Tensor = self.jacobian.to_dense().unflatten(2, (-1, self.width + self.has_bias))[:, :, rows]
        return by_row[..., -1] if self.is_bias else by_row[..., : self.width].flatten(2)

    def write_average(self, nodes: NodeWeights, out: Float[Tensor, "N K size"], *, adds: bool) -> None:
        """Write the average over nodes of each of N points, in one product for points with similar numbers of nodes.

        Args:
            nodes: The points and weights of the E evaluations.
            out: The result, which is overwritten.
            adds: Whether to add to it, for nodes after the first.
        """
        if type(self.jacobian) is not OuterProductJacobian:
            values = nodes.add(None, self.written(), 1).transpose(0, 1)
            out.add_(values) if adds else out.copy_(values)
            return
        grads, inputs = self.jacobian.output_grads.permute(1, 0, 3, 2), self.jacobian.inputs  # E K n_out L, E L n_in
        if not adds and sum(len(points) for points, *_ in nodes.by_point) < len(out):
            out.zero_()
        for points, rows, weights in nodes.by_point:
            is_whole, size = len(points) == len(out), max(1, _AVERAGED // out[0].numel())
            for part in (slice(first, first + size) for first in range(0, len(points), size)):
                own = rows[part]
                weighted = (grads[own] * weights[part][..., None, None, None]).permute(0, 2, 3, 1, 4).flatten(3)
                if self.is_bias:
                    values = weighted.sum(dim=3)
                else:
                    values = (weighted.flatten(1, 2) @ inputs[own].flatten(1, 2)).view(len(own), out.shape[1], -1)
                if is_whole:
                    out[part].add_(values) if adds else out[part].copy_(values)
                elif adds:
                    out.index_add_(0, points[part], values)
                else:
                    out[points[part]] = values

    def products(self, H: Float[Tensor, "R size"], rows: slice = _ALL) -> Float[Tensor, "R E"]:
        """Multiply adjoints of some rows of the parameter by the gradients of one output at each point."""
        if isinstance(self.jacobian, EmbeddingJacobian):
            return self.jacobian.products(H, rows)
        return self.products_of_steps(H[None], rows)[0].T

    def products_of_steps(self, H: Float[Tensor, "T R size"], rows: slice = _ALL) -> Float[Tensor, "T B R"]:
        """Multiply adjoints of T steps by the gradients of one output at B points of each step.

        A few adjoints are multiplied by the inputs first, so that no gradient becomes dense.
        """
        own, (T, R, _) = self.jacobian, H.shape
        if type(own) is OuterProductJacobian and own.inputs.shape[1] == 1 and not self.is_bias:
            B = len(own.inputs) // T
            if R * (B + self.width) < B * self.width:  # numbers for each output of the layer, and gradients
                factors = own.inputs, own.output_grads[0][..., rows]
                inputs, delta = (x.to(H).flatten(0, -2).unflatten(0, (T, -1)) for x in factors)
                of_outputs = (H.reshape(T, -1, self.width) @ inputs.mT).unflatten(1, (R, -1))  # T R n_out B
                few: Tensor = (of_outputs * delta.mT[:, None]).sum(dim=2).mT
                return few
        products: Tensor = self.written(rows)[0].to(H).unflatten(0, (T, -1)) @ H.mT
        return products


def by_parameter(
    net: PlannedModel, jacobians: Sequence[LayerJacobian], *, all_dense: bool = False
) -> list[ParameterGradients]:
    """Return the gradients in each parameter, in the order of the flat weights.

    Args:
        net: The network.
        jacobians: The result of `layer_jacobians`.
        all_dense: Whether there is one dense Jacobian of all weights (`ContractionCost.all_dense`).
    """
    model, plan = net.model, net.plan
    shapes, found = dict(zip(model.names, model.shapes, strict=True)), dict[str, ParameterGradients]()
    names = model.names if all_dense else plan.dense_params
    layers = () if all_dense else zip(plan.bias_of.items(), jacobians, strict=False)
    for (weight, bias), jacobian in layers:
        if bias is None:
            found[weight] = ParameterGradients(jacobian, _width(shapes[weight]))
            continue
        width = shapes[weight].numel() // shapes[bias].numel()
        found |= {name: ParameterGradients(jacobian, width, True, name == bias) for name in (weight, bias)}
    if names:
        parts = jacobians[-1].to_dense().split([shapes[name].numel() for name in names], dim=2)
        for name, part in zip(names, parts, strict=True):
            found[name] = ParameterGradients(DenseJacobian(part), _width(shapes[name]))
    return [found[name] for name in model.names]


def _width(shape: torch.Size) -> int:
    return max(1, shape[1:].numel())

"""A network with the plan of how to differentiate it, and its dense Jacobians, sample by sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.func import vjp, vmap

from epk_gp.autodiff.representations import DenseJacobian
from epk_gp.core.losses import Head, Loss, loss_derivatives
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import DifferentiationPlan, MemoryPlan
from epk_gp.core.torch_overrides import disable_fused_attention


@dataclass(frozen=True, eq=False)
class Cotangents:
    """K cotangents of the logits of every sample.

    Attributes:
        of_logits: Maps logits (E, C) to the cotangents (K, E, C).
        are_constant: The cotangents do not depend on the logits.
        head: The cotangents are those of all C outputs of this head; None for any others.
    """

    of_logits: Callable[[Float[Tensor, "E C"]], Float[Tensor, "K E C"]]
    are_constant: bool = False
    head: Head | None = None


def all_outputs(head: Head) -> Cotangents:
    """Return the C cotangents of the outputs: rows of I, or of I - 1 p^T (docs/theory.md, section 5)."""

    def rows(z: Tensor) -> Tensor:
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None, :].expand(-1, z.shape[0], -1)
        return eye if head == "logits" else eye - z.softmax(dim=1)

    return Cotangents(rows, are_constant=head == "logits", head=head)


def chosen_outputs(head: Head, classes: Int64[Tensor, " E"]) -> Cotangents:
    """Return the one cotangent of each sample's own output."""
    every = all_outputs(head).of_logits

    def rows(z: Tensor) -> Tensor:
        return every(z)[classes, torch.arange(len(z), device=z.device)][None]

    return Cotangents(rows, are_constant=head == "logits")


def summed_outputs(head: Head) -> Cotangents:
    """Return the one cotangent of the sum of all outputs."""
    every = all_outputs(head).of_logits
    return Cotangents(lambda z: every(z).sum(0, keepdim=True), are_constant=head == "logits")


def combined_outputs(head: Head, coefficients: Float[Tensor, "K C"]) -> Cotangents:
    """Return the K cotangents of sums over the outputs of a head, each with coefficients of its own."""

    def rows(z: Tensor) -> Tensor:
        V = coefficients.to(z)
        every = V[:, None].expand(-1, len(z), -1)
        return every if head == "logits" else every - V.sum(1)[:, None, None] * z.softmax(dim=1)

    return Cotangents(rows, are_constant=head == "logits")


def weighted_loss(loss: Loss, y: Shaped[Tensor, "B ..."], c: Float[Tensor, " B"]) -> Cotangents:
    """Return the one cotangent of each sample's weighted loss: c_i times its derivative in the logits."""
    return Cotangents(lambda z: (c[:, None] * loss_derivatives(loss, z, y))[None])


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A network in the computation's dtype and on its device, with its plan.

    Attributes:
        model: The network as a function of its weights.
        plan: How to differentiate it.
    """

    model: FunctionalModel
    plan: DifferentiationPlan

    def memory_plan(self, budget: int) -> MemoryPlan:
        """Return what turns a budget of bytes into block sizes for this network."""
        return MemoryPlan(budget, self.itemsize, self.plan, self.model.num_weights)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.model.spec.dtype.itemsize


def flat_columns(net: PlannedModel, *, all_dense: bool) -> Int64[Tensor, " P"]:
    """Return the place in the flat weights of each entry of dense layer Jacobians, in their order.

    Args:
        net: The network.
        all_dense: There is one dense Jacobian of all weights (`ContractionCost.all_dense`).
    """
    model, plan = net.model, net.plan
    if all_dense:
        return torch.arange(model.num_weights)
    places = dict(zip(model.names, torch.arange(model.num_weights).split(list(model.sizes)), strict=True))
    columns = []
    for name, bias in plan.bias_of.items():
        if bias is None:
            columns.append(places[name])
        else:
            weight = places[name].view(len(places[bias]), -1)
            columns.append(torch.cat([weight, places[bias][:, None]], dim=1).flatten())
    return torch.cat([*columns, *(places[name] for name in plan.dense_params)])


def dense_jacobian(
    net: PlannedModel,
    names: tuple[str, ...],
    w: Float[Tensor, " PQ"],
    X: Shaped[Tensor, "E ..."],
    cotangents: Float[Tensor, "K E C"],
    *,
    d: Float[Tensor, " PQ"] | None = None,
    t: Float[Tensor, " E"] | None = None,
    create_graph: bool = False,
) -> DenseJacobian:
    """Differentiate the contracted logits with respect to named parameters, or moving statistics.

    Args:
        net: The network.
        names: The parameters.
        w: Flat weights, and moving statistics behind them where the network has any.
        X: E inputs.
        cotangents: K cotangents of each sample's logits.
        d: Flat direction, if row e is evaluated at w + t_e d.
        t: (E,) with `d`.
        create_graph: Keep the result differentiable with respect to X.
    """
    plan = net.plan
    if d is not None and t is not None and plan.shares_pass and not plan.supports_mapped_passes:
        points, groups = group_rows(t)
        parts = [
            dense_jacobian(net, names, w + u * d, X[rows], cotangents[:, rows], create_graph=create_graph).values
            for u, rows in zip(points, groups, strict=True)
        ]
        return DenseJacobian(torch.cat(parts, dim=1)[:, torch.cat(groups).argsort()])
    t_of_rows = torch.zeros(len(X), dtype=w.dtype, device=X.device) if t is None else t
    with disable_fused_attention():
        if not plan.supports_vmap:
            rows = [
                _jacobian_of_sample(
                    net,
                    names,
                    _parameters_at(net, w, d, t_of_rows[e]),
                    X[e : e + 1],
                    cotangents[:, e : e + 1],
                    create_graph,
                )
                for e in range(len(X))
            ]
            return DenseJacobian(torch.stack(rows, dim=1))

        def pull_back(x: Tensor, cotangent: Tensor, t_of_row: Tensor) -> Tensor:
            here = _parameters_at(net, w, d, t_of_row)
            others = {name: value for name, value in here.items() if name not in names}

            def outputs(inner: Mapping[str, Tensor]) -> Any:
                return net.model.evaluate({**others, **inner}, x.unsqueeze(0)).squeeze(0)

            pull = vjp(outputs, {name: here[name] for name in names})[1]
            (columns,) = vmap(pull)(cotangent)
            return torch.cat([columns[name].flatten(1) for name in names], dim=1)

        chunk = plan.vmap_chunk_size
        # rows first: torch maps a result that is the same for all rows (a parameter without a gradient) in no other way
        values = vmap(pull_back, in_dims=(0, 1, 0), chunk_size=chunk)(X, cotangents, t_of_rows).transpose(0, 1)
        return DenseJacobian(values if create_graph else values.detach())


def group_rows(t: Float[Tensor, " E"]) -> tuple[Float[Tensor, " G"], list[Int64[Tensor, " _"]]]:
    """Return the different points of a segment, and the rows at each of them."""
    points, index = t.unique(return_inverse=True)
    return points, [(index == k).nonzero().squeeze(1) for k in range(len(points))]


def _parameters_at(net: PlannedModel, w: Tensor, d: Tensor | None, t: Tensor) -> dict[str, Tensor]:
    params = net.model.unflatten(w)
    if d is None:
        return params
    direction = net.model.unflatten(d)
    return {name: value + t * direction[name] for name, value in params.items()}


def _jacobian_of_sample(
    net: PlannedModel,
    names: tuple[str, ...],
    params: Mapping[str, Tensor],
    x: Tensor,
    cotangents: Tensor,
    create_graph: bool,
) -> Tensor:
    """Differentiate one sample by one backward pass per cotangent: works wherever training does."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        z = net.model(leaves, x)
        grads = [
            torch.autograd.grad(
                z,
                [leaves[name] for name in names],
                cotangent,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
            for cotangent in cotangents
        ]
    return torch.stack([torch.cat([g.reshape(-1) for g in of_cotangent]) for of_cotangent in grads])

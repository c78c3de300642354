"""How to differentiate a network: which weights are layers', which are not, and which of torch's ways work on it."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.interception import LayerIO
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.model import FunctionalModel

_BYTES_AT_A_TIME = 48 << 20
_PASS_BYTES = 1 << 20  # of a forward pass, from which one cotangent is worth a backward pass of its own


def rows_at_a_time(plan: DifferentiationPlan, dtype: torch.dtype = torch.float64, cotangents: int = 1) -> int:
    """Count the samples whose passes stay so small that memory is used again, not fetched anew.

    Measured on two convolutions and MNIST images, in milliseconds: one Gram block in float64 takes 296 with 100 images
    at a time, 188 with 25, 255 with 6; the plain forward pass is 4 times slower with 400 than with 100, because the C
    library returns large blocks to the system after each use.

    Args:
        plan: Says how much a sample takes.
        dtype: Of the computation.
        cotangents: Gradients that are taken back at once.
    """
    at_once = 1 if plan.backward_per_output else cotangents
    return max(1, _BYTES_AT_A_TIME // (plan.activations_per_sample * dtype.itemsize * (at_once + 2)))


def cotangents_at_a_time(plan: DifferentiationPlan, rows: int, cotangents: int, dtype: torch.dtype) -> int:
    """Count the cotangents that are taken back at once: as many as fit, or one where a pass is no small thing."""
    each = max(1, rows) * plan.activations_per_sample * dtype.itemsize
    if plan.backward_per_output and each >= _PASS_BYTES:
        return 1
    return max(1, min(cotangents, _BYTES_AT_A_TIME // each - 2))


def flat_layout(model: FunctionalModel, plan: DifferentiationPlan, *, dense: bool) -> Int64[Tensor, " P"]:
    """Find the place in the flat weights of each entry of written-out features, in their order.

    Args:
        model: The network.
        plan: How its weights are used.
        dense: The features are one Jacobian of all weights (`ContractionCost.dense`).
    """
    places = dict(zip(model.names, torch.arange(model.num_weights).split(list(model.sizes)), strict=True))
    if dense:
        return torch.arange(model.num_weights)
    rows = []
    for name, bias in plan.bias_of.items():
        if bias is None:
            rows.append(places[name])
        else:
            weight = places[name].view(len(places[bias]), -1)
            rows.append(torch.cat([weight, places[bias][:, None]], dim=1).flatten())
    return torch.cat([*rows, *(places[name] for name in plan.dense_params)])


def grads_of_calls(
    z: Float[Tensor, "E C"],
    calls: Sequence[LayerIO],
    seeds: Float[Tensor, "K E C"],
    *,
    batched: bool,
    final: bool = True,
    create_graph: bool = False,
) -> list[Tensor]:
    """Pull K cotangents of the logits back to the outputs of layer calls: one (K, E, ...) tensor each.

    Args:
        z: The logits, or whatever the cotangents are for.
        calls: The layer calls.
        seeds: The cotangents.
        batched: Take them back at once.
        final: The graph will not be used again.
        create_graph: Keep the result differentiable.
    """
    if not calls:
        return []
    edges = [c.edge for c in calls]
    columns: list[Tensor | None]
    if batched and len(seeds) > 1 and not create_graph:
        found = torch.autograd.grad(z, edges, seeds, is_grads_batched=True, retain_graph=not final, allow_unused=True)
        columns = [None if g is None else g.detach() for g in found]
    else:
        rows = [
            torch.autograd.grad(
                z,
                edges,
                seed,
                retain_graph=create_graph or not final or k + 1 < len(seeds),
                create_graph=create_graph,
                allow_unused=True,
            )
            for k, seed in enumerate(seeds)
        ]
        columns = [
            None if own[0] is None else own[0][None] if len(own) == 1 else torch.stack(own)
            for own in zip(*rows, strict=True)
        ]
    return [
        z.new_zeros(len(seeds), *c.shape) if column is None else column
        for c, column in zip(calls, columns, strict=True)
    ]

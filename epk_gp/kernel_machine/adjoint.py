"""Contributions under any linear update rule: adjoints accumulated from the last step back (theory, section 4)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.jacobians import Cotangents, WeightLocation, gradients
from epk_gp.autodiff.plan import rows_at_a_time
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.core.losses import Loss, loss_derivatives
from epk_gp.core.trajectory import batch_of, flat_weights
from epk_gp.core.update_rules import UpdateCoefficients, broadcast_to_params
from epk_gp.gram.step_average import averaged_jacobian, to_flat_order
from epk_gp.kernel_machine.problem import AttributionProblem, integrate_step
from epk_gp.kernel_machine.progress import PassProgress


@dataclass(frozen=True, eq=False)
class SampleContributions:
    """What some samples of one step add to some predictions.

    Attributes:
        step: s.
        rows: Which N of the points.
        samples: Indices of B training samples, a sample as often as it occurs.
        values: Their contributions, (N, K, B, G) over G groups of parameters.
    """

    step: int
    rows: Int64[Tensor, " N"]
    samples: Int64[Tensor, " B"]
    values: Float[Tensor, "N K B G"]


@dataclass(frozen=True, eq=False)
class Decay:
    """What weight decay adds to some predictions in one step, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


def accumulate(
    query: AttributionProblem,
    groups: Int64[Tensor, " L"],
    take: Callable[[SampleContributions | Decay], None],
    keeper: PassProgress,
    *,
    progress: bool,
) -> None:
    """Go through the run from its last step to its first and hand out every term.

    With Phi the averaged gradients of the outputs, the adjoint of the momentum buffer is
    M_s = momentum_s Phi_s + keep_{s+1} M_{s+1}, that of h is H_s = take_s M_s + direct_s Phi_s, and sample i adds
    -<H_s, gradient_s c_i grad loss_i(w_s)>.

    Args:
        query: What is asked.
        groups: Group of each of the L parameters.
        take: Called with every term; decay terms that are zero are left out.
        keeper: Where the pass stands; what is done is left out.
        progress: Show a progress bar.
    """
    trajectory, n = query.trajectory, len(query.X)
    panel = panel_size(query)
    panels = torch.arange(n, device=query.X.device).split(panel)
    S = trajectory.num_steps
    units = len(panels) * S
    with tqdm(total=units, initial=keeper.done, desc="steps", disable=not progress) as bar:
        for number, rows in enumerate(panels):
            for place in range(max(0, keeper.done - number * S), S):
                step = trajectory.steps[S - 1 - place]
                carried = keeper.carried if place else None  # keep_{s+1} * M_{s+1}
                integral, nodes = integrate_step(query, step, rows, max(1, panel))
                Phi = averaged_jacobian(nodes, len(rows), query.layout)
                del nodes
                w = flat_weights(trajectory, step.index, query.X)
                u = trajectory.updates[step.index]
                H, carried = _adjoints(u, query.model.sizes, Phi, carried)
                _hand_out_decay(query, groups, step.index, rows, (H, Phi), u, w, take)
                _hand_out_samples(query, groups, step.index, rows, H, u, w, take)
                keeper.advance(integral, carried, last=keeper.done + 1 == units)
                bar.update()


def panel_size(query: AttributionProblem) -> int:
    """Choose how many points are taken at a time, from the memory budget."""
    size = torch.finfo(query.dtype).bits // 8
    per_point = 10 * query.num_rows * query.model.num_weights + 8 * query.plan.activations_per_sample * (
        query.num_rows + 3
    )
    return max(1, query.memory_budget // (2 * size * per_point))


def _adjoints(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], carried: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Tensor | None]:
    """Go one step back: the adjoint of h, and what the step before receives."""
    momentum, keep, take, direct = (
        broadcast_to_params(v, sizes, Phi) for v in (u.momentum_lr, u.beta, u.one_minus_dampening, u.lr)
    )
    M = carried
    if momentum.any():
        M = momentum * Phi if M is None else M.addcmul_(Phi, momentum)
    if M is None:
        return direct * Phi, None
    H = take * M
    if direct.any():
        H.addcmul_(Phi, direct)
    return H, M.mul_(keep) if keep.any() else None


def _hand_out_decay(
    query: AttributionProblem,
    groups: Tensor,
    step: int,
    rows: Tensor,
    adjoints: tuple[Tensor, Tensor],
    u: UpdateCoefficients,
    w: Tensor,
    take: Callable[[SampleContributions | Decay], None],
) -> None:
    H, Phi = adjoints
    sizes = query.model.sizes
    total = None
    for adjoint, factor in ((H, u.weight_decay), (Phi, u.decoupled_decay)):
        if factor.any():
            pull = broadcast_to_params(factor, sizes, w) * w
            part = _grouped(adjoint, pull[None], groups, sizes).squeeze(2)  # N K G
            total = part if total is None else total + part
    if total is not None:
        take(Decay(step, rows, -total))


def _hand_out_samples(
    query: AttributionProblem,
    groups: Tensor,
    step: int,
    rows: Tensor,
    H: Tensor,
    u: UpdateCoefficients,
    w: Tensor,
    take: Callable[[SampleContributions | Decay], None],
) -> None:
    trajectory, sizes = query.trajectory, query.model.sizes
    X, y, c = batch_of(trajectory, trajectory.steps[step], w)
    chosen = trajectory.steps[step].batch
    samples = (torch.arange(len(X)) if chosen is None else chosen).to(X.device)
    H = H * broadcast_to_params(u.grad_scale, sizes, H) if not bool((u.grad_scale == 1).all()) else H
    one = ContractionCost(pairs=1, products=1, dense=query.form.dense)
    for part in torch.arange(len(X), device=X.device).split(_batch_size(query)):
        cotangents = weighted_loss(trajectory.loss, y[part], c[part])
        features = gradients(query.model, query.plan, WeightLocation(w), X[part], cotangents, one, fixed_seed=False)
        G = to_flat_order(features, query.layout)[0]  # B P
        take(SampleContributions(step, rows, samples[part], -_grouped(H, G, groups, sizes)))


def _grouped(
    H: Float[Tensor, "K N P"], G: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Take inner products, summed over each group of parameters apart."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ G.T).view(K, N, len(G)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(G), count)
    first = 0
    for group, size in zip(groups.tolist(), sizes, strict=True):
        part = slice(first, first + size)
        out[..., group] += (H[..., part].flatten(0, 1) @ G[:, part].T).view(K, N, len(G)).transpose(0, 1)
        first += size
    return out


def _batch_size(query: AttributionProblem) -> int:
    size = torch.finfo(query.dtype).bits // 8
    rows = query.memory_budget // (8 * size * (3 * query.model.num_weights + 8 * query.plan.activations_per_sample))
    return max(1, min(rows, rows_at_a_time(query.plan, query.dtype)))


def weighted_loss(loss: Loss, y: Shaped[Tensor, "B ..."], c: Float[Tensor, " B"]) -> Cotangents:
    """Give the one cotangent of each sample's weighted loss: c_i times its derivative with respect to the logits."""

    def rows(z: Tensor) -> Tensor:
        return (c[:, None] * loss_derivatives(loss, z, y))[None]

    return rows

"""Find out how a network uses its weights, by watching one forward pass, and verify it against plain autograd.

Nothing is believed of a module because of its name. A weight is treated as a layer's only if every use of it is a
linear, convolution or normalisation call, and only if the gradients so obtained equal autograd's on a few inputs;
everything else is differentiated densely.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import jvp_per_sample, jvp_via_double_vjp
from epk_gp.autodiff.interception import (
    CONVOLUTIONS,
    LAYERS,
    InterpolatedWeights,
    ParameterUsage,
    ParameterUsageRecorder,
    StackedWeights,
    UnsupportedParameterUseError,
    disable_fused_attention,
)
from epk_gp.autodiff.jacobians import WeightLocation, dense_jacobian, gradients
from epk_gp.autodiff.representations import ContractionCost, to_dense
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, flat_weights

T = TypeVar("T")

_MAP_ELEMENTS = 1 << 24
_PROBE_ROWS = 6


def plan_for(trajectory: Trajectory, model: FunctionalModel) -> DifferentiationPlan:
    """Return the plan of a run's network, made once for each dtype and device.

    Args:
        trajectory: The run. Its training inputs and trained weights are what the plan is tried on.
        model: The network in the computation's dtype and on its device.
    """
    cache = model.cache
    with cache.lock:
        key = (model.spec, cache.needs_dense_plan)
        if key not in cache.plans:
            X = probe_rows(trajectory.inputs).to(model.spec.device)
            X = X.to(model.spec.dtype) if X.is_floating_point() else X
            w = flat_weights(trajectory, trajectory.num_steps, X)
            cache.plans[key] = build_plan(model, w, X, dense=cache.needs_dense_plan)
        return cache.plans[key]


def with_plan(trajectory: Trajectory, model: FunctionalModel, compute: Callable[[DifferentiationPlan], T]) -> T:
    """Compute with the network's plan; with the dense one if the inputs use a parameter in a way that was not foreseen.

    A network may send each row to another expert: a layer then sees some of the rows, which the rows that the plan was
    made on need not show. The model's cache keeps that finding for every later computation.

    Args:
        trajectory: The run.
        model: The network in the computation's dtype and on its device.
        compute: What to compute. It must leave nothing behind when it raises.
    """
    plan = plan_for(trajectory, model)
    try:
        return compute(plan)
    except UnsupportedParameterUseError:
        if model.cache.plans.get((model.spec, True)) is plan:
            raise
        model.cache.needs_dense_plan = True
    return compute(plan_for(trajectory, model))


def probe_rows(X: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "E ..."]:
    """Take a few rows, spread over all, forth and back: no order that a network could sort them into is theirs."""
    forth = torch.linspace(0, len(X) - 1, _PROBE_ROWS, device=X.device).long()
    return X[torch.cat([forth, forth[:-1].flip(0)])]


def build_plan(
    model: FunctionalModel, w: Float[Tensor, " P"], X: Shaped[Tensor, "E ..."], *, dense: bool = False
) -> DifferentiationPlan:
    """Watch the network at weights w and choose how to differentiate it.

    Args:
        model: The network, in the computation's dtype.
        w: Flat weights of some state.
        X: A few inputs.
        dense: Believe in no layer, and in no line.

    Raises:
        ValueError: A sample's output depends on the other samples of the batch.
    """
    weights = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
    with ParameterUsageRecorder(weights) as uses, disable_fused_attention():
        z = model(weights, X).detach()
    with torch.no_grad(), disable_fused_attention():
        single = torch.cat([model(weights, row) for row in X.split(1)])
    if not _alike(z, single):
        raise ValueError(
            "an output must depend on its own input alone: the network gives other outputs for a batch than for its "
            "rows one by one (statistics of the batch?)."
        )
    plan = DifferentiationPlan(
        bias_of={} if dense else _layers(uses.calls),
        dense_params=(),
        supports_interpolation=not dense and all(use.proper for use in uses.calls),
        supports_stacking=True,
        supports_jvp=True,
        supports_double_backward=True,
        supports_batched_vjp=True,
        backward_per_output=any(use.function in CONVOLUTIONS for use in uses.calls),
        supports_vmap=True,
        vmap_chunk_size=64,
        activations_per_sample=max(1, uses.elements // len(X)),
        num_outputs=z.shape[1],
    )
    return validate_plan(model, w, X, plan)


def _layers(uses: list[ParameterUsage]) -> dict[str, str | None]:
    """Map the weights that only layers' calls use to the bias that always goes with each."""
    seen: dict[str, list[ParameterUsage]] = {}
    for use in uses:
        for name in use.names:
            seen.setdefault(name, []).append(use)
    biases: dict[str, str | None] = {}
    for name, own in seen.items():
        layers = all(use.proper and use.weight == name for use in own)
        functions = {use.function for use in own}
        if layers and len(functions) == 1 and functions <= {*LAYERS}:
            bias = own[0].bias
            together = all(use.bias == bias for use in own)
            biases[name] = bias if bias is not None and together and len(seen[bias]) == len(own) else None
    return biases


def validate_plan(model: FunctionalModel, w: Tensor, X: Tensor, plan: DifferentiationPlan) -> DifferentiationPlan:
    """Keep in the plan only what reproduces plain autograd on the rows of X."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(w.numel(), device=w.device, dtype=torch.float64).sin().to(w.dtype)
    here = WeightLocation(w + 0.02 * rows)  # off the trained weights, where a zero could hide a mistake
    with torch.no_grad():
        z = model(model.unflatten(here.w), X)
    seeds = torch.randn(2, *z.shape, generator=generator, dtype=torch.float64).to(z)
    loop = replace(plan, supports_vmap=False)
    truth = dense_jacobian(model, loop, model.names, here, X, seeds).values
    pieces = dict(zip(model.names, truth.split([shape.numel() for shape in model.shapes], dim=2), strict=True))
    kept = {}
    for name, bias in plan.bias_of.items():
        alone = replace(plan, bias_of={name: bias}, supports_batched_vjp=False)
        if passes_check(lambda alone=alone: _layer_error(model, alone, here, X, seeds, pieces)):  # type: ignore[misc]
            kept[name] = bias
    covered = {*kept, *(bias for bias in kept.values() if bias is not None)}
    plan = replace(plan, bias_of=kept, dense_params=tuple(name for name in model.names if name not in covered))
    plan = replace(plan, supports_batched_vjp=passes_check(lambda: _layer_error(model, plan, here, X, seeds, pieces)))
    plan = replace(plan, vmap_chunk_size=max(1, _MAP_ELEMENTS // (model.num_weights + plan.activations_per_sample)))
    if plan.supports_interpolation:
        plan = replace(plan, supports_interpolation=passes_check(lambda: _line_error(model, plan, here, X)))
    stacked = (
        plan.supports_interpolation and not plan.dense_params and passes_check(lambda: _stack_error(model, here, X))
    )
    plan = replace(plan, supports_stacking=stacked)
    _load_forward_mode()
    plan = replace(plan, supports_jvp=passes_check(lambda: _forward_error(model, here, X)))
    plan = replace(plan, supports_double_backward=passes_check(lambda: _twice_error(model, here, X)))
    names = plan.dense_params if plan.supports_interpolation else model.names
    if names:
        wanted = torch.cat([pieces[name] for name in names], dim=2)
        mapped = passes_check(lambda: (dense_jacobian(model, plan, names, here, X, seeds).values, wanted))
        plan = replace(plan, supports_vmap=mapped)
    return plan


Pair = tuple[Tensor, Tensor]


def _layer_error(
    model: FunctionalModel,
    plan: DifferentiationPlan,
    here: WeightLocation,
    X: Tensor,
    seeds: Tensor,
    pieces: dict[str, Tensor],
) -> Pair:
    found = gradients(
        model, replace(plan, dense_params=()), here, X, lambda _: seeds, ContractionCost(1, 1), fixed_seed=False
    )
    wanted = []
    for name, bias in plan.bias_of.items():
        rows = pieces[name]
        if bias is not None:
            rows = torch.cat([rows.unflatten(2, (pieces[bias].shape[2], -1)), pieces[bias].unsqueeze(3)], dim=3)
        wanted.append(rows.flatten(2))
    empty = seeds.new_zeros(*seeds.shape[:2], 0)
    return torch.cat([empty, *map(to_dense, found)], dim=2), torch.cat([empty, *wanted], dim=2)


def _line_error(model: FunctionalModel, plan: DifferentiationPlan, here: WeightLocation, X: Tensor) -> Pair:
    d = 0.1 * here.w.flip(0)
    t = (0.9 + 0.31 * torch.arange(len(X), dtype=here.w.dtype, device=X.device)) % 1
    weights = model.unflatten(here.w)
    with torch.no_grad(), disable_fused_attention():
        with InterpolatedWeights(weights, model.unflatten(d), t):
            found = model(weights, X)
        rows = [model(model.unflatten(here.w + t[e] * d), X[e : e + 1]) for e in range(len(X))]
    return found, torch.cat(rows)


def _stack_error(model: FunctionalModel, here: WeightLocation, X: Tensor) -> Pair:
    each = torch.stack([here.w, 1.1 * here.w, 0.9 * here.w + 0.1 * here.w.flip(0)])
    weights = model.unflatten(here.w)
    with torch.no_grad(), disable_fused_attention():
        with StackedWeights(weights, model.unflatten_rows(each)):
            found = model(weights, torch.cat([X] * len(each)))
        return found, torch.cat([model(model.unflatten(w), X) for w in each])


def _forward_error(model: FunctionalModel, here: WeightLocation, X: Tensor) -> Pair:
    d = 0.1 * here.w.flip(0)
    weights, direction = model.unflatten(here.w), model.unflatten(d)
    with torch.no_grad(), disable_fused_attention(), fwAD.dual_level():
        duals = {name: fwAD.make_dual(value, direction[name]) for name, value in weights.items()}
        tangent = fwAD.unpack_dual(model(duals, X)).tangent
    return tangent, _slope(model, weights, direction, X)


def _twice_error(model: FunctionalModel, here: WeightLocation, X: Tensor) -> Pair:
    weights, direction = model.unflatten(here.w), model.unflatten(0.1 * here.w.flip(0))
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    with torch.enable_grad(), disable_fused_attention():
        slope = jvp_via_double_vjp(model(leaves, X), leaves, direction)
    return slope, _slope(model, weights, direction, X)


def _slope(model: FunctionalModel, weights: dict[str, Tensor], direction: dict[str, Tensor], X: Tensor) -> Tensor:
    with disable_fused_attention():
        return torch.cat([jvp_per_sample(model, weights, direction, x, "logits")[1] for x in X.split(1)])


def _load_forward_mode() -> None:
    """Let torch load its forward-mode rules; it calls a deprecated function of its own on the way (torch 2.13)."""
    with warnings.catch_warnings(), fwAD.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        fwAD.make_dual(torch.zeros(1), torch.zeros(1))


def passes_check(attempt: Callable[[], Pair]) -> bool:
    """Whether a way of computing runs without complaint and gives what it should."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it falls back to a slow loop
            found, wanted = attempt()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, UserWarning, AttributeError):
        return False
    return found.shape == wanted.shape and _alike(found, wanted)


def _alike(found: Tensor, wanted: Tensor) -> bool:
    if not wanted.numel():
        return True
    eps = torch.finfo(wanted.dtype).eps
    return bool((found - wanted).abs().max() <= eps**0.65 * (wanted.abs().max() + eps))

"""Find out how a network uses its weights, by watching one forward pass, and verify it against plain autograd.

Nothing is believed of a module because of its name. A weight is treated as a layer's only if every use of it is a
linear, convolution or normalisation call, and only if the gradients so obtained equal autograd's on a few inputs;
everything else is differentiated densely.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

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
from epk_gp.autodiff.plan import Plan
from epk_gp.autodiff.representations import ContractionCost, to_dense
from epk_gp.core.model import Skeleton, call, unflatten, unflatten_rows
from epk_gp.core.trajectory import Trajectory, compute_dtype, flat_weights, skeleton_for

P = ParamSpec("P")
T = TypeVar("T")

_MAP_ELEMENTS = 1 << 24
_PROBE_ROWS = 6
_DENSE = "dense plan"


def plan_for(trajectory: Trajectory, like: Shaped[Tensor, "..."]) -> Plan:
    """Give the plan for computations in the dtype and on the device of `like` (made once each)."""
    dense = bool(trajectory.memo.get(_DENSE))
    key = ("plan", dense, compute_dtype(trajectory, like), like.device)
    if key not in trajectory.memo:
        skeleton = skeleton_for(trajectory, compute_dtype(trajectory, like), like.device)
        X = probe_rows(trajectory.inputs).to(like.device)
        X = X.to(like.dtype) if X.is_floating_point() else X
        trajectory.memo[key] = build_plan(
            skeleton, flat_weights(trajectory, trajectory.num_steps, like), X, dense=dense
        )
    found: Plan = trajectory.memo[key]
    return found


def once_more(ask: Callable[P, T]) -> Callable[P, T]:
    """Let a question be asked again, with a dense plan, if its own rows use weights otherwise than the probe's.

    A network may send each row to another expert: a layer then sees some of the rows, which the probe's rows need not
    show. The run remembers.

    Args:
        ask: Its first argument is the trajectory.
    """

    @wraps(ask)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(*args, **kwargs)
        except UnsupportedParameterUseError:
            trajectory: Any = args[0] if args else kwargs["trajectory"]
            if trajectory.memo.get(_DENSE):
                raise
            trajectory.memo[_DENSE] = True
            return ask(*args, **kwargs)

    return asked


def probe_rows(X: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "E ..."]:
    """Take a few rows, spread over all, forth and back: no order that a network could sort them into is theirs."""
    forth = torch.linspace(0, len(X) - 1, _PROBE_ROWS, device=X.device).long()
    return X[torch.cat([forth, forth[:-1].flip(0)])]


def build_plan(skeleton: Skeleton, w: Float[Tensor, " P"], X: Shaped[Tensor, "E ..."], *, dense: bool = False) -> Plan:
    """Watch the network at weights w and choose how to differentiate it.

    Args:
        skeleton: The network, in the computation's dtype.
        w: Flat weights of some state.
        X: A few inputs.
        dense: Believe in no layer, and in no line.

    Raises:
        ValueError: A sample's output depends on the other samples of the batch.
    """
    weights = {name: value.detach().requires_grad_() for name, value in unflatten(skeleton, w).items()}
    with ParameterUsageRecorder(weights) as uses, disable_fused_attention():
        z = call(skeleton, weights, X).detach()
    with torch.no_grad(), disable_fused_attention():
        single = torch.cat([call(skeleton, weights, row) for row in X.split(1)])
    if not _alike(z, single):
        raise ValueError(
            "an output must depend on its own input alone: the network gives other outputs for a batch than for its "
            "rows one by one (statistics of the batch?)."
        )
    plan = Plan(
        biases={} if dense else _layers(uses.calls),
        dense=(),
        on_line=not dense and all(use.proper for use in uses.calls),
        stacked=True,
        forward_mode=True,
        twice=True,
        batched=True,
        by_output=any(use.function in CONVOLUTIONS for use in uses.calls),
        mapped=True,
        map_chunk=64,
        elements=max(1, uses.elements // len(X)),
        outputs=z.shape[1],
    )
    return validate_plan(skeleton, w, X, plan)


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


def validate_plan(skeleton: Skeleton, w: Tensor, X: Tensor, plan: Plan) -> Plan:
    """Keep in the plan only what reproduces plain autograd on the rows of X."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(w.numel(), device=w.device, dtype=torch.float64).sin().to(w.dtype)
    here = WeightLocation(w + 0.02 * rows)  # off the trained weights, where a zero could hide a mistake
    with torch.no_grad():
        z = call(skeleton, unflatten(skeleton, here.w), X)
    seeds = torch.randn(2, *z.shape, generator=generator, dtype=torch.float64).to(z)
    loop = replace(plan, mapped=False)
    truth = dense_jacobian(skeleton, loop, skeleton.names, here, X, seeds).values
    pieces = dict(zip(skeleton.names, truth.split([shape.numel() for shape in skeleton.shapes], dim=2), strict=True))
    kept = {}
    for name, bias in plan.biases.items():
        alone = replace(plan, biases={name: bias}, batched=False)
        if passes_check(lambda alone=alone: _layer_error(skeleton, alone, here, X, seeds, pieces)):  # type: ignore[misc]
            kept[name] = bias
    covered = {*kept, *(bias for bias in kept.values() if bias is not None)}
    plan = replace(plan, biases=kept, dense=tuple(name for name in skeleton.names if name not in covered))
    plan = replace(plan, batched=passes_check(lambda: _layer_error(skeleton, plan, here, X, seeds, pieces)))
    plan = replace(plan, map_chunk=max(1, _MAP_ELEMENTS // (skeleton.num_weights + plan.elements)))
    if plan.on_line:
        plan = replace(plan, on_line=passes_check(lambda: _line_error(skeleton, plan, here, X)))
    stacked = plan.on_line and not plan.dense and passes_check(lambda: _stack_error(skeleton, here, X))
    plan = replace(plan, stacked=stacked)
    _load_forward_mode()
    plan = replace(plan, forward_mode=passes_check(lambda: _forward_error(skeleton, here, X)))
    plan = replace(plan, twice=passes_check(lambda: _twice_error(skeleton, here, X)))
    names = plan.dense if plan.on_line else skeleton.names
    if names:
        wanted = torch.cat([pieces[name] for name in names], dim=2)
        mapped = passes_check(lambda: (dense_jacobian(skeleton, plan, names, here, X, seeds).values, wanted))
        plan = replace(plan, mapped=mapped)
    return plan


Pair = tuple[Tensor, Tensor]


def _layer_error(
    skeleton: Skeleton, plan: Plan, here: WeightLocation, X: Tensor, seeds: Tensor, pieces: dict[str, Tensor]
) -> Pair:
    found = gradients(
        skeleton, replace(plan, dense=()), here, X, lambda _: seeds, ContractionCost(1, 1), fixed_seed=False
    )
    wanted = []
    for name, bias in plan.biases.items():
        rows = pieces[name]
        if bias is not None:
            rows = torch.cat([rows.unflatten(2, (pieces[bias].shape[2], -1)), pieces[bias].unsqueeze(3)], dim=3)
        wanted.append(rows.flatten(2))
    empty = seeds.new_zeros(*seeds.shape[:2], 0)
    return torch.cat([empty, *map(to_dense, found)], dim=2), torch.cat([empty, *wanted], dim=2)


def _line_error(skeleton: Skeleton, plan: Plan, here: WeightLocation, X: Tensor) -> Pair:
    d = 0.1 * here.w.flip(0)
    t = (0.9 + 0.31 * torch.arange(len(X), dtype=here.w.dtype, device=X.device)) % 1
    weights = unflatten(skeleton, here.w)
    with torch.no_grad(), disable_fused_attention():
        with InterpolatedWeights(weights, unflatten(skeleton, d), t):
            found = call(skeleton, weights, X)
        rows = [call(skeleton, unflatten(skeleton, here.w + t[e] * d), X[e : e + 1]) for e in range(len(X))]
    return found, torch.cat(rows)


def _stack_error(skeleton: Skeleton, here: WeightLocation, X: Tensor) -> Pair:
    each = torch.stack([here.w, 1.1 * here.w, 0.9 * here.w + 0.1 * here.w.flip(0)])
    weights = unflatten(skeleton, here.w)
    with torch.no_grad(), disable_fused_attention():
        with StackedWeights(weights, unflatten_rows(skeleton, each)):
            found = call(skeleton, weights, torch.cat([X] * len(each)))
        return found, torch.cat([call(skeleton, unflatten(skeleton, w), X) for w in each])


def _forward_error(skeleton: Skeleton, here: WeightLocation, X: Tensor) -> Pair:
    d = 0.1 * here.w.flip(0)
    weights, direction = unflatten(skeleton, here.w), unflatten(skeleton, d)
    with torch.no_grad(), disable_fused_attention(), fwAD.dual_level():
        duals = {name: fwAD.make_dual(value, direction[name]) for name, value in weights.items()}
        tangent = fwAD.unpack_dual(call(skeleton, duals, X)).tangent
    return tangent, _slope(skeleton, weights, direction, X)


def _twice_error(skeleton: Skeleton, here: WeightLocation, X: Tensor) -> Pair:
    weights, direction = unflatten(skeleton, here.w), unflatten(skeleton, 0.1 * here.w.flip(0))
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    with torch.enable_grad(), disable_fused_attention():
        slope = jvp_via_double_vjp(call(skeleton, leaves, X), leaves, direction)
    return slope, _slope(skeleton, weights, direction, X)


def _slope(skeleton: Skeleton, weights: dict[str, Tensor], direction: dict[str, Tensor], X: Tensor) -> Tensor:
    with disable_fused_attention():
        return torch.cat([jvp_per_sample(skeleton, weights, direction, x, "logits")[1] for x in X.split(1)])


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

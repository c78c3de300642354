"""Find out how a network uses its parameters, verify each way to differentiate it against plain autograd, and plan.

A module's name proves nothing. A parameter is treated as a layer's only if every use of it is a linear, convolution or
normalisation call, and only if the resulting Jacobian equals autograd's on a few inputs; everything else is
differentiated densely. Every other capability (`DifferentiationPlan`) is tested in the same way.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff import interception
from epk_gp.autodiff.dense import (
    Cotangents,
    PlannedModel,
    WeightSegment,
    dense_jacobian,
    directional_derivatives,
    values,
)
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import VMAP_ELEMENTS, DifferentiationPlan, TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention, filter_own_warnings, forward_mode, outside_autocast
from epk_gp.core.trajectory import Trajectory, flat_state

_NUM_PROBE_ROWS = 6

# Largest size in bytes of the true Jacobian of the rows with which ways of differentiating are compared; each of them
# needs as much: together less than a small memory budget. A network of a million weights in float64 has four rows.
_TRUTH_BYTES, _FEWEST_ROWS = 1 << 26, 2
Pair = tuple[Tensor, Tensor]  # the computed and the expected value
T = TypeVar("T")


def probe_rows(X: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "E ..."]:
    """Return a few rows, spread over all, forwards then backwards.

    The order is its own mirror image, so that a network that sorts its batch is noticed.
    """
    forwards = torch.linspace(0, len(X) - 1, _NUM_PROBE_ROWS, device=X.device).long()
    return X[torch.cat([forwards, forwards[:-1].flip(0)])]


def observed_plan(
    model: FunctionalModel, w: Float[Tensor, " PQ"], X: Shaped[Tensor, "E ..."], *, all_dense: bool = False
) -> DifferentiationPlan:
    """Observe the network at weights w, and return every way to differentiate it that may work, without tests.

    Args:
        model: The network, in the computation's dtype.
        w: Flat weights of any state, and its moving statistics.
        X: A few inputs.
        all_dense: Whether to treat no parameter as a layer's, and not to interpolate weights.

    Raises:
        ValueError: A sample's output depends on the other samples of the batch.
    """
    params = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
    calls, num_activations, dtypes = list[interception.FunctionCall](), 0, set[torch.dtype]()

    def watch(call: interception.FunctionCall | None, result: Any) -> None:
        nonlocal num_activations
        num_activations += sum(value.numel() for value in interception.tensors_in((result,)))
        # torch 2.11's checkpointing makes an empty tensor in float32, which rounds nothing
        dtypes.update(v.dtype for v in interception.tensors_in((result,)) if v.requires_grad and v.numel())
        # a shape or a dtype does not depend on a parameter's value
        if call is not None and interception.has_tensors(result):
            calls.append(call)

    with interception.ParameterInterception(params, watch) as mode, disable_fused_attention():
        z = model(params, X).detach()
    with disable_fused_attention():
        single = torch.cat([model(params, row).detach() for row in X.split(1)])
    if not allclose(z, single):
        raise ValueError(
            "an output must depend on its own input alone: the network gives other outputs for a batch than for its "
            "rows one by one (statistics of the batch?)."
        )
    graph = model.signature.graph
    all_dense = all_dense or graph is not None
    activations = max(1, num_activations // (len(X) if graph is None else graph.num_nodes))
    per_row = activations if graph is None else max(1, num_activations)  # one row goes backward through all of them
    bias_of = {} if all_dense else _layers(calls, model.names)
    covered = {*bias_of, *bias_of.values()}
    return DifferentiationPlan(
        bias_of=bias_of,
        dense_params=tuple(name for name in model.names if name not in covered),
        supports_interpolation=not all_dense,
        supports_stacking=True,
        supports_jvp=True,
        supports_batched_vjp=True,
        supports_pool_windows=False,  # tested when the layers are known
        supports_vmap=True,
        calls_convolutions=any(call.function in interception.CONVOLUTIONS for call in calls),
        vmap_chunk_size=max(1, VMAP_ELEMENTS // (model.num_weights + per_row)),
        activations_per_sample=activations,
        num_outputs=z.shape[1],
        calls_fused_functions=mode.calls_fused_functions,
        shares_pass=graph is not None,
        casts_to_float32=model.spec.dtype == torch.float64 and torch.float32 in dtypes,
    )


def build_plan(
    model: FunctionalModel, w: Float[Tensor, " PQ"], X: Shaped[Tensor, "E ..."], *, all_dense: bool = False
) -> DifferentiationPlan:
    """Keep the ways to differentiate the network that reproduce plain autograd on X.

    Arguments and errors: as in `observed_plan`.
    """
    plan = replace(observed_plan(model, w, X, all_dense=all_dense), dense_params=())
    trial = _make_trial(model, w, X, plan)
    one_by_one, bias_of = replace(plan, supports_batched_vjp=False), plan.bias_of
    if not passes_check(lambda: _layer_jacobians(trial, one_by_one), one_by_one=True):
        alone = {name: replace(one_by_one, bias_of={name: bias}) for name, bias in bias_of.items()}
        works = [name for name, plan in alone.items() if passes_check(partial(_layer_jacobians, trial, plan))]
        bias_of = {name: bias_of[name] for name in works}
    covered = {*bias_of, *bias_of.values()}
    plan = replace(plan, bias_of=bias_of, dense_params=tuple(name for name in model.names if name not in covered))
    plan = _verified(plan, "supports_batched_vjp", lambda plan: _layer_jacobians(trial, plan))
    if plan.calls_convolutions and plan.bias_of:
        # a way that does not fit into a pass for one row fits for none
        expected = {name: rows[:, :1] for name, rows in trial.expected.items()}
        first_row = replace(trial, X=trial.X[:1], cotangents=trial.cotangents[:, :1], expected=expected)
        windows = partial(_layer_jacobians, first_row, tries_pool_windows=True)
        plan = _verified(replace(plan, supports_pool_windows=True), "supports_pool_windows", windows)
    plan = _verified(plan, "supports_interpolation", lambda plan: _interpolated_outputs(trial, plan))
    if not plan.supports_interpolation or plan.dense_params:
        plan = replace(plan, supports_stacking=False)
    with forward_mode(), filter_own_warnings("ignore", DeprecationWarning):
        fwAD.make_dual(torch.zeros(1), torch.zeros(1))  # torch 2.13 first calls its own deprecated function
    plan = _verified(plan, "supports_jvp", lambda plan: _slopes(trial, replace(plan, supports_interpolation=False)))
    if plan.supports_interpolation:
        plan = _verified(plan, "supports_jvp", lambda plan: _slopes(trial, plan))
    plan = _verified(plan, "supports_stacking", lambda plan: _on_lines(trial, plan))
    if plan.shares_pass and plan.supports_jvp:
        plan = _verified(plan, "supports_vmap", lambda plan: _mapped_passes(trial, plan))
    # all parameters are mapped over if derivatives along a segment are not available in another way
    names = plan.dense_params if plan.supports_interpolation else model.names + model.statistics
    return _verified(plan, "supports_vmap", lambda plan: _mapped_jacobian(trial, plan, names)) if names else plan


def _verified(
    plan: DifferentiationPlan, flag: str, attempt: Callable[[DifferentiationPlan], Pair | Iterator[Pair]]
) -> DifferentiationPlan:
    """Return the plan without a flag unless its capability reproduces the expected values."""
    if not getattr(plan, flag) or passes_check(lambda: attempt(plan)):
        return plan
    return replace(plan, **cast(Any, {flag: False}))


def _layers(calls: Sequence[interception.FunctionCall], trained: Sequence[str]) -> dict[str, str | None]:
    """Map the weights that only layers' calls use to the bias that always accompanies each, and others to None."""
    by_name = defaultdict[str, list[interception.FunctionCall]](list)
    for call in calls:
        for name in call.params:
            by_name[name].append(call)
    bias_of: dict[str, str | None] = {}
    for name, own in by_name.items():
        as_weight = all(call.in_slots and call.names.get("weight") == name for call in own)
        functions, biases = {call.function for call in own}, {call.names.get("bias") for call in own}
        if as_weight and len(functions) == 1 and functions <= {*interception.LAYERS}:
            bias = biases.pop() if len(biases) == 1 else None
            bias_of[name] = bias if bias is not None and len(by_name[bias]) == len(own) else None
    return bias_of | {name: None for name in trained if name in by_name.keys() - {*bias_of, *bias_of.values()}}


@dataclass(frozen=True, eq=False)
class _Trial:
    """Inputs and weights on which ways of differentiating a network are compared with plain autograd.

    Attributes:
        model: The network.
        w: Flat weights away from the trained ones, where a zero could hide a mistake; statistics likewise.
        d: A direction of motion. A statistic may be a variance, so it only grows.
        X: Inputs.
        cotangents: Two random cotangents of each sample's logits.
        expected: The Jacobian of every parameter and statistic, by backward passes sample by sample.
    """

    model: FunctionalModel
    w: Tensor
    d: Tensor
    X: Tensor
    cotangents: Tensor
    expected: dict[str, Tensor]

    def segment(self, plan: DifferentiationPlan) -> WeightSegment:
        """Return the line along the direction."""
        return WeightSegment(PlannedModel(self.model, plan), self.w, self.d, "logits", 1 << 30)


def _make_trial(model: FunctionalModel, w: Tensor, X: Tensor, plan: DifferentiationPlan) -> _Trial:
    P = model.num_weights
    wave = torch.arange(w.numel(), device=w.device, dtype=torch.float64).sin().to(w.dtype)
    here = torch.cat([w[:P] + 0.02 * wave[:P], w[P:] + 0.02 * wave[P:].abs()])
    with torch.no_grad():
        z = model(model.unflatten(here), X)
    num_rows = max(_FEWEST_ROWS, _TRUTH_BYTES // (2 * w.nbytes))
    X, z = X[:num_rows], z[:num_rows]
    generator = torch.Generator().manual_seed(0)
    cotangents = torch.randn(2, *z.shape, generator=generator, dtype=torch.float64).to(z)
    loop = PlannedModel(model, replace(plan, supports_vmap=False))
    names, shapes = model.names + model.statistics, model.shapes + model.statistic_shapes
    truth = dense_jacobian(loop, names, here, X, cotangents).values
    pieces = truth.split([shape.numel() for shape in shapes], dim=2)
    direction = torch.cat([0.1 * here[:P].flip(0), 0.1 * here[P:].abs().flip(0)])
    return _Trial(model, here, direction, X, cotangents, dict(zip(names, pieces, strict=True)))


def _layer_jacobians(trial: _Trial, plan: DifferentiationPlan, *, tries_pool_windows: bool = False) -> Iterator[Pair]:
    """Compare layer by layer, because the Jacobians of all layers together may be large."""
    net = PlannedModel(trial.model, replace(plan, dense_params=()))
    fixed = Cotangents(lambda _: trial.cotangents)
    at, cost = WeightLocation(trial.w), ContractionCost(1, 1, tries_pool_windows=tries_pool_windows)
    jacobians = layer_jacobians(net, at, trial.X, fixed, cost)
    for (name, bias), jacobian in zip(plan.bias_of.items(), jacobians, strict=True):
        rows = trial.expected[name]
        if bias is not None:
            bias_rows = trial.expected[bias]
            rows = torch.cat([rows.unflatten(2, (bias_rows.shape[2], -1)), bias_rows.unsqueeze(3)], dim=3)
        yield jacobian.to_dense(), rows.flatten(2)


def _interpolated_outputs(trial: _Trial, plan: DifferentiationPlan) -> Pair:
    """Compare outputs for two numbers of rows, so that no other size can be confused with the number of rows."""
    model, X, segment = trial.model, trial.X, trial.segment(replace(plan, calls_fused_functions=False))
    t = (0.9 + 0.31 * torch.arange(len(X), dtype=trial.w.dtype, device=X.device)) % 1
    together = [values(segment, X[:n], t[:n]) for n in (len(X), len(X) - 1)]
    rows = [model(model.unflatten(trial.w + u * trial.d), x) for u, x in zip(t, X.split(1), strict=True)]
    return torch.cat(together), torch.cat([*rows, *rows[:-1]])


def _on_lines(trial: _Trial, plan: DifferentiationPlan) -> Iterator[Pair]:
    """Compare outputs, slopes and Jacobians of a few rows on two lines with those on each line."""
    X, w, d, of_rows = trial.X[:3], trial.w, trial.d, trial.cotangents[:, :3]  # all are held at once
    line = replace(trial.segment(plan), w=torch.stack([w, 0.9 * w + d]), d=torch.stack([d, 2 * d]))
    pair = torch.arange(2 * len(X), device=X.device)
    t = (0.9 + 0.31 * pair.to(w)) % 1
    alone = [replace(line, w=w, d=d) for w, d in zip(line.w, line.d, strict=True)]
    if plan.supports_jvp:
        by_line = [directional_derivatives(own, X, u) for own, u in zip(alone, t.split(len(X)), strict=True)]
        together = directional_derivatives(line, X, t, pair)
        yield from zip(together, (torch.cat(values) for values in zip(*by_line, strict=True)), strict=True)
    rows, cotangents = X.repeat(2, *[1] * (X.ndim - 1)), of_rows.repeat(1, 2, 1)
    for places in (None, t):
        parts = [None] * 2 if places is None else t.split(len(X))
        ats = [WeightLocation(own.w, None if u is None else own.d, u) for own, u in zip(alone, parts, strict=True)]
        at = WeightLocation(line.w, None if places is None else line.d, places)
        fixed = [Cotangents(lambda _: of_rows), Cotangents(lambda _: cotangents)]
        expected = [layer_jacobians(line.net, own, X, fixed[0], ContractionCost(1, 1)) for own in ats]
        found = layer_jacobians(line.net, at, rows, fixed[1], ContractionCost(1, 1))
        for layer, own in enumerate(found):
            yield own.to_dense(), torch.cat([one[layer].to_dense() for one in expected], dim=1)


def _slopes(trial: _Trial, plan: DifferentiationPlan) -> Pair:
    """Multiply the outputs' derivatives along the direction by the cotangents, and compute this in another way.

    Two numbers per row represent all outputs: differentiating a thousand outputs would take a minute.
    """
    segment = trial.segment(replace(plan, calls_fused_functions=False))
    slopes = directional_derivatives(segment, trial.X, trial.w.new_zeros(len(trial.X)))[1]
    parts = trial.d.split([rows.shape[2] for rows in trial.expected.values()])
    products = [rows @ part for rows, part in zip(trial.expected.values(), parts, strict=True)]
    return (trial.cotangents * slopes).sum(dim=2), torch.stack(products).sum(dim=0)


def _mapped_jacobian(trial: _Trial, plan: DifferentiationPlan, names: tuple[str, ...]) -> Iterator[Pair]:
    mapped = dense_jacobian(PlannedModel(trial.model, plan), names, trial.w, trial.X, trial.cotangents)
    expected = [trial.expected[name] for name in names]
    return zip(mapped.values.split([rows.shape[2] for rows in expected], dim=2), expected, strict=True)


def _mapped_passes(trial: _Trial, plan: DifferentiationPlan) -> Pair:
    """Compare passes that are mapped over points of the direction with separate passes at each point."""
    t = (0.9 + 0.31 * torch.arange(3, dtype=trial.w.dtype, device=trial.X.device)) % 1
    X = trial.X[: len(t)]
    mapped = directional_derivatives(trial.segment(plan), X, t)
    at_each = directional_derivatives(trial.segment(replace(plan, supports_vmap=False)), X, t)
    return torch.cat(mapped), torch.cat(at_each)


def passes_check(attempt: Callable[[], Pair | Iterator[Pair]], *, one_by_one: bool = False) -> bool:
    """Return whether a way of computing runs without a warning and reproduces the expected values.

    Args:
        attempt: Returns computed and expected values, together or piece by piece.
        one_by_one: Whether the tolerance of a piece is relative to its own size, not to the largest piece.
    """
    with without_errors_of_a_trial(), filter_own_warnings("error", Warning):  # torch warns of its slow loops
        found = attempt()
        pieces = [found] if isinstance(found, tuple) else found
        return all(_agree([piece]) for piece in pieces) if one_by_one else _agree(pieces)
    return False  # type: ignore[unreachable]  # an error was suppressed


@contextmanager
def without_errors_of_a_trial() -> Iterator[None]:
    """Suppress errors that mean that this way of computing does not fit the network."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, Warning) as error:
        # a lack of memory does not depend on the network, and a plan is kept; on the CPU only the text shows it
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise


def allclose(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal up to rounding: eps^0.65 of the largest expected entry."""
    return _agree([(computed, expected)])


def _agree(pairs: Iterable[Pair]) -> bool:
    """Return whether all pieces of two results are equal up to rounding: eps^0.65 of the largest expected entry."""
    errors, sizes, eps = [], [], 0.0
    for computed, expected in pairs:
        if computed.shape != expected.shape:
            return False
        if expected.numel():
            errors.append((computed - expected).abs().max())
            sizes.append(expected.abs().max())
            eps = torch.finfo(expected.dtype).eps
    return not errors or bool(torch.stack(errors).max() <= eps**0.65 * (torch.stack(sizes).max() + eps))


def _num_dropped(plan: DifferentiationPlan) -> tuple[int, int]:
    """Count the parameters that are not a layer's, and the ways of differentiating that did not reproduce autograd."""
    ways = (plan.supports_interpolation, plan.supports_jvp, plan.supports_batched_vjp)
    return len(plan.dense_params), ways.count(False)


def plan_for(trajectory: Trajectory, model: FunctionalModel) -> PlannedModel:
    """Return a run's network with its plan, which is made once for each dtype and device.

    Args:
        trajectory: The run. The plan is tested on its training inputs and trained weights.
        model: The network in the computation's dtype and on its device.
    """
    cache = model.cache
    with cache.lock:
        key = (model.spec, cache.needs_dense_plan)
        if key not in cache.plans:
            X = model.spec.cast(probe_rows(trajectory.inputs))
            w = flat_state(trajectory, trajectory.num_steps, X)
            plan = build_plan(model, w, X, all_dense=cache.needs_dense_plan)
            may_have_layers = not (cache.needs_dense_plan or plan.shares_pass)
            if may_have_layers and model.spec.dtype != torch.float64 and any(_num_dropped(plan)):
                # rounding in float32 switches one of 1e6 ReLUs, so that two ways differ that agree in float64
                double = model.converted(TensorSpec(torch.float64, model.spec.device))
                with suppress(RuntimeError, ValueError, TypeError):  # casts to float32 inside may fail
                    other = build_plan(double, w.double(), double.spec.cast(probe_rows(trajectory.inputs)))
                    plan = min(plan, other, key=_num_dropped)
            cache.plans[key] = plan
        return PlannedModel(model, cache.plans[key])


def with_plan(compute: Callable[..., T], X: Shaped[Tensor, "n ..."], *runs: Trajectory) -> T:
    """Return compute(net, ...), called with the planned network of each run.

    If the inputs use a parameter in a way that a plan did not foresee, the first network whose plan is not dense gets
    the dense plan, and `compute` is called again: it must leave no trace when it raises. A network may send each row to
    another expert: a layer then sees only some rows, which the rows of the plan need not show. The model's cache keeps
    this finding for every later computation.

    Args:
        compute: The computation with the networks.
        X: Inputs, in the dtype and on the device of the computation.
        runs: The runs, which may share a network.

    Raises:
        UnsupportedParameterUseError: The dense plans do not cover it either.
        ValueError: The network makes Python numbers of its tensors.
    """
    with outside_autocast():
        while True:
            nets = [plan_for(run, run.model_for(X)) for run in runs]
            try:
                return compute(*nets)
            except interception.UnsupportedParameterUseError:
                layered = [net for net in nets if net.plan is not net.model.cache.plans.get((net.model.spec, True))]
                if not layered:
                    raise
                layered[0].model.cache.needs_dense_plan = True
            except RuntimeError as error:
                if "calling .item()" not in str(error):
                    raise
                raise ValueError(
                    "the network must compute with tensors: forward() makes a Python number of a weight or an "
                    "activation (.item(), float(), or an `if` on a tensor), through which nothing is differentiated. "
                    "Compute with the tensor itself, or make the number of a buffer."
                ) from error

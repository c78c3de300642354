"""Find out how a network uses its parameters, verify each way to differentiate it against plain autograd, and plan.

Nothing is believed of a module because of its name. A parameter is treated as a layer's only if every use of it is a
linear, convolution or normalisation call, and only if the Jacobian so obtained equals autograd's on a few inputs;
everything else is differentiated densely. Every other capability (`DifferentiationPlan`) is tried in the same way.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, dense_jacobian
from epk_gp.autodiff.directional import WeightSegment, jvp_via_double_vjp, mapped_passes
from epk_gp.autodiff.forward_mode import forward_mode
from epk_gp.autodiff.interception import (
    CONVOLUTIONS,
    LAYERS,
    InterpolatedWeights,
    ParameterUsage,
    ParameterUsageRecorder,
    StackedWeights,
    UnsupportedParameterUseError,
)
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import DifferentiationPlan, vmap_chunk_size
from epk_gp.core.torch_overrides import disable_fused_attention, outside_autocast
from epk_gp.core.trajectory import Trajectory, flat_state


class _ThreadCategory(type):
    """Kind of a warning category to which the warnings of one thread belong, as long as it is active."""

    thread: int
    kind: type[Warning]
    is_active: bool

    def __subclasscheck__(cls, category: Any) -> bool:
        return cls.is_active and threading.get_ident() == cls.thread and issubclass(category, cls.kind)


@contextmanager
def filter_own_warnings(action: Literal["error", "ignore"], kind: type[Warning]) -> Iterator[None]:
    """Turn this thread's warnings into errors, or ignore them, and leave those of other threads alone.

    `warnings.catch_warnings` replaces the process's list of filters: another thread would get errors in the middle of
    its work, and two threads that leave in the order in which they came would keep the filters of one for good. Here
    one more filter stands in that list for a while, which matches nothing in other threads, nor later, should another
    thread's `catch_warnings` have copied it.

    Args:
        action: "error" or "ignore".
        kind: Category of the warnings, with all its subclasses.
    """
    names = {"thread": threading.get_ident(), "kind": kind, "is_active": True}
    category = cast(Any, _ThreadCategory("OwnWarning", (Warning,), names))
    warnings.simplefilter(action, category)
    try:
        yield
    finally:
        category.is_active = False
        for entry in [entry for entry in warnings.filters if entry[2] is category]:
            with suppress(ValueError):  # another thread has replaced the list
                cast(Any, warnings.filters).remove(entry)


_NUM_PROBE_ROWS = 6

# Bytes that the true Jacobian of the rows may take on which ways of differentiating are compared with it, which need as
# much each: together less than a small memory budget. A network of a million weights in float64 has four rows.
_TRUTH_BYTES, _FEWEST_ROWS = 1 << 26, 2
Pair = tuple[Tensor, Tensor]  # what was computed, and what is expected


def probe_rows(X: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "E ..."]:
    """Take a few rows, spread over all, forwards then backwards.

    The order is its own mirror image, so that a network that sorts its batch cannot go unnoticed.
    """
    forwards = torch.linspace(0, len(X) - 1, _NUM_PROBE_ROWS, device=X.device).long()
    return X[torch.cat([forwards, forwards[:-1].flip(0)])]


def build_plan(
    model: FunctionalModel, w: Float[Tensor, " PQ"], X: Shaped[Tensor, "E ..."], *, all_dense: bool = False
) -> DifferentiationPlan:
    """Observe the network at weights w and choose how to differentiate it.

    Args:
        model: The network, in the computation's dtype.
        w: Flat weights of some state, and its moving statistics.
        X: A few inputs.
        all_dense: Treat no parameter as a layer's, and do not interpolate weights.

    Raises:
        ValueError: A sample's output depends on the other samples of the batch.
    """
    params = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
    with ParameterUsageRecorder(params) as recorder, disable_fused_attention():
        z = model(params, X).detach()
    with torch.no_grad(), disable_fused_attention():
        single = torch.cat([model(params, row) for row in X.split(1)])
    if not allclose(z, single):
        raise ValueError(
            "an output must depend on its own input alone: the network gives other outputs for a batch than for its "
            "rows one by one (statistics of the batch?)."
        )
    graph = model.signature.graph
    all_dense = all_dense or graph is not None
    activations = max(1, recorder.num_activations // (len(X) if graph is None else graph.num_nodes))
    per_row = activations if graph is None else max(1, recorder.num_activations)  # a row goes backward through all
    # hypotheses, of which validate_plan keeps what holds
    plan = DifferentiationPlan(
        bias_of={} if all_dense else _layers(recorder.usages),
        dense_params=(),
        supports_interpolation=not all_dense,
        supports_stacking=True,
        supports_jvp=True,
        supports_double_backward=True,
        supports_batched_vjp=True,
        calls_convolutions=any(usage.function in CONVOLUTIONS for usage in recorder.usages),
        supports_pool_windows=False,  # tried when the layers are known
        supports_vmap=True,
        vmap_chunk_size=vmap_chunk_size(model.num_weights, per_row),
        activations_per_sample=activations,
        num_outputs=z.shape[1],
        calls_fused_functions=recorder.calls_fused_functions,
        shares_pass=graph is not None,
    )
    return validate_plan(model, w, X, plan)


def _layers(usages: Sequence[ParameterUsage]) -> dict[str, str | None]:
    """Map the weights that only layers' calls use to the bias that always goes with each."""
    by_name: dict[str, list[ParameterUsage]] = {}
    for usage in usages:
        for name in usage.names:
            by_name.setdefault(name, []).append(usage)
    bias_of: dict[str, str | None] = {}
    for name, own in by_name.items():
        as_weight = all(usage.is_jointly_linear and usage.weight == name for usage in own)
        functions = {usage.function for usage in own}
        if as_weight and len(functions) == 1 and functions <= {*LAYERS}:
            bias = own[0].bias
            together = all(usage.bias == bias for usage in own)
            bias_of[name] = bias if bias is not None and together and len(by_name[bias]) == len(own) else None
    return bias_of


@dataclass(frozen=True, eq=False)
class _Trial:
    """Inputs and weights on which ways of differentiating a network are compared with plain autograd.

    Attributes:
        model: The network.
        w: Flat weights off the trained ones, where a zero could hide a mistake; statistics likewise.
        X: Inputs.
        cotangents: Two random cotangents of each sample's logits.
        expected: The Jacobian of every parameter and statistic, by backward passes sample by sample.
    """

    model: FunctionalModel
    w: Tensor
    X: Tensor
    cotangents: Tensor
    expected: dict[str, Tensor]

    @property
    def direction(self) -> Tensor:
        """A direction to move in. A statistic may be a variance: it only grows."""
        w, statistics = _split(self.model, self.w)
        return torch.cat([0.1 * w.flip(0), 0.1 * statistics.abs().flip(0)])

    def compare_slopes(self, slopes: Float[Tensor, "E C"]) -> Pair:
        """Multiply the outputs' derivatives along the direction with the cotangents, and compute that another way.

        Two numbers of each row stand for all outputs: to differentiate each of a thousand would take a minute.
        """
        parts = self.direction.split([rows.shape[2] for rows in self.expected.values()])
        products = [rows @ part for rows, part in zip(self.expected.values(), parts, strict=True)]
        return (self.cotangents * slopes).sum(dim=2), torch.stack(products).sum(dim=0)

    def first_row(self) -> "_Trial":
        """Leave out all rows but the first: what does not fit into a pass for one row fits for none."""
        expected = {name: rows[:, :1] for name, rows in self.expected.items()}
        return replace(self, X=self.X[:1], cotangents=self.cotangents[:, :1], expected=expected)


def validate_plan(
    model: FunctionalModel, w: Float[Tensor, " PQ"], X: Shaped[Tensor, "E ..."], plan: DifferentiationPlan
) -> DifferentiationPlan:
    """Keep in the plan only what reproduces plain autograd on the rows of X."""
    trial = _make_trial(model, w, X, plan)
    bias_of = {}
    for name, bias in plan.bias_of.items():
        alone = replace(plan, bias_of={name: bias}, supports_batched_vjp=False)
        if passes_check(lambda alone=alone: _layer_jacobians(trial, alone)):  # type: ignore[misc]
            bias_of[name] = bias
    covered = {*bias_of, *(bias for bias in bias_of.values() if bias is not None)}
    plan = replace(plan, bias_of=bias_of, dense_params=tuple(name for name in model.names if name not in covered))
    plan = replace(plan, supports_batched_vjp=passes_check(lambda: _layer_jacobians(trial, plan)))
    if plan.calls_convolutions and plan.bias_of:
        windows = replace(plan, supports_pool_windows=True)
        if passes_check(lambda: _layer_jacobians(trial.first_row(), windows, tries_pool_windows=True)):
            plan = windows
    if plan.supports_interpolation:
        plan = replace(plan, supports_interpolation=passes_check(lambda: _interpolated_outputs(trial)))
    stacks = plan.supports_interpolation and not plan.dense_params and passes_check(lambda: _stacked_outputs(trial))
    plan = replace(plan, supports_stacking=stacks)
    _load_forward_mode_rules()
    plan = replace(plan, supports_jvp=passes_check(lambda: _jvp(trial)))
    if plan.supports_jvp and plan.supports_interpolation:
        plan = replace(plan, supports_interpolation=passes_check(lambda: _interpolated_slopes(trial)))
    plan = replace(plan, supports_double_backward=passes_check(lambda: _double_vjp(trial)))
    if plan.shares_pass and plan.supports_jvp:
        plan = replace(plan, supports_mapped_passes=passes_check(lambda: _mapped_passes(trial, plan)))
    # all parameters are mapped over where derivatives along a segment can be had in no other way
    names = plan.dense_params if plan.supports_interpolation and plan.supports_jvp else model.names + model.statistics
    return replace(plan, supports_vmap=passes_check(lambda: _mapped_jacobian(trial, plan, names))) if names else plan


def _make_trial(model: FunctionalModel, w: Tensor, X: Tensor, plan: DifferentiationPlan) -> _Trial:
    wave = torch.arange(w.numel(), device=w.device, dtype=torch.float64).sin().to(w.dtype)
    weights, statistics = _split(model, w)
    here = torch.cat([weights + 0.02 * wave[: len(weights)], statistics + 0.02 * wave[len(weights) :].abs()])
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
    return _Trial(model, here, X, cotangents, dict(zip(names, pieces, strict=True)))


def _split(model: FunctionalModel, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the moving statistics of a flat vector."""
    return w[: model.num_weights], w[model.num_weights :]


def _layer_jacobians(trial: _Trial, plan: DifferentiationPlan, *, tries_pool_windows: bool = False) -> Iterator[Pair]:
    """Compare layer by layer: the Jacobians of all layers together may be large."""
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


def _interpolated_outputs(trial: _Trial) -> Pair:
    """Compare outputs for two numbers of rows, so that no other size can be taken for that of the rows."""
    model, X, d = trial.model, trial.X, trial.direction
    t = (0.9 + 0.31 * torch.arange(len(X), dtype=trial.w.dtype, device=X.device)) % 1
    params = model.unflatten(trial.w)
    together = []
    with torch.no_grad(), disable_fused_attention():
        for n in (len(X), len(X) - 1):
            with InterpolatedWeights(params, model.unflatten(d), t[:n]):
                together.append(model(params, X[:n]))
        rows = [model(model.unflatten(trial.w + t[e] * d), X[e : e + 1]) for e in range(len(X))]
    return torch.cat(together), torch.cat([*rows, *rows[:-1]])


def _interpolated_slopes(trial: _Trial) -> Pair:
    model, X, d = trial.model, trial.X, trial.direction
    params, zeros = model.unflatten(trial.w), torch.zeros(len(X), dtype=trial.w.dtype, device=X.device)
    with torch.no_grad(), disable_fused_attention(), forward_mode():
        t = fwAD.make_dual(zeros, torch.ones_like(zeros))
        with InterpolatedWeights(params, model.unflatten(d), t):
            z = model(params, X)
        slope = fwAD.unpack_dual(z).tangent
    return trial.compare_slopes(slope)


def _stacked_outputs(trial: _Trial) -> Pair:
    model, X, w = trial.model, trial.X, trial.w
    stacked = torch.stack([w, 1.1 * w, 0.9 * w + trial.direction])
    params = model.unflatten(w)
    with torch.no_grad(), disable_fused_attention():
        with StackedWeights(params, model.unflatten_rows(stacked)):
            together = model(params, X.repeat(len(stacked), *[1] * (X.ndim - 1)))
        parts = [model(model.unflatten(row), X) for row in stacked]
    return together, torch.cat(parts)


def _jvp(trial: _Trial) -> Pair:
    model = trial.model
    params, direction = model.unflatten(trial.w), model.unflatten(trial.direction)
    with torch.no_grad(), disable_fused_attention(), forward_mode():
        duals = {name: fwAD.make_dual(value, direction[name]) for name, value in params.items()}
        tangent = fwAD.unpack_dual(model(duals, trial.X)).tangent
    return trial.compare_slopes(tangent)


def _double_vjp(trial: _Trial) -> Pair:
    model = trial.model
    leaves = {name: value.detach().requires_grad_() for name, value in model.unflatten(trial.w).items()}
    with torch.enable_grad(), disable_fused_attention():
        slope = jvp_via_double_vjp(model(leaves, trial.X), leaves, model.unflatten(trial.direction))
    return trial.compare_slopes(slope)


def _mapped_jacobian(trial: _Trial, plan: DifferentiationPlan, names: tuple[str, ...]) -> Iterator[Pair]:
    mapped = dense_jacobian(PlannedModel(trial.model, plan), names, trial.w, trial.X, trial.cotangents)
    expected = [trial.expected[name] for name in names]
    return zip(mapped.values.split([rows.shape[2] for rows in expected], dim=2), expected, strict=True)


def _mapped_passes(trial: _Trial, plan: DifferentiationPlan) -> Pair:
    t = (0.9 + 0.31 * torch.arange(3, dtype=trial.w.dtype, device=trial.X.device)) % 1
    segment = WeightSegment(PlannedModel(trial.model, plan), trial.w, trial.direction, "logits", 1 << 30)
    X = trial.X[: len(t)]
    with torch.no_grad(), disable_fused_attention():
        mapped = mapped_passes(
            segment, X, (t, list(torch.arange(len(t), device=X.device).split(1))), differentiate=True
        )
    f, slopes = mapped
    model, loop = trial.model, PlannedModel(trial.model, replace(plan, supports_vmap=False))
    names, cotangents = model.names + model.statistics, trial.cotangents[:, : len(t)]
    outputs, expected = [], []
    for e, u in enumerate(t):
        w, x = trial.w + u * trial.direction, X[e : e + 1]
        outputs.append(model(model.unflatten(w), x))
        expected.append(dense_jacobian(loop, names, w, x, cotangents[:, e : e + 1]).values @ trial.direction)
    computed = [f.flatten(), (cotangents * slopes).sum(dim=2).flatten()]
    return torch.cat(computed), torch.cat([torch.cat(outputs).flatten(), torch.cat(expected, dim=1).flatten()])


def _load_forward_mode_rules() -> None:
    """Let torch load its forward-mode rules; it calls a deprecated function of its own on the way (torch 2.13)."""
    with forward_mode(), filter_own_warnings("ignore", DeprecationWarning):
        fwAD.make_dual(torch.zeros(1), torch.zeros(1))


def passes_check(attempt: Callable[[], Pair | Iterator[Pair]]) -> bool:
    """Return whether a way of computing runs without a warning and reproduces what is expected.

    Args:
        attempt: Returns what was computed and what is expected, in one piece or piece by piece.
    """
    try:
        with filter_own_warnings("error", Warning):  # torch warns where it falls back to a slow loop
            found = attempt()
            return _agree(iter([found]) if isinstance(found, tuple) else found)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, UserWarning, AttributeError) as error:
        if _is_out_of_memory(error):
            raise  # it says nothing about the network, and a plan is kept
        return False


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out: on the CPU torch says so in the text of a `RuntimeError` only."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def allclose(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal up to rounding: eps^0.65 of the largest expected entry."""
    return _agree(iter([(computed, expected)]))


def _agree(pairs: Iterator[Pair]) -> bool:
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


T = TypeVar("T")


def plan_for(trajectory: Trajectory, model: FunctionalModel) -> PlannedModel:
    """Return a run's network with its plan, which is made once for each dtype and device.

    Args:
        trajectory: The run. Its training inputs and trained weights are what the plan is tried on.
        model: The network in the computation's dtype and on its device.
    """
    cache = model.cache
    with cache.lock:
        key = (model.spec, cache.needs_dense_plan)
        if key not in cache.plans:
            X = model.spec.cast(probe_rows(trajectory.inputs))
            w = flat_state(trajectory, trajectory.num_steps, X)
            cache.plans[key] = build_plan(model, w, X, all_dense=cache.needs_dense_plan)
        return PlannedModel(model, cache.plans[key])


@contextmanager
def planned(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> Iterator[PlannedModel]:
    """Give a run's network with its plan to what is computed in `while True:`, and left by `return`.

        while True:
            with planned(trajectory, X) as net:
                return ...

    If the inputs use a parameter as the plan did not foresee, the body ends there and is carried out once more, with
    the dense plan: it must leave nothing behind when it raises. A network may send each row to another expert: a layer
    then sees some of the rows, which the rows that the plan was made on need not show. The model's cache keeps that
    finding for every later computation.

    Args:
        trajectory: The run.
        X: Inputs, of the computation's dtype and on its device.
    """
    model = trajectory.model_for(X)
    with outside_autocast():
        net = plan_for(trajectory, model)
        try:
            yield net
        except UnsupportedParameterUseError:
            if net.plan is model.cache.plans.get((model.spec, True)):
                raise
            model.cache.needs_dense_plan = True
        except RuntimeError as error:
            if "calling .item()" not in str(error):
                raise
            raise ValueError(
                "the network must compute with tensors: forward() makes a Python number of a weight or an activation "
                "(.item(), float(), or an `if` on a tensor), through which nothing is differentiated. Compute with the "
                "tensor itself, or make the number of a buffer."
            ) from error


def with_plan(trajectory: Trajectory, model: FunctionalModel, compute: Callable[[PlannedModel], T]) -> T:
    """Compute with the network's plan, as `planned` does, which replaces it."""
    X = torch.empty(0, dtype=model.spec.dtype, device=model.spec.device)
    while True:
        with planned(trajectory, X) as net:
            return compute(net)

"""Reasons that a recorded step differs from the stated one: guesses that are tested before one is reported.

A loop's actions show in three places, which are examined in the order of the computation. The outputs of a pass are
those of the recorded network, or the network computed something else. The optimizer's gradient is the one that comes
through the outputs, or something was added to it, left over in it, or changed in it afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import allclose
from epk_gp.core.gradients import PassData, TrainingReplay, passes_of
from epk_gp.core.graphs import rows_of
from epk_gp.core.model import device_random_state
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import ForwardPass, Step
from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop, with_tensors
from epk_gp.optimizers.update_rules import predict_step, relative_rounding, step_tolerance
from epk_gp.recording.causes import changed_setting
from epk_gp.recording.gradient_fit import GradientFit, GradientTerms
from epk_gp.recording.passes import common_factor, of_nodes, rounding_of
from epk_gp.recording.seen import CapturedForward, MadeStep
from epk_gp.recording.setup import TrainingSetup

_OF_OUTPUTS = 10  # times the rounding of a gradient in the outputs, whose replay may sum in another order


class StepMeasures(NamedTuple):
    """Differences of a step from the update rule's step on the gradient that the optimizer used.

    Attributes:
        momentum: The momentum buffer after it. Like the optimizer's own, it follows the gradient that was used.
        difference: Largest distance of a weight's step from the predicted one.
        follows_rule: Whether the difference is within the rounding of the weights; it may be rounding if it is not.
    """

    momentum: Float[Tensor, " B"]
    difference: float
    follows_rule: bool


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """A step with its record, and the weights and moving statistics around it.

    Attributes:
        made: The optimizers' step.
        step: Learning rate, batch and forward passes.
        start: The weights before it.
        end: The weights after it.
        momentum: The momentum buffer before it, as the recorder follows it.
        start_statistics: The moving statistics before it; empty for a network without them.
        end_statistics: The moving statistics after it.
        measures: Its differences from the update rule's step.
        terms: The loop's changes to gradients that earlier steps show.
        is_edit_seen, came, edit: The results of `epk_gp.recording.check.edit_of`.
    """

    made: MadeStep
    step: Step
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    momentum: Float[Tensor, " P"]
    start_statistics: Float[Tensor, " Q"]
    end_statistics: Float[Tensor, " Q"]
    measures: StepMeasures
    terms: GradientTerms
    is_edit_seen: bool
    came: Float[Tensor, " P"]
    edit: GradientFit | None


@dataclass(frozen=True, eq=False)
class StepCheck:
    """A step with the gradient that was recomputed from the user's statements.

    Attributes:
        observed: The step.
        gradient: Gradient of the loss on the stated batch before the step, (P,), through the outputs; zero for
            parameters without a gradient in this step.
        w: The weights before it; also zero for these parameters.
        inner: The masks and decays that are added to it in the backward pass.
        is_explained: Whether the gradient arrived as expected, and the loop's later changes to it are known.
    """

    observed: ObservedStep
    gradient: Float[Tensor, " P"]
    w: Float[Tensor, " P"]
    inner: GradientFit
    is_explained: bool = False

    @cached_property
    def expected(self) -> Float[Tensor, " P"]:
        """The expected gradient, (P,)."""
        return self.inner.of(self.gradient, self.w, self.observed.terms.sizes)

    @property
    def state(self) -> Float[Tensor, " PQ"]:
        """Weights before the step, then moving statistics."""
        return torch.cat([self.observed.start, self.observed.start_statistics])


_Seen = list[tuple[CapturedForward, PassData]]  # passes as the hooks saw them, each with its record


def _seen_passes(setup: TrainingSetup, made: MadeStep, step: Step) -> _Seen:
    """Return the passes of a step with known outputs and output gradients; none if one batch's were not seen."""
    if not made.announced or not all(batch.forwards for batch in made.announced):
        return []
    has_graph = setup.model.signature.graph is not None
    captured = [of_nodes(f, b.samples) if has_graph else f for b in made.announced for f in b.forwards]
    step = step if step.passes else replace(step, passes=tuple(ForwardPass(len(f.inputs)) for f in captured))
    seen = zip(captured, passes_of(step, setup.X, setup.y, setup.loss), strict=True)
    return [(f, data) for f, data in seen if f.returned is not None and f.sent]


def explain_mismatch(setup: TrainingSetup, check: StepCheck, *, follows_rule: bool) -> str:
    """Return the reason that a step is not the stated one, as a clause without a full stop.

    Args:
        setup: The training.
        check: The step with its recomputed gradient.
        follows_rule: Whether the step is the update rule's step on the gradient that the optimizer used.
    """
    observed, made = check.observed, check.observed.made
    if not torch.isfinite(observed.came).all():
        return "the gradient holds NaN or infinity: training diverged"
    if not follows_rule and allclose(observed.came, check.expected):
        return _move_cause(setup, observed)
    if made.unseen is not None and not all(batch.forwards for batch in made.announced):
        return made.unseen
    reached = {bool(f.sent) for b in made.announced for f in b.forwards if f.returned is not None}
    if len(reached) == 2:
        return "recorder.batch() announced rows that no backward() went through: leave them out"
    seen, spec = _seen_passes(setup, made, observed.step), TensorSpec(check.state.dtype, check.state.device)
    # each from a new copy of the network, because a replay changes integers and generators in it
    kernel_replay, network_replay = (TrainingReplay(setup.model, setup.loss, spec) for _ in range(2))
    cause = _kernel_cause(kernel_replay, check, seen) or _network_cause(setup, network_replay, check.state, seen)
    return cause or _gradient_cause(setup, check, is_shown=bool(seen))


def _move_cause(setup: TrainingSetup, observed: ObservedStep) -> str:
    """Describe the cause of a change of the weights other than the optimizer's step on the stated loss."""
    model, made, known = setup.model, observed.made, "the gradient is that of the stated loss"
    predicted, _ = predict_step(made.update, model.sizes, observed.start, made.gradient, observed.momentum)
    step, allowed = observed.end - observed.start, step_tolerance(observed.start, predicted)
    rest, factor, rule = step - predicted, common_factor(step, predicted), setup.update_rule.name
    rate, is_scaled = -common_factor(rest, made.gradient), allclose(step, factor * predicted)
    moved = [name for name, part in model.unflatten(rest).items() if part.numel() and part.abs().max() > allowed]
    if abs(factor - 1) < 1e-4 and (step - factor * predicted).norm() < 0.5 * rest.norm():
        return (
            f"{known}, and the step is {rule}'s but for {abs(factor - 1):.1g} of it: where it is compiled "
            "or capturable=True, torch computes its rates in float32. Accept it with unexplained=0.001"
        )
    cause = f"the weights moved by {factor:.4g} times {rule}'s step: its learning rate was another one inside of step()"
    if rate > 0 and allclose(rest, -rate * made.gradient):
        other = f"another optimizer moved the weights by {rate:.3g} times it too: pass the recorder both"
        return f"{known}, and {other}{f' (or {cause})' * is_scaled}"
    if is_scaled:
        return f"{known}, and {cause}. Change it before or after optimizer.step()"
    if len(moved) < len(model.names):
        return f"{known}, and the weights of {_named(moved)} were changed between batch() and the end of the step"
    return f"{known}, but the weights did not move by {rule}'s rule: another optimizer or option"


def _kernel_cause(replay: TrainingReplay, check: StepCheck, seen: _Seen) -> str | None:
    """Describe the difference between the loop's torch kernels and those of a replay; None if there is none."""
    came = check.observed.came
    with disable_fused_attention(), kernels_of_the_loop():  # the previous kernels, also within a pass
        gradient = sum((replay.gradient(check.state, data).gradient for _, data in seen), torch.zeros_like(came))
    missed, left = ((came - g).abs().max() for g in (check.expected, gradient))
    if not (seen and left < missed / 8 and allclose(came, gradient)):
        return None
    if any(_replayed(replay, check.state, *own)[1] for own in seen):
        advice = "Train inside of torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        return f"fused attention draws its dropout otherwise than a replay. {advice}"
    if came.dtype != torch.float32 or not came.is_cuda:
        return None
    return (
        "the loop computes in less than its dtype. Set torch.backends.cudnn.allow_tf32 = False and "
        "torch.set_float32_matmul_precision('highest'), or accept an unexplained share of a step, unexplained=0.05"
    )


def _network_cause(
    setup: TrainingSetup, replay: TrainingReplay, state: Float[Tensor, " PQ"], seen: _Seen
) -> str | None:
    """Describe the reason that the outputs of a pass are not those of the recorded network; None if they are."""
    model, net = setup.model, setup.net
    for forward, data in seen:
        returned, draws_otherwise = _replayed(replay, state, forward, data)
        z, own = rows_of(returned, len(data.X)), rows_of(forward.returned, len(data.X))
        if z.shape != own.shape:
            continue
        difference = float((z.double() - own.double()).abs().max())
        if difference <= _OF_OUTPUTS * rounding_of(own) * float(own.abs().max()):
            continue
        if (changed := changed_setting(net, model)) is not None:
            return changed
        what = f"the outputs that the loop saw are not the recorded network's (by up to {difference:.2g})"
        if draws_otherwise:
            return (
                f"{what}: it draws other random numbers than torch's default generator gives to its layers. Draw from "
                "that; under torch.compile set torch._inductor.config.fallback_random = True before the first call"
            )
        layout, parts = model.signature.layout, dict(model.module.named_modules())
        hooked = [n for n, part in net.named_modules() if n and len(part._forward_hooks) > len(parts[n]._forward_hooks)]
        if hooked:
            return f"{what}: a forward hook of module {_named(hooked)} changes them. Register it before recording"
        if forward.num_arguments > (1 if layout is None else len(layout.tensors)):
            return f"{what}: the network was called with further arguments. Pass all that it depends on as X"
        return f"{what}, at the same weights, rows and random numbers: something else in it changes. Let it be a buffer"
    return None


def _replayed(
    replay: TrainingReplay, state: Float[Tensor, " PQ"], captured: CapturedForward, data: PassData
) -> tuple[Any, bool]:
    """Replay a pass in the precision of the training: return the network's result, and whether it draws otherwise.

    The original pass drew other random numbers if its replay, through the uncompiled layers, ends at another state of
    torch's generator.
    """
    module = replay.module_in_modes(data)
    named = {n: value.clone() for n, value in module.named_buffers()} | replay.params(state, data)
    with torch.no_grad(), disable_fused_attention(), replay.conditions(module, data, exact=False):
        returned = replay.call(with_tensors(module, named), data, exact=False)
        reached = torch.random.get_rng_state(), device_random_state(replay.spec.device)
    before = data.forward.random_state, data.forward.device_random_state
    states = zip(before, reached, captured.random_states_after, strict=True)
    others = (not (used is None or own is None or end is None or torch.equal(own, end)) for used, own, end in states)
    return returned, any(others)


def _gradient_cause(setup: TrainingSetup, check: StepCheck, *, is_shown: bool) -> str:
    """Describe the change of the gradient after it came through the outputs, if the outputs' gradient was seen."""
    model, net, made, edit = setup.model, setup.net, check.observed.made, check.observed.edit
    if not bool(made.gradient.any()):
        return "the gradient was 0 in all parameters: zero_grad() was called after backward(), or .grad was set to 0"
    flat = (made.gradient, check.observed.came) if edit is None else (check.observed.came, check.expected)
    after, before = map(model.unflatten, flat)
    off = [name for name, u in after.items() if u.numel() and not _is_same(u, before[name])] or [*after]
    names, share = _named(off), float((flat[0] - flat[1]).norm() / flat[0].norm())
    records = "unexplained=SHARE records it as a term of its own"
    if edit is None:
        return (
            f"{share:.2g} of the gradient, in {names}, was changed after backward(), by no factor, mask, clipping or "
            f"decay, as by noise or an edit: {records}"
        )
    if is_shown and len(off) < len(after) and not any(bool(before[name].any()) for name in off):
        return (
            f"no gradient comes to {names} through the network's outputs: the loss alone uses it. Let forward() use "
            "it, as in logits times a scale, or train it by an optimizer of its own that the recorder does not get"
        )
    if made.has_left_over:
        return (
            "a gradient was left over when backward() through the network began, of a step before or of a term of the "
            "loss that does not depend on its outputs: call optimizer.zero_grad() before backward()"
        )
    if (doubt := made.doubt or made.unseen) is not None:  # from other processes
        return doubt
    hooked = [n for n, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [n for n, part in net.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    if hooked:
        return f"a backward hook at {_named(hooked)} changes gradients; {records}"
    if not is_shown:
        return (
            f"the gradient is not that of the stated loss on X[batch], y[batch]: {share:.2g} of it, in {names}. State "
            "the loop's loss (loss=); loss=None records the run without one"
        )
    if check.observed.terms.is_fixed and bool(check.inner.decay.any()):
        return "the factor of the loss's L2 penalty is not that of the steps checked before: check_every=1 records it"
    text = f"{share:.2g} of the gradient, in {names}, does not come through the outputs of the announced rows"
    if rows := sum(len(f.inputs) for f in made.others):
        return f"{text}, and backward() went through {rows} other rows: announce them too, if their gradient is used"
    return f"{text}, as of another penalty than L2: {records}"


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients are equal up to a few roundings of the largest entry."""
    return bool((a - b).abs().max() <= 4 * relative_rounding(a.dtype) * b.abs().max())


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

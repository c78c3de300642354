"""Gradients of the training loss, the steps they predict, and the rounding that separates those from recorded steps."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from epk_gp.core.losses import Loss, loss_terms
from epk_gp.core.model import NUM_FINGERPRINT_POINTS, FunctionalModel, perturbed_initial
from epk_gp.core.plans import TensorSpec, batch_gradient_rows
from epk_gp.core.replay import PassData, TrainingData, TrainingReplay, passes_of
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints
from epk_gp.core.trajectory import (
    Trajectory,
    batch_of,
    flat_state,
    flat_weights,
    held_coefficients,
    step_coefficients,
)
from epk_gp.core.update_law import UpdateLaw
from epk_gp.optimizers.update_rules import predict_step

# How many times larger than the rounding of a gradient its difference from another computation of it may be, where
# sums cancel. Measured in float32 on converged regressions whose gradients were accumulated over 2 to 200 batches
# (50 runs of 60 steps): at most 2.1 times. The rest is room for sums in another order, such as those of a GPU.
CANCELLATION_FACTOR = 32


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A step that was computed once more, from the training gradients.

    Attributes:
        step: Its learning rate, batch and forward passes.
        w: The weights w_s before it.
        d: The update w_{s+1} - w_s that the update rule predicts from exact gradients.
        momentum: The momentum buffer before it.
        as_trained: The update that it predicts from gradients in the precision of the training; `d` itself without
            automatic mixed precision.
        statistics_error: Largest difference of moving statistics after a pass from the recorded ones, in units of what
            rounding explains; 0 without them.
        by_options: The update that the optimizer's recorded options, and what it keeps, give on the gradients of
            `as_trained`; None where it was not asked for.
    """

    step: Step
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    momentum: Float[Tensor, " P"]
    as_trained: Float[Tensor, " P"]
    statistics_error: float = 0.0
    by_options: Float[Tensor, " P"] | None = None


@dataclass(frozen=True, eq=False)
class UnseenMove:
    """A move of moving statistics between recorded passes: by passes without a loss, or by a reset.

    Attributes:
        moved: Which statistics moved, by whole tensors.
        values: All of them after the move.
        is_reset: Whether those that moved are as in a new network, so that they do not depend on the weights.
    """

    moved: Bool[Tensor, " Q"]
    values: Float[Tensor, " Q"]
    is_reset: bool


def has_memory(trajectory: Trajectory) -> bool:
    """Whether a step follows from earlier steps too, beside the weights before it: of momentum, or of an average."""
    return trajectory.average is not None or has_momentum(trajectory)


def has_momentum(trajectory: Trajectory) -> bool:
    """Whether the steps of a run take a buffer of earlier gradients."""
    updates = (held_coefficients(trajectory, s) for s in range(trajectory.num_steps))
    return any(bool(u.momentum_lr.any() and u.beta.any()) for u in updates)


def replayed_steps(
    trajectory: Trajectory,
    model: FunctionalModel,
    reference: Tensor,
    steps: slice = slice(None),
    law: UpdateLaw | None = None,
) -> Iterator[ReplayedStep]:
    """Replay a run: yield each step with the update that the update rule predicts.

    The updates are computed from the training gradients, not from the difference of the recorded weights.

    Args:
        trajectory: The run; of an average the run that it is made of.
        model: Its network in the dtype of the computation.
        reference: Tensor whose dtype and device the computation has.
        steps: Which steps; they must begin with the first one where a step follows from earlier ones (`has_memory`).
        law: The steps as functions, for `by_options`.
    """
    trajectory = trajectory.trained
    memory = None if law is None else law.initial()
    momentum = torch.zeros_like(flat_weights(trajectory, 0, reference))
    own_momentum = momentum  # in the precision of the training
    run = RunReplay(trajectory, model, reference)
    for step in trajectory.steps[steps]:
        w, before, own_before = flat_weights(trajectory, step.index, reference), momentum, own_momentum
        update = step_coefficients(trajectory, step.index, reference)
        g, error = run.gradient(step)
        d, momentum = predict_step(update, model.sizes, w, g, before)
        as_trained, own, by_options = d, g, None
        # in another dtype rounding differs, and a preconditioner can amplify it
        is_other_dtype = trajectory.dtype != model.spec.dtype
        if step.passes and (is_other_dtype or any(forward.autocast is not None for forward in step.passes)):
            own, error = run.gradient(step, exact=False)
            as_trained, own_momentum = predict_step(update, model.sizes, w, own, own_momentum)
        else:
            own_momentum = momentum
        if law is not None and memory is not None:
            memory = replace(memory, momentum=own_before)
            by_options, memory = law.step(step.index).replayed(update, memory, w, own)
        yield ReplayedStep(step, w, d, before, as_trained, error, by_options)


class RunReplay:
    """Recomputes the gradients of a run's steps; to be used by one thread.

    Args:
        trajectory: The run.
        model: Its network in the dtype of the computation.
        reference: Tensor whose dtype and device the computation has.
    """

    def __init__(self, trajectory: Trajectory, model: FunctionalModel, reference: Tensor) -> None:
        self.trajectory, self.model, self.reference = trajectory, model, reference
        self.data = TrainingData(trajectory.inputs, trajectory.targets, trajectory.loss)

    @cached_property
    def passes(self) -> TrainingReplay:
        """Replays the forward passes, in the run's own dtype where random numbers are drawn."""
        own = self.trajectory.model.variant(TensorSpec(self.trajectory.dtype, self.model.spec.device))
        return TrainingReplay(own, self.trajectory.loss, self.model.spec)

    def gradient(self, step: Step, *, exact: bool = True) -> tuple[Float[Tensor, " P"], float]:
        """Return the gradient of a step's loss, and the error of its statistics in units of their rounding."""
        return self.gradient_at(step, flat_state(self.trajectory, step.index, self.reference), exact=exact)

    def gradient_at(
        self, step: Step, state: Float[Tensor, " PQ"], *, exact: bool = True
    ) -> tuple[Float[Tensor, " P"], float]:
        """Return the gradient of a step's loss at some state, and the error of its statistics."""
        if not step.passes:
            X, y, c = batch_of(self.trajectory, step, state)
            with disable_fused_attention():
                return batch_gradient(self.model, state, X, y, self.trajectory.loss, c), 0.0
        total, error = torch.zeros_like(state[: self.model.num_weights]), 0.0
        for data in passes_of(step, self.data):
            replayed = self.passes.gradient(state, data, exact=exact)
            total += replayed.gradient
            if self.trajectory.statistics is not None:
                after = data.forward.statistics_after
                after = self.trajectory.statistics[step.index + 1] if after is None else after
                error = max(error, statistics_error(replayed.statistics, after, self.trajectory.dtype))
        return total, error

    def unseen_moves(self, step: Step, passes: Sequence[PassData]) -> list[UnseenMove | None]:
        """Return what moved the statistics before each pass of a step and after the last; None where nothing did."""
        recorded, model = self.trajectory.statistics, self.model
        if recorded is None:
            return [None] * (len(passes) + 1)
        start, end = recorded[step.index], recorded[step.index + 1]
        forwards = [data.forward for data in passes]
        found = [start if own.statistics is None else own.statistics for own in forwards]
        left = [end if own.statistics_after is None else own.statistics_after for own in forwards]
        return [_unseen_move(model, a, b) for a, b in zip([start, *left], [*found, end], strict=True)]


def _unseen_move(model: FunctionalModel, left: Float[Tensor, " Q"], found: Float[Tensor, " Q"]) -> UnseenMove | None:
    """Compare the statistics that one pass left with those that the next one found."""
    sizes = [shape.numel() for shape in model.statistic_shapes]
    pairs = list(zip(left.split(sizes), found.split(sizes), strict=True))
    differ = [not torch.equal(a, b.to(a)) for a, b in pairs]
    if not any(differ):
        return None
    moved = torch.cat([torch.full_like(b, own, dtype=torch.bool) for own, (_, b) in zip(differ, pairs, strict=True)])
    initial = [1.0 if name.endswith("running_var") else 0.0 for name in model.statistics]
    resets = [bool((b == value).all()) for value, (_, b) in zip(initial, pairs, strict=True)]
    return UnseenMove(moved, found, all(reset for own, reset in zip(differ, resets, strict=True) if own))


def statistics_error(replayed: Float[Tensor, " Q"], recorded: Float[Tensor, " Q"], dtype: torch.dtype) -> float:
    """Return the largest difference of moving statistics, in units of what rounding explains.

    A running variance adds a share of a batch's variance, whose relative rounding is that of a sum.
    """
    if not len(recorded):
        return 0.0
    allowed = relative_rounding(dtype) * recorded.abs().max().double() + torch.finfo(dtype).tiny
    return float((replayed.double() - recorded.to(replayed.device).double()).abs().max() / allowed)


def replay_rounding(replayed: ReplayedStep, dtype: torch.dtype) -> float:
    """Return the difference of a replayed step from the recorded one that is rounding without a closer look.

    It is the rounding of the weights and a small share of the step.

    Args:
        replayed: The step.
        dtype: The coarser of the dtypes of run and computation.
    """
    eps = torch.finfo(dtype).eps
    share = 2**16 * eps if dtype == torch.float64 else relative_rounding(dtype)
    return float(4 * eps * replayed.w.abs().max() + share * replayed.d.abs().max())


def mismatch_ratio(
    trajectory: Trajectory,
    model: FunctionalModel,
    replayed: ReplayedStep,
    difference: Float[Tensor, " P"],
    dtype: torch.dtype,
) -> float:
    """Return the largest difference of a recorded step from the replayed one, in units of what rounding explains.

    Only if it is larger than `replay_rounding`, the rounding of the step is measured: it is recomputed from the
    gradient of the rows in reverse order, at weights that are moved by their own rounding. That is done parameter by
    parameter: what a preconditioner amplifies in one explains nothing in the others.

    Args:
        trajectory: The run.
        model: Its network in the dtype of the computation.
        replayed: The step.
        difference: The recorded step less the replayed one.
        dtype: The coarser of the dtypes of run and computation.
    """
    w, d, step = replayed.w, replayed.d, replayed.step
    found, plain = _largest_by_parameter(model, difference), replay_rounding(replayed, dtype)
    allowed = torch.full_like(found, plain)
    if not found.max() <= plain:
        state = flat_state(trajectory, step.index, w)
        moved = torch.cat([move_by_rounding(w, torch.finfo(dtype).eps), state[len(w) :]])
        if step.passes:
            g, _ = RunReplay(trajectory, model, w).gradient_at(step, moved)
        else:
            X, y, c = batch_of(trajectory, step, w)
            with disable_fused_attention():
                g = batch_gradient(model, moved, X.flip(0), y.flip(0), trajectory.loss, c.flip(0))
        again, _ = predict_step(step_coefficients(trajectory, step.index, w), model.sizes, w, g, replayed.momentum)
        rounding = _largest_by_parameter(model, again - d)
        # a small parameter can come out the same by chance
        allowed = (CANCELLATION_FACTOR * torch.maximum(rounding, rounding.median())).clamp(min=plain)
    return float(torch.where(found == 0, 0.0, found / allowed).max())


def _largest_by_parameter(model: FunctionalModel, values: Float[Tensor, " P"]) -> Float[Tensor, " L"]:
    parts = values.abs().split([size for size in model.sizes if size])
    return torch.stack([part.max() for part in parts]) if parts else values.new_zeros(1)


def batch_gradient(
    model: FunctionalModel,
    state: Float[Tensor, " PQ"],
    X: Shaped[Tensor, "B ..."],
    y: Shaped[Tensor, "B ..."],
    loss: Loss,
    c: Float[Tensor, " B"],
    *,
    in_statistics: bool = False,
) -> Float[Tensor, " P"]:
    """Return the gradient of a batch's loss, sum_i c_i grad loss_i, of the network in evaluation mode.

    Args:
        model: The network.
        state: Its weights, and its moving statistics if it has any.
        X: Inputs of the batch.
        y: Their targets.
        loss: The loss of a sample.
        c: Weight of each sample in the batch's loss.
        in_statistics: Differentiate in the moving statistics too, which then follow the weights: (P + Q,).
    """
    weights = {name: value.detach() for name, value in model.unflatten(state).items()}
    names = (*model.names, *model.statistics) if in_statistics else model.names
    leaves = [weights[name].requires_grad_() for name in names]
    rows = batch_gradient_rows(X[0].numel())
    total = torch.zeros_like(state if in_statistics else state[: model.num_weights])
    with torch.enable_grad():
        for X_block, y_block, c_block in zip(X.split(rows), y.split(rows), c.to(state).split(rows), strict=True):
            value = c_block @ loss_terms(model.signature, loss, model.returned(weights, X_block), y_block)
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            total += torch.cat(
                [
                    (torch.zeros_like(leaf) if g is None else g).reshape(-1)
                    for leaf, g in zip(leaves, gradients, strict=True)
                ]
            )
    return total


def step_tolerance(start: Tensor, predicted: Tensor) -> float:
    """Return the largest difference between a recorded and a predicted step that rounding can explain.

    A step is the difference of two weight vectors, so it carries the rounding of the weights (4 eps of the largest
    weight) beside the relative rounding of the gradient.
    """
    weight_rounding = 4 * torch.finfo(start.dtype).eps * largest_entry(start)
    return float(relative_rounding(start.dtype) * largest_entry(predicted) + float(weight_rounding))


def largest_entry(x: Float[Tensor, " P"]) -> Float[Tensor, ""]:
    """Return the largest absolute value of a vector, without a copy of it."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def relative_rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding of a gradient or step that is accepted without a closer look.

    In float64 it is the square root of eps, 1.5e-8. In float32 that would be 3.5e-4 and hide a weight decay or a
    gradient scaled by 0.9998; it is 64 eps = 7.6e-6, and a larger difference is compared with the gradient in float64
    (`consistent_up_to_rounding` in `epk_gp.recording.check`).
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**0.5 if dtype == torch.float64 else 64 * eps


def move_by_rounding(w: Float[Tensor, " P"], eps: float) -> Float[Tensor, " P"]:
    """Return weights whose entries are moved by one eps of their size, up or down.

    What a computation gives at both weights differs by its rounding: the change of its inputs that rounding stands for.
    """
    index = torch.arange(w.numel(), device=w.device, dtype=torch.float64)
    signs = (index * index).sin().sign().to(w.dtype)
    return w * (1 + eps * signs)


def allclose(a: Tensor, b: Tensor) -> bool:
    """Return whether two gradients agree up to the square root of eps, relative to the largest entry of b."""
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())


_HOOKS_ARE_OFF = "epk_gp: this forward pass must set no hooks."
_MUST_BE_KEPT = (
    "activation checkpointing in evaluation mode must be torch.utils.checkpoint with use_reentrant=False around "
    "torch's own functions: got {got}, which would be recomputed with other weights. {advice}, or checkpoint in "
    "training mode only (if self.training)."
)


def with_kept_activations(model: FunctionalModel, state: Tensor, X: Shaped[Tensor, "M ..."]) -> FunctionalModel:
    """Return the model, such that nothing of a forward pass is computed again in the backward pass.

    Args:
        model: The network in evaluation mode.
        state: Its initial weights, then its moving statistics.
        X: Inputs; a few are used.

    Returns:
        The same model if the network uses no activation checkpointing in evaluation mode.

    Raises:
        ValueError: It checkpoints re-entrantly, or around functions whose activations cannot be kept; or it cannot be
            differentiated.
    """
    rows = X[:NUM_FINGERPRINT_POINTS]
    weights, statistics = state.split([model.num_weights, model.num_statistics])
    state = torch.cat([perturbed_initial(weights), statistics])  # other weights than those in the module
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_HOOKS_ARE_OFF):
            outputs, _ = _outputs(model, state, rows)
    except RuntimeError as error:
        if _HOOKS_ARE_OFF not in str(error):
            raise ValueError(
                f"the network must be differentiable in its weights: a forward pass with gradients fails: {error}"
            ) from error
        model = model.keeping_activations()
        outputs, leaves = _outputs(model, state, rows)
        if not _has_reentrant_checkpoint(outputs):
            _validate_kept(model, state, rows, outputs, leaves)
    if _has_reentrant_checkpoint(outputs):
        raise ValueError(_MUST_BE_KEPT.format(got="use_reentrant=True", advice="Pass use_reentrant=False"))
    return model


def _outputs(model: FunctionalModel, state: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    params = {name: value.detach() for name, value in model.unflatten(state).items()}
    leaves = [params[name].requires_grad_() for name in model.names]
    with torch.enable_grad():
        return model(params, rows), leaves


def _validate_kept(model: FunctionalModel, state: Tensor, rows: Tensor, outputs: Tensor, leaves: list[Tensor]) -> None:
    """Raise if a gradient at given weights is not the one of a module that holds these weights."""
    wave = torch.arange(outputs.numel(), dtype=outputs.dtype, device=outputs.device).cos().view_as(outputs)
    module = copy.deepcopy(model.module)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in model.unflatten(state).items():
            own[name].copy_(value)
    held = [own[name].requires_grad_() for name in model.names]
    signature = model.signature
    with torch.enable_grad(), quiet_checkpoints(), disable_fused_attention():
        again = signature.outputs(signature.call(module, rows, model.spec))
        expected = torch.autograd.grad(again, held, wave, allow_unused=True, materialize_grads=True)
        try:
            found = torch.autograd.grad(outputs, leaves, wave, allow_unused=True, materialize_grads=True)
            is_kept = allclose(torch.cat([g.reshape(-1) for g in found]), torch.cat([g.reshape(-1) for g in expected]))
        except RuntimeError:
            is_kept = False
    if not is_kept:
        kind = "a function of another kind (a torch.autograd.Function, or a scripted one)"
        raise ValueError(_MUST_BE_KEPT.format(got=kind, advice="Call it outside of the checkpoint"))


def _has_reentrant_checkpoint(outputs: Tensor) -> bool:
    waiting, seen = [outputs.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
    return False

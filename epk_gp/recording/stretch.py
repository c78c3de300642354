"""A stretch of steps of a small network: what is compared for many steps at once.

In a small network the arithmetic of a step costs less than the calls that carry it out. So steps wait until there are
some, and rows, gradients in the outputs and changes of the weights are compared for all of them together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.graphs import tensors_of
from epk_gp.core.losses import (
    ClassLoss,
    Loss,
    PerSampleLoss,
    UnstatedLoss,
    ignored_class,
    loss_derivatives,
    sample_weights,
)
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import (
    LinearStep,
    Number,
    coefficient_of_all,
    linear_step,
    relative_rounding,
    stack_steps,
)
from epk_gp.recording.mismatches import StepMeasures
from epk_gp.recording.observer import CapturedForward, MadeStep
from epk_gp.recording.passes import TOLERANCE
from epk_gp.recording.setup import TrainingSetup

MOST_STEPS, MOST_BYTES = 64, 1 << 22  # that wait, and that their rows and outputs take


@dataclass(eq=False)
class WaitingStep:
    """A made step with the weights and moving statistics around it.

    Attributes:
        made: What the optimizers did.
        start: The weights before it, (P,).
        end: The weights after it, (P,).
        before: The moving statistics before it, (Q,).
        statistics: Those after it.
        snapshot: What a resumed run continues from after it, of a run on disk.
    """

    made: MadeStep
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    before: Float[Tensor, " Q"]
    statistics: Float[Tensor, " Q"]
    snapshot: Mapping[str, Any] | None = None


def num_bytes(made: MadeStep) -> int:
    """Return how much memory a step takes that waits, beside its weights."""
    passes = [forward for batch in made.announced for forward in batch.forwards]
    return sum(v.nbytes for f in passes for v in (f.inputs, *tensors_of(f.returned), *f.sent.values()))


def plain_records(
    setup: TrainingSetup, differs_in: Callable[[Bool[Tensor, " modules"]], bool], index: int, steps: Sequence[MadeStep]
) -> list[Step | None]:
    """Return the records of steps of which everything follows from weights, data, batch and loss; None of the others.

    Args:
        setup: The training.
        differs_in: Whether the network computes something else in some modes than in evaluation mode.
        index: Number of the first step.
        steps: Steps one after another.
    """
    forwards = [_plain_pass(setup, made) for made in steps]
    chosen = [(k, f) for k, f in enumerate(forwards) if f is not None and not differs_in(f.modes)]
    records: list[Step | None] = [None] * len(steps)
    if not chosen:
        return records
    counts = [f.inputs.shape[0] for _, f in chosen]
    samples = torch.cat([steps[k].announced[0].samples for k, _ in chosen])
    rows = samples.to(setup.X.device)
    outputs = [f.outputs for _, f in chosen if f.outputs is not None]
    y, z, delta = setup.y[rows], torch.cat(outputs).double(), torch.cat([f.sent[f.place] for _, f in chosen]).double()
    is_same = (torch.cat([f.inputs for _, f in chosen]) == setup.X[rows]).reshape(len(rows), -1).all(dim=1)
    c, derivative = _weights_of(setup.loss, y, counts)[:, None], loss_derivatives(setup.loss, z, y)
    share, floor = TOLERANCE[outputs[0].dtype]
    bound = share * (c * derivative).abs().amax(dim=1, keepdim=True) + floor * c.abs()
    is_same &= ((delta.reshape(z.shape) - c * derivative).abs() <= bound).all(dim=1)
    for (k, _), own, batch in zip(chosen, is_same.split(counts), samples.split(counts), strict=True):
        if bool(own.all()):
            made = steps[k]
            records[k] = Step(index + k, made.lr, None if made.announced[0].indices is None else batch)
    return records


def _plain_pass(setup: TrainingSetup, made: MadeStep) -> CapturedForward | None:
    """Return the only pass of a step that may be plain, as far as single values show it."""
    if len(made.announced) != 1 or made.others or setup.model.statistics or setup.model.signature.graph is not None:
        return None
    (batch,) = made.announced
    is_one = len(batch.forwards) == 1 and batch.position >= 0 and batch.targets is None
    if not is_one or isinstance(batch.weight, Tensor) or batch.weight != 1 or isinstance(setup.loss, UnstatedLoss):
        return None
    (forward,) = batch.forwards
    record, z = forward.record, forward.outputs
    is_alike = (forward.inputs.shape[1:], forward.inputs.dtype) == (setup.X.shape[1:], setup.X.dtype)
    is_seen = (
        z is not None
        and z.ndim == 2
        and z.dtype in TOLERANCE
        and forward.sent.keys() == {forward.place}
        and forward.stray is None
    )
    special = record.random_state, record.device_random_state, record.autocast, record.settings, record.weights
    is_plain = is_alike and is_seen and all(value is None for value in special)
    return forward if is_plain and forward.inputs.shape[0] == batch.samples.numel() else None


def _weights_of(loss: Loss, y: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the weights of the rows of several batches in the loss of their own batch."""
    by_target = isinstance(loss, PerSampleLoss) and loss.counts is not None
    if isinstance(loss, ClassLoss) and not y.is_floating_point():
        by_target = loss.class_weights is not None or bool((y == ignored_class(loss)).any())
    if by_target:
        return torch.cat([sample_weights(loss, own) for own in y.split(list(counts))])
    of_count = {n: sample_weights(loss, y[:n]) for n in set(counts)}
    return torch.cat([of_count[n] for n in counts])


def measure_together(
    sizes: Sequence[int], steps: Sequence[WaitingStep], momentum: Float[Tensor, " B"]
) -> list[StepMeasures] | None:
    """Compare steps of a small network with the update rule's, as `measure_step` does for one.

    Args:
        sizes: Number of weights of each parameter.
        steps: Steps one after another.
        momentum: The momentum buffer before the first one.

    Returns:
        None where a step is multiplied with matrices, or has a second buffer.
    """
    updates = stack_steps([own.made.linear for own in steps], sizes)
    if any(update.has_matrices for update in updates) or len(momentum) > len(steps[0].start):
        return None
    momenta, sizes_of = list[Tensor](), list[Tensor]()
    for own, update in zip(steps, updates, strict=True):
        own.made.update, linear, w, g = update, own.made.linear, own.start, own.made.gradient
        if isinstance(linear, LinearStep):
            c: Sequence[Number] = linear.numbers
        else:
            c = [coefficient_of_all(value, sizes, w) for value in update]
        step, momentum = linear_step(c, w, g, momentum)
        momenta.append(momentum)
        sizes_of += torch._foreach_norm([own.end - w + step, step, w], ord=math.inf)
    numbers = torch.stack(sizes_of).double().view(-1, 3).tolist()
    rounding, eps = relative_rounding(steps[0].start.dtype), torch.finfo(steps[0].start.dtype).eps
    return [
        StepMeasures(momentum, difference, difference <= rounding * step + 4 * eps * weight)
        for momentum, (difference, step, weight) in zip(momenta, numbers, strict=True)
    ]

"""A recorded run as it would have been recorded with other weights of its samples."""

import hashlib
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.averages import averaged_trajectory
from epk_gp.core.step import tensor_bytes
from epk_gp.core.plans import weight_rows
from epk_gp.core.replay import passes_of
from epk_gp.core.plans import rows_of_weights
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, step_coefficients
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.kernel_machine.stacked_training import StackedStep, StackedTraining


def retrained_run(
    training: StackedTraining, weights: Float[Tensor, " M"], budget: int
) -> tuple[Trajectory, Float[Tensor, " 2"]]:
    """Train with other weights of the samples, and return the run with all its states.

    Args:
        training: Makes the steps of the recorded run.
        weights: One weight per sample.
        budget: Bytes of memory; states that do not fit into their share of it go to a temporary file.

    Returns:
        The run, whose loss terms have the recorded weights times the given ones; and by how much a run with all weights
        1 misses the recorded weights (`StackedTraining.difference`).
    """
    whole, recorded = training.trajectory, training.law.trajectory
    P, S = training.net.num_weights, recorded.num_steps
    reference = training.law.reference
    states = rows_of_weights(S + 1, P, reference, weight_rows(budget, reference.element_size(), P))
    states[0] = recorded.states[0].to(states)
    statistics = None if recorded.statistics is None else [recorded.statistics[0].to(reference)]
    steps, updates, replayed = list[Step](), list[UpdateCoefficients](), flat_state(recorded, 0, recorded.inputs)
    for made in training.steps(weights[None]):
        index = made.step.index
        states[index + 1], replayed = made.states[1, :P], made.states[0]
        if statistics is not None:
            statistics.append(made.states[1, P:].clone())
        steps.append(_reweighted(training, made, weights))
        updates.append(made.update(step_coefficients(recorded, index, recorded.inputs), 1).map(torch.clone))
    digest = hashlib.blake2b(recorded.digest.encode(), digest_size=16)
    digest.update(tensor_bytes(weights))
    run = replace(
        recorded,
        states=tuple(states),
        statistics=None if statistics is None else tuple(statistics),
        steps=tuple(steps),
        updates=tuple(updates),
        digest=digest.hexdigest(),
    )
    difference = training.difference(replayed, recorded)
    return (run if whole.average is None else averaged_trajectory(run, whole.average.coefficients)), difference


def _reweighted(training: StackedTraining, made: StackedStep, weights: Float[Tensor, " M"]) -> Step:
    """Return a recorded step with the weights of its samples, and the run's own moving statistics."""
    step, data = made.step, passes_of(made.step, training.run.data)
    c = torch.cat([part.c * weights[part.samples.to(weights.device)].to(part.c) for part in data])
    passes = step.passes
    if passes and training.trajectory.statistics is not None:
        passes = tuple(
            replace(
                forward,
                statistics=None if forward.statistics is None else before[1].clone(),
                statistics_after=None if forward.statistics_after is None else after[1].clone(),
            )
            for forward, before, after in zip(passes, made.before_passes, made.after_passes, strict=True)
        )
    return replace(step, sample_weights=c.double().cpu(), passes=passes)

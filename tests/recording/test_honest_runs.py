"""Runs that are what they claim to be, however unusual: none is refused, and the kernel machine is exact."""

from typing import Any

import pytest
import torch
from torch import nn

import epk_gp as epk
from checked_loops import (
    Annealed,
    Attentive,
    Counting,
    DropoutInEvaluationMode,
    FunctionalDropout,
    HandMadeNorm,
    Loop,
    Regression,
)
from loops import mlp


class Scheduled(Loop):
    def after(self, step):
        self.optimizer.param_groups[0]["lr"] *= 0.9


class ClippingThatDoesNotAct(Loop):
    def gradients(self, step):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e6)


class SwitchedOffDropout(Loop):
    def make_net(self):
        return nn.Sequential(mlp(), nn.Dropout(0.0))


class Switched(Loop):
    """An option of the optimizer is changed after the first steps."""

    options: tuple[str, Any] = ("lr", 0.1)

    def before(self, step):
        if step == 2:
            self.optimizer.param_groups[0].update([self.options])


class MomentumLate(Switched):
    options = ("momentum", 0.9)


class DecayLate(Switched):
    options = ("weight_decay", 0.1)


class MaximizeLate(Switched):
    options = ("maximize", True)


class RateChangedBeforeTheStep(Loop):
    def between(self, step):
        self.optimizer.param_groups[0].update(lr=0.2)


class LayerFrozenLate(Loop):
    def before(self, step):
        self.net[0].requires_grad_(step < 2)


class MomentumForgotten(Loop):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def before(self, step):
        if step == 2:
            self.optimizer.state.clear()


class CountingCalls(Loop):
    """A buffer that changes and does not matter."""

    def make_net(self):
        return Counting()


class RandomInTraining(Loop):
    """Dropout by torch's function, which no module shows."""

    def make_net(self):
        return FunctionalDropout().double()


class RandomAttention(Loop):
    def make_net(self):
        return Attentive().double()


class DropoutSwitchedOnLate(DropoutInEvaluationMode):
    def before(self, step):
        self.net.train(step == 2)


class StatisticsByHand(Loop):
    """A normalisation by the batch that is written out, and has no statistics to move."""

    def make_net(self):
        return HandMadeNorm()


class ClippedByNorm(Loop):
    """Clipping that nobody stated."""

    def gradients(self, step):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e-2)


class ClippedByValue(Loop):
    def gradients(self, step):
        nn.utils.clip_grad_value_(self.net.parameters(), 1e-2)


class Augmented(Loop):
    def inputs(self, step, rows):
        return self.X[rows] + 0.1 * torch.randn(len(rows), 4).double()


class EditedInPlace(Loop):
    """The loop's data change; the recorder has those that it was given, and rows as seen."""

    def before(self, step):
        if step == 2:
            self.X.mul_(1.1)


class AnnealedOutputs(Loop):
    """A buffer of the network's own that moves, and that the outputs depend on."""

    def make_net(self):
        return Annealed()


HONEST = [RandomInTraining, RandomAttention, DropoutSwitchedOnLate, StatisticsByHand, ClippedByNorm, ClippedByValue]
HONEST += [Augmented, EditedInPlace, AnnealedOutputs]
HONEST += [Loop, Regression, Scheduled, ClippingThatDoesNotAct, DropoutInEvaluationMode, SwitchedOffDropout]
HONEST += [MomentumLate, DecayLate, MaximizeLate, RateChangedBeforeTheStep, LayerFrozenLate, MomentumForgotten]
HONEST += [CountingCalls]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("honest", HONEST)
def test_an_honest_run_passes_and_is_explained(honest):
    loop = honest()
    trajectory = loop.run().trajectory
    assert trajectory.num_steps == 4
    parts = epk.attribute(trajectory, loop.X, head="logits")
    assert parts.max_error <= 1e-12
    assert parts.certified

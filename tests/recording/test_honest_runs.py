"""Runs that are what they claim to be, however unusual: none is refused, and the kernel machine is exact."""

from collections.abc import Callable
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


def loop_with(base: type[Loop] = Loop, **parts: Any) -> type[Loop]:
    """Return a loop with other parts; `net` makes its network."""
    if "net" in parts:
        make = parts.pop("net")
        parts["make_net"] = lambda self: make()
    return type("Honest", (base,), parts)


def changing(**options: Any) -> type[Loop]:
    """Return a loop that changes options of the optimizer after the first steps."""
    return loop_with(before=lambda self, step: step == 2 and self.optimizer.param_groups[0].update(options))


def clipped(clip: Callable[..., Any], bound: float) -> type[Loop]:
    """Return a loop with clipping that nobody stated."""
    return loop_with(gradients=lambda self, step: clip(self.net.parameters(), bound))


class MomentumForgotten(Loop):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def before(self, step):
        if step == 2:
            self.optimizer.state.clear()


HONEST = {
    "plain": Loop,
    "regression": Regression,
    "scheduled": loop_with(after=lambda self, step: self.optimizer.param_groups[0].update(lr=0.1 * 0.9**step)),
    "momentum_late": changing(momentum=0.9),
    "decay_late": changing(weight_decay=0.1),
    "maximize_late": changing(maximize=True),
    "rate_changed_before_the_step": loop_with(between=lambda self, step: self.optimizer.param_groups[0].update(lr=0.2)),
    "layer_frozen_late": loop_with(before=lambda self, step: self.net[0].requires_grad_(step < 2)),
    "momentum_forgotten": MomentumForgotten,
    "clipping_that_does_not_act": clipped(nn.utils.clip_grad_norm_, 1e6),
    "clipped_by_norm": clipped(nn.utils.clip_grad_norm_, 1e-2),
    "clipped_by_value": clipped(nn.utils.clip_grad_value_, 1e-2),
    "dropout_in_evaluation_mode": DropoutInEvaluationMode,
    "dropout_switched_on_late": loop_with(DropoutInEvaluationMode, before=lambda self, step: self.net.train(step == 2)),
    "dropout_of_nothing": loop_with(net=lambda: nn.Sequential(mlp(), nn.Dropout(0.0))),
    "dropout_that_no_module_shows": loop_with(net=lambda: FunctionalDropout().double()),
    "dropout_of_attention": loop_with(net=lambda: Attentive().double()),
    "normalisation_by_hand": loop_with(net=HandMadeNorm),
    "buffer_that_does_not_matter": loop_with(net=Counting),
    "buffer_that_scales_outputs": loop_with(net=Annealed),
    "augmented": loop_with(inputs=lambda self, step, rows: self.X[rows] + 0.1 * torch.randn(len(rows), 4).double()),
    "data_edited_in_place": loop_with(before=lambda self, step: self.X.mul_(1.1) if step == 2 else None),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST.keys())
def test_an_honest_run_passes_and_is_explained(honest):
    loop = honest()
    trajectory = loop.run().trajectory
    assert trajectory.num_steps == 4
    parts = epk.attribute(trajectory, loop.X, head="logits")
    assert parts.max_error <= 1e-12
    assert parts.certified

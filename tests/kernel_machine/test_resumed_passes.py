"""A pass over the run that was interrupted goes on from its last save, and gives the same bytes."""

from dataclasses import fields

import pytest
import torch
from path_runs import queries, recorded
from weighted_loops import WeightedLoop

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine import adjoint
from epk_gp.kernel_machine.influence_pass import InfluenceWork

LOOP = WeightedLoop(lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3))
STEP, BACK = (adjoint, "propagate_step"), (InfluenceWork, "_back")


def average():
    return averaged_trajectory(run := recorded("tanh_momentum"), averaging_coefficients(run.num_steps, decay=0.8))


# A call, what it does at each step of a block of points, and at which of these calls it is interrupted.
CHORDS = lambda **o: epk.attribute(recorded("tanh_momentum"), queries(), path=epk.chords(2), **o)  # noqa: E731
PASSES = {
    "momentum": (lambda **o: epk.attribute(recorded("tanh_momentum"), queries(), **o), STEP, 3),
    "within a chord": (CHORDS, STEP, 3),
    "both adjoints of an average": (lambda **o: epk.attribute(average(), queries(), **o), STEP, 3),
    "outputs apart, second block": (lambda **o: epk.attribute(recorded("tanh_momentum"), queries(2), **o), STEP, 7),
    "lines together": (CHORDS, STEP, 4),
    "influence": (lambda **o: epk.influence(LOOP.record(), LOOP.test_points, **o), BACK, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_an_interrupted_pass_goes_on_where_it_was(name, tmp_path, monkeypatch):
    call, (owner, function), last = PASSES[name]
    real, made, left = getattr(owner, function), [], [last]

    def counted(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        made.append(args)
        return real(*args)

    if "apart" in name:
        monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)
        monkeypatch.setattr("epk_gp.kernel_machine.attribute.MAPPED_ADJOINTS", 0)
    if "within" in name:
        monkeypatch.setattr(adjoint.StepBack, "nbytes", 1 << 40)  # no two steps go together
    num_lines = 2 if "lines" in name else 1
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: num_lines)
    monkeypatch.setattr("epk_gp.storage.partial_sums.SECONDS", 0)
    whole = call()
    monkeypatch.setattr(owner, function, counted)
    with pytest.raises(KeyboardInterrupt):
        call(checkpoint=tmp_path)
    resumed = call(checkpoint=tmp_path)
    together = len(made)
    made.clear()
    call()
    assert together - len(made) in range(2 * num_lines - 1)  # each step once, before and after, or those of some lines
    for field in fields(whole):
        a, b = getattr(whole, field.name), getattr(resumed, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else field.name == "axes" or a == b, field.name

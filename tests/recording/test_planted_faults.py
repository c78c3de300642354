"""Runs that are not what they claim to be: each is found, at its step, by its cause."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from checked_loops import (
    Auxiliary,
    Loop,
    Regression,
    eager_batch_norm,
)
from loops import data, mlp, regression_data, sgd

FAULTY_STEP = 2


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where it is seen, and what the message must say."""

    loop: type[Loop]
    message: str
    step: int = FAULTY_STEP


def fault(message: str, base: type[Loop] = Loop, step: int = FAULTY_STEP, **parts: Any) -> Fault:
    def late(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Loop, *args: Any) -> Any:
            at = next(a for a in args if isinstance(a, int))
            return (part if at == FAULTY_STEP else getattr(base, name))(self, *args)

        return replaced

    fixed = {k: v for k, v in parts.items() if k.startswith("make_") or not callable(v)}
    parts = {k: late(k, v) for k, v in parts.items() if k not in fixed}
    return Fault(type("Faulty", (base,), {**fixed, **parts}), message, step)


class WithAuxiliary(Loop):
    def make_net(self):
        return Auxiliary()

    def value(self, z, y, step):
        return F.cross_entropy(z[0], y) + F.cross_entropy(z[1], y)


def edit_weights(self, *_):
    with torch.no_grad():
        self.net[0].weight[0, 0] += 1e-3


def edit_frozen(self, *_):
    with torch.no_grad():
        self.net[0].weight[0, 0] += 1e-3


def frozen_first() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def another_optimizer(self, *_):
    torch.optim.SGD(self.net.parameters(), lr=0.01).step()


FAULTS = {
    "batch_norm_switched_on_late": fault(
        r"'1.running_mean' changed. If training moves it, put the network into training mode",
        make_net=lambda _: eager_batch_norm(),
        before=lambda self, step: self.net.train(),
    ),
    "auxiliary_output": Fault(WithAuxiliary, "network returns tuple in training mode. Say with output=", 0),
    "sum_for_mean": fault(
        "that of CrossEntropy.reduction='sum'., not of the stated CrossEntropy",
        value=lambda self, z, y, step: F.cross_entropy(z, y, reduction="sum"),
    ),
    "mean_for_sum": fault(
        "that of CrossEntropy.reduction='mean'., not of the stated CrossEntropy",
        step=0,
        loss=epk.CrossEntropy("sum"),
    ),
    "sum_for_mean_regression": fault(
        "that of MeanSquaredError.reduction='sum'., not of the stated MeanSquaredError",
        base=Regression,
        value=lambda self, z, y, step: F.mse_loss(z, y, reduction="sum"),
    ),
    "mean_for_sum_regression": fault(
        "that of MeanSquaredError.reduction='mean'., not of the stated MeanSquaredError",
        base=Regression,
        step=0,
        loss=epk.MeanSquaredError("sum"),
    ),
    "gradient_accumulation": fault(
        "2 times that of the stated loss: .* or accumulated over several backward",
        gradients=lambda self, step: F.cross_entropy(
            self.net(self.X[self.rows(step)]), self.y[self.rows(step)]
        ).backward(),
    ),
    "squared_error_for_cross_entropy": fault(
        "that of MeanSquaredError.reduction='mean'., not of the stated CrossEntropy",
        value=lambda self, z, y, step: F.mse_loss(z, F.one_hot(y, 3).to(z.dtype)),
    ),
    "cross_entropy_for_squared_error": fault(
        "that of CrossEntropy.reduction='mean'., not of the stated MeanSquaredError",
        base=Regression,
        make_data=lambda _: (data()[0], F.one_hot(data()[1], 3).double()),
        value=lambda self, z, y, step: F.cross_entropy(z, y),
    ),
    "label_smoothing": fault(
        "not that of the stated loss .*another loss",
        value=lambda self, z, y, step: F.cross_entropy(z, y, label_smoothing=0.1),
    ),
    "regularised_loss": fault(
        "not that of the stated loss .*another loss",
        value=lambda self, z, y, step: F.cross_entropy(z, y) + 0.1 * self.net[0].weight.square().sum(),
    ),
    "wrong_indices": fault(
        r"must get the indices of the rows that the network saw: row 0 was X\[2\], the batch says X\[3\]",
        announce=lambda self, recorder, rows, step: recorder.batch(rows + 1),
    ),
    "batch_said_to_be_all": fault(
        "no call of the network on the batch's rows was seen",
        announce=lambda self, recorder, rows, step: recorder.batch(None),
    ),
    "no_zero_grad": fault("gradients left over from an earlier backward", zero=lambda self, step: None),
    "weights_edited_between_steps": fault("they were changed in between", before=edit_weights),
    "weights_edited_before_the_step": fault("the weights .*were changed between batch", between=edit_weights),
    "second_optimizer_between_steps": fault("they were changed in between", step=3, after=another_optimizer),
    "second_optimizer_before_the_step": fault("another optimizer", between=another_optimizer),
    "learning_rate_nan": fault(
        "learning rate must be finite", before=lambda self, step: self.optimizer.param_groups[0].update(lr=float("nan"))
    ),
    "step_without_batch": fault("must be preceded by recorder.batch", announce=lambda self, recorder, rows, step: None),
    "second_step_of_one_batch": fault(
        "must be preceded by recorder.batch", step=3, after=lambda self, step: self.optimizer.step()
    ),
    "frozen_weight_changed": fault("'0.weight' changed", make_net=lambda _: frozen_first(), before=edit_frozen),
    "frozen_weight_changed_after_the_last_step": fault(
        "'0.weight' changed", step=3, steps=3, make_net=lambda _: frozen_first(), after=edit_frozen
    ),
    "gradient_nan": fault(
        "training diverged", gradients=lambda self, step: self.net[0].weight.grad.fill_(float("nan"))
    ),
}


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_found_and_named(planted):
    loop = planted.loop()
    with pytest.raises(epk.StepMismatchError, match=rf"^step {planted.step}: .*{planted.message}"):
        loop.run()
    assert loop.recorder.num_steps == planted.step
    assert not loop.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_training_that_diverges_names_the_step(dtype):
    net, (X, y) = mlp(dtype, nn.ReLU), regression_data()
    with pytest.raises(epk.StepMismatchError, match=r"step [1-9]\d*: .*training diverged .*Lower the learning rate"):
        epk.train(net, X.to(dtype), y.to(dtype), optimizer=sgd(net, 50.0), steps=1000, loss=epk.MeanSquaredError())


def test_a_batch_without_its_step_is_found_at_the_end():
    loop = Loop()
    loop.update = lambda step: loop.optimizer.step() if step < 3 else None
    with pytest.raises(epk.StepMismatchError, match="followed by optimizer.step.*the one of step 3 was not"):
        loop.run()
    assert loop.recorder.trajectory.num_steps == 3


def test_a_batch_outside_the_recorder_is_refused():
    net, (X, y) = mlp(), data()
    recorder = epk.Recorder(net, sgd(net), X, y)
    with pytest.raises(RuntimeError, match="inside 'with Recorder"):
        recorder.batch(None)
    with recorder:
        pass
    with pytest.raises(RuntimeError, match="inside 'with Recorder"):
        recorder.batch(None)
    with recorder, pytest.raises(RuntimeError, match="inside 'with Recorder"):
        recorder.batch(None)

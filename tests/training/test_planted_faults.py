"""Runs that are not what they claim to be: each is found, at its step, by its cause. And honest ones pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from loops import data, mlp, regression_data, sgd

FAULTY_STEP = 2


class Loop:
    """A correct training loop; a fault replaces one of its parts, from step 2 on."""

    loss: Any = epk.CrossEntropy()
    lr = 0.1
    steps = 4
    batch_size = 4

    def __init__(self) -> None:
        self.net = self.make_net()
        self.X, self.y = self.make_data()
        self.optimizer = sgd(self.net, self.lr)

    def make_net(self) -> nn.Module:
        return mlp()

    def make_data(self) -> tuple[Tensor, Tensor]:
        return data()

    def rows(self, step: int) -> Tensor:
        return (torch.arange(self.batch_size) + step) % len(self.X)

    def zero(self, step: int) -> None:
        self.optimizer.zero_grad()

    def before(self, step: int) -> None: ...

    def inputs(self, step: int, rows: Tensor) -> Tensor:
        return self.X[rows]

    def value(self, z: Tensor, y: Tensor, step: int) -> Tensor:
        return F.cross_entropy(z, y)

    def gradients(self, step: int) -> None: ...

    def announce(self, recorder: epk.Recorder, rows: Tensor, step: int) -> None:
        recorder.batch(rows)

    def between(self, step: int) -> None: ...

    def update(self, step: int) -> None:
        self.optimizer.step()

    def after(self, step: int) -> None: ...

    def run(self) -> epk.Recorder:
        with epk.Recorder(self.net, self.optimizer, self.X, self.y, loss=self.loss) as recorder:
            self.recorder = recorder
            for step in range(self.steps):
                rows = self.rows(step)
                self.before(step)
                self.zero(step)
                self.value(self.net(self.inputs(step, rows)), self.y[rows], step).backward()
                self.gradients(step)
                self.announce(recorder, rows, step)
                self.between(step)
                self.update(step)
                self.after(step)
        return recorder


class Regression(Loop):
    loss = epk.MeanSquaredError()

    def make_data(self):
        return regression_data()

    def value(self, z, y, step):
        return F.mse_loss(z, y)


class Scheduled(Loop):
    def after(self, step):
        self.optimizer.param_groups[0]["lr"] *= 0.9


class ClippingThatDoesNotAct(Loop):
    def gradients(self, step):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e6)


class DropoutInEvaluationMode(Loop):
    def make_net(self):
        return nn.Sequential(mlp(), nn.Dropout(0.5)).eval()


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


HONEST = [Loop, Regression, Scheduled, ClippingThatDoesNotAct, DropoutInEvaluationMode, SwitchedOffDropout]
HONEST += [MomentumLate, DecayLate, MaximizeLate, RateChangedBeforeTheStep, LayerFrozenLate, MomentumForgotten]
HONEST += [CountingCalls]


@pytest.mark.parametrize("honest", HONEST)
def test_an_honest_run_passes_and_is_explained(honest):
    loop = honest()
    trajectory = loop.run().trajectory
    assert trajectory.num_steps == 4
    assert epk.attribute(trajectory, loop.X, head="logits").max_error <= 1e-12


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where it is seen, and what the message must say."""

    loop: type[Loop]
    says: str
    step: int = FAULTY_STEP


def fault(says: str, base: type[Loop] = Loop, step: int = FAULTY_STEP, **parts: Any) -> Fault:
    def late(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Loop, *args: Any) -> Any:
            at = next(a for a in args if isinstance(a, int))
            return (part if at == FAULTY_STEP else getattr(base, name))(self, *args)

        return replaced

    fixed = {k: v for k, v in parts.items() if k.startswith("make_") or not callable(v)}
    parts = {k: late(k, v) for k, v in parts.items() if k not in fixed}
    return Fault(type("Faulty", (base,), {**fixed, **parts}), says, step)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.3, training=self.training))


class HandMadeNorm(nn.Module):
    """Batch statistics in training, none in evaluation, and no layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0) if self.training else x)


class Attentive(nn.Module):
    """Dropout inside of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 5, -1)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Counting(nn.Module):
    """A buffer that moves whenever the network is called, without any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x)


class Annealed(nn.Module):
    """A buffer that moves whenever the network is called, and scales its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.scale * self.inner(x)
        if self.training:
            self.scale = self.scale * 0.9
        return z


class Auxiliary(nn.Module):
    """A second output in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        return (self.inner(x), self.inner(2 * x)) if self.training else self.inner(x)


class WithAuxiliary(Loop):
    def make_net(self):
        return Auxiliary()

    def value(self, z, y, step):
        return F.cross_entropy(z[0], y) + F.cross_entropy(z[1], y)


def eager_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()


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
    "functional_dropout": fault(
        "forward pass is random .*dropout", step=0, make_net=lambda _: FunctionalDropout().double()
    ),
    "dropout_inside_attention": fault("forward pass is random", step=0, make_net=lambda _: Attentive().double()),
    "dropout_module_switched_on_late": fault(
        r"'1' \(Dropout\) is random in training mode",
        base=DropoutInEvaluationMode,
        before=lambda self, step: self.net.train(),
    ),
    "batch_statistics_in_training": fault(
        "training mode differs from .*batch statistics", step=0, make_net=lambda _: HandMadeNorm()
    ),
    "batch_norm_switched_on_late": fault(
        r"'1' \(BatchNorm1d\) uses the statistics of the batch",
        make_net=lambda _: eager_batch_norm(),
        before=lambda self, step: self.net.train(),
    ),
    "auxiliary_output": Fault(WithAuxiliary, "returns something else than one tensor", 0),
    "clipping_by_norm": fault(
        "it was clipped or scaled down",
        gradients=lambda self, step: nn.utils.clip_grad_norm_(self.net.parameters(), 1e-2),
    ),
    "clipping_by_value": fault(
        r"clipped to \+-0.01 entry by entry",
        gradients=lambda self, step: nn.utils.clip_grad_value_(self.net.parameters(), 1e-2),
    ),
    "sum_for_mean": fault(
        "4 times the stated loss's: the loss was reduced by 'sum', not 'mean'",
        value=lambda self, z, y, step: F.cross_entropy(z, y, reduction="sum"),
    ),
    "mean_for_sum": fault(
        "1/4 of the stated loss's: the loss was reduced by 'mean', not 'sum'",
        step=0,
        loss=epk.CrossEntropy("sum"),
    ),
    "sum_for_mean_regression": fault(
        "12 times the stated loss's: the loss was reduced by 'sum', not 'mean'",
        base=Regression,
        value=lambda self, z, y, step: F.mse_loss(z, y, reduction="sum"),
    ),
    "mean_for_sum_regression": fault(
        "1/12 of the stated loss's: the loss was reduced by 'mean', not 'sum'",
        base=Regression,
        step=0,
        loss=epk.MeanSquaredError("sum"),
    ),
    "gradient_accumulation": fault(
        "scaled up, or accumulated over several backward",
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
        "other indices than those given", announce=lambda self, recorder, rows, step: recorder.batch(rows + 1)
    ),
    "batch_said_to_be_all": fault(
        "other indices than those given", announce=lambda self, recorder, rows, step: recorder.batch(None)
    ),
    "augmented_inputs": fault(
        "augmented inputs", inputs=lambda self, step, rows: self.X[rows] + 0.1 * torch.randn(len(rows), 4).double()
    ),
    "data_edited_in_place": fault("augmented inputs", before=lambda self, step: self.X.mul_(1.1)),
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
    "buffer_changed": fault("'scale' changed", step=0, make_net=lambda _: Annealed()),
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
    with pytest.raises(epk.StepMismatchError, match=rf"^step {planted.step}: .*{planted.says}"):
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


class RandomOptimizer(torch.optim.SGD):
    """A subclass may do anything."""


OPTIMIZERS = {
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.1), "that of Adamax is not"),
    "rprop": (lambda p: torch.optim.Rprop(p, lr=0.1), "that of Rprop is not"),
    "subclass": (lambda p: RandomOptimizer(p, lr=0.1), "that of RandomOptimizer is not"),
}


@pytest.mark.parametrize(("make", "says"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_whose_law_is_not_known_is_refused_at_the_door(make, says):
    net, (X, y) = mlp(), data()
    with pytest.raises(ValueError, match=f"update rule must be known: {says}"):
        epk.train(net, X, y, optimizer=make(net.parameters()), steps=1)


class AlwaysCentred(HandMadeNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


class AlwaysRandom(FunctionalDropout):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.3))


NETWORKS = {
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.1)), r"'1' \(Dropout\) is random"),
    "alpha_dropout": (lambda: nn.Sequential(mlp(), nn.AlphaDropout(0.1)), r"'1' \(AlphaDropout\) is random"),
    "randomised_relu": (lambda: nn.Sequential(mlp(), nn.RReLU()), r"'1' \(RReLU\) is random"),
    "batch_norm": (lambda: eager_batch_norm().train(), r"'1' \(BatchNorm1d\) uses the statistics of the batch"),
    "batch_norm_without_running_statistics": (
        lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3, track_running_stats=False)).double().eval(),
        r"'1' \(BatchNorm1d\) uses the statistics of the batch",
    ),
    "batch_statistics_by_hand": (AlwaysCentred, "must depend on its own input alone: evaluated together, 8 inputs"),
    "batch_statistics_by_hand_behind_a_zero_last_layer": (
        lambda: zero_final_layer(AlwaysCentred()),
        "must depend on its own input alone",
    ),
    "dropout_by_hand": (lambda: AlwaysRandom().double(), "deterministic network: two evaluations .* differ"),
}


@pytest.mark.parametrize(("make", "says"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_random_or_coupled_network_is_refused_at_the_door(make, says):
    net, (X, y) = make(), data()
    with pytest.raises(ValueError, match=says):
        epk.train(net, X, y, optimizer=sgd(net), steps=1)


def test_a_loss_that_mixes_the_rows_is_refused_at_the_door():
    net, (X, y) = mlp(), data()
    loss = epk.PerSampleLoss(lambda z, t: F.cross_entropy(z, t, reduction="none") / z.detach().std())
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        epk.train(net, X, y, optimizer=sgd(net), steps=1, loss=loss)

"""Random small trainings with one fault planted in the loop, and what the package says of them."""

import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.show import CertificateWarning
from epk_gp.optimizers.update_rules import ClipNorm

POINTS, INPUTS, CLASSES = 10, 3, 3


@dataclass
class Training:
    """A training loop; a fault replaces one of its parts at one step.

    Attributes:
        draw: Source of everything random.
        faulty_step: The step at which the fault acts.
        fault: Its name in `FAULTS`; None for a correct loop.
    """

    draw: random.Random
    fault: str | None
    faulty_step: int = 0
    net: nn.Module = field(init=False)
    X: Tensor = field(init=False)
    y: Tensor = field(init=False)
    loss: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    options: dict[str, Any] = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw
        torch.manual_seed(draw.randrange(1 << 30))
        self.dtype = draw.choice([torch.float64, torch.float64, torch.float64, torch.float32])
        self.net = make_net(draw).to(self.dtype)
        self.X = torch.randn(POINTS, INPUTS, dtype=self.dtype)
        self.loss, self.y = make_loss(draw, self.X)
        self.optimizer = make_optimizer(draw, self.net)
        self.steps = draw.randint(3, 5)
        self.faulty_step = draw.randrange(self.steps)
        self.clip = ClipNorm(draw.uniform(0.05, 0.5)) if draw.random() < 0.15 else None
        check_every = 1 if self.clip else draw.choice([1, 1, 3, 1000])
        self.options = {"loss": self.loss, "clip": self.clip, "check_every": check_every}
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.warm_up = draw.random() < 0.25

    def record(self) -> epk.Trajectory:
        """Train under a recorder."""
        draw, previous = self.draw, None
        with epk.Recorder(self.net, self.optimizer, self.X, self.y, **self.options) as recorder:
            for step in range(self.steps):
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * step / 2 if self.warm_up and step < 2 else rate
                rows = torch.tensor(draw.sample(range(POINTS), draw.randint(2, 6)))
                fault = FAULTS.get(self.fault or "") if step == self.faulty_step else None
                batch = Batch(self, rows, rows, self.y[rows], previous)
                if fault is not None and fault.before is not None:
                    fault.before(batch)
                self.optimizer.zero_grad()
                batch.value().backward()
                if self.clip is not None:
                    self.clip.clip_gradients(self.net)
                if fault is not None and fault.gradients is not None:
                    fault.gradients(batch)
                recorder.batch(rows)
                self.optimizer.step()
                previous = rows
            if self.fault in AFTER:
                AFTER[self.fault](self)
        return recorder.trajectory


@dataclass
class Batch:
    """What the loop's loss is taken of."""

    training: Training
    announced: Tensor
    rows: Tensor
    targets: Tensor
    previous: Tensor | None
    factor: float = 1.0
    single: bool = False

    def value(self) -> Tensor:
        """Return the loss of the batch."""
        training = self.training
        if self.single:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.dtype == torch.float32):
                z = training.net(training.X[self.rows].float().to(training.dtype))
        else:
            z = training.net(training.X[self.rows])
        return self.factor * reduced(training.loss, z.to(training.dtype), self.targets)


@dataclass(frozen=True)
class Fault:
    """What is done before the loss is computed, or to the gradients."""

    before: Callable[[Batch], object] | None = None
    gradients: Callable[[Batch], object] | None = None


def make_net(draw: random.Random) -> nn.Module:
    """Draw a network."""
    activation = draw.choice([nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus])
    kind = draw.choice(["mlp", "deep", "norm", "layer_norm", "convolution"])
    width = draw.randint(3, 6)
    if kind == "convolution":
        body = [nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, width, 2), activation(), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(2 * width, CLASSES))
    layers: list[nn.Module] = [nn.Linear(INPUTS, width)]
    if kind == "norm":
        layers.append(nn.BatchNorm1d(width).eval())
    if kind == "layer_norm":
        layers.append(nn.LayerNorm(width))
    layers.append(activation())
    if kind == "deep":
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def make_loss(draw: random.Random, X: Tensor) -> tuple[Any, Tensor]:
    """Draw a loss, and targets for it."""
    labels, values = torch.arange(POINTS) % CLASSES, torch.randn(POINTS, CLASSES).to(X)
    reduction = draw.choice(["mean", "sum"])
    kind = draw.choice(["cross_entropy", "weighted", "smoothed", "squares", "huber"])
    if kind == "squares":
        return epk.MeanSquaredError(reduction), values
    if kind == "huber":
        return epk.PerSampleLoss(huber, reduction), values
    if kind == "weighted":
        return epk.CrossEntropy(reduction, class_weights=(0.5, 1.0, 2.0)), labels
    return epk.CrossEntropy(reduction, label_smoothing=0.1 if kind == "smoothed" else 0.0), labels


def huber(z: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(z, y, reduction="none").sum(dim=1)


def reduced(loss: Any, z: Tensor, y: Tensor) -> Tensor:
    """Return a batch's loss by torch's own functions."""
    if isinstance(loss, epk.MeanSquaredError):
        return F.mse_loss(z, y, reduction=loss.reduction)
    if isinstance(loss, epk.PerSampleLoss):
        return huber(z, y).mean() if loss.reduction == "mean" else huber(z, y).sum()
    weight = None if loss.class_weights is None else z.new_tensor(loss.class_weights)
    return F.cross_entropy(z, y, weight=weight, reduction=loss.reduction, label_smoothing=loss.label_smoothing)


def make_optimizer(draw: random.Random, net: nn.Module) -> torch.optim.Optimizer:
    """Draw an optimizer."""
    decay = draw.choice([0.0, 0.01])
    kind = draw.choice(["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad"])
    rate = draw.uniform(0.01, 0.1)
    parameters = net.parameters()
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=decay)
    if kind in ("momentum", "nesterov"):
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=decay, nesterov=kind == "nesterov")
    maker = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    return maker.get(kind, torch.optim.Adagrad)(parameters, lr=rate, weight_decay=decay)


def other_rows(batch: Batch) -> None:
    """Other indices than those announced."""
    draw = batch.training.draw
    batch.rows = torch.tensor(draw.sample(range(POINTS), len(batch.rows)))
    batch.targets = batch.training.y[batch.rows]


def other_labels(batch: Batch) -> None:
    """Labels that are shuffled within the batch."""
    batch.targets = batch.targets.roll(1, 0)


def other_weight(batch: Batch) -> None:
    """A loss that is multiplied by something."""
    batch.factor = batch.training.draw.choice([0.5, 2.0, 1.001, -1.0])


def other_reduction(batch: Batch) -> None:
    """The mean for the sum, or the sum for the mean."""
    loss, count = batch.training.loss, len(batch.rows)
    batch.factor = 1 / count if loss.reduction == "sum" else count


def last_batch(batch: Batch) -> None:
    """Steps whose gradients come in another order: that of the batch before."""
    if batch.previous is not None:
        batch.rows, batch.targets = batch.previous, batch.training.y[batch.previous]


def less_precision(batch: Batch) -> None:
    """A gradient in less precision: bfloat16 for float32, float32 for float64."""
    batch.single = True


def moved_buffer(batch: Batch) -> None:
    """A buffer that is changed; nothing where there is none."""
    for buffer in batch.training.net.buffers():
        if buffer.is_floating_point():
            buffer += 0.1


def left_over_gradients(batch: Batch) -> None:
    """The gradient of another batch is added."""
    other_rows(batch)
    batch.value().backward()


def edited_weights(training: Training) -> None:
    """Weights that are replaced after the last step."""
    with torch.no_grad():
        for p in training.net.parameters():
            p.mul_(0.99)


FAULTS = {
    "index": Fault(before=other_rows),
    "label": Fault(before=other_labels),
    "weight": Fault(before=other_weight),
    "reduction": Fault(before=other_reduction),
    "order": Fault(before=last_batch),
    "precision": Fault(before=less_precision),
    "buffer": Fault(before=moved_buffer),
    "left_over": Fault(gradients=left_over_gradients),
}
AFTER = {"replaced_weights": edited_weights}
NAMES = (*FAULTS, *AFTER)

# What a sum may miss the network by where nothing was found, relative to the largest output.
HARMLESS = {torch.float64: 1e-9, torch.float32: 1e-3}


def outcome(seed: int, fault: str | None) -> str:
    """Train with a fault and ask for reconstruction and attribution.

    Returns:
        "refused" (an error while recording), "uncertified" (a result warns, and says that it is not certified), "exact"
        (both are certified), or else what was silently wrong. Sums that are certified must be the network's outputs.
    """
    training = Training(random.Random(seed), fault)
    try:
        trajectory = training.record()
    except epk.StepMismatchError:
        return "refused"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [f(trajectory, trajectory.inputs[:2]) for f in (epk.reconstruct, epk.attribute)]
    warned = sum(issubclass(warning.category, CertificateWarning) for warning in caught)
    uncertified = [result for result in results if not result.certified]
    if warned != len(uncertified):
        return f"{len(uncertified)} results are not certified, {warned} warnings"
    size = max(1.0, float(results[0].network.abs().max()))
    errors = [result.max_error for result in results if result.certified]
    if not all(error <= HARMLESS[training.dtype] * size for error in errors):
        return f"certified with errors of {errors}"
    return "uncertified" if uncertified else "exact"


def count_outcomes(first: int, count: int, *, planted: bool = True) -> Counter[str]:
    """Count the outcomes of some trainings; each seed has its own fault.

    Args:
        first: The first seed.
        count: Number of trainings.
        planted: Whether a fault is planted at all.
    """
    draw = [outcome(seed, NAMES[seed % len(NAMES)] if planted else None) for seed in range(first, first + count)]
    return Counter(draw)

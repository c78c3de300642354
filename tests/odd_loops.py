"""Small training loops with odd parts, drawn from a seed and run by plain torch: nothing here is of the package.

Every loop takes a weight for each step and sample, which multiplies the sample's loss term; the divisor of a mean over
a batch stays. Central differences in these weights are the brute force of `odd_programs`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from odd_parts import AVERAGE, CLASSES, OPTIMIZERS, POINTS, Clipping, make_net
from torch import Tensor, nn
from torch.nn import functional as F

FAULTS = ("index", "label", "weight", "reduction", "order", "precision", "buffer", "left_over", "replaced")


@dataclass
class Ended:
    """A loop that has ended."""

    net: nn.Module
    recorder: Any
    norms: list[tuple[float, ...]]
    average: list[Tensor]  # of the weights


@dataclass
class OddLoop:
    """A training loop, the same in every run but for the weights of the samples."""

    seed: int  # of the initial weights, data, batches and random numbers
    net_kind: str = "mlp"  # of `make_net`
    activation: type[nn.Module] = nn.Tanh  # class of the activation
    inputs: int = 3  # numbers of an input
    loss: str = "cross_entropy"  # "cross_entropy", "smoothed", "weighted" or "squares"
    reduction: str = "mean"  # "mean" or "sum"
    optimizers: tuple[str, ...] = ("SGD",)  # names in `OPTIMIZERS`, one or two: the second one has the last layer
    options: tuple[dict[str, Any], ...] = ({},)  # options of each of them
    decay: float = 0.0  # weight decay
    rate: float = 1.0  # factor of the learning rates
    steps: int = 6  # number of steps
    batch: int | None = 4  # samples of a batch; None for all
    accumulated: int = 1  # batches of a step
    schedule: tuple[float, ...] = ()  # factors of the learning rate
    change: tuple[str, Any, int] | None = None  # option, value and step of a change in the loop
    changes_one_group: bool = False  # whether the change is in the first parameter group alone
    changes_back: bool = False  # whether every second step has the old value again
    group_added: int | None = None  # step at which the optimizer gets the first layer, frozen before; None if it has it
    added_options: dict[str, Any] = field(default_factory=dict)  # of the added group
    frozen_from: int | None = None  # step from which the first layer gets no gradients
    steps_before: int = 0  # steps before the recording
    clipping: Clipping | None = None  # of the gradients
    clips_part: bool = False  # whether the last layer alone is clipped
    passes: str | None = None  # forward passes at one step without a loss: "no_grad", "evaluation", "unused", "reset"
    passes_at: int = 2  # that step
    seen: str = "same"  # what the network sees of a row: "same", "normalised" or "noise"
    announced: str = "right"  # which indices are announced: "right", or another kind
    momentum: float | None = 0.1  # of batch normalisation
    dtype: torch.dtype = torch.float64  # of everything
    sets_to_none: bool = True  # whether gradients are None after `zero_grad`
    init: int = 0  # number of the initial weights
    splits_groups: bool = False  # whether biases have a group with options of their own
    repeats: bool = False  # whether a batch may hold a sample twice
    row_weights: bool = False  # whether each row of a batch has a weight of its own, which is announced
    fault: str | None = None  # what one step does without saying so: a name in `FAULTS`
    fault_at: int = 0  # that step
    ignored: bool = False  # whether samples without a label are left out of the loss by its `ignore_index`

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        X = torch.randn(POINTS, self.inputs, generator=generator, dtype=torch.float64).to(self.dtype)
        if self.net_kind == "embedding":
            X = torch.randint(0, 7, (POINTS, 3), generator=generator)
        if self.loss == "squares":
            return X, torch.randn(POINTS, CLASSES, generator=generator, dtype=torch.float64).to(self.dtype)
        y = torch.arange(POINTS) % CLASSES
        return X, torch.where(torch.arange(POINTS) % 4 == 3, -100, y) if self.ignored else y

    @property
    def test_points(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.net_kind == "embedding":
            return torch.randint(0, 7, (3, 3), generator=generator)
        return torch.randn(3, self.inputs, generator=generator, dtype=torch.float64).to(self.dtype)

    @property
    def batches(self) -> list[list[Tensor]]:
        """The true rows of each batch of each step."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        size = POINTS if self.batch is None else self.batch
        draw = partial(torch.randint, 0, POINTS, (size,)) if self.repeats else partial(torch.randperm, POINTS)
        return [[draw(generator=generator)[:size] for _ in range(self.accumulated)] for _ in range(self.steps)]

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each row."""
        if self.loss == "squares":
            per_row = (z - y).square()
            return per_row.mean(dim=1) if self.reduction == "mean" else per_row.sum(dim=1)
        smoothing = 0.1 if self.loss == "smoothed" else 0.0
        losses = F.cross_entropy(z, y, reduction="none", label_smoothing=smoothing)
        return losses * self.class_weights[y] if self.loss == "weighted" else losses

    def divisor(self, y: Tensor) -> float | Tensor:
        """Return what the sum of the losses of a batch is divided by."""
        if self.reduction == "sum":
            return 1.0
        if self.loss == "weighted":
            return self.class_weights[y].sum()
        return (y != -100).sum() if self.ignored else len(y)

    @property
    def class_weights(self) -> Tensor:
        return torch.tensor([0.5, 1.0, 2.0], dtype=self.dtype)

    def make(self) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Make the network and its optimizers as they are before the first step."""
        torch.default_generator.manual_seed(self.seed + self.init)
        net = make_net(self.net_kind, self.inputs, self.activation).to(self.dtype)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = self.momentum
        if self.group_added is not None:
            for p in net[0].parameters():
                p.requires_grad_(False)
        parts = [list(net.parameters())]
        if self.group_added is not None:
            parts = [[p for layer in net[1:] for p in layer.parameters()]]
        if len(self.optimizers) > 1:
            parts = [[p for layer in net[:-1] for p in layer.parameters()], list(net[-1].parameters())]
        optimizers = []
        for name, options, part in zip(self.optimizers, self.options, parts, strict=True):
            kind, rate, _ = OPTIMIZERS[name]
            if self.splits_groups:
                other = {"lr": 0.5 * self.rate * rate, "weight_decay": 0.1}
                biases = [p for p in part if p.ndim == 1]
                part = [{"params": [p for p in part if p.ndim > 1]}, {"params": biases, **other}]
            optimizers.append(kind(part, lr=self.rate * rate, weight_decay=self.decay, **options))
        return net, optimizers

    def rows_seen(self, X: Tensor, step: int) -> Tensor:
        """Return what the network sees of all rows in a step."""
        if self.seen == "normalised":
            return (X - 0.3) / 1.7
        if self.seen == "noise":
            return X + 0.1 * torch.randn(X.shape, generator=torch.Generator().manual_seed(step), dtype=X.dtype)
        return X

    def used(self, fault: str | None, step: int, y: Tensor) -> tuple[list[Tensor], Tensor, float]:
        """Return the rows of each batch of a step, all targets and a factor of the loss, as the loop takes them."""
        batches, size = self.batches[step - (fault == "order")], len(self.batches[step][0])
        if fault == "index":
            batches = [(rows + 3) % POINTS for rows in batches]
        factors = {"weight": 1.001, "reduction": size if self.reduction == "mean" else 1 / size}
        return batches, y.roll(1, 0) if fault == "label" else y, factors.get(fault, 1.0)

    def announce(self, rows: Tensor, count: int) -> Tensor:
        """Return the indices that are announced."""
        if self.announced == "counted":
            return torch.arange(count, count + len(rows)) % POINTS
        if self.announced == "within_subset":
            return (rows + 3) % POINTS
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed + count))
        return rows[order] if self.announced == "shuffled" else rows

    def run(
        self,
        weights: Tensor | None = None,
        recorder_of: Callable[..., Any] | None = None,
        watch: Any = None,
        *,
        until: int | None = None,
        is_resumed: bool = False,
    ) -> Ended:
        """Train.

        Args:
            weights: One for each step and sample.
            recorder_of: Makes a recorder, if the run is recorded.
            watch: An observer of the steps; see `odd_programs.ByHand`.
            until: Number of steps after which a recorded loop is interrupted.
            is_resumed: Whether it goes on from there.
        """
        X, y = self.data
        net, optimizers = self.make()
        torch.default_generator.manual_seed(self.seed + 3)
        for _ in range(self.steps_before):
            self._step(net, optimizers, (X, y), [torch.arange(POINTS)])
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        recorder, norms, count = None if recorder_of is None else recorder_of(net, optimizers), [], 0
        if not is_resumed:
            torch.default_generator.manual_seed(self.seed + 4)
        average = [p.detach().clone() for p in net.parameters()]
        if watch is not None:
            watch.begin(net)
        if recorder is not None:
            recorder.__enter__()
        steps = range(self.steps) if until is None else recorder.until(until)
        for step in steps:
            fault = self.fault if step == self.fault_at else None
            batches, targets, factor = self.used(fault, step, y)
            self._change(step, net, optimizers)
            for optimizer, own in zip(optimizers, rates, strict=True):
                for k, group in enumerate(optimizer.param_groups):
                    group["lr"] = own[min(k, len(own) - 1)] * (self.schedule[step] if self.schedule else 1.0)
            if step == self.passes_at:
                self._pass_without_loss(net, X)
            announced = [self.announce(batch, count) for batch in self.batches[step]]
            count += sum(map(len, batches))
            own = None if weights is None else weights[step]
            data = (self.rows_seen(X, step), targets)
            norms.append(self._step(net, optimizers, data, batches, own, recorder, watch, announced, fault, factor))
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.lerp_(p.detach(), AVERAGE)
        if recorder is not None:
            if self.fault == "replaced":
                nn.utils.vector_to_parameters(0.99 * nn.utils.parameters_to_vector(net.parameters()), net.parameters())
            recorder.__exit__(None, None, None)
        return Ended(net, recorder, norms, average)

    def _step(self, net, optimizers, data, batches, weights=None, recorder=None, watch=None, announced=(), fault=None,
              factor=1.0) -> tuple[float, ...]:  # fmt: skip
        """Make a step; return the sizes of its gradient: its largest entry, and its norms for p = 1, 2 and 3."""
        X, y = data
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=self.sets_to_none)
        if fault == "left_over":
            self.losses(net(X[::2]), y[::2]).sum().backward()
        for buffer in net.buffers():
            if fault == "buffer" and buffer.is_floating_point():
                buffer += 0.1
        for number, batch in enumerate(batches):
            factors = torch.linspace(0.5, 1.5, len(batch), dtype=self.dtype) if self.row_weights else 1.0
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fault == "precision"):
                z = net(X[batch]).to(self.dtype)
            terms = factor * self.losses(z, y[batch]) / self.divisor(y[batch]) / len(batches) * factors
            if watch is not None:
                watch.gradients(net, batch, terms)
            (terms if weights is None else terms * weights[batch]).sum().backward()
            if recorder is not None:
                recorder.batch(announced[number], weight=factors / len(batches))
        parameters = [p for p in net.parameters() if p.grad is not None]
        g = torch.cat([p.grad.flatten() for p in parameters])
        norms = (float(g.abs().max()), *(float(torch.linalg.vector_norm(g, p)) for p in (1, 2, 3)))
        if self.clipping is not None:
            self.clipping.clip(list(net[-1].parameters()) if self.clips_part else parameters)
        if watch is not None:
            watch.before_step(net)
        for optimizer in optimizers:
            optimizer.step()
        if watch is not None:
            watch.after_step(net, optimizers)
        return norms

    def _change(self, step: int, net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if self.change is not None and step >= self.change[2]:
            name, value, first = self.change
            for number, group in enumerate(optimizers[0].param_groups):
                if self.changes_one_group and number:
                    continue
                if step == first:
                    self._unchanged = group[name]
                if step == first or self.changes_back:
                    group[name] = value if (step - first) % 2 == 0 else self._unchanged
        if step == self.group_added:
            for p in net[0].parameters():
                p.requires_grad_(True)
            optimizers[0].add_param_group({"params": list(net[0].parameters()), **self.added_options})
        if step == self.frozen_from:
            for p in net[0].parameters():
                p.requires_grad_(False)

    def _pass_without_loss(self, net: nn.Module, X: Tensor) -> None:
        if self.passes in ("no_grad", "unused", "evaluation"):
            net.train(self.passes != "evaluation")
            with torch.set_grad_enabled(self.passes == "unused"):
                net(X if self.passes == "evaluation" else X[:7])
            net.train()
        for module in net.modules() if self.passes == "reset" else ():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()

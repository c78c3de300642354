"""Training loops without the package, and the small runs that the tests of recording share."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import epk_gp as epk
from helpers import refusal

Losses = Callable[[Tensor, Tensor], Tensor]


def mlp(dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.Tanh, outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, outputs)).to(dtype)


def data(points: int = 10, dtype: torch.dtype = torch.float64, outputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(points, 4, generator=generator, dtype=torch.float64).to(dtype)
    return X, torch.arange(points) % outputs


def sgd(net: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=lr, **options)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters() if p.requires_grad])


def file_hashes(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def record(
    net: nn.Module,
    optimizer: Any,
    X: Any,
    y: Tensor,
    batches: Iterable[Any],
    *,
    value: Losses = F.cross_entropy,
    call: Callable[[Any, Any], Any] = lambda net, x: net(x),
    before: Callable[[int], object] = id,
    announced: Callable[[int], object] = id,
    after: Callable[[int], object] = id,
    weight: Any = 1.0,
    targets: Any = None,
    clear: bool = True,
    stepped: Any = None,
    **options: Any,
) -> epk.Recorder:
    """Record one's own loop over batches, None for all rows; `call` gets the rows of each tensor of X.

    `before` is called before each step with its number, `announced` after `batch()`, `after` after the step. The loop
    steps the recorded optimizers, or `stepped`, which moves the weights in their place.
    """
    optimizers = optimizer if isinstance(optimizer, list) else [stepped or optimizer]
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for step, batch in enumerate(batches):
            before(step)
            rows = slice(None) if batch is None else batch
            for each in optimizers if clear else ():
                each.zero_grad()
            seen = tree_map(lambda x, rows=rows: x[rows] if isinstance(x, Tensor) else x, X)
            value(call(net, seen), y[rows]).backward()
            recorder.batch(batch, weight=weight, targets=None if targets is None else targets[step])
            announced(step)
            for each in optimizers:
                each.step()
            after(step)
    return recorder


def assert_exact(
    run: epk.Trajectory, X: Any, net: Any = None, *, tolerance: float = 1e-10, head: str = "logits", **options: Any
) -> Any:
    """The terms are certified, and sum to the network: `net` in evaluation mode, else the recorded one."""
    parts = epk.attribute(run, X, head=head, **options)
    expected = parts.network if net is None else net.eval()(X).detach()
    assert parts.certified
    assert (parts.total - expected).abs().max() < tolerance
    return parts


def assert_has_no_influence(run: epk.Trajectory, X: Any, message: str) -> None:
    """What needs steps that follow from the loss as a function of the weights refuses the run."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: epk.influence(run, X), lambda: epk.influence(run, own=True),
        lambda: epk.retrain(run, torch.ones(run.num_points)),
    )  # fmt: skip
    assert [refusal(ValueError, message, call) for call in calls] == [None] * 3


class Net(nn.Module):
    """A network whose forward pass is a function of itself and its inputs; `parts` are its attributes."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Attentive(nn.Module):
    """Some tokens of a width: attention and LayerNorm."""

    def __init__(self, width: int, outputs: int = 3) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(width, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (-1, self.embed.in_features)))
        return self.out(self.norm(h + self.attention(h, h, h, need_weights=False)[0]).mean(dim=1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(x).mean(dim=1)))


@dataclass(frozen=True)
class RunCase:
    """One way to train, described twice: for the package, and for a loop without it."""

    name: str
    loss: Any = epk.CrossEntropy()  # noqa: RUF009  # a frozen value
    losses: Losses = lambda z, y: F.cross_entropy(z, y, reduction="none")
    divided: bool = True
    make_net: Callable[[], nn.Module] = mlp
    make_data: Callable[[], tuple[Tensor, Tensor]] = data
    make_optimizer: Callable[[nn.Module], torch.optim.SGD] = sgd
    make_scheduler: Callable[[Any], Any] | None = None
    batch_size: int | None = None
    steps: int = 5

    def batches(self, points: int) -> Iterator[Tensor | None]:
        generator = torch.Generator().manual_seed(3)
        while True:
            if self.batch_size is None:
                yield None
            else:
                yield from torch.randperm(points, generator=generator).split(self.batch_size)


def by_hand(
    case: RunCase, recording: Callable[[Any, Any, Tensor, Tensor], Any] | None = None
) -> tuple[Any, list[Tensor]]:
    """Train in one's own loop, with or without a recorder; return the recorder and the weights after every step."""
    net, (X, y) = case.make_net(), case.make_data()
    optimizer = case.make_optimizer(net)
    scheduler = None if case.make_scheduler is None else case.make_scheduler(optimizer)
    recorder = None if recording is None else recording(net, optimizer, X, y)
    batches, states = case.batches(len(X)), [flat(net)]
    with recorder or nullcontext():
        for batch in islice(batches, case.steps):
            rows = slice(None) if batch is None else batch
            optimizer.zero_grad()
            values = case.losses(net(X[rows]), y[rows])
            ((1 / len(values) if case.divided else 1.0) * values.sum()).backward()
            if recorder is not None:
                recorder.batch(batch)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            states.append(flat(net))
    return recorder, states


def trained(case: RunCase, path: Path | None = None) -> epk.Trajectory:
    """Train with `epk.train`."""
    net, generator = case.make_net(), torch.Generator().manual_seed(3)
    optimizer = case.make_optimizer(net)
    scheduler = None if case.make_scheduler is None else case.make_scheduler(optimizer)
    return epk.train(
        net, *case.make_data(), optimizer=optimizer, steps=case.steps, loss=case.loss, batch_size=case.batch_size,
        generator=generator, scheduler=scheduler, folder=path,
    )  # fmt: skip


def frozen_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    net[1].running_mean.copy_(torch.linspace(-1, 1, 6))
    net[1].eval()
    return net


def frozen_layer() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def tokens() -> nn.Module:
    torch.manual_seed(1)
    return Tokens().double()


def token_data() -> tuple[Tensor, Tensor]:
    return torch.arange(30).reshape(10, 3) % 7, torch.arange(10) % 3


def soft_data() -> tuple[Tensor, Tensor]:
    X, _ = data()
    return X, torch.softmax(torch.arange(30, dtype=torch.float64).reshape(10, 3).sin(), dim=1)


def regression_data() -> tuple[Tensor, Tensor]:
    X, _ = data()
    return X, X[:, :3].sin()


def two_groups(net: nn.Module) -> torch.optim.SGD:
    first, last = net[0], net[2]
    return torch.optim.SGD([{"params": last.parameters()}, {"params": first.parameters()}], lr=0.1)


def huber(z: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(z, y, reduction="none").sum(dim=1)


def squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean(dim=1)


CASES = {
    case.name: case
    for case in (
        RunCase("full_batch"),
        RunCase("minibatch", batch_size=4, steps=7),  # 4, 4, 2 and again
        RunCase("one_point_batches", batch_size=1),
        RunCase("sum", loss=epk.CrossEntropy("sum"), divided=False, batch_size=4),
        RunCase("schedule", make_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7)),
        RunCase("two_groups", make_optimizer=two_groups),
        RunCase("float32", make_net=lambda: mlp(torch.float32), make_data=lambda: data(dtype=torch.float32)),
        RunCase("integer_inputs", make_net=tokens, make_data=token_data, batch_size=4),
        RunCase("frozen_layer", make_net=frozen_layer),
        RunCase("frozen_batch_norm", make_net=frozen_batch_norm, batch_size=4),
        RunCase("soft_labels", make_data=soft_data),
        RunCase("regression", loss=epk.MeanSquaredError(), losses=squares, make_data=regression_data, batch_size=4),
        RunCase("regression_sum", loss=epk.MeanSquaredError("sum"), losses=lambda z, y: (z - y).square().sum(dim=1),
            divided=False, make_data=regression_data, make_optimizer=lambda net: sgd(net, 0.01)),
        RunCase("own_loss", loss=epk.PerSampleLoss(huber, name="huber"), losses=huber, make_data=regression_data),
        RunCase("one_step", steps=1),
    )
}  # fmt: skip

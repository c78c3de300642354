"""Loops that move the weights without a gradient, with and without a recorder, and brute force for their shares."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from statistics_runs import in_plain_words
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import epk_gp as epk

POINTS, CLASSES = 12, 3


class LookaheadState:
    """As in airbench94: slow copies of all weights and statistics, which the network is reset to."""

    def __init__(self, net: nn.Module) -> None:
        self.net_ema = {k: v.clone() for k, v in net.state_dict().items()}

    def update(self, net: nn.Module, decay: float) -> None:
        for ema_param, net_param in zip(self.net_ema.values(), net.state_dict().values(), strict=True):
            if net_param.is_floating_point():
                ema_param.lerp_(net_param, 1 - decay)
                net_param.copy_(ema_param)

    def state_dict(self) -> dict[str, Tensor]:
        return self.net_ema

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.net_ema = state


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def cnn() -> nn.Module:
    norm = nn.BatchNorm2d(3, momentum=0.4)
    norm.weight.requires_grad = False
    layers = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), norm, nn.GELU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, CLASSES, bias=False))


def data() -> tuple[Tensor, Tensor]:
    X = torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return X, torch.arange(POINTS) % CLASSES


def queries() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def batch_of(step: int) -> Tensor:
    return torch.arange(4 * step, 4 * step + 4) % POINTS


@dataclass
class Memory:
    """What a loop keeps beside the network: slow weights, and the best ones."""

    lookahead: LookaheadState
    saved: dict[str, Any] = field(default_factory=dict)


Move = Callable[[nn.Module, int, Memory], object]  # called after each step with its number


def lookahead(net: nn.Module, step: int, memory: Memory, decay: float = 0.6) -> None:
    if step % 3 == 2:
        memory.lookahead.update(net, decay)


def restored(net: nn.Module, step: int, memory: Memory) -> None:
    """The best checkpoint, that after three steps, is loaded after the seventh, and training goes on."""
    if step == 2:
        memory.saved = copy.deepcopy(net.state_dict())
    if step == 6:
        net.load_state_dict(memory.saved)


def nested(net: nn.Module, step: int, memory: Memory) -> None:
    """Lookahead, over which a checkpoint is restored; its slow weights stay as they are."""
    if step == 1:
        memory.saved = copy.deepcopy(net.state_dict())
    if step in (2, 5, 9):
        memory.lookahead.update(net, 0.6)
    if step == 7:
        net.load_state_dict(memory.saved)


def undone(net: nn.Module, step: int, memory: Memory) -> None:
    if step in (3, 6):
        with torch.no_grad():
            for name, value in net.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(memory.saved[name], 1.0 if step == 3 else 0.5)
    memory.saved = copy.deepcopy(net.state_dict())


MOVES: dict[str, Move] = {"lookahead": lookahead, "restored": restored, "nested": nested, "undone": undone}


def run(
    make_net: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], move: Move,
    steps: int = 11, *, look: Callable[[nn.Module, Tensor], object] | None = None,
    after: Callable[[nn.Module, Memory], object] | None = None, is_recorded: bool = True, **options: Any,
) -> tuple[Any, nn.Module]:  # fmt: skip
    """Train; `look` is called before each step with the batch, `after` at the end, inside of the `with` statement."""
    torch.manual_seed(1)
    net, (X, y) = make_net().double().train(), data()
    optimizer, memory = make_optimizer(net), Memory(LookaheadState(net))
    recorder = epk.Recorder(net, optimizer, X, y, **options) if is_recorded else None
    with recorder or nullcontext():
        for step in range(steps) if recorder is None else recorder.until(steps):
            batch = batch_of(step)
            if look is not None:
                look(net, batch)
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            if recorder is not None:
                recorder.batch(batch)
            optimizer.step()
            move(net, step, memory)
        if after is not None:
            after(net, memory)
    return recorder, net


def flat_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items() if value.is_floating_point()}


def shares_by_hand(
    make_net: Callable[[], nn.Module], move: Move, path: dict[int, tuple[int, float]], steps: int = 11
) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions under SGD with momentum and decay, by per-row gradients and buffers pushed through the optimizer.

    Args:
        make_net: Makes the network.
        move: Moves it without a gradient.
        path: What these moves are, by the step: the anchor, and the share of the way.
        steps: Number of steps.

    Returns:
        Those of the samples, (n, C, M), of decay, (n, C), and of the moving statistics.
    """
    lr, momentum, decay = 0.1, 0.9, 0.05
    X, y = data()
    states: list[dict[str, Tensor]] = []
    gradients: list[Tensor] = []

    def look(net: nn.Module, batch: Tensor) -> None:
        states.append(flat_state(net))
        copied = copy.deepcopy(net)
        parameters = [p for p in copied.parameters() if p.requires_grad]
        losses = F.cross_entropy(copied(X[batch]), y[batch], reduction="none") / len(batch)
        rows = torch.zeros(POINTS, sum(p.numel() for p in parameters)).double()
        for row, loss in zip(batch.tolist(), losses, strict=True):
            own = torch.autograd.grad(loss, parameters, retain_graph=True)
            rows[row] += torch.cat([g.flatten() for g in own])
        gradients.append(rows)

    _, net = run(make_net, sgd, move, steps, look=look, is_recorded=False)
    states.append(flat_state(net))
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    moving = [name for name in states[0] if name.endswith(("running_mean", "running_var"))]
    w = [torch.cat([state[name].flatten() for name in names]) for state in states]

    buffers = torch.zeros(POINTS + 1, len(w[0])).double()
    displacements = [torch.zeros_like(buffers)]  # of the weights since the beginning, by sample, and by decay at last
    for step, rows in enumerate(gradients):
        buffers = momentum * buffers + torch.cat([rows, decay * w[step][None]])
        moved = displacements[step] - lr * buffers
        if step in path:
            anchor, share = path[step]
            moved = moved + share * (displacements[anchor] - moved)
        displacements.append(moved)
        torch.testing.assert_close(displacements[-1].sum(dim=0), w[step + 1] - w[0], rtol=0, atol=1e-13)

    nodes, weights = (torch.tensor(v) for v in np.polynomial.legendre.leggauss(12))
    found = torch.zeros(3, CLASSES, POINTS + 2).double()
    evaluated = in_plain_words(net).eval()
    for step in range(steps):
        change = displacements[step + 1] - displacements[step]
        for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            at = {n: torch.lerp(a, states[step + 1][n], float(t)).requires_grad_() for n, a in states[step].items()}
            z = functional_call(evaluated, at, (queries(),))
            for n in range(3):
                for k in range(CLASSES):
                    leaves = [at[name] for name in (*names, *moving)]
                    jacobian = torch.autograd.grad(z[n, k], leaves, retain_graph=True)
                    of_weights = torch.cat([g.flatten() for g in jacobian[: len(names)]])
                    found[n, k, :-1] += weight * (change @ of_weights)
                    for name, g in zip(moving, jacobian[len(names) :], strict=True):
                        found[n, k, -1] += weight * (g * (states[step + 1][name] - states[step][name])).sum()
    return found[:, :, :POINTS], found[:, :, POINTS], found[:, :, POINTS + 1]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)

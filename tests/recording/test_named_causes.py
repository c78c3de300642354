"""Each planted fault is refused, and one cause is named: the right one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.optimizers.update_rules import ClipNorm
from loops import record, sgd

POINTS, ROWS, STEPS, FAULTY = 24, 8, 3, 1
CLASSES = 4


class Transformer(nn.Module):
    """Two tokens of attention with LayerNorm."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.embed(x.view(len(x), 4, 4))
        return self.out(self.norm(h + self.attention(h, h, h, need_weights=False)[0]).mean(dim=1))


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, CLASSES),
    ),
    "transformer": Transformer,
}  # fmt: skip


def keep(loop):
    loop.clear = False


def extra_backward(loop):
    rows = torch.arange(3)
    F.cross_entropy(loop.net(loop.X[rows]), loop.y[rows]).backward()


def later_batch(loop):
    rows = (loop.rows + 7) % POINTS
    F.cross_entropy(loop.net(loop.X[rows]), loop.y[rows]).backward()


def again(loop):
    loop.recorder.batch(loop.rows)


def edit_weight(loop):
    with torch.no_grad():
        [*loop.net.parameters()][-1].view(-1)[0] += 0.01


def another_step(loop):
    torch.optim.SGD(loop.net.parameters(), lr=0.02).step()


def add_noise(loop):
    for p in loop.net.parameters():
        p.grad += 0.01 * torch.randn_like(p)


def edit_gradient(loop):
    next(loop.net.parameters()).grad.view(-1)[2] += 0.1


def hook(loop):
    [*loop.net.parameters()][-1].register_hook(lambda g: g + 0.1)


def l1(loop):
    return F.cross_entropy(loop.z, loop.t) + 1e-2 * sum(p.abs().sum() for p in loop.net.parameters())


def orthogonal(loop):
    rest = (W @ W.T - torch.eye(len(W)).to(W) for W in loop.net.parameters() if W.ndim == 2)
    return F.cross_entropy(loop.z, loop.t) + 0.1 * sum(gram.square().sum() for gram in rest)


def fourth_powers(loop):
    return F.cross_entropy(loop.z, loop.t) + 0.1 * sum(p.pow(4).sum() for p in loop.net.parameters() if p.ndim > 1)


def later(loop):
    loop.net.register_forward_hook(lambda module, args, returned: returned)  # one that only looks
    [*loop.net.modules()][-1].register_forward_hook(lambda module, args, returned: 1.1 * returned)


@dataclass
class Fault:
    """What goes wrong, in which place of the loop, and what the message must say."""

    cause: str
    at: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    value: Callable[[Any], Any] | None = None
    announced: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    options: dict[str, Any] = field(default_factory=dict)


ADDED = "in '.* does not come through the outputs .*, as of another penalty than L2: unexplained=SHARE records"
EDITED = "in '.* was changed after backward.., by no factor, mask, clipping or decay, as by noise or an edit: unexpl"
UNCLIPPED = r"the gradient must be clipped as stated, ClipNorm.bound=0.001, .*: its 2-norm was \S+ after backward.. and"
FAULTS = {
    "indices in another order": Fault(r"row 0 was X\[\d+\], the batch says X", announced=lambda rows: rows.roll(1)),
    "indices of others": Fault(r"row 0 was X\[\d+\], the batch says X", announced=lambda rows: (rows + 5) % POINTS),
    "left over": Fault("a gradient was left over when backward.. .* began, .*: call optimizer.zero_grad",
        {"clear": keep}),
    "announced twice": Fault("recorder.batch.. was called twice for one forward pass", {"announced": again}),
    "a later batch forgotten": Fault("and backward.. went through 8 other rows: announce them too",
        {"after": later_batch}),
    "backward of other rows": Fault("announced rows, and backward.. went through 3 other rows: announce them too",
        {"begin": extra_backward}),
    "weights edited": Fault(r"the weights of '\S+' were changed between batch.. and the end", {"step": edit_weight}),
    "another optimizer": Fault("another optimizer moved the weights by 0.02 times it", {"step": another_step}),
    "L1 penalty": Fault(ADDED, value=l1),
    "fourth powers": Fault(ADDED, value=fourth_powers),
    "orthogonality": Fault(ADDED, value=orthogonal),
    "gradient edited": Fault(EDITED, {"announced": edit_gradient}),
    "clipped otherwise": Fault(UNCLIPPED,
        {"announced": lambda loop: nn.utils.clip_grad_norm_(loop.net.parameters(), 2e-3)},
        options={"clip": ClipNorm(1e-3)}),
    "not clipped": Fault(UNCLIPPED, options={"clip": ClipNorm(1e-3)}),
    "no gradient left": Fault("gradient was 0 in all parameters: zero_grad",
        {"announced": lambda loop: loop.net.zero_grad(set_to_none=False)}),
    "noise": Fault(EDITED, {"announced": add_noise}),
    "hook on gradients": Fault("a backward hook at .* changes gradients", {"begin": hook}),
    "hook on outputs": Fault("a forward hook of module .* changes them", {"begin": later}),
}  # fmt: skip


def train(name, dtype, fault):
    """Train three steps, of which the second has the fault."""
    torch.manual_seed(1)
    net = NETWORKS[name]().to(dtype)
    draw = torch.Generator().manual_seed(2)
    X = torch.randn(POINTS, 16, generator=draw, dtype=torch.float64).to(dtype)
    y = torch.randint(0, CLASSES, (POINTS,), generator=draw)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    loop = SimpleNamespace(net=net, X=X, y=y, clear=True)
    with epk.Recorder(net, optimizer, X, y, check_every=1, **fault.options) as recorder:
        loop.recorder = recorder
        for step in range(STEPS):
            is_faulty = step == FAULTY
            at = fault.at if is_faulty else {}
            act = lambda place, at=at: at.get(place, id)(loop)  # noqa: E731
            rows = loop.rows = torch.randperm(POINTS, generator=draw)[:ROWS]
            act("clear")
            if loop.clear:
                optimizer.zero_grad()
            act("begin")
            loop.t, loop.z = y[rows], net(X[rows])
            value = fault.value if is_faulty and fault.value else lambda loop: F.cross_entropy(loop.z, loop.t)
            value(loop).backward()
            act("after")
            recorder.batch(fault.announced(rows) if is_faulty else rows)
            if "clip" in fault.options and not is_faulty:
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            act("announced")
            act("step")
            optimizer.step()
    return recorder


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_cause_of_a_fault_is_named_and_no_other(name, dtype, fault):
    with pytest.raises(epk.StepMismatchError) as error:
        train(name, dtype, FAULTS[fault])
    message = str(error.value)
    assert message.startswith(f"step {FAULTY}: ")
    assert re.search(FAULTS[fault].cause, message), message
    named = [
        other for other, row in FAULTS.items() if row.cause != FAULTS[fault].cause and re.search(row.cause, message)
    ]
    assert not named, f"{named}: {message}"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_loop_without_a_fault_is_recorded(name):
    assert train(name, torch.float64, Fault("")).num_steps == STEPS
    assert train(name, torch.float32, Fault("")).num_steps == STEPS


class Scaled(nn.Module):
    """Takes a number besides the rows, and holds one in a list."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), [1.0]

    def forward(self, x, scale=1.0):
        return self.table[0] * self.inner(x) * scale


NUMBERS = {
    "the network was called with further arguments": lambda net: {"call": lambda net, x: net(x, scale=1.5)},
    "something else in it changes": lambda net: {"before": lambda step: net.table.__setitem__(0, 1.0 + step)},
}


@pytest.mark.parametrize("cause", NUMBERS)
def test_numbers_that_the_network_gets_beside_the_rows_are_named(cause):
    net, X, y = Scaled().double(), torch.randn(12, 4).double(), torch.arange(12) % 3
    with pytest.raises(epk.StepMismatchError, match=f"Likely cause: .*{cause}"):
        record(net, sgd(net), X, y, torch.randperm(12).split(6), **NUMBERS[cause](net))

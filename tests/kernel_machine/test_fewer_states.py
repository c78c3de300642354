"""Runs that keep every k-th state: the same sums, along states made again bit by bit, or by the update rule."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from captured_loops import FEATURES, CapturedLoop
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core import replay
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.states import Recomputation, recomputation_of, recomputed_run
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue

STEPS, KEEP = 7, 3
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),  # no preconditioner scales its first five steps
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
}


def points(n, dtype=torch.float64, seed=5):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = points(2, seed=9)


def train(name, path=None, dtype=torch.float64, clip=None):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {} if path is None else {"folder": path, "storage": epk.Storage(keep_every=KEEP)}
    return epk.train(
        net, points(12, dtype), torch.arange(12) % 3, optimizer=optimizer, steps=STEPS, batch_size=5,
        generator=torch.Generator().manual_seed(3), scheduler=scheduler, clip=clip, **options,
    )  # fmt: skip


def captured(feature, path=None):
    loop = CapturedLoop(feature)
    loop.steps = STEPS
    return loop.run(path, **({} if path is None else {"storage": epk.Storage(keep_every=KEEP)}))


RUNS = {
    **{name: (lambda path, name=name: train(name, path)) for name in OPTIMIZERS},
    **{name: (lambda path, name=name: captured(name, path)) for name in FEATURES},
    "clipped_norm": lambda path: train("momentum", path, clip=ClipNorm(0.2)),
    "clipped_value": lambda path: train("momentum", path, clip=ClipValue(0.05)),
}
QUICK = ("adamw", "dropout", "clipped_norm")
OTHER_LOSSES = ("mixup", "accumulation")  # written out in the loop, with soft targets, whose bits are not torch's


@pytest.fixture
def by_law(monkeypatch):
    """Let no step be made again bit by bit."""
    monkeypatch.setattr(Recomputation, "missed", lambda self, step, device: "other bits")


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in RUNS])
def test_contributions_are_those_of_the_run_with_all_states(name, tmp_path):
    thinned, whole = RUNS[name](tmp_path / "run"), RUNS[name](None)
    assert recomputation_of(thinned).kept.numbers == (0, 3, 6, 7)
    assert all(torch.equal(thinned.states[s], whole.states[s]) for s in (0, 3, 6, 7))
    assert all(torch.allclose(thinned.states[s], whole.states[s], rtol=0, atol=1e-12) for s in range(8))
    for s in range(STEPS):
        for own, other in zip(thinned.updates[s], whole.updates[s], strict=True):
            assert torch.allclose(own, other.expand_as(own) if len(own) == len(other) else own, rtol=1e-6)
    own, other = epk.attribute(thinned, X), epk.attribute(whole, X)
    assert own.certified
    assert own.max_error < 1e-12
    for term in ("samples", "decay", "statistics"):
        a, b = getattr(own, term), getattr(other, term)
        assert (a - b).abs().max() <= 1e-10 * other.samples.abs().max()
    sums = epk.reconstruct(thinned, X)
    assert sums.certified
    assert sums.max_error < 1e-12


@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in RUNS])
def test_states_and_coefficients_are_those_that_the_loop_made_bit_by_bit(name, tmp_path):
    """Also the attribution then, but where that of plain steps is summed in another order."""
    thinned, whole = RUNS[name](tmp_path / "run"), RUNS[name](None)
    if name in OTHER_LOSSES:
        assert thinned.states[1] is not None
        assert "made again, ends at other bits" in recomputation_of(thinned).finding
        return
    assert all(torch.equal(thinned.states[s], whole.states[s]) for s in range(8))
    assert recomputation_of(thinned).finding is None
    for s in range(STEPS):
        pairs = zip(thinned.updates[s].tensors(), whole.updates[s].tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    own, other = epk.attribute(thinned, X), epk.attribute(whole, X)
    assert own.certified
    for term in ("samples", "decay", "statistics", "unexplained"):
        a, b = getattr(own, term), getattr(other, term)
        assert torch.equal(a, b) if not whole.is_vanilla_gd else torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("by_law")
def test_in_float32_the_jumps_at_kept_states_are_unexplained(tmp_path):
    run = train("momentum", tmp_path / "run", torch.float32)
    parts = epk.attribute(run, X)
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-12
    assert 1e-10 < parts.unexplained.abs().max() < 1e-5
    computed = recomputation_of(run)
    for first, last in pairwise(computed.kept.numbers):
        way = float((run.states[last] - run.states[first]).norm())
        assert 0 < computed.jump(last, run.model_for(points(1)).spec) < 1e-5 * way


def test_a_kept_state_that_the_update_rule_does_not_lead_to_is_found(tmp_path, monkeypatch):
    own = recomputation_of(train("sgd", tmp_path / "run"))
    kind, read = type(own.kept), type(own.kept).__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda kept, state: read(kept, state) + 1e-3 * (state == 3))
    moved = recomputed_run(own.run, own.kept, own.updates)
    with pytest.warns(epk.CertificateWarning, match="step [25] differs"):
        parts = epk.attribute(moved, X)
    assert not parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-12
    assert parts.unexplained.abs().max() > 1e-4
    with pytest.warns(epk.CertificateWarning):
        assert epk.reconstruct(moved, X).max_error < 1e-12


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_pass_over_the_run_computes_every_stretch_once(name, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    monkeypatch.setattr(replay.math, "isqrt", lambda n: n)  # a segment is a stretch
    whole, run, calls, gradient_at = train(name), train(name, tmp_path / "run"), [], RunReplay.gradient_at
    monkeypatch.setattr(RunReplay, "gradient_at", lambda *args, **o: calls.append(args) or gradient_at(*args, **o))
    first_pass, found = list(range(STEPS + 1)), []
    for order in (first_pass, first_pass[::-1], [5, 4]):
        calls.clear()
        assert all(torch.allclose(run.states[s], whole.states[s], rtol=0, atol=1e-12) for s in order)
        found.append(len(calls))
    # the last stretch has one step, which ends at a kept state: nobody asks for it; two stretches are held in any case
    assert found == [6, 0, 0]


def test_kernels_influence_and_retraining_follow_the_computed_states(tmp_path):
    thinned, whole = train("adamw", tmp_path / "run"), train("adamw")
    A, B = epk.Points(X, is_train=False), epk.Points(whole.inputs, is_train=True)
    blocks = [epk.gram_block(run, A, B, rule=epk.gauss_legendre(2)) for run in (thinned, whole)]
    assert torch.allclose(*blocks, rtol=1e-10)
    effects = [epk.influence(run, X).values for run in (thinned, whole)]
    assert torch.allclose(*effects, rtol=1e-7, atol=1e-9)


def test_trajectories_of_kept_states_are_not_plain_gradient_descent_where_a_scale_is_computed(tmp_path):
    assert train("sgd", tmp_path / "sgd").is_vanilla_gd
    net, y = nn.Linear(4, 3, bias=False).double(), torch.arange(12) % 3
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)  # one parameter, one number held, and no momentum
    options = {"folder": tmp_path / "adagrad", "storage": epk.Storage(keep_every=KEEP)}
    run = epk.train(net, points(12), y, optimizer=optimizer, steps=4, **options)
    assert not run.is_vanilla_gd
    assert not replace(run).is_vanilla_gd
    assert epk.reconstruct(run, X).max_error < 1e-12


LONG, SPARSE, LETTERS, LENGTH = 12, 5, 11, 8


class GPT(nn.Module):
    """Causal attention and a wide layer, with dropout in both; tied embeddings, positions without a row."""

    def __init__(self, rate=0.1, width=16):
        super().__init__()
        self.wte, self.wpe, self.rate = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width), rate
        self.norm_1, self.norm_2, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(rate))
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        n, T = x.shape
        x = self.wte(x) + self.wpe(torch.arange(T))
        q, k, v = self.qkv(self.norm_1(x)).view(n, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.out(a.transpose(1, 2).reshape(n, T, -1))
        return self.head(self.norm(x + self.wide(self.norm_2(x))))


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    ),
    "gpt": lambda rate=0.1: GPT(rate),
}
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


class OtherSGD(torch.optim.SGD):
    """The step of SGD in another order of operations: its bits are not torch's."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(-(3 * group["lr"] * p.grad / 3 - p))


LOOPS = {
    "mlp, AdamW": (ADAMW, {}), "mlp, momentum, clipped": (MOMENTUM, {"clip": 0.5}),
    "mlp, masked, clipped": (ADAMW, {"masked": 5, "clip": 0.5}),
    "mlp, fused": (partial(torch.optim.AdamW, lr=0.01, fused=True), {}),
    "cnn, momentum, accumulated": (MOMENTUM, {"accumulated": 3}), "cnn, AdamW, clipped": (ADAMW, {"clip": 0.3}),
    "gpt, AdamW, accumulated, clipped": (ADAMW, {"accumulated": 3, "clip": 1.0}),
    "gpt, fused attention, momentum": (MOMENTUM, {"rate": 0.0}),
    "gpt, classes second": (ADAMW, {"value": lambda z, y: F.cross_entropy(z.transpose(1, 2), y)}),
    "gpt, sum": (ADAMW, {"value": lambda z, y: of_letters(z, y, reduction="sum") / 64}),
    "gpt, bfloat16": (ADAMW, {"autocast": True, "unexplained": 0.5}), "gpt, no loss stated": (ADAMW, {"loss": None}),
    "mlp, focal loss, not stated": (ADAMW, {"loss": None, "value": lambda z, y: F.cross_entropy(z, y) ** 2}),
}  # fmt: skip


def of_letters(z, y, **options):
    return F.cross_entropy(z.view(-1, LETTERS), y.view(-1), **options)


def data(net):
    torch.manual_seed(0)
    if isinstance(net, GPT):
        text = torch.randint(LETTERS, (40, LENGTH + 1))
        return text[:, :-1].clone(), text[:, 1:].clone()
    X = torch.randn(40, 1, 6, 6) if isinstance(net[0], nn.Conv2d) else torch.randn(40, 4)
    return X, torch.arange(40) % 3


def record(name, path=None, *, make_optimizer=None, keep=SPARSE):
    optimizer, options = LOOPS[name]
    options = dict(options)
    torch.manual_seed(1)
    net = NETS[name[:3]](*([options.pop("rate")] if "rate" in options else []))
    X, y = data(net)
    optimizer = (make_optimizer or optimizer)(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(s, 4) / 4 * (1 - s / 50))  # begins with 0
    masked = options.pop("masked", 0)
    value = options.pop("value", of_letters if isinstance(net, GPT) else F.cross_entropy)
    accumulated, clip, autocast = options.pop("accumulated", 1), options.pop("clip", None), options.pop("autocast", 0)
    if isinstance(net, GPT):
        options["output"] = lambda z: z[:, -1]
    if path is not None:
        options |= {"folder": path, "storage": epk.Storage(keep_every=keep)}
    weight = {} if "loss" in options else {"weight": None if name == "gpt, sum" else 1 / accumulated}
    torch.manual_seed(5)
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for _ in range(LONG):
            optimizer.zero_grad()
            for _ in range(accumulated):
                rows = torch.randint(40, (8,))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
                    loss = value(net(X[rows]), y[rows])
                (loss / accumulated).backward()
                recorder.batch(rows, **weight)
            if masked:
                next(net.parameters()).grad[:masked] = 0
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            scheduler.step()
    return recorder.trajectory


def asked(run):
    return run.inputs[:2] if run.inputs.dtype == torch.int64 else run.inputs[:2].double()


@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_of_a_state_differs_and_the_run_is_certified_like_one_with_all_states(name, tmp_path):
    thinned, whole = record(name, tmp_path / "run"), record(name)
    assert recomputation_of(thinned).kept.numbers == (0, 5, 10, 12)
    assert sum(int((thinned.states[s] != whole.states[s]).sum()) for s in range(LONG + 1)) == 0
    assert recomputation_of(thinned).finding is None
    own, other = (epk.attribute(run, asked(run), classes=torch.tensor([1, 0])) for run in (thinned, whole))
    assert own.certified
    assert own.states == ""
    for term in ("samples", "decay", "statistics", "unexplained", "total"):
        assert torch.equal(getattr(own, term), getattr(other, term))


def test_a_run_whose_bits_cannot_be_had_takes_the_update_rule_and_says_so(tmp_path):
    run = record("mlp, AdamW", tmp_path / "run", make_optimizer=lambda p: OtherSGD(p, lr=0.3))
    parts = epk.attribute(run, asked(run))
    assert "made again, ends at other bits" in recomputation_of(run).finding
    assert parts.states == f"states between kept ones follow the update rule, for {recomputation_of(run).finding}"
    assert parts.states in str(parts.entries(1))
    assert float((parts.total - parts.network).abs().max()) < 1e-5


def test_other_weights_at_a_kept_state_are_seen(tmp_path, monkeypatch):
    """The negative control: the bits of one weight decide, in that stretch and the next, and not in the last."""
    run = record("mlp, AdamW", tmp_path / "run")
    kept = recomputation_of(run).kept
    read = type(kept).__getitem__
    changed = read(kept, 5)
    changed[3] = torch.nextafter(changed[3], torch.tensor(1.0))
    monkeypatch.setattr(type(kept), "__getitem__", lambda own, s: changed if s == 5 else read(own, s))
    missed = [recomputation_of(run).missed(step, torch.device("cpu")) for step in (11, 2, 7)]
    assert missed == [None, "step 4, made again, ends at other bits", "step 5, made again, ends at other bits"]

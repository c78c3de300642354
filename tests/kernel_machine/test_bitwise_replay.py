"""Runs that keep every k-th state, of loops as people write them, in float32: every step is made again bit by bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import recomputation_of

STEPS, KEEP, LETTERS, LENGTH = 24, 10, 11, 8


class Block(nn.Module):
    """Causal attention and a wide layer, with dropout in both."""

    def __init__(self, width, rate):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.rate = nn.Linear(width, 3 * width), nn.Linear(width, width), rate
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(rate))

    def forward(self, x):
        n, T, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.out(a.transpose(1, 2).reshape(n, T, width))
        return x + self.wide(self.norm_2(x))


class GPT(nn.Module):
    """Tied embeddings, positions without a row."""

    def __init__(self, rate=0.1, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.block, self.norm = Block(width, rate), nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        return self.head(self.norm(self.block(self.wte(x) + self.wpe(torch.arange(x.shape[1])))))


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


def adamw(p):
    return torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)


def momentum(p):
    return torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3)


def of_letters(z, y):
    return F.cross_entropy(z.view(-1, LETTERS), y.view(-1))


class OtherSGD(torch.optim.SGD):
    """The step of SGD in another order of operations: its bits are not torch's."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(-(3 * group["lr"] * p.grad / 3 - p))


LOOPS = {
    "mlp, AdamW": (mlp, adamw, {}),
    "mlp, momentum, clipped": (mlp, momentum, {"clip": 0.5}),
    "mlp, masked, clipped": (mlp, adamw, {"masked": 5, "clip": 0.5}),
    "mlp, fused": (mlp, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), {}),
    "cnn, momentum, accumulated": (cnn, momentum, {"accumulated": 3}),
    "cnn, AdamW, clipped": (cnn, adamw, {"clip": 0.3}),
    "gpt, AdamW, accumulated, clipped": (GPT, adamw, {"accumulated": 3, "clip": 1.0}),
    "gpt, fused attention, momentum": (lambda: GPT(0.0), momentum, {}),
    "gpt, classes second": (GPT, adamw, {"value": lambda z, y: F.cross_entropy(z.transpose(1, 2), y)}),
    "gpt, sum": (GPT, adamw, {"value": lambda z, y: by_sum(z, y)}),
    "gpt, bfloat16": (GPT, adamw, {"autocast": True, "unexplained": 0.5}),
    "gpt, no loss stated": (GPT, adamw, {"loss": None}),
    "mlp, focal loss, not stated": (mlp, adamw, {"loss": None, "value": lambda z, y: F.cross_entropy(z, y) ** 2}),
}  # fmt: skip


def data(net):
    torch.manual_seed(0)
    if isinstance(net, GPT):
        text = torch.randint(LETTERS, (40, LENGTH + 1))
        return text[:, :-1].clone(), text[:, 1:].clone()
    X = torch.randn(40, 1, 6, 6) if isinstance(net[0], nn.Conv2d) else torch.randn(40, 4)
    return X, torch.arange(40) % 3


def record(name, path=None, *, make_optimizer=None, keep=KEEP):
    make_net, optimizer, options = LOOPS[name]
    options = dict(options)
    torch.manual_seed(1)
    net = make_net()
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
        for _ in range(STEPS):
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


def by_sum(z, y):
    return F.cross_entropy(z.view(-1, LETTERS), y.view(-1), reduction="sum") / 64


def asked(run):
    return run.inputs[:2] if run.inputs.dtype == torch.int64 else run.inputs[:2].double()


@pytest.mark.parametrize("name", LOOPS)
def test_no_bit_of_a_state_differs_and_the_run_is_certified_like_one_with_all_states(name, tmp_path):
    thinned, whole = record(name, tmp_path / "run"), record(name)
    assert recomputation_of(thinned).kept.numbers == (0, 10, 20, 24)
    assert sum(int((thinned.states[s] != whole.states[s]).sum()) for s in range(STEPS + 1)) == 0
    assert recomputation_of(thinned).finding is None
    own, other = epk.attribute(thinned, asked(thinned)), epk.attribute(whole, asked(whole))
    assert own.certified
    assert own.states == ""
    for term in ("samples", "decay", "statistics", "unexplained", "total"):
        assert torch.equal(getattr(own, term), getattr(other, term))


def test_what_bfloat16_leaves_unexplained_is_a_number(tmp_path):
    """A small share of the outputs' change, without which the sum would miss them."""
    run = record("gpt, bfloat16", tmp_path / "run")
    parts = epk.attribute(run, asked(run))
    change = (parts.network - parts.initial).abs().sum()
    share = float(parts.unexplained.abs().sum() / change)
    assert 1e-4 < share < 0.05
    assert float((parts.total - parts.network).abs().max()) < 1e-4
    assert "unexplained" in str(parts)


def test_a_run_whose_bits_cannot_be_had_takes_the_update_rule_and_says_so(tmp_path):
    """A step in another order of operations: torch's misses it from the first step with a rate on."""
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
    changed = read(kept, 10)
    changed[3] = torch.nextafter(changed[3], torch.tensor(1.0))
    monkeypatch.setattr(type(kept), "__getitem__", lambda own, s: changed if s == 10 else read(own, s))
    missed = [recomputation_of(run).missed(step, torch.device("cpu")) for step in (22, 3, 13)]
    assert missed == [None, "step 9, made again, ends at other bits", "step 10, made again, ends at other bits"]

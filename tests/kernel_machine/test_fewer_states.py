"""Runs that keep every k-th state: the same sums, along states made again bit by bit, or by the update rule."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from captured_loops import FEATURES, CapturedLoop
from torch import nn

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
    """Both decompose alike, to the rounding that a step amplifies, and the sums are exact."""
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
    """Without them the sum misses the network: the rounding of three steps in float32, each."""
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
    """The sum stays exact, with the jump as its unexplained part, and the certificate names a step beside it."""
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
    """Also without room, forwards and backwards; momentum lies in a temporary file then."""
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

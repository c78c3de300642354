"""Runs that keep every k-th state: the same sums, computed along states that the update rule gives again."""

from dataclasses import dataclass, replace

import pytest
import torch
from captured_loops import CapturedLoop
from torch import nn

import epk_gp as epk
from epk_gp.core import states as recomputation
from epk_gp.core.gradients import RunReplay
from epk_gp.core.show import CertificateWarning
from epk_gp.core.states import averaged_trajectory, averaging_coefficients, recomputation_of, recomputed_run
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue

STEPS, KEEP = 7, 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
}
FEATURES = (
    "dropout",
    "batch_norm",
    "augmentation",
    "mixup",
    "accumulation",
    "two_optimizers",
    "accumulated_batch_norm",
)


def train(name, path=None, dtype=torch.float64, clip=None, **storage):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    X, y = points(12, dtype), torch.arange(12) % 3
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {} if path is None else {"folder": path, "storage": epk.Storage(**{"keep_every": KEEP} | storage)}
    return epk.train(
        net, X, y, optimizer=optimizer, steps=STEPS, batch_size=5, generator=torch.Generator().manual_seed(3),
        scheduler=scheduler, clip=clip, **options,
    )  # fmt: skip


def captured(feature, path=None):
    loop = CapturedLoop(feature)
    loop.steps = STEPS
    return loop.run(path, **({} if path is None else {"storage": epk.Storage(keep_every=KEEP)}))


def points(n, dtype=torch.float64, seed=5):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_results(thinned, whole):
    """Both decompose alike, to the rounding that a step amplifies, and the sums are exact."""
    X = points(2, seed=9)
    own, other = epk.attribute(thinned, X), epk.attribute(whole, X)
    assert own.certified
    assert own.max_error < 1e-12
    assert (own.total - own.network).abs().max() < 1e-12
    for name in ("samples", "decay", "statistics"):
        a, b = getattr(own, name), getattr(other, name)
        assert (a - b).abs().max() <= 1e-10 * other.samples.abs().max()
    sums = epk.reconstruct(thinned, X)
    assert sums.certified
    assert sums.max_error < 1e-12


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["adamw", *(name for name in OPTIMIZERS if name != "adamw")])
def test_contributions_are_those_of_the_run_with_all_states(name, tmp_path):
    thinned, whole = train(name, tmp_path / "run"), train(name)
    assert recomputation_of(thinned).kept.numbers == (0, 3, 6, 7)
    assert all(torch.equal(thinned.states[s], whole.states[s]) for s in (0, 3, 6, 7))
    assert all(torch.allclose(thinned.states[s], whole.states[s], rtol=0, atol=1e-12) for s in range(8))
    for s in range(STEPS):
        for own, other in zip(thinned.updates[s], whole.updates[s], strict=True):
            assert torch.allclose(own, other.expand_as(own) if len(own) == len(other) else own, rtol=1e-6)
    assert_same_results(thinned, whole)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [ClipNorm(0.2), ClipValue(0.05)])
def test_clipped_steps_are_computed_again(clip, tmp_path):
    assert_same_results(train("momentum", tmp_path / "run", clip=clip), train("momentum", clip=clip))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("feature", FEATURES)
def test_recorded_passes_are_replayed_at_computed_states(feature, tmp_path):
    assert_same_results(captured(feature, tmp_path / "run"), captured(feature))


@pytest.mark.slow
def test_an_average_of_computed_states_is_explained(tmp_path):
    coefficients = averaging_coefficients(STEPS, decay=0.8)
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-7)):  # averages are rounded as weights are
        own = averaged_trajectory(train("adamw", tmp_path / str(dtype), dtype), coefficients)
        parts = epk.attribute(own, points(2, seed=9))
        assert (parts.total - parts.network).abs().max() < rounding


def test_in_float32_the_jumps_at_kept_states_are_unexplained(tmp_path):
    """Without them the sum misses the network: the rounding of three steps in float32, each."""
    run = train("momentum", tmp_path / "run", torch.float32)
    parts = epk.attribute(run, points(2, seed=9))
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-12
    assert 1e-10 < parts.unexplained.abs().max() < 1e-5
    states, jumps = recomputation_of(run).kept.numbers, list(recomputation_of(run).jumps(run.model_for(points(1)).spec))
    assert [state for state, _, _ in jumps] == list(states[1:])
    assert all(0 < jump < 1e-5 * way for _, jump, way in jumps)


@dataclass(frozen=True)
class Moved:
    """Kept states of which one is another."""

    kept: object
    by: float

    @property
    def numbers(self):
        return self.kept.numbers

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, state):
        w = self.kept[state]
        return w + self.by if state == 3 else w


def test_a_kept_state_that_the_update_rule_does_not_lead_to_is_found(tmp_path):
    """The sum stays exact, with the jump as its unexplained part, and the certificate names a step beside it."""
    run = train("sgd", tmp_path / "run")
    own = recomputation_of(run)
    moved = recomputed_run(own.run, Moved(own.kept, 1e-3), own.updates)
    with pytest.warns(CertificateWarning, match="step [25] differs"):
        parts = epk.attribute(moved, points(2, seed=9))
    assert not parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-12
    assert parts.unexplained.abs().max() > 1e-4
    with pytest.warns(CertificateWarning):
        assert epk.reconstruct(moved, points(2, seed=9)).max_error < 1e-12


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_pass_over_the_run_computes_every_stretch_once(name, tmp_path, monkeypatch):
    """Also with room for one stretch only, forwards and backwards; momentum lies in a temporary file then."""
    monkeypatch.setattr(recomputation, "HELD_BYTES", 0)
    whole, run, count = train(name), train(name, tmp_path / "run"), [0]
    gradient_at = RunReplay.gradient_at

    def counted(*args, **options):
        count[0] += 1
        return gradient_at(*args, **options)

    monkeypatch.setattr(RunReplay, "gradient_at", counted)
    first_pass, found = list(range(STEPS + 1)), []
    for order in (first_pass, first_pass[::-1], [5, 4]):
        count[0] = 0
        assert all(torch.allclose(run.states[s], whole.states[s], rtol=0, atol=1e-12) for s in order)
        found.append(count[0])
    # the last stretch has one step, which ends at a kept state: nobody asks for it; one stretch is held
    assert found == [6, 3, 3]


def test_kernels_influence_and_retraining_follow_the_computed_states(tmp_path):
    thinned, whole, X = train("adamw", tmp_path / "run"), train("adamw"), points(2, seed=9)
    A, B = epk.Points(X, is_train=False), epk.Points(whole.inputs, is_train=True)
    blocks = [epk.gram_block(run, A, B, rule=epk.gauss_legendre(2)) for run in (thinned, whole)]
    assert torch.allclose(*blocks, rtol=1e-10)
    effects = [epk.influence(run, X).values for run in (thinned, whole)]
    assert torch.allclose(*effects, rtol=1e-7, atol=1e-9)


def test_trajectories_of_kept_states_are_not_plain_gradient_descent_where_a_scale_is_computed(tmp_path):
    run = train("sgd", tmp_path / "sgd")
    assert run.is_vanilla_gd
    net, X, y = nn.Linear(4, 3, bias=False).double(), points(12), torch.arange(12) % 3
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)  # one parameter, one number held, and no momentum
    options = {"folder": tmp_path / "adagrad", "storage": epk.Storage(keep_every=KEEP)}
    run = epk.train(net, X, y, optimizer=optimizer, steps=4, **options)
    assert not run.is_vanilla_gd
    assert not replace(run).is_vanilla_gd
    assert epk.reconstruct(run, points(2, seed=9)).max_error < 1e-12

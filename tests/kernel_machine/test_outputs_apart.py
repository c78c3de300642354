"""Where the adjoints of all outputs of a point do not fit into the budget, outputs go through the run apart."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from path_runs import queries, recorded
from torch import nn

import epk_gp as epk
from distributed_cases import Shuffled
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute_many
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.kernel_machine.plan import plan_attribution
from epk_gp.kernel_machine.terms import AttributionWork
from epk_gp.quadrature.rules import WeightPath
from epk_gp.work.run import Sums
from helpers import assert_close

RULE = epk.gauss_legendre(3)
TERMS = (
    "initial",
    "values",
    "decay",
    "statistics",
    "statistics_of_no_sample",
    "unexplained",
    "amplification",
    "network",
)
Apart = Callable[[], None]


@pytest.fixture
def outputs_apart(monkeypatch: pytest.MonkeyPatch) -> Apart:
    """Let the adjoints of two outputs fit, and not those of all three of a point: a block may hold two points."""
    return lambda: monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)


def split(run: epk.Trajectory, X: torch.Tensor, **options: object) -> tuple[GroupedAttribution, ...]:
    by = [[by_sample(run)], [by_layer(run), by_step(run)]]
    return attribute_many(run, X, by, **options)  # type: ignore[arg-type]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tanh_momentum", epk.straight()),
        ("batch_norm_sgd", epk.chords(2)),
        ("dropout_momentum", epk.layerwise()),
        ("average", epk.straight()),
        ("transformer_adamw", epk.layerwise()),
    ],
)
def test_terms_do_not_depend_on_it(name: str, path: WeightPath, outputs_apart: Apart) -> None:
    run, X = recorded(name), queries()
    whole = split(run, X, path=path)
    outputs_apart()
    for together, apart in zip(whole, split(run, X, path=path), strict=True):
        for term in TERMS:
            expected, found = getattr(together, term), getattr(apart, term)
            assert torch.allclose(found, expected, rtol=1e-7, atol=1e-11), term
        assert apart.certified
        assert apart.max_error <= 1e-11
        assert sum(apart.statuses.values()) == 3 * sum(together.statuses.values())
        assert apart.evaluations == pytest.approx(together.evaluations, rel=0.5)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_small_budget_brings_it_about(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least budget, 1 MiB, and 5,700 weights; plain gradient descent has no adjoints."""
    torch.manual_seed(0)
    X, y, seen = torch.randn(12, 4).double(), torch.arange(12) % 3, list[int]()
    net = nn.Sequential(nn.Linear(4, 700), nn.Tanh(), nn.Linear(700, 3)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum), steps=2)
    X, whole = X[:2], epk.attribute(run, X[:2])
    block = AttributionWork.block
    monkeypatch.setattr(AttributionWork, "block", lambda work, k: seen.append(work.outputs_per_row) or block(work, k))
    small = epk.attribute(run, X, memory_budget=1 << 20)
    assert_close(small.samples, whole.samples, rounding=1e5)
    assert set(seen) == {1 if momentum else 3}
    one = epk.attribute(run, X, classes=torch.tensor([2, 0]), memory_budget=1 << 20)
    assert_close(one.samples[:, 0], whole.samples[[0, 1], [2, 0]], rounding=1e5)


def test_workers_and_a_checkpoint_give_the_same_bytes(tmp_path: Path, outputs_apart: Apart) -> None:
    run, X = recorded("tanh_momentum"), queries()
    outputs_apart()
    alone = epk.attribute(run, X, rule=RULE)
    shared = epk.attribute(run, X, rule=RULE, executor=Shuffled(), checkpoint=tmp_path)
    kept = epk.attribute(run, X, rule=RULE, checkpoint=tmp_path)
    for other in (shared, kept):
        assert torch.equal(other.samples, alone.samples)
        assert torch.equal(other.decay, alone.decay)
        assert other.evaluations == alone.evaluations


def test_the_estimate_counts_such_pieces(outputs_apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    run, X = recorded("tanh_momentum"), queries(3)
    outputs_apart()
    found = plan_attribution(epk.PathKernel(run, rule=RULE), X, [[by_sample(run)]], seconds=0.05)
    sizes, compute = list[int](), AttributionWork.compute

    def noted(self: AttributionWork, place: tuple[int, ...], saved: Sums) -> Iterator[Sums]:
        for sums in compute(self, place, saved):
            yield sums
        sizes.append(sum(value.nbytes for name, value in sums.added.items() if name.startswith("sum.")))

    monkeypatch.setattr(AttributionWork, "compute", noted)
    attribute_many(run, X, [[by_sample(run)]], rule=RULE, executor=Shuffled())
    assert found.pieces == len(sizes) == 5
    assert (found.piece_bytes, found.result_bytes) == (max(sizes), sum(sizes))

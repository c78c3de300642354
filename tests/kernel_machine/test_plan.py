"""What a computation costs before it starts: pieces and bytes are those of workers, seconds are of measured pieces."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import epk_gp as epk
from distributed_cases import RULE, SMALL, Shuffled, inputs, mixed
from distributed_cases import recorded as training_run
from epk_gp.core.plans import MemoryPlan
from epk_gp.gram.tiles import GramWork
from epk_gp.kernel_machine import plan
from epk_gp.kernel_machine.axes import by_label, by_sample
from epk_gp.kernel_machine.plan import plan_attribution, plan_gram
from epk_gp.kernel_machine.terms import AttributionWork
from epk_gp.work.run import Piece, Sums


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the sums of each piece that is computed."""
    found = list[int]()
    for work in (GramWork, AttributionWork):

        def noted(self: Any, place: tuple[int, ...], saved: Sums, compute: Any = work.compute) -> Iterator[Sums]:
            for sums in compute(self, place, saved):
                yield sums
            added = sums.added.items()
            found.append(sum(value.nbytes for name, value in added if name.startswith(("sum.", "total"))))

        monkeypatch.setattr(work, "compute", noted)
    return found


@pytest.mark.parametrize("budget", [SMALL, 1 << 30], ids=["tiles", "ranges"])
@pytest.mark.parametrize("path", [epk.straight(), epk.chords(2)], ids=["straight", "chords"])
def test_the_pieces_of_a_block_are_those_of_its_workers(budget, path, sizes):
    run = training_run("plain", 40)
    a, b = mixed(100 if budget == SMALL else 4), mixed(3)
    found = plan_gram(epk.PathKernel(run, rule=RULE, path=path), a, b, memory_budget=budget, seconds=1e-9)
    sizes.clear()
    K = epk.gram_block(run, a, b, rule=RULE, path=path, memory_budget=budget, executor=Shuffled())
    assert (found.pieces, found.piece_bytes, found.result_bytes) == (len(sizes), max(sizes), K.nbytes)


def test_the_bytes_of_a_block_are_of_the_type_in_which_it_is_summed():
    run = training_run("plain", 4, torch.float32)
    a = mixed(2, torch.float32)
    for accumulate, itemsize in ((None, 4), (torch.float64, 8)):
        found = plan_gram(epk.PathKernel(run, rule=RULE), a, a, accumulate=accumulate, seconds=1e-9)
        assert found.result_bytes == 2 * 2 * run.num_outputs**2 * itemsize


@pytest.mark.parametrize(("kind", "is_apart"), [("plain", False), ("momentum", False), ("momentum", True)])
def test_the_pieces_of_an_attribution_are_those_of_its_workers(kind, is_apart, sizes, monkeypatch):
    run, X = training_run(kind, 40), inputs(3)
    if is_apart:
        monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)
        monkeypatch.setattr("epk_gp.kernel_machine.attribute.MAPPED_ADJOINTS", 0)
    by = [[by_sample(run)], [by_label(run)]]
    found = plan_attribution(run, X, by=by, rule=RULE, seconds=1e-9)
    sizes.clear()
    epk.attribute(run, X, by=by, rule=RULE, executor=Shuffled())
    assert (found.pieces, found.piece_bytes) == (len(sizes), max(sizes))
    assert found.result_bytes == (sum(sizes) if is_apart else found.piece_bytes)  # else one block of points


@pytest.mark.parametrize(("seconds", "computed"), [(1e-9, 2), (100.0, 8)])
def test_seconds_are_extrapolated_kind_by_kind(monkeypatch, seconds, computed):
    """One piece of each kind tells, or all are computed; a step of the first costs 1 s, one of the second 3 s."""
    kinds, now, places = [(0, 4), (0, 2), (0, 1), *[(1, 3)] * 5], [0.0], []

    def compute(place, saved):
        places.append(place)
        for step in range(1, place[1] + 1):
            now[0] += (1.0, 3.0)[place[0]]
            yield Sums({"total": torch.zeros(1)}, steps=step)

    pieces = [Piece(f"{n}", (*kind, n), kind[1]) for n, kind in enumerate(kinds)]
    monkeypatch.setattr(plan, "time", SimpleNamespace(perf_counter=lambda: now[0]))  # only the work moves it
    work = SimpleNamespace(pieces=pieces, piece_bytes=8, compute=compute)
    found = plan._measured(work, [kind for kind, _ in kinds], 5, seconds)
    assert found == plan.Plan(8, 5, 8, 7.0 + 45.0)
    assert len(places) == computed


def test_an_attribution_says_what_it_takes_of_disk_memory_and_trainings(tmp_path):
    """By the sizes of its vectors: of 6 numbers, 20 steps' rounding, and two stretches of weights and coefficients."""
    torch.manual_seed(0)
    X, y = torch.randn(24, 4), torch.arange(24) % 3
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer, storage = torch.optim.Adam(net.parameters(), lr=0.01), epk.Storage(keep_every=10)
    options = {"optimizer": optimizer, "steps": 20, "batch_size": 8, "folder": tmp_path / "run", "storage": storage}
    run = epk.train(net, X, y, **options)
    path, P = epk.layerwise(every=5), run.num_weights
    found = plan_attribution(run, X[:2].double(), path=path, seconds=100.0)
    assert found.seconds > 0
    assert found.trainings == {"states": 2, "steps": 1, "test side": 6 * 2 / 8 / 5, "training side": 1 + 6 / 3}
    assert found.disk_bytes == sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*"))
    adjoints, residuals, states = 3 * 6 * P * 8, 20 * P * 8, 2 * 10 * 2 * P * 4
    assert found.memory_bytes == adjoints + residuals + states


def test_wrong_arguments_are_refused():
    run = training_run("plain", 4)
    kernel = epk.PathKernel(run, rule=RULE)
    with pytest.raises(ValueError, match="seconds must be positive"):
        plan_gram(kernel, mixed(2), mixed(2), seconds=0.0)
    with pytest.raises(TypeError, match=r"plan_gram\(\) got an unexpected keyword argument 'executor'"):
        plan_gram(kernel, mixed(2), mixed(2), executor=Shuffled())
    with pytest.raises(ValueError, match="seconds must be positive"):
        plan_attribution(run, inputs(2), seconds=0.0)

"""What an attribution costs before it starts: pieces and bytes are those of its workers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import epk_gp as epk
from distributed_cases import RULE, Shuffled, inputs
from distributed_cases import recorded as training_run
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine.attribute import plan_attribution
from epk_gp.kernel_machine.axes import by_label, by_sample
from epk_gp.kernel_machine.terms import AttributionWork
from epk_gp.work.run import Sums


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the sums of each piece that is computed."""
    found, compute = list[int](), AttributionWork.compute

    def noted(self: Any, place: tuple[int, ...], saved: Sums) -> Iterator[Sums]:
        for sums in compute(self, place, saved):
            yield sums
        found.append(sum(value.nbytes for name, value in sums.added.items() if name.startswith("sum.")))

    monkeypatch.setattr(AttributionWork, "compute", noted)
    return found


@pytest.mark.parametrize(("kind", "is_apart"), [("plain", False), ("momentum", False), ("momentum", True)])
def test_the_pieces_of_an_attribution_are_those_of_its_workers(kind, is_apart, sizes, monkeypatch):
    run, X = training_run(kind, 40), inputs(3)
    if is_apart:
        monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)
        monkeypatch.setattr("epk_gp.kernel_machine.attribute.MAPPED_ADJOINTS", 0)
    by = [[by_sample(run)], [by_label(run)]]
    found = plan_attribution(run, X, by=by, rule=RULE)
    assert sizes == []  # it is counted
    epk.attribute(run, X, by=by, rule=RULE, executor=Shuffled())
    assert (found.pieces, found.piece_bytes) == (len(sizes), max(sizes))
    assert found.result_bytes == (sum(sizes) if is_apart else found.piece_bytes)  # else one block of points


def test_an_attribution_says_what_it_takes_of_disk_memory_and_trainings(tmp_path):
    """By the sizes of its vectors: of 6 numbers, 20 steps' rounding, and two stretches of weights and coefficients."""
    torch.manual_seed(0)
    X, y = torch.randn(24, 4), torch.arange(24) % 3
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer, storage = torch.optim.Adam(net.parameters(), lr=0.01), epk.Storage(keep_every=10)
    options = {"optimizer": optimizer, "steps": 20, "batch_size": 8, "folder": tmp_path / "run", "storage": storage}
    run = epk.train(net, X, y, **options)
    path, P = epk.layerwise(every=5), run.num_weights
    found = plan_attribution(run, X[:2].double(), path=path)
    assert found.trainings == {"states": 2, "steps": 1, "test side": 6 * 2 / 8 / 5, "training side": 1 + 6 / 3}
    assert found.disk_bytes == sum(file.stat().st_size for file in (tmp_path / "run").glob("chunk-*"))
    adjoints, residuals, states = 3 * 6 * P * 8, 20 * P * 8, 2 * 10 * 2 * P * 4
    assert found.memory_bytes == adjoints + residuals + states


def test_wrong_arguments_are_refused():
    run = training_run("plain", 4)
    with pytest.raises(TypeError, match=r"plan_attribution\(\) got an unexpected keyword argument 'executor'"):
        plan_attribution(run, inputs(2), executor=Shuffled())
    with pytest.raises(ValueError, match="head must be one of"):
        plan_attribution(run, inputs(2), head="softmax")

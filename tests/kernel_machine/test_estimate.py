"""What an attribution will cost: its pieces and bytes are exact, and known costs of steps are found."""

from itertools import count
from pathlib import Path

import pytest
import torch

import epk_gp as epk
from distributed_cases import RULE, SMALL, Shuffled, inputs, recorded
from epk_gp.kernel_machine import adjoint as stretch_average
from epk_gp.kernel_machine import estimate, vanilla_gd
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.kernel_machine.attribution_pass import AttributionPieces
from epk_gp.kernel_machine.axes import by_label, by_sample, by_step
from epk_gp.kernel_machine.estimate import estimate_attribution


class Ticking:
    """A clock that is one second later whenever it is read."""

    def __init__(self) -> None:
        self.seconds = count()

    def __call__(self) -> float:
        return float(next(self.seconds))


@pytest.mark.parametrize("kind", ["plain", "momentum"])
@pytest.mark.parametrize("keeps", [False, True], ids=["no_checkpoint", "checkpoint"])
def test_pieces_and_bytes_are_those_of_the_real_call(tmp_path, monkeypatch, kind, keeps):
    run, X = recorded(kind, 2), inputs(7)
    by = [[by_sample(run)], [by_label(run), by_step(run)]]
    options = {"rule": RULE, "memory_budget": SMALL, "checkpoint": tmp_path / "pieces" if keeps else None}
    found = estimate_attribution(run, X, by, workers=2, seconds=1e-3, clock=Ticking(), **options)
    assert list(tmp_path.iterdir()) == []

    sizes, compute = list[int](), AttributionPieces.piece

    def noted(self, place):
        result = compute(self, place)
        sizes.append(sum(value.nbytes for name, value in result.items() if name.startswith("sum.")))
        return result

    monkeypatch.setattr(AttributionPieces, "piece", noted)
    attribute_many(run, X, by, executor=Shuffled(), **options)
    assert found.num_pieces == len(sizes) > 1
    assert found.disk.piece == max(sizes)
    assert found.disk.result == sum(sizes)
    assert found.disk.pieces_at_once == len(sizes)
    assert found.disk.scratch > sum(sizes)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", ["plain", "momentum", "adam", "dropout", "batch_norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_kind_of_run_is_measured(kind, dtype):
    run = recorded(kind, 5, dtype)
    found = estimate_attribution(run, inputs(2).to(dtype), [[by_sample(run)]], rule=RULE, seconds=10.0, clock=Ticking())
    assert found.costs.num_measured >= 2
    assert found.work_seconds > 0
    assert found.setup_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "momentum"])
def test_known_costs_of_steps_are_found(monkeypatch, kind):
    """The early steps of a run cost more; the pass may begin with its last one."""
    run, X, now = recorded(kind, 12), inputs(6), [0.0]
    module = vanilla_gd if kind == "plain" else stretch_average
    real = module.integrate_stretch

    def costly(problem, steps, rows, max_nodes):
        now[0] += (4.0 if steps[0] < 4 else 1.0) * len(rows)
        return real(problem, steps, rows, max_nodes)

    monkeypatch.setattr(module, "integrate_stretch", costly)
    monkeypatch.setattr(estimate, "replayed_steps", lambda *arguments: iter(()))
    total = 6 * (4 * 4.0 + 8 * 1.0)
    options = {"rule": epk.left_endpoint(), "memory_budget": SMALL, "clock": lambda: now[0]}
    exact = estimate_attribution(run, X, [[by_sample(run)]], seconds=1e6, **options)
    assert exact.costs.is_exact
    assert exact.work_seconds == total
    sampled = estimate_attribution(run, X, [[by_sample(run)]], seconds=0.5 * total, **options)
    assert not sampled.costs.is_exact
    low, high = sampled.work_interval
    assert low <= total <= high


def test_a_replay_of_the_run_is_counted_once_more_for_workers(monkeypatch):
    run, now = recorded("momentum", 5), [0.0]
    real = estimate.replayed_steps

    def costly(*arguments):
        for replayed in real(*arguments):
            now[0] += 3.0
            yield replayed

    monkeypatch.setattr(estimate, "replayed_steps", costly)
    one, two = (
        estimate_attribution(run, inputs(2), [[by_sample(run)]], rule=RULE, workers=workers, seconds=1.0,
                             clock=lambda: now[0])
        for workers in (None, 2)
    )  # fmt: skip
    assert one.setup_seconds == 15
    assert two.setup_seconds == 30


def test_pieces_ahead_follow_from_the_room_where_they_will_lie(tmp_path, monkeypatch):
    run, asked = recorded("plain", 2), []
    monkeypatch.setattr(estimate, "free_bytes", lambda folder: asked.append(folder) or 0)
    for folder in (None, tmp_path / "pieces"):
        options = {"rule": RULE, "checkpoint": folder, "seconds": 1e-3, "clock": Ticking()}
        estimate_attribution(run, inputs(2), [[by_sample(run)]], workers=2, **options)
    assert asked == [None, tmp_path / "pieces"]


def test_one_process_writes_what_its_checkpoint_takes():
    run, X = recorded("momentum", 2), inputs(3)
    sums, kept = (
        estimate_attribution(run, X, [[by_sample(run)]], rule=RULE, checkpoint=folder, seconds=1e-3, clock=Ticking())
        for folder in (None, "nowhere")
    )
    assert sums.disk.scratch == 0
    weights = sum(value.numel() for value in run.weights(0).values())
    assert kept.disk.scratch > 2 * 3 * 3 * weights * 8  # the adjoints of three points and outputs
    assert not Path("nowhere").exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"classes": torch.tensor([7, 7])}, ValueError, r"classes must lie in 0\.\.2"),
        ({"head": "probabilities"}, ValueError, "head"),
        ({"accumulate": torch.float64}, TypeError, r"estimate_attribution\(\) got an unexpected keyword"),
        ({"workers": 0}, ValueError, "workers must be at least 1: got 0"),
        ({"seconds": -1}, ValueError, "seconds must be positive and finite: got -1"),
        ({"groupings": [[by_sample]]}, TypeError, "axes|Axis|axis"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_uses_are_refused_before_anything_is_measured(monkeypatch, changes, error, message):
    monkeypatch.setattr(estimate, "sample_costs", None)
    run = recorded("plain", 2)
    arguments = {"groupings": [[by_sample(run)]], "rule": RULE, **changes}
    groupings = arguments.pop("groupings")
    with pytest.raises(error, match=message):
        estimate_attribution(run, inputs(2), groupings, **arguments)

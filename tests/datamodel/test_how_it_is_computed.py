"""Budgets, tiles, checkpoints, workers and disks change no number; precisions and joined kernels change little."""

from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from datamodel_cases import Loop, error, internals, mlp, vectors

import epk_gp as epk
from epk_gp.kernel_machine.influence import Influence
from epk_gp.storage import files
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
LOOP = Loop(optimizer="adam", steps=14, batch=4)
X, Y = LOOP.asked
KEPT = (torch.arange(3)[:, None] != torch.arange(11) % 3).double()


def single(dtype: torch.dtype = torch.float32) -> epk.Trajectory:
    torch.manual_seed(1)
    net = mlp().double().to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    return epk.train(net, vectors(11).to(dtype), torch.arange(11) % 3, optimizer=optimizer, steps=22)


def test_numbers_have_the_precision_of_the_questions_and_hardly_depend_on_it() -> None:
    """Of a run in float32, of one in float64, and of a run in float32 that is asked in float64."""
    run, wide = single(), X.float().double()
    short, mixed, long = (epk.datamodel(*own, Y) for own in ((run, X.float()), (run, wide), (single(torch.float64), X)))
    for model, other, dtype, most in ((short, long, torch.float32, 1e-3), (mixed, short, torch.float64, 1e-4)):
        assert model.scores.dtype == model.outputs.dtype == model.predict(KEPT).dtype == dtype
        assert error(model.scores, other.scores) < most
        assert error(model.predict(KEPT), other.predict(KEPT)) < most
    assert error(short.derivative(), long.derivative()) < 1e-3
    outputs = epk.network_outputs(run, wide)[range(4), Y]
    assert torch.allclose(epk.datamodel(run, wide, classes=Y, head="logits").outputs, outputs)


MANY = 180
BYTES = 8 * MANY * (MANY + 4)  # of a kernel


@pytest.fixture(scope="module")
def many() -> epk.Trajectory:
    torch.manual_seed(1)
    net, points = mlp().double(), vectors(MANY, seed=5)
    y = (points[:, 0] > 0).long() + (points[:, 1] > 1).long()
    return epk.train(net, points, y, optimizer=torch.optim.Adam(net.parameters(), lr=0.03), steps=31)


@pytest.mark.parametrize("groups", [3, 2, 1])
def test_where_six_kernels_do_not_fit_there_are_three_or_sums_of_them(groups: int, many: epk.Trajectory) -> None:
    whole = epk.datamodel(many, X, Y)
    assert len(whole.trainings[0].kernels) == len(whole.states) == 6
    three = epk.datamodel(many, X, Y, memory_budget=6 * BYTES)
    model = epk.datamodel(many, X, Y, memory_budget=max(1 << 20, 2 * groups * BYTES))
    assert len(model.trainings[0].kernels) == groups
    assert model.states == three.states == (5, 15, 25)
    assert_close(sum(model.trainings[0].kernels), sum(three.trainings[0].kernels), rounding=1e5)
    assert_close(model.scores, three.scores, rounding=1e7)
    assert error(model.scores, whole.scores) < 0.2
    kept = torch.rand(5, MANY, generator=torch.Generator().manual_seed(1)) < 0.5
    change, expected = model.predict(kept) - model.outputs, whole.predict(kept) - whole.outputs
    assert bool(change.isfinite().all())
    assert error(change, expected) < 0.5
    assert torch.equal(model.predict(torch.ones(MANY)), model.outputs)


def test_a_budget_that_holds_no_kernel_is_refused() -> None:
    torch.manual_seed(1)
    net, points = mlp().double(), vectors(260)
    run = epk.train(net, points, torch.arange(260) % 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=6)
    message = "half of memory_budget must hold the kernel of 260 .*, 549,120 bytes: got memory_budget=1,048,576"
    with pytest.raises(ValueError, match=message):
        epk.datamodel(run, X, Y, memory_budget=1 << 20)
    assert epk.datamodel(run, X, Y, memory_budget=1 << 21).scores.shape == (4, 260)


@pytest.mark.parametrize(("network", "points"), [("mlp", 1), ("mlp", 4), ("cnn", 2), ("attention", 4)])
def test_tiles_change_no_number(network: str, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(network, "adam")
    asked, labels = loop.asked
    whole = epk.datamodel(loop.run, asked, labels)
    monkeypatch.setattr(internals("kernels")._NodeSide, "tile_points", points)
    tiled = epk.datamodel(loop.run, asked, labels)
    assert_close(torch.stack(tiled.trainings[0].kernels), torch.stack(whole.trainings[0].kernels), rounding=1e4)
    assert_close(tiled.scores, whole.scores, rounding=4e5)
    assert_close(tiled.predict(KEPT), whole.predict(KEPT), rounding=4e5)


def test_a_small_budget_changes_no_number_of_a_wide_network() -> None:
    """Its gradients, 180 kB a point, go in tiles of a point then."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 150), torch.nn.Tanh(), torch.nn.Linear(150, 150), torch.nn.Tanh()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(150, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    run = epk.train(net, vectors(11), torch.arange(11) % 3, optimizer=optimizer, steps=6)
    whole, small = (epk.datamodel(run, X, Y, memory_budget=budget) for budget in (1 << 30, 1 << 20))
    assert len(small.trainings[0].kernels) == 6
    assert_close(small.scores, whole.scores, rounding=4e5)
    assert_close(small.predict(KEPT), whole.predict(KEPT), rounding=4e5)


def same(a: Any, b: Any) -> bool:
    """Whether two datamodels have the same bytes."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("outputs", "scores")]
    for own, other in zip(a.trainings, b.trainings, strict=True):
        pairs += [*zip(own.kernels, other.kernels, strict=True), (own.start, other.start), (own.forces, other.forces)]
    pairs.append((a.predict(KEPT), b.predict(KEPT)))
    return all(torch.equal(x, y) for x, y in pairs)


def test_an_interrupted_computation_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, made, left = internals("kernels").KernelWork, list[int](), [4]
    real: Callable[..., Any] = work.compute

    def counted(self: Any, place: Any, saved: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        made.append(place[0])
        yield from real(self, place, saved)

    monkeypatch.setattr(files, "SECONDS", 0)
    monkeypatch.setattr(work, "compute", counted)
    with pytest.raises(KeyboardInterrupt):
        epk.datamodel(LOOP.run, X, Y, checkpoint=tmp_path)
    resumed = epk.datamodel(LOOP.run, X, Y, checkpoint=tmp_path)
    assert sorted(made) == list(range(6))
    assert same(resumed, epk.datamodel(LOOP.run, X, Y))
    made.clear()
    assert same(epk.datamodel(LOOP.run, X, Y, checkpoint=tmp_path), resumed)
    assert not made


def test_a_checkpoint_belongs_to_one_computation(tmp_path: Path) -> None:
    """To its questions, their labels and kind, its run and its budget."""
    given = {"trajectory": LOOP.run, "X": X, "y": Y}
    epk.datamodel(**given, checkpoint=tmp_path)
    for other in (
        {"X": X + 1}, {"y": Y.flip(0)}, {"y": None, "classes": Y}, {"memory_budget": 1 << 22},
        {"trajectory": Loop(optimizer="adam", steps=15).run},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be of this very computation"):
            epk.datamodel(**given | other, checkpoint=tmp_path)


@pytest.fixture(scope="module")
def processes() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(["epk_gp.gram.path_features", "datamodel_cases"])
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        yield pool


def test_workers_give_the_bytes_of_none(processes: Executor, tmp_path: Path) -> None:
    """Of the kernels, the forecast and the derivative, without a checkpoint, with one, and from one."""
    asked = {"pairs": 3, "derivative": True}
    alone = epk.datamodel(LOOP.run, X, Y, **asked)
    for options in ({}, {"checkpoint": tmp_path}, {"checkpoint": tmp_path}):
        found = epk.datamodel(LOOP.run, X, Y, **asked, executor=processes, **options)
        assert same(found, alone)
        assert torch.equal(found.forecast.measured, alone.forecast.measured)
        assert torch.equal(found.correction, alone.correction)
        assert found.forecast.lds == alone.forecast.lds


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_a_run_on_disk_gives_the_bytes_of_the_run_in_memory(optimizer: str, every: int, tmp_path: Path) -> None:
    loop = Loop(optimizer=optimizer, steps=14, batch=4)
    stored = loop.record(folder=tmp_path / "run", storage=epk.Storage(keep_every=every))
    memory = epk.datamodel(loop.run, X, Y)
    assert same(epk.datamodel(stored, X, Y), memory)
    assert same(epk.datamodel(epk.load_trajectory(tmp_path / "run", mlp().double()), X, Y), memory)


def test_a_derivative_that_is_given_is_the_one_that_is_computed() -> None:
    computed = epk.datamodel(LOOP.run, X, Y, derivative=True)
    given = epk.influence(LOOP.run, X, function=LOOP.model.questions.as_function)
    assert isinstance(given, Influence)
    assert torch.equal(epk.datamodel(LOOP.run, X, Y, derivative=given).correction, computed.correction)
    plain = LOOP.model
    E, G = given.values[:, 0], plain.derivative()
    most = (2 * G.norm(dim=1, keepdim=True) / E.norm(dim=1, keepdim=True)).clamp(max=1)
    expected = 0.25 * (most * E - G)
    assert_close(computed.correction, expected)
    assert_close(computed.predict(KEPT), plain.predict(KEPT) + (KEPT - 1) @ expected.T)
    assert torch.equal(computed.scores, plain.scores)

"""Sums that survive a kill, and sums in float64."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine.axes import Axis
from epk_gp.storage import files as checkpoints
from epk_gp.storage.files import PartialSums
from helpers import surprising_run
from stored_runs import flip

RULE = epk.gauss_legendre(2)
VERSION = "must be a partial sum of this version"
COMPUTATION = "of this very computation"


def recorded(n=20, steps=20, dtype=torch.float64, activation=nn.Tanh, batch_size=None, **options):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64).to(dtype)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), activation(), nn.Linear(7, 3)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, **options)
    return epk.train(net, X, torch.arange(n) % 3, optimizer=optimizer, steps=steps, batch_size=batch_size)


@pytest.fixture(scope="module")
def run():
    return recorded()


@pytest.fixture(scope="module")
def points(run):
    X = torch.cat([run.inputs[:5], run.inputs[5:9] + 0.1])
    return epk.Points(X, torch.arange(9) < 5)


@pytest.mark.slow
def test_float32_products_summed_in_float64_are_closer(points, monkeypatch):
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: 1)  # else each sum is one product
    run, X = recorded(steps=100, dtype=torch.float32), points.X.float()
    reference = epk.gram_block(run, *[epk.Points(X.double(), points.is_train)] * 2, rule=RULE)
    kinds = (None, torch.float64)
    both = [epk.gram_block(run, *[epk.Points(X, points.is_train)] * 2, rule=RULE, accumulate=kind) for kind in kinds]
    errors = [float((K.double() - reference).abs().max() / reference.abs().max()) for K in both]
    assert errors[1] < min(errors[0], 5e-7)


class KilledError(Exception):
    """What stands for a kill inside one process."""


def killed_at(monkeypatch, moments, compute):
    """Compute, with a kill after each of these saves; return the result, and name and number of terms of all saves."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    save, saves = PartialSums.save, []

    def counted(self, *args):
        saves.append((args[0], args[2]))
        save(self, *args)
        if len(saves) in moments:
            raise KilledError

    monkeypatch.setattr(PartialSums, "save", counted)
    for _ in moments:
        with pytest.raises(KilledError):
            compute()
    return compute(), saves


def test_a_computation_resumes_where_it_was_stopped(run, points, tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: 1)  # ranges of 16 steps
    whole = epk.gram_block(run, points, points, rule=RULE, checkpoint=tmp_path / "whole")
    done, saves = killed_at(
        monkeypatch, (1, 3, 5), lambda: epk.gram_block(run, points, points, rule=RULE, checkpoint=tmp_path / "cut")
    )
    assert torch.equal(done, whole)
    ranges = [name for name, _ in saves if name.endswith("-begun")]
    assert len(ranges) == len(set(ranges)) == 6  # three kinds of tiles, two ranges of steps each: none twice


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_an_attribution_resumes_where_it_was_stopped(tmp_path, monkeypatch, options):
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: 1)  # else all six steps are one piece
    run = recorded(12, 6, activation=nn.ReLU, batch_size=5, **options)
    x = run.inputs[:4] + 0.1
    whole = epk.attribute(run, x, checkpoint=tmp_path / "whole")
    assert torch.equal(epk.attribute(run, x).samples, whole.samples)
    done, saves = killed_at(monkeypatch, (2, 5), lambda: epk.attribute(run, x, checkpoint=tmp_path / "cut"))
    assert [count for _, count in saves] == [*range(1, 7), 6]  # no step twice, and then the whole block
    for name in ("samples", "decay", "total", "max_residual", "evaluations"):
        assert torch.equal(torch.as_tensor(getattr(done, name)), torch.as_tensor(getattr(whole, name))), name
    assert torch.equal(epk.attribute(run, x, checkpoint=tmp_path / "cut").samples, whole.samples)
    with pytest.raises(ValueError, match=COMPUTATION):
        epk.attribute(run, x + 1, checkpoint=tmp_path / "cut")


def test_a_checkpoint_of_something_else_is_refused(run, points, tmp_path):
    epk.gram_block(run, points, points, rule=RULE, checkpoint=tmp_path / "a")
    with pytest.raises(ValueError, match=COMPUTATION):
        epk.gram_block(run, points, points, rule=epk.QuadratureRule.midpoint(2), checkpoint=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="new or empty folder"):
        epk.gram_block(run, points, points, rule=RULE, checkpoint=tmp_path / "b")
    os.truncate(next((tmp_path / "a").glob("*.safetensors")), 40)
    with pytest.raises(ValueError, match=VERSION):
        epk.gram_block(run, points, points, rule=RULE, checkpoint=tmp_path / "a")
    group = torch.zeros(run.num_points, dtype=torch.int64)
    one, two = Axis("sample", group, ("a",)), Axis("sample", group, ("a", "b"))
    epk.attribute(run, run.inputs[:2], by=[one], checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match=COMPUTATION):
        epk.attribute(run, run.inputs[:2], by=[two], checkpoint=tmp_path / "c")


SCRIPT = """
    import os, signal, sys, torch
    from pathlib import Path
    import epk_gp as epk
    from epk_gp.storage import files as checkpoint

    torch.set_num_threads(1)
    checkpoint.SECONDS = 0.0
    X, folder = torch.randn(40, 3, dtype=torch.float64), Path(sys.argv[1])
    net = torch.nn.Sequential(torch.nn.Linear(3, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).double()
    run = epk.train(net, X, torch.arange(40) % 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=40)
    both = epk.Points(X, torch.arange(40) < 20)

    def start(name):
        if child := os.fork():
            return child
        torch.save(epk.gram_block(run, both, both, checkpoint=folder / name), folder / f"{name}.pt")
        os._exit(0)

    os.waitpid(start("whole"), 0)
    child = start("cut")
    while not list(folder.glob("cut/*.safetensors")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    assert not (folder / "cut.pt").exists()
    os.waitpid(start("cut"), 0)
    assert torch.equal(torch.load(folder / "cut.pt"), torch.load(folder / "whole.pt"))
"""


@pytest.mark.slow
def test_kill_9_and_the_same_call_again_give_the_same_bytes(tmp_path):
    """In a process of its own, for it forks."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


@pytest.mark.slow
def test_a_second_plan_does_not_resume_from_the_firsts_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    run, x = surprising_run()
    parts = epk.attribute(run, x, checkpoint=tmp_path / "a", memory_budget=1 << 20)
    assert run.model.cache.needs_dense_plan
    assert parts.max_error < 1e-11
    pair = epk.Points(x, is_train=False), epk.Points(run.inputs, is_train=True)
    run.model.cache.needs_dense_plan = False
    run.model.cache.plans.clear()
    kept = epk.gram_block(run, *pair, checkpoint=tmp_path / "b", memory_budget=1 << 20)
    torch.testing.assert_close(kept, epk.gram_block(run, *pair), rtol=1e-11, atol=1e-11)


def test_points_that_require_gradients_are_taken_for_their_values(run):
    x = run.inputs[:3] + 0.1
    parts = epk.attribute(run, x.clone().requires_grad_())
    assert torch.equal(parts.samples, epk.attribute(run, x).samples)


@pytest.mark.parametrize(("name", "message"), [("checkpoint.json", COMPUTATION), ("sums.safetensors", VERSION)])
def test_a_file_without_measure_is_refused_unread(tmp_path, name, message):
    """A sparse file of 1 TB: the size is looked at, or the safetensors header, and nothing else."""
    PartialSums(tmp_path / "sums", "identity").save("sums", {"total": torch.ones(3)}, 1)
    os.truncate(tmp_path / "sums" / name, 1 << 40)
    with pytest.raises(ValueError, match=message):
        PartialSums(tmp_path / "sums", "identity").load("sums")


def test_a_flipped_bit_of_a_partial_sum_is_found(tmp_path):
    sums = PartialSums(tmp_path / "sums", "1")
    sums.save("a", {"total": torch.arange(5.0)}, 3)
    loaded, count = sums.load("a")
    assert torch.equal(loaded["total"], torch.arange(5.0))
    assert count == sums.count("a") == 3
    flip(tmp_path / "sums" / "a.safetensors", -1)
    with pytest.raises(ValueError, match=VERSION):
        sums.load("a")


def test_a_partial_sum_serves_its_own_piece_computation_and_version_only(tmp_path, monkeypatch):
    sums = {name: PartialSums(tmp_path / name, name) for name in ("own", "other")}
    for each in sums.values():
        for name in ("a", "b"):
            each.save(name, {"total": torch.ones(3)}, 1)
    own, other = tmp_path / "own", tmp_path / "other"
    (own / "a.safetensors").rename(own / "c.safetensors")
    shutil.copy(other / "b.safetensors", own / "b.safetensors")
    for read in (sums["own"].load, sums["own"].count):
        for name in ("b", "c"):
            with pytest.raises(ValueError, match=VERSION):
                read(name)
    monkeypatch.setattr(epk, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=VERSION):
        sums["other"].load("a")

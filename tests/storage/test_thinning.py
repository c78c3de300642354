"""Copies of runs that keep fewer states: they are read and resumed as if they had been recorded so."""

import pytest
import torch
from captured_loops import CapturedLoop, make_net

import epk_gp as epk
from epk_gp.core.recomputation import recomputation_of
from epk_gp.storage import thinning
from epk_gp.storage.check import check_run
from epk_gp.storage.schema import read_header
from epk_gp.storage.thinning import thin_run
from loops import file_hashes, mlp
from stored_runs import KEPT_STEPS as STEPS
from stored_runs import as_version_2
from stored_runs import record_kept as record


def own_rule(net):
    return torch.optim.Rprop(net.parameters(), lr=0.01)


@pytest.mark.parametrize("compression", ["none", "deltas"])
def test_a_copy_holds_what_a_recording_that_keeps_as_few_holds(tmp_path, compression):
    record(tmp_path / "run", keep_every=1, compression=compression)
    before = file_hashes(tmp_path / "run")
    thinned = thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=3, chunk_bytes=1))
    direct, _ = record(tmp_path / "direct")
    copy = epk.load_trajectory(tmp_path / "copy", mlp())
    assert recomputation_of(copy).kept.numbers == (0, 3, 6, 7)
    assert all(torch.equal(copy.states[s], direct.states[s]) for s in range(STEPS + 1))
    for s in range(STEPS):
        assert all(torch.equal(a, b) for a, b in zip(copy.updates[s], direct.updates[s], strict=True))
    assert (read_header(tmp_path / "copy")["version"], check_run(tmp_path / "copy").finished) == (4, True)
    assert thinned.per_weight == ()
    assert file_hashes(tmp_path / "run") == before


def test_a_copy_is_resumed(tmp_path):
    record(tmp_path / "run", keep_every=1, until=4, finish=False)
    thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=3))
    assert not check_run(tmp_path / "copy").finished
    resumed, _ = record(tmp_path / "copy", resume=True)
    whole, _ = record(None, keep_every=1)
    assert torch.equal(resumed.states[STEPS], whole.states[STEPS])
    assert recomputation_of(resumed).kept.numbers == (0, 3, 6, 7)


def test_a_copy_of_a_copy_keeps_multiples(tmp_path):
    record(tmp_path / "run", keep_every=2, weights_dtype=torch.float32)
    thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=4))
    copy, run = (epk.load_trajectory(tmp_path / name, mlp()) for name in ("copy", "run"))
    assert recomputation_of(copy).kept.numbers == (0, 4, 7)
    assert torch.equal(copy.states[4], run.states[4])
    assert read_header(tmp_path / "copy")["weights_dtype"] == "torch.float32"
    with pytest.raises(ValueError, match="keep_every must be a multiple of 2"):
        thin_run(tmp_path / "run", tmp_path / "other", epk.Storage(keep_every=3))
    with pytest.raises(ValueError, match="weights_dtype must be torch.float32, that of the run's kept states"):
        thin_run(tmp_path / "run", tmp_path / "other", epk.Storage(keep_every=4, weights_dtype=torch.bfloat16))
    assert not (tmp_path / "other").exists()


def test_passes_and_statistics_are_copied(tmp_path):
    loop = CapturedLoop("batch_norm")
    loop.steps = 5
    whole = loop.run(tmp_path / "run", storage=epk.Storage(steps=2))
    thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=3))
    copy = epk.load_trajectory(tmp_path / "copy", make_net("batch_norm"))
    assert all(torch.equal(copy.statistics[s], whole.statistics[s]) for s in range(6))
    assert all(torch.allclose(copy.states[s], whole.states[s], rtol=0, atol=1e-12) for s in range(6))


def test_coefficients_that_no_gradient_says_stay(tmp_path):
    whole, _ = record(tmp_path / "run", optimizer=own_rule, keep_every=1)
    thinned = thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=3))
    assert thinned.per_weight == ("direct",)
    copy = epk.load_trajectory(tmp_path / "copy", mlp())
    assert all(torch.equal(copy.updates[s].lr, whole.updates[s].lr) for s in range(STEPS))
    assert all(torch.allclose(copy.states[s], whole.states[s], rtol=0, atol=1e-12) for s in range(STEPS + 1))


def test_a_run_of_version_2_is_thinned_and_keeps_the_coefficients_whose_options_it_lacks(tmp_path):
    record(tmp_path / "run", keep_every=1)
    as_version_2(tmp_path / "run")
    assert thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=3)).per_weight == ("momentum",)
    copy, whole = (epk.load_trajectory(tmp_path / name, mlp()) for name in ("copy", "run"))
    assert all(torch.allclose(copy.states[s], whole.states[s], rtol=0, atol=1e-12) for s in range(STEPS + 1))


def test_what_is_not_thinned_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    record(tmp_path / "run", keep_every=1)
    with pytest.raises(ValueError, match="keep_every must be above 1"):
        thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage())
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        thin_run(tmp_path / "run", tmp_path / "run", epk.Storage(keep_every=2))

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(thinning, "write_header", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thin_run(tmp_path / "run", tmp_path / "copy", epk.Storage(keep_every=2))
    assert not (tmp_path / "copy").exists()

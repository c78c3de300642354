"""Forward passes and moving statistics on disk: what is written is what is read, when it is asked for."""

import pytest
import torch

import epk_gp as epk
from epk_gp.storage.check import check_run
from stored_runs import norm_net, same_passes, write_by_hand


@pytest.mark.parametrize("compression", ["none", "deltas"])
@pytest.mark.parametrize("statistics", [True, False], ids=["moving_statistics", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_passes_and_statistics_are_read_as_they_were_written(tmp_path, compression, statistics, seed):
    options = {} if statistics else {"statistics": (), "net": norm_net()}
    run = write_by_hand(tmp_path / "run", seed, compression=compression, steps=2, unexplained=0.25, **options)
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert opened.digest == run.history.last.digest
    assert opened.unexplained == 0.25
    assert [step.index for step in opened.steps] == list(range(6))
    for number in torch.randperm(6).tolist():
        assert same_passes(opened.steps[number].passes, run.steps[number].passes)
        assert same_passes(run.history.steps[number].passes, run.steps[number].passes)
    for number in torch.randperm(7).tolist():
        assert torch.equal(opened.states[number], run.states[number])
        assert not statistics or torch.equal(opened.statistics[number], run.statistics[number])
    assert (opened.statistics is None) == (not statistics)
    assert check_run(tmp_path / "run").num_steps == 6

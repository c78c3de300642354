"""Trainings of several processes are recorded as one run, which is the run of the same loop in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epk_gp as epk
import ranks
from loops import assert_exact
from ranks import LOOPS, POINTS, SIZE, data, in_one_process, on_rank, on_ranks, on_whole_batches

TEST = data()[0][:3] + 0.1


def assert_same(trajectory, expected):
    """Exact, and as the loop in one process to 1e-12."""
    one, other = assert_exact(trajectory, TEST, head="log_softmax"), epk.attribute(expected, TEST)
    for name in ("samples", "decay", "network"):
        a, b = getattr(one, name), getattr(other, name)
        assert float((a - b).abs().max()) < 1e-12 * max(1.0, float(b.abs().max())), name
    assert torch.equal(trajectory.targets, expected.targets)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run of each loop on two ranks, and what rank 1 says when it is asked for it."""
    found = on_ranks(SIZE, ranks.each, tmp_path_factory.mktemp("runs"), [(on_rank, name) for name in LOOPS])
    return dict(zip(LOOPS, zip(*found, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_run_of_two_ranks_is_that_of_the_loop_in_one_process(runs, name):
    """A step has the passes of all ranks, and the moving statistics are those of rank 0."""
    (trajectory, refusal), expected = runs[name], in_one_process(name)
    assert_same(trajectory, expected)
    assert "on rank 0" in refusal
    assert trajectory.num_steps == LOOPS[name].steps
    assert list(trajectory.moves) == ([1, 3] if LOOPS[name].pulls else [])
    if trajectory.statistics is not None:
        assert torch.allclose(trajectory.statistics[-1], expected.statistics[-1], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_any_number_of_ranks_gives_the_contributions_of_one_process_on_whole_batches(size, tmp_path):
    trajectory = on_ranks(size, on_rank, tmp_path, "plain")[0]
    assert_same(trajectory, on_whole_batches("plain"))
    assert [len(step.batch) for step in trajectory.steps] == [8] * 4
    assert not any(step.passes for step in trajectory.steps)


OTHERS = "0 step 0: the weights after a step must be the same on all ranks: those of rank 1 are not those of rank 0."
FAULTS = {
    "shuffled": "2 step 2: rank 1: recorder.batch() must get the indices of the rows that the network saw: row 0 was",
    "silent": "2 step 2: rank 1: optimizer.step() must be preceded by recorder.batch(indices): it was not",
    "broken": "2 step 2: rank 1: RuntimeError: inconsistent tensor size",
    "fewer": "Likely cause: on rank 1 no call of the network on the batch's rows was seen, but one on inputs of shape",
    "lr": OTHERS + " Likely cause: other options of the optimizer there, such as the learning rate",
    "edit": OTHERS.replace("0 step 0", "2 step 2")
    + " Likely cause: they, or what the optimizer holds, were changed on one rank alone",
    "module": OTHERS + " Likely cause: its gradient is its own. DDP averages gradients in the backward pass of net(X)",
    "none": "nothing",
    "data": "X and y must be the same on all ranks: those of rank 1 are not those of rank 0",
}


REFUSED = {
    ranks.sharded_vocabulary: "each process must hold all weights .*: got weights that ranks divide. Train with",
    ranks.sharded_weights: "each process must hold all weights .*: got weights that ranks divide",
    ranks.sharded_state: "all of the optimizer's state, .*: got ZeroRedundancyOptimizer",
    ranks.another_wrapper: "ddp must hold the network that is recorded: it holds another one",
    ranks.unwrapped_when_recorded: "Likely cause: the gradient was averaged over the 2 processes",
    ranks.with_join: "step 0: rank 0: all ranks must have as many batches",
}


@pytest.mark.slow
def test_a_fault_on_one_rank_and_what_ranks_cannot_record_are_named_on_all_of_them(tmp_path):
    """A sound loop says nothing."""
    calls = [*((ranks.with_fault, fault) for fault in FAULTS), *((program,) for program in REFUSED)]
    expected = [*map(re.escape, FAULTS.values()), *REFUSED.values()]
    for call, message, *said in zip(calls, expected, *on_ranks(SIZE, ranks.each, tmp_path, calls), strict=True):
        assert [re.search(message, one) is not None for one in said] == [True] * SIZE, (call, said)


def test_ddp_takes_a_wrapper_alone(unchecked):
    net, _ = LOOPS["plain"].make()
    with pytest.raises(TypeError, match="ddp must be a DistributedDataParallel: got Sequential"):
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), *data(), ddp=net)


@pytest.mark.slow
def test_influence_and_retraining_follow_the_statistics_of_each_rank(runs):
    """Each rank begins a step with the statistics of rank 0, and those that it leaves are not used; by differences."""
    trajectory, _ = runs["accumulated_batch_norm"]
    found = epk.influence(trajectory, TEST, head="logits")
    assert found.certified
    for sample in range(3):
        ends, h = [], 1e-5
        for sign in (1, -1):
            weights = torch.ones(POINTS, dtype=torch.float64)
            weights[sample] += sign * h
            net = in_one_process("accumulated_batch_norm", weights=weights)
            ends.append(net(TEST).detach())
            again = epk.retrain(trajectory, weights).outputs(TEST, head="logits")[0]
            assert float((again - ends[-1]).abs().max()) < 1e-10
        expected = (ends[0] - ends[1]) / (2 * h)
        assert float((found.values[:, :, sample] - expected).abs().max()) < 1e-7 * float(expected.abs().max())


@pytest.mark.slow
def test_a_run_whose_rank_died_is_resumed_to_the_same_end(tmp_path):
    """With each rank's own random numbers, rows, and buffers; from the last step on disk."""
    whole, _ = on_ranks(SIZE, ranks.resumable, tmp_path / "whole", tmp_path / "whole" / "run")
    assert whole[0] == 0
    broken = tmp_path / "broken"
    assert on_ranks(SIZE, ranks.resumable, broken, broken / "run", 3, dies=True) == []
    (first, digest), (_, count) = on_ranks(SIZE, ranks.resumable, broken, broken / "run")
    assert 3 <= first <= 4
    assert (digest, count) == (whole[1], 6)


PROGRAMS = Path(__file__).parents[2] / "docs" / "recipes" / "programs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCHES = {  # what starts a program's processes; `accelerate launch` starts them as torchrun does
    "ddp": (*TORCHRUN, "--max-restarts=1"),
    "accelerate_ddp": TORCHRUN,
    "lightning_ddp": (),
}
DIES = """
import os

if rank == 1 and step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.pages
def test_pages_programs_record_two_processes_that_their_launchers_start(tmp_path):
    """All are started at once. Under torchrun a rank dies at its fifth step; the second attempt goes on."""
    for module in ("accelerate", "pytorch_lightning"):
        pytest.importorskip(module)
    # torch 2.13 with gloo cannot restart processes that meet in the launcher's store, whatever they do
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = str(Path(epk.__file__).parents[1])
    begun = {}
    for program, launcher in LAUNCHES.items():
        source, folder = (PROGRAMS / f"{program}.py").read_text(), tmp_path / program
        if program == "ddp":
            step = "        optimizer.step()\n"
            assert step in source
            source = source.replace(step, step + DIES.replace("\n", "\n        ") + "\n")
        folder.mkdir()
        (folder / "program.py").write_text(source)
        command, pipes = [sys.executable, *launcher, "program.py"], dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        begun[program] = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)
    try:
        done = {program: (*process.communicate(timeout=90), process.returncode) for program, process in begun.items()}
    finally:
        for process in begun.values():
            process.kill()
    for program, (said, errors, code) in done.items():
        assert code == 0, errors
        assert "certified True, 6 steps" in said
        assert ("exitcode: 1" in errors) == (program == "ddp"), "the first attempt fails, and no other one"

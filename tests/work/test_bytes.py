"""What tells the pieces of one computation from those of another, in a folder that calls share."""

import copy
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

import epk_gp as epk
from distributed_cases import CALLS, RULE, SMALL, Shuffled, alone, inputs, mixed, recorded, run_of, same
from epk_gp.kernel_machine.axes import by_sample
from helpers import gram_diagonal_blocks, surprising_run


def test_budgets_and_splits_of_the_statistics_are_of_the_identity(folder, tmp_path):
    run = run_of("block")
    epk.gram_block(run, mixed(2), mixed(2), executor=Shuffled(), checkpoint=folder)
    with pytest.raises(ValueError, match="must be of this very computation"):
        epk.gram_block(run, mixed(2), mixed(2), executor=Shuffled(), checkpoint=folder, memory_budget=SMALL)
    run, X, other = recorded("batch_norm", 2), inputs(2), tmp_path / "split"
    epk.attribute(run, X, rule=RULE, checkpoint=other)
    with pytest.raises(ValueError, match="must be of this very computation"):
        epk.attribute(run, X, by=[by_sample(run)], rule=RULE, checkpoint=other)


@pytest.mark.parametrize("name", ["diagonal", "reconstruct", "features"])
@pytest.mark.parametrize("has_executor", [False, True])
def test_a_second_plan_goes_on_in_the_same_folder(name, has_executor, folder):
    run, X = surprising_run()
    points = epk.Points(X, is_train=False)
    compute = {
        "diagonal": lambda **options: gram_diagonal_blocks(run, points, rule=RULE, **options),
        "reconstruct": lambda **options: epk.reconstruct(run, X, rule=RULE, **options),
        "features": lambda **options: epk.path_features(run, X, 4, nodes=2, num_probe=0, **options),
    }[name]
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as executor:
        warnings.simplefilter("ignore")  # features of another plan are of another sketch, and one rule is not exact
        kept = compute(executor=executor if has_executor else None, checkpoint=folder)
        expected = compute()
    assert run.model.cache.needs_dense_plan
    assert same(kept, expected)


@pytest.mark.slow
def test_pieces_of_workers_serve_calls_of_one_thread(folder):
    """Workers compute with one thread, whatever their owner has: other numbers of threads round otherwise."""
    call, run, before = CALLS["features"], run_of("features"), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        call(run, executor=Shuffled(), checkpoint=folder)
        with pytest.raises(ValueError, match="must be of this very computation"):
            call(run, checkpoint=folder)
        torch.set_num_threads(1)
        executor = Shuffled()
        call(run, executor=executor, checkpoint=folder)
        assert not executor.order
    finally:
        torch.set_num_threads(before)


def test_a_reader_that_is_interrupted_lets_go_of_the_folder(folder):
    """While the error, and with it the reader's frame, is kept, as an interactive session keeps the last one."""
    run, points = run_of("block"), mixed(4)

    asked = {"rule": RULE, "executor": Shuffled(), "checkpoint": folder}
    stopped = mock.patch("epk_gp.gram.tiles.scatter_block", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt) as kept:
        epk.gram_block(run, points, points, **asked)
    epk.gram_block(run, points, points, **asked)
    assert kept.value is not None


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["block", "attribute", "influence", "features"])
def test_partial_sums_of_another_computation_are_refused(name, tmp_path):
    call, run = CALLS[name], run_of(name)
    call(run, checkpoint=tmp_path / "own")
    call(replace(run, digest="of another run"), executor=Shuffled(), checkpoint=tmp_path / "other")
    others = sorted((tmp_path / "other").glob("*.safetensors"))
    assert others
    for file in others:
        shutil.copy(file, tmp_path / "own" / file.name)
    with pytest.raises(ValueError, match="must be a partial sum of this version"):
        call(run, checkpoint=tmp_path / "own")
    for file in others:
        (tmp_path / "own" / file.name).unlink()
    assert same(call(run, checkpoint=tmp_path / "own"), alone(name))


def test_kernels_and_processes_with_an_executor_have_the_same_values_and_can_be_copied():
    run, executor, X = recorded("plain", 3), Shuffled(), mixed(4).X
    kernel, expected = epk.EPKKernel(run, rule=RULE, executor=executor), epk.EPKKernel(run, rule=RULE)(X).to_dense()
    gp, posterior = epk.LogitGP(run, rule=RULE, executor=executor), epk.LogitGP(run, rule=RULE).logit_posterior(X)
    for copied in (lambda value: value, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert torch.equal(copied(kernel)(X).to_dense(), expected)
        assert same(copied(gp).logit_posterior(X).covariance, posterior.covariance)
    assert executor.order


QUICK = ("block", "momentum", "features")  # the run-time checks of shapes make many small steps slow
CASES = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)


@CASES
def test_pieces_in_any_order_threads_and_processes_give_the_bytes_of_none(name, processes):
    call, executor = CALLS[name], Shuffled()
    assert same(call(run_of(name), executor=executor), alone(name))
    assert len(executor.order) > 1
    assert executor.order != sorted(executor.order)
    if name in (*QUICK, "many", "influence", "retrain", "diagonal", "reconstruct"):  # one of each kind of work
        with ThreadPoolExecutor(2) as threads:
            assert same(call(run_of(name), executor=threads), alone(name))
    assert same(call(run_of(name), executor=processes), alone(name))

"""Arguments of a wrong type or value in the rest of the public functions: one clear error each."""

import pytest

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from loops import data, mlp, sgd

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
X, Y = data()


T = epk.test_copy(X)


WRONG_TYPES = {
    "order_a_fraction": (lambda t: epk.adaptive(order=2.5), "order must be a whole number, at least 1: got 2.5"),
    "max_evaluations_a_fraction": (lambda t: epk.adaptive(max_evaluations=2.5), "max_evaluations must be a whole"),
    "tol_a_text": (lambda t: epk.adaptive("x"), "tol must be a positive number: got 'x'"),
    "nodes_true": (lambda t: epk.gauss_legendre(True), "the number of nodes must be a whole number.*got True"),
    "midpoint_a_fraction": (lambda t: epk.midpoint(2.5), "the number of nodes must be a whole number.*got 2.5"),
    "loss_nothing": (lambda t: epk.PerSampleLoss(None), "the loss must be a function of outputs and targets: got None"),
    "block_without_copies": (lambda t: epk.gram_block(t, X, X), r"a must be epk_gp.Points\(X, is_train=...\).*got"),
    "weights_a_list": (
        lambda t: epk.gram_block(t, epk.Points(X, True), epk.Points(X, True), step_weights=[1.0] * 7),
        r"step_weights must be a torch.Tensor, \(7,\): got list. Convert it",
    ),
    "points_a_number": (lambda t: epk.LogitGP(t, points=5), "points must be a list or tensor of indices .*: got 5"),
    "points_a_text": (lambda t: epk.LogitGP(t, points="abc"), "points must be a list or tensor of indices .*: got"),
    "points_a_slice": (lambda t: epk.LogitGP(t, points=slice(3)), "points must be a list or tensor .*: got slice"),
    "kernel_of_a_list": (lambda t: epk.EPKKernel(t)([[1.0] * 5]), "points must be a torch.Tensor: got list. Make them"),
    "train_copy_of_a_list": (lambda t: epk.train_copy([[1.0]]), "inputs must be a torch.Tensor: got list. Convert it"),
    "state_a_text": (lambda t: t.weights("a"), "state must be a whole number: got 'a'"),
    "zeroing_nothing": (lambda t: zero_final_layer(None), "net must be a torch.nn.Module: got NoneType"),
}


@pytest.mark.parametrize(("ask", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_an_argument_of_another_kind_is_refused(trajectory, ask, message):
    with pytest.raises(TypeError, match=message):
        ask(trajectory)


WRONG_VALUES = {
    "no_points": (lambda t: epk.EPKKernel(t)(T[:0]).to_dense(), r"there must be at least one point: got shape \(0"),
    "one_point": (lambda t: epk.train_copy(X[0]), r"one row per point: got shape \(4,\). A single point is X\[None\]"),
    "order_zero": (lambda t: epk.adaptive(order=0), "order must be at least 1: got 0"),
    "fit_backwards": (lambda t: epk.LogitGP(t, points=[0, 1]).fit(steps=1, lr=-1.0), "lr must be positive and"),
}


@pytest.mark.parametrize(("ask", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_a_value_that_means_nothing_is_refused(trajectory, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(trajectory)


def test_a_chunk_that_is_removed_while_the_run_is_used_is_named(tmp_path):
    net = mlp()
    trajectory = epk.train(net, X, Y, optimizer=sgd(net), steps=2, folder=tmp_path / "run")
    (tmp_path / "run" / "chunk-000001.safetensors").unlink(missing_ok=True)
    (tmp_path / "run" / "chunk-000000.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"chunk-00000\d.safetensors \(states \d..\d\) does not exist"):
        epk.reconstruct(trajectory, X)

"""Update rules: every optimizer's run is a kernel machine, and each sample has the share that it had in the buffers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.losses import NegativeLogLikelihood
from epk_gp.kernel_machine.baselines import single_machine
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue, LinearStep, stack_coefficients
from helpers import assert_close

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RMSPROP, ADAGRAD = torch.optim.RMSprop, torch.optim.Adagrad
OPTIMIZERS = {
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "decay": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "adam_decay": (ADAM, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": (ADAMW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop_momentum": (RMSPROP, {"lr": 0.001, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
}


def problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return net, torch.randn(11, 4).double(), torch.randint(0, 3, (11,)), torch.randn(3, 4).double()


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop_momentum"])
def test_memory_and_disk_hold_the_same_numbers(tmp_path, name):
    kind, options = OPTIMIZERS[name]
    runs = []
    for path in (None, tmp_path / "run"):
        net, X, y, X_test = problem()
        optimizer, generator = kind(net.parameters(), **options), torch.manual_seed(0)
        settings = {"steps": 7, "batch_size": 4, "folder": path, "generator": generator}
        runs.append(epk.train(net, X, y, optimizer=optimizer, **settings))
    loaded = epk.load_trajectory(tmp_path / "run", problem()[0])
    assert loaded.digest == runs[0].digest == runs[1].digest
    assert loaded.update_rule == runs[0].update_rule
    for s in range(7):
        for loaded_value, value in zip(loaded.updates[s], runs[0].updates[s], strict=True):
            assert torch.equal(loaded_value, value)
    assert torch.equal(epk.attribute(loaded, X_test).samples, epk.attribute(runs[0], X_test).samples)


@pytest.mark.slow
def test_stated_clipping_is_part_of_the_coefficients():
    for clip in (ClipNorm(0.05), ClipNorm(0.03, norm_type=float("inf")), ClipValue(0.01)):
        net, X, y, X_test = problem()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.8)
        trajectory = epk.train(net, X, y, optimizer=optimizer, steps=4, batch_size=4, clip=clip)
        assert any(float(trajectory.updates[s].grad_scale.min()) < 0.9 for s in range(4)), "the bound never acted"
        assert epk.attribute(trajectory, X_test).max_error <= 1e-12
        assert epk.reconstruct(trajectory, X_test).max_error <= 1e-12


LOSSES = {
    "class_weights": epk.CrossEntropy(class_weights=(1.0, 4.0, 0.3)),
    "smoothing": epk.CrossEntropy("sum", label_smoothing=0.2),
    "ignored": epk.CrossEntropy(ignore_index=2),
    "likelihood": NegativeLogLikelihood(class_weights=(1.0, 4.0, 0.3)),
    "torch_module": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.3]).double(), ignore_index=1),
    "function": epk.PerSampleLoss(lambda z, y: F.multi_margin_loss(z, y, p=2)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_every_loss_is_explained_on_uneven_batches(loss):
    net, X, y, X_test = problem()
    net = nn.Sequential(net, nn.LogSoftmax(dim=1)) if isinstance(loss, NegativeLogLikelihood) else net
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), torch.manual_seed(1)
    run = epk.train(net, X, y, optimizer=optimizer, steps=4, batch_size=4, loss=loss, generator=generator)
    for head in ("logits", "log_softmax"):
        assert epk.attribute(run, X_test, head=head).max_error <= 1e-11


def test_a_network_that_ends_in_log_softmax_counts_it_once():
    """Cross entropy of log-probabilities, their likelihood, and cross entropy of logits are the same run."""
    runs = []
    for loss, ends in ((epk.CrossEntropy(), False), (epk.CrossEntropy(), True), (NegativeLogLikelihood(), True)):
        net, X, y, X_test = problem()
        whole = nn.Sequential(net, nn.LogSoftmax(dim=1)) if ends else net
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.2)
        runs.append(epk.train(whole, X, y, optimizer=optimizer, steps=5, loss=loss))
    expected = epk.attribute(runs[0], X_test, head="log_softmax").samples
    for run in runs[1:]:
        for head in ("logits", "log_softmax"):
            assert_close(epk.attribute(run, X_test, head=head).samples, expected)
    machine = single_machine(runs[2], X_test, head="logits")
    assert machine.max_error <= 1e-12


@pytest.mark.parametrize("name", ["momentum", "adam_decay", "decay"])
def test_no_single_machine_where_coefficients_move(name):
    kind, options = OPTIMIZERS[name]
    net, X, y, X_test = problem()
    trajectory = epk.train(net, X, y, optimizer=kind(net.parameters(), **options), steps=3)
    with pytest.raises(ValueError, match="needs steps of plain gradient descent on the loss itself: step 0 of"):
        single_machine(trajectory, X_test)


def test_coefficients_of_several_types_lose_nothing():
    kinds = (torch.tensor([True, False]), torch.tensor([0.5, 0.25]), torch.tensor([0.1], dtype=torch.float64), 0.5)
    joined = stack_coefficients([LinearStep(lr=0.1, grad_scale=kind) for kind in kinds], [2, 2, 1, 1])
    assert joined.grad_scale.tolist() == [1, 0, 0.5, 0.25, 0.1, 0.5]

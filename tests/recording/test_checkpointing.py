"""Networks that use activation checkpointing (torch.utils.checkpoint): the same run as without."""

import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import epk_gp as epk
from epk_gp.core.gradients import batch_gradient
from epk_gp.core.model import functionalize, with_kept_activations
from epk_gp.core.plans import TensorSpec
from epk_gp.core.trajectory import flat_state
from epk_gp.kernel_machine.loss_products import LossProducts
from loops import Net, assert_exact, data, record, sgd

X, Y = data()
TEST = X[:3] + 0.1


def attention():
    """A block of a GPT on three tokens of two channels."""

    def forward(net, h):
        tokens = h.unflatten(1, (3, 2))
        q, k, v = net.qkv(net.norms[0](tokens)).split(2, dim=-1)
        tokens = tokens + net.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        tokens = tokens + F.dropout(F.gelu(net.mlp(net.norms[1](tokens))), 0.2, net.training)
        return tokens.flatten(1)

    norms = nn.ModuleList([nn.LayerNorm(2), nn.LayerNorm(2)])
    return Net(forward, norms=norms, qkv=nn.Linear(2, 6), out=nn.Linear(2, 2), mlp=nn.Linear(2, 2))


def block(*layers):
    return lambda: nn.Sequential(nn.Linear(6, 6), *[make() for make in layers], nn.Linear(6, 6))


BLOCKS = {
    "dropout": block(nn.Tanh, nn.Dropout),
    "relu": block(nn.ReLU),
    "in_place": block(lambda: nn.ReLU(inplace=True), nn.Dropout),
    "frozen_batch_norm": block(lambda: nn.BatchNorm1d(6).eval(), nn.Tanh),
    "attention": attention,
}
OFF, ALWAYS, IN_TRAINING, REENTRANT_IN_TRAINING = (None, True), (False, True), (False, False), (True, False)
USES = {"always": ALWAYS, "in_training": IN_TRAINING, "reentrant_in_training": REENTRANT_IN_TRAINING}


class Checkpointed(nn.Module):
    def __init__(self, make_block, use):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.block, self.c = nn.Linear(4, 6), make_block(), nn.Linear(6, 3)
        self.use_reentrant, self.in_evaluation = use

    def hidden(self, x):
        return torch.tanh(self.a(x))

    def forward(self, x):
        h = self.hidden(x)
        if self.use_reentrant is not None and (self.in_evaluation or self.training):
            h = checkpoint(self.block, h, use_reentrant=self.use_reentrant)
        else:
            h = self.block(h)
        return self.c(h)


def recorded(net, steps=3, **options):
    frozen = [module for module in net.modules() if not module.training]
    net.train()
    for module in frozen:
        module.eval()
    torch.manual_seed(7)
    batches = (torch.randperm(10)[:6] for _ in range(steps))
    recorder = record(net, sgd(net, lr=0.2, momentum=0.5), X, Y, batches, **options)
    net.eval()
    return recorder.trajectory


def make(name, use, kind=Checkpointed):
    return kind(BLOCKS[name], use).double()


POINTS = epk.Points(X[:2], is_train=True), epk.Points(TEST, is_train=False)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("in_place", "frozen_batch_norm", "attention")]


@pytest.fixture(scope="module", params=["dropout", *SLOW])
def without_checkpoints(request):
    run = recorded(make(request.param, OFF))
    return request.param, run, epk.attribute(run, TEST, head="logits"), epk.gram_block(run, *POINTS)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_checkpointed_network_gives_what_the_same_network_without_gives(without_checkpoints, use, monkeypatch):
    name, plain, expected, K = without_checkpoints
    net = make(name, use)
    run = recorded(net)
    shares = assert_exact(run, TEST, net)
    assert torch.equal(run.states[-1], plain.states[-1])
    assert epk.reconstruct(run, TEST).certified
    torch.testing.assert_close(epk.gram_block(run, *POINTS), K, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(LossProducts, "_forward", mock.Mock(side_effect=RuntimeError("not supported")))
    for parts in (shares, epk.attribute(run, TEST, head="logits")):  # however they are computed
        assert parts.certified
        torch.testing.assert_close(parts.samples, expected.samples, rtol=1e-12, atol=1e-12)


def test_a_stored_run_is_loaded_into_a_checkpointed_network_resumed_and_copied(tmp_path):
    run = recorded(make("dropout", ALWAYS), folder=tmp_path / "run")
    expected = epk.attribute(run, TEST).samples
    for use in (ALWAYS, IN_TRAINING):
        loaded = epk.load_trajectory(tmp_path / "run", make("dropout", use))
        assert loaded.model.recomputes == (use == ALWAYS)
        torch.testing.assert_close(epk.attribute(loaded, TEST).samples, expected, rtol=1e-13, atol=1e-15)
    with pytest.raises(ValueError, match="activation checkpointing in evaluation mode .* Pass use_reentrant=False"):
        epk.load_trajectory(tmp_path / "run", make("dropout", (True, True)))
    for steps in (2, 4):
        net = make("relu", ALWAYS)
        run = epk.train(net, X, Y, optimizer=sgd(net), steps=steps, folder=tmp_path / "again", resume=True)
    assert epk.reconstruct(run, TEST).certified
    single = TensorSpec(torch.float32, torch.device("cpu"))
    for model in (run.model, pickle.loads(pickle.dumps(run.model)), run.model.variant(single)):
        assert model.recomputes
    assert not recorded(make("relu", IN_TRAINING), steps=1).model.recomputes


def test_second_derivatives_go_through_a_checkpoint():
    def curvature(use):
        net = make("attention", use).eval()
        model = functionalize(net)
        state = model.flatten(dict(net.named_parameters()))
        model = with_kept_activations(model, state, X)
        params = {name: (1.1 * value).requires_grad_() for name, value in model.unflatten(state).items()}
        x = TEST.clone().requires_grad_()
        gradients = torch.autograd.grad(model(params, x).square().sum(), list(params.values()), create_graph=True)
        (mixed,) = torch.autograd.grad(sum(g.square().sum() for g in gradients), x)
        return mixed

    torch.testing.assert_close(curvature(ALWAYS), curvature(OFF), rtol=1e-12, atol=1e-12)


class OnInputs(Checkpointed):
    """The checkpoint's inputs require no gradient: torch warns, and trains nothing of a re-entrant one."""

    def hidden(self, x):
        return F.pad(x, (0, 2))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_torch_warns_in_the_users_loop_alone(use):
    def loop(is_recorded):
        net = make("dropout", use, OnInputs).train()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if is_recorded:
                run = recorded(net)
                epk.attribute(run, TEST)
                assert epk.reconstruct(run, TEST).certified
            for _ in range(0 if is_recorded else 3):
                F.cross_entropy(net(X[:6]), Y[:6]).backward()
        return [str(warning.message) for warning in caught if "requires_grad=True" in str(warning.message)]

    assert loop(is_recorded=True) == loop(is_recorded=False)
    assert len(loop(is_recorded=False)) == (3 if use == REENTRANT_IN_TRAINING else 0)


def test_statistics_that_a_checkpoint_moves_twice_are_refused_in_words():
    net = Checkpointed(block(lambda: nn.BatchNorm1d(6), nn.Tanh), IN_TRAINING).double()
    with pytest.raises(epk.StepMismatchError, match="inside torch.utils.checkpoint moves them once more"):
        recorded(net)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * ctx.saved_tensors[0]


def unknown():
    return Net(lambda net, x: Same.apply(x))


def test_what_a_checkpoint_would_still_recompute_is_refused():
    net = Checkpointed(block(unknown), ALWAYS).double()
    with pytest.raises(ValueError, match=r"a function of another kind .* outside of the checkpoint"):
        epk.Recorder(net, sgd(net), X, Y)
    run = recorded(Checkpointed(block(unknown), IN_TRAINING).double())
    assert epk.reconstruct(run, TEST).certified


def test_without_kept_activations_a_gradient_would_be_of_other_weights():
    """The control."""
    run, plain = recorded(make("relu", ALWAYS)), recorded(make("relu", OFF))
    state, c = flat_state(run, 3, X), torch.ones(10)
    kept, expected = (batch_gradient(model, state, X, Y, run.loss, c) for model in (run.model, plain.model))
    assert torch.equal(kept, expected)
    recomputing = functionalize(make("relu", ALWAYS))
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        batch_gradient(recomputing, state, X, Y, run.loss, c)  # the weights in the module require no gradient
    recomputing.module.requires_grad_()
    assert (batch_gradient(recomputing, state, X, Y, run.loss, c) - expected).abs().max() > 1e-2 * expected.abs().max()

"""The network as a function of its weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from epk_gp.core.losses import apply_head
from epk_gp.core.model import functionalize, zero_final_layer
from epk_gp.recording.setup import validate_batch_statistics, validate_row_independence
from helpers import NETWORKS, assert_close
from loops import data, frozen_batch_norm, frozen_layer, mlp


def inputs_for(name, points=6):
    shape = NETWORKS[name][1]
    if shape is None:
        return torch.arange(points * 7).reshape(points, 7) % 20
    return torch.randn(points, *shape, dtype=torch.float64)


@pytest.fixture(params=NETWORKS)
def named(request):
    return NETWORKS[request.param][0]().double(), inputs_for(request.param)


def test_calling_with_the_networks_own_weights_is_calling_the_network(named):
    net, X = named
    model = functionalize(net)
    weights = model.unflatten(model.flatten(dict(net.named_parameters())))
    assert_close(model(weights, X), net.eval()(X).detach())


def test_the_skeletons_own_weights_do_not_matter(named):
    """The negative control: they are replaced in every call, also those that are used twice or tied."""
    net, X = named
    model = functionalize(net)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in model.module.parameters():
        p.fill_(float("nan"))
    assert_close(model(weights, X), net.eval()(X).detach())
    assert not torch.isfinite(model.module(X)).all()


def test_flat_and_named_weights_are_each_others_inverse(named):
    net, _ = named
    model = functionalize(net)
    flat = torch.arange(float(model.num_weights), dtype=torch.float64)
    assert torch.equal(model.flatten(model.unflatten(flat)), flat)
    assert model.num_weights == sum(p.numel() for p in net.parameters())


def test_ordinary_networks_pass_the_door(named):
    net, X = named
    validate_batch_statistics(net)
    model = functionalize(net)
    validate_row_independence(model, dict(net.named_parameters()), X)


def test_copying_a_structure_does_not_touch_the_network():
    net = frozen_layer().train()
    before = {name: p.clone() for name, p in net.named_parameters()}
    model = functionalize(net)
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(model.frozen_state()["0.weight"], before["0.weight"])


def test_what_is_not_trained_is_a_constant():
    assert set(functionalize(frozen_layer()).frozen_state()) == {"0.weight", "0.bias"}
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(functionalize(frozen_batch_norm()).frozen_state()) == buffers
    assert functionalize(mlp()).frozen_state() == {}


def test_one_row_that_is_told_by_its_neighbours_is_found():
    class Neighbour(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x) + 1e-6 * x.roll(1, 0)[:, :3]

    model = functionalize(Neighbour())
    with pytest.raises(ValueError, match="must depend on its own input alone: evaluated together, 8 inputs"):
        validate_row_independence(model, dict(Neighbour().named_parameters()), data()[0])


def test_layers_of_one_sample_pass():
    by_rows = (nn.InstanceNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(3), nn.Dropout(0.0))
    evaluated = (nn.BatchNorm1d(4).eval(), nn.Dropout(0.5).eval(), nn.RReLU().eval())
    for layer in (*by_rows, *evaluated):
        validate_batch_statistics(nn.Sequential(layer))


def test_normalisation_by_the_batch_in_evaluation_mode_is_named():
    layer = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(ValueError, match=r"module 'inner.0' \(BatchNorm1d\) uses the statistics of the batch"):
        validate_batch_statistics(nn.ModuleDict({"inner": nn.Sequential(layer)}))


def test_heads_are_what_they_are_called():
    z = torch.randn(5, 3, dtype=torch.float64)
    assert apply_head(z, "logits") is z
    assert torch.equal(apply_head(z, "log_softmax"), F.log_softmax(z, dim=1))


def test_a_zeroed_final_layer_makes_a_constant_output():
    """Remark 1, Bell et al. (2023): b(x) = log softmax(0)."""
    net = mlp()
    assert zero_final_layer(net) is net
    assert (net(data()[0]) == 0).all()
    assert net[2].weight.requires_grad
    assert not (net[0].weight == 0).any()

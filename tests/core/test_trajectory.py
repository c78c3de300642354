"""The view of a recorded run, and the network as a function of its weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import functionalize, zero_final_layer
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import fingerprint_data
from epk_gp.core.trajectory import batch_of, flat_weights
from epk_gp.recording.setup import validate_batch_statistics, validate_row_independence
from helpers import NETWORKS, assert_close
from loops import CASES, by_hand, data, frozen_batch_norm, frozen_layer, mlp, trained


@pytest.fixture(scope="module", params=["memory", "disk"])
def trajectory(request, tmp_path_factory):
    return trained(CASES["minibatch"], None if request.param == "memory" else tmp_path_factory.mktemp("run") / "run")


def test_states_count_from_either_end_and_others_are_refused(trajectory):
    for s in range(8):
        for name, w in trajectory.weights(s).items():
            assert torch.equal(w, trajectory.weights(s - 8)[name])
    for s in (8, -9):
        with pytest.raises(IndexError, match=rf"state must lie in 0\.\.7 .*: got {s}"):
            trajectory.weights(s)
    before = trajectory.states[2].clone()
    trajectory.weights(2)["0.weight"].zero_()  # a copy
    assert torch.equal(trajectory.states[2], before)
    assert trajectory.step_sizes.tolist() == [0.1] * 7


def test_stored_states_refuse_what_they_do_not_hold(tmp_path):
    states = trained(CASES["minibatch"], tmp_path / "run").states
    assert len(list(states)) == len(states) == 8
    for state in (8, -1):
        with pytest.raises(IndexError, match=rf"state must lie in 0\.\.7: got {state}"):
            states[state]


def test_network_outputs_are_those_of_the_plain_loop(trajectory):
    _, states = by_hand(CASES["minibatch"])
    X = torch.randn(5, 4, dtype=torch.float64)
    for s in (0, 3, 7, -1):
        net = mlp()
        nn.utils.vector_to_parameters(states[s], net.parameters())
        z = net(X).detach()
        assert torch.equal(epk.network_outputs(trajectory, X, state=s), z)
        assert torch.equal(epk.network_outputs(trajectory, X, state=s, head="log_softmax"), F.log_softmax(z, dim=1))


def test_float32_points_give_float32_outputs(trajectory):
    X = torch.randn(5, 4, dtype=torch.float64)
    outputs = epk.network_outputs(trajectory, X.float())
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs.double(), epk.network_outputs(trajectory, X), rtol=1e-5, atol=1e-5)
    assert flat_weights(trajectory, 1, X.float()).dtype == torch.float32


def test_the_skeleton_is_converted_once_and_the_original_stays():
    trajectory = trained(CASES["frozen_batch_norm"])
    converted = trajectory.model.variant(TensorSpec(torch.float32, torch.device("cpu")))
    assert converted is trajectory.model.variant(TensorSpec(torch.float32, torch.device("cpu")))
    assert converted.module[1].running_mean.dtype == torch.float32
    assert trajectory.model.module[1].running_mean.dtype == torch.float64


def test_the_data_digest_tells_values_shapes_types_and_sides_apart():
    X, y = torch.arange(6.0), torch.zeros(6)
    variants = [(X, y), (X.reshape(6, 1), y), (X.double(), y), (X + 1, y), (y, X), (X, y.long())]
    assert len({fingerprint_data(*pair) for pair in variants}) == len(variants)
    assert fingerprint_data(X, y) == fingerprint_data(X.clone(), torch.zeros(12)[::2])


def test_batches_begin_at_multiples_of_64_bytes(trajectory):
    """Workers hold copies of the data, which begin there: the last bits of a gradient depend on it."""
    X = trajectory.inputs
    elsewhere = torch.empty(X.numel() + 9, dtype=X.dtype)
    first = 1 + (-elsewhere.data_ptr() % 64) // X.itemsize
    elsewhere = elsewhere[first : first + X.numel()].view(X.shape).copy_(X)
    assert elsewhere.data_ptr() % 64
    batch, _, _ = batch_of(replace(trajectory, inputs=elsewhere), replace(trajectory.steps[0], batch=None), X)
    assert torch.equal(batch, X)
    assert batch.data_ptr() % 64 == 0


def inputs_for(name, points=6):
    shape = NETWORKS[name][1]
    if shape is None:
        return torch.arange(points * 7).reshape(points, 7) % 20
    return torch.randn(points, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_skeletons_own_weights_do_not_matter(name):
    """The negative control: they are replaced in every call, also those that are used twice or tied."""
    net, X = NETWORKS[name][0]().double(), inputs_for(name)
    model = functionalize(net)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in model.module.parameters():
        p.fill_(float("nan"))
    assert_close(model(weights, X), net.eval()(X).detach())
    assert not torch.isfinite(model.module(X)).all()


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


def test_a_zeroed_final_layer_makes_a_constant_output():
    """Remark 1, Bell et al. (2023): b(x) = log softmax(0)."""
    net = mlp()
    assert zero_final_layer(net) is net
    assert (net(data()[0]) == 0).all()
    assert net[2].weight.requires_grad
    assert not (net[0].weight == 0).any()

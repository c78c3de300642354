"""Jacobians of networks with moving statistics, against loops over autograd on the network in plain words."""

from dataclasses import replace

import pytest
import torch
from statistics_runs import cnn, in_plain_words, mlp, reference_jacobian, reference_outputs, rows, train_by_hand
from torch import nn

from epk_gp.autodiff.dense import (
    PlannedModel,
    WeightSegment,
    all_outputs,
    directional_derivatives,
    flat_columns,
    values,
)
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, statistics_jacobian
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.model import functionalize
from epk_gp.core.trajectory import flat_state, network_outputs

NETWORKS = {
    "mlp": (mlp, (4,)),
    "mlp_without_scale": (lambda: mlp(affine=False), (4,)),
    "cnn": (cnn, (1, 8, 8)),
    "cnn_without_scale": (lambda: cnn(affine=False), (1, 8, 8)),
    "instance_norm": (lambda: cnn(norm=nn.InstanceNorm2d), (1, 8, 8)),
    "plain_words": (lambda: in_plain_words(mlp()), (4,)),
}
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


class Case:
    def __init__(self, name):
        make, shape = NETWORKS[name]
        X, y = rows(16, shape)
        self.net, self.is_plain = make(), name == "plain_words"
        self.trajectory = trained(name, self.net, X, y)
        self.X = torch.randn(5, *shape, dtype=torch.float64)
        self.planned = plan_for(self.trajectory, self.trajectory.model_for(self.X))
        self.start, end = (flat_state(self.trajectory, s, self.X) for s in (1, 2))
        self.d, self.P = end - self.start, self.trajectory.num_weights
        self.at = WeightLocation(self.start, self.d, torch.tensor([0.0, 0.3, 0.3, 0.8, 1.0], dtype=torch.float64))

    def reference(self, head):
        """(E, C, P + Q) at every row's own point."""
        points = zip(self.X, self.at.t, strict=True)
        states = ((x[None], self.start + t * self.d) for x, t in points)
        return torch.cat([reference_jacobian(self.net, self.trajectory, w, x, head) for x, w in states])

    def jacobians(self, at, X, head, num_pairs):
        """(C, E, P), factored where there are few pairs of outputs."""
        cost = ContractionCost(num_pairs, 1, all_dense=not self.planned.plan.supports_interpolation)
        jacobians = layer_jacobians(self.planned, at, X, all_outputs(head), cost)
        return to_flat_order(jacobians, flat_columns(self.planned, all_dense=cost.all_dense))


def trained(name, net, X, y):
    if name != "plain_words":
        return train_by_hand(net, X, y, num_steps=2)
    other = mlp()  # trains; the network in plain words only evaluates
    run = train_by_hand(other, X, y, num_steps=2)
    net.load_state_dict(other.state_dict())
    return replace(run, model=functionalize(net, run.model.names, run.model.statistics))


@pytest.fixture(params=NETWORKS, scope="module")
def case(request):
    torch.manual_seed(0)
    return Case(request.param)


def test_layers_stay_layers_and_outputs_are_those_of_torch_with_the_states_statistics(case):
    plan, is_plain = case.planned.plan, case.is_plain
    assert plan.supports_interpolation == plan.supports_stacking == (not is_plain)
    assert plan.supports_jvp
    assert plan.supports_vmap
    assert is_plain or not plan.dense_params
    f = network_outputs(case.trajectory, case.X)
    last = flat_state(case.trajectory, 2, case.X)
    torch.testing.assert_close(f, reference_outputs(case.net, case.trajectory, last, case.X), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(f, case.net.eval()(case.X), **CLOSE)
    assert (f - network_outputs(case.trajectory, case.X, state=0)).abs().max() > 0.01


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_derivatives_in_weights_and_statistics_are_those_at_each_rows_own_point(case, head):
    expected, P = case.reference(head), case.P
    segment = WeightSegment(case.planned, case.start, case.d, head, 1 << 26)
    f, slope = directional_derivatives(segment, case.X, case.at.t)
    torch.testing.assert_close(f, values(segment, case.X, case.at.t), **CLOSE)
    torch.testing.assert_close(slope, expected @ case.d, **CLOSE)
    assert (slope - expected[..., :P] @ case.d[:P]).abs().max() > 1e-3  # the negative control
    of_weights, of_statistics = expected.transpose(0, 1).split([P, expected.shape[2] - P], dim=2)
    for num_pairs in (9, 10**9):
        torch.testing.assert_close(case.jacobians(case.at, case.X, head, num_pairs), of_weights, **CLOSE)
    row_by_row = replace(case.planned.plan, supports_interpolation=False, supports_vmap=False)
    for plan in (case.planned.plan, row_by_row):
        net = PlannedModel(case.planned.model, plan)
        found = statistics_jacobian(net, case.at, case.X, all_outputs(head))
        torch.testing.assert_close(found, of_statistics, **CLOSE)


def test_jacobians_at_stacked_weights_have_each_parts_statistics(case):
    if not case.planned.plan.supports_stacking:
        pytest.skip("every parameter is dense")
    weights = torch.stack([case.start, case.start + 0.4 * case.d, case.start + case.d])
    X = case.X.repeat(3, *[1] * (case.X.ndim - 1))
    computed = case.jacobians(WeightLocation(weights), X, "logits", 9)
    expected = torch.cat([reference_jacobian(case.net, case.trajectory, w, case.X) for w in weights])
    torch.testing.assert_close(computed, expected[..., : case.P].transpose(0, 1), **CLOSE)


def test_normalisation_of_constant_inputs_does_not_count_as_constant():
    """A first BatchNorm sees constant inputs, but what it scales moves with its statistics."""
    case = Case("mlp_without_scale")
    with torch.no_grad():
        layers = layer_jacobians(case.planned, case.at, case.X, all_outputs("logits"), ContractionCost(9, 1))
    assert not any(getattr(layer, "input_is_constant", False) for layer in layers)


def test_statistics_of_the_module_itself_are_refused():
    case = Case("mlp")
    weights = case.trajectory.model.unflatten(case.start[: case.P])
    with pytest.raises(RuntimeError, match="must be called with those of a state of the run"):
        case.trajectory.model(weights, case.X)

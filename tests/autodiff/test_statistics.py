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
BUDGET = 1 << 26


class Case:
    def __init__(self, name):
        make, shape = NETWORKS[name]
        X, y = rows(16, shape)
        self.net = make()
        self.trajectory = trained(name, self.net, X, y)
        self.X = torch.randn(5, *shape, dtype=torch.float64)
        self.t = torch.tensor([0.0, 0.3, 0.3, 0.8, 1.0], dtype=torch.float64)
        self.planned = plan_for(self.trajectory, self.trajectory.model_for(self.X))
        self.start, end = (flat_state(self.trajectory, s, self.X) for s in (1, 2))
        self.d = end - self.start
        self.P = self.trajectory.num_weights

    def reference(self, head="logits"):
        """(E, C, P + Q) at every row's own point."""
        parts = [
            reference_jacobian(self.net, self.trajectory, self.start + t * self.d, x[None], head)
            for x, t in zip(self.X, self.t, strict=True)
        ]
        return torch.cat(parts)


def trained(name, net, X, y):
    if name != "plain_words":
        return train_by_hand(net, X, y, num_steps=2)
    other = mlp()  # trains; the network in plain words only evaluates
    run = train_by_hand(other, X, y, num_steps=2)
    net.load_state_dict(other.state_dict())
    return replace(run, model=functionalize(net, run.model.names, run.model.statistics))


@pytest.fixture(params=NETWORKS)
def case(request):
    return Case(request.param)


def test_layers_stay_layers_and_kinks_can_be_located():
    for name in NETWORKS:
        plan = Case(name).planned.plan
        assert plan.supports_interpolation == (name != "plain_words")
        assert plan.supports_stacking == (name != "plain_words")
        assert plan.supports_jvp
        assert plan.supports_vmap
        assert name == "plain_words" or not plan.dense_params


def test_outputs_are_those_of_torch_with_the_states_statistics(case):
    f = network_outputs(case.trajectory, case.X)
    last = flat_state(case.trajectory, 2, case.X)
    torch.testing.assert_close(f, reference_outputs(case.net, case.trajectory, last, case.X), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(f, case.net.eval()(case.X), **CLOSE)
    first = network_outputs(case.trajectory, case.X, state=0)
    assert (f - first).abs().max() > 0.01


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_rows_at_their_own_points_have_the_joint_directional_derivative(case, head):
    segment = WeightSegment(case.planned, case.start, case.d, head, BUDGET)
    f, slope = directional_derivatives(segment, case.X, case.t)
    torch.testing.assert_close(f, values(segment, case.X, case.t), **CLOSE)
    expected = case.reference(head)
    torch.testing.assert_close(slope, expected @ case.d, **CLOSE)
    without_statistics = expected[..., : case.P] @ case.d[: case.P]
    assert (slope - without_statistics).abs().max() > 1e-3  # the negative control


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
@pytest.mark.parametrize("is_factored", [True, False])
def test_jacobians_are_those_in_the_weights(case, head, is_factored):
    net = case.planned
    cost = ContractionCost(9 if is_factored else 10**9, 1, all_dense=not net.plan.supports_interpolation)
    at = WeightLocation(case.start, case.d, case.t)
    jacobians = layer_jacobians(net, at, case.X, all_outputs(head), cost)
    columns = flat_columns(net, all_dense=cost.all_dense)
    expected = case.reference(head)[..., : case.P].transpose(0, 1)
    torch.testing.assert_close(to_flat_order(jacobians, columns), expected, **CLOSE)


def test_jacobians_at_stacked_weights_have_each_parts_statistics(case):
    net = case.planned
    if not net.plan.supports_stacking:
        pytest.skip("every parameter is dense")
    weights = torch.stack([case.start, case.start + 0.4 * case.d, case.start + case.d])
    at = WeightLocation(weights[0], stacked=weights)
    X = case.X.repeat(3, *[1] * (case.X.ndim - 1))
    jacobians = layer_jacobians(net, at, X, all_outputs("logits"), ContractionCost(9, 1))
    expected = torch.cat([reference_jacobian(case.net, case.trajectory, w, case.X) for w in weights])
    computed = to_flat_order(jacobians, flat_columns(net, all_dense=False))
    torch.testing.assert_close(computed, expected[..., : case.P].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_gradients_in_the_statistics_are_those_of_each_row(case, head):
    at = WeightLocation(case.start, case.d, case.t)
    computed = statistics_jacobian(case.planned, at, case.X, all_outputs(head))
    expected = case.reference(head)[..., case.P :].transpose(0, 1)
    torch.testing.assert_close(computed, expected, **CLOSE)
    if case.planned.plan.supports_interpolation:
        dense = PlannedModel(case.planned.model, plan_without_interpolation(case))
        torch.testing.assert_close(statistics_jacobian(dense, at, case.X, all_outputs(head)), expected, **CLOSE)


def plan_without_interpolation(case):
    return replace(case.planned.plan, supports_interpolation=False, supports_vmap=False)


def test_normalisation_of_constant_inputs_does_not_count_as_constant():
    """A first BatchNorm sees constant inputs, but what it scales moves with its statistics."""
    case = Case("mlp_without_scale")
    with torch.no_grad():
        at = WeightLocation(case.start, case.d, case.t)
        layers = layer_jacobians(case.planned, at, case.X, all_outputs("logits"), ContractionCost(9, 1))
    assert not any(getattr(layer, "input_is_constant", False) for layer in layers)


def test_statistics_of_the_module_itself_are_refused():
    case = Case("mlp")
    weights = case.trajectory.model.unflatten(case.start[: case.P])
    with pytest.raises(RuntimeError, match="must be called with those of a state of the run"):
        case.trajectory.model(weights, case.X)

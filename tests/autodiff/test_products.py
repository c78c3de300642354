"""Layer Jacobians by parameter are those in flat order, and products with some of their rows those of the whole."""

import pytest
import torch
from torch import nn

from epk_gp.autodiff.dense import Cotangents, flat_columns
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.products import by_parameter
from epk_gp.autodiff.representations import ContractionCost, NodeWeights, to_flat_order
from epk_gp.autodiff.verification import plan_for
from loops import record

NETWORKS = {
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    ),
    "without bias": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 3)),
    "several positions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.LayerNorm((2, 5)), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("all_dense", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_columns_and_products_are_those_in_flat_order(name, all_dense):
    net = NETWORKS[name]().double()
    X, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    X = X.unsqueeze(1) if name == "convolution" else X
    run = record(net, torch.optim.SGD(net.parameters(), lr=0.1), X, y, [None]).trajectory
    planned = plan_for(run, run.model_for(X))
    w = torch.cat([p.detach().flatten() for p in net.parameters()])
    V = torch.randn(2, 8, 3, dtype=torch.float64)
    for is_factored in (False, True):
        cost = ContractionCost(1, 0 if is_factored else 1, all_dense=all_dense)
        jacobians = layer_jacobians(planned, WeightLocation(w), X, Cotangents(lambda z: V), cost)
        expected = to_flat_order(jacobians, flat_columns(planned, all_dense=all_dense))
        parameters = by_parameter(planned, jacobians, all_dense=all_dense)
        points, weights = torch.tensor([0, 2, 0, 0, 2, 0, 3, 0]), torch.rand(8, dtype=torch.float64)
        average = torch.zeros(2, 4, len(w), dtype=torch.float64).index_add(1, points, weights[:, None] * expected)
        out = torch.full((4, 2, len(w)), torch.nan, dtype=torch.float64)
        for gradients, columns in zip(parameters, out.split(list(planned.model.sizes), dim=2), strict=True):
            gradients.write_average(NodeWeights(weights, points, 4), columns, adds=False)
            gradients.write_average(NodeWeights(weights, points, 4), columns, adds=True)
        torch.testing.assert_close(out, 2 * average.transpose(0, 1), rtol=1e-13, atol=1e-14)
        H, first = torch.randn(5, len(w), dtype=torch.float64), 0
        for gradients, shape in zip(parameters, planned.model.shapes, strict=True):
            unit = 1 if gradients.is_bias else gradients.width
            for row in range(shape.numel() // unit):
                columns = slice(first + row * unit, first + (row + 1) * unit)
                found = gradients.products(H[:, columns], slice(row, row + 1))
                torch.testing.assert_close(found, H[:, columns] @ expected[0, :, columns].T, rtol=1e-12, atol=1e-13)
            first += shape.numel()

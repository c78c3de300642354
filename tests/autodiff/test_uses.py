"""Parameters that are no layer's weights have gradients row by row; products with some rows are those of all."""

from dataclasses import replace

import pytest
import torch
from language_models import BY_HAND, BY_TRANSFORMERS, LENGTH, WIDTH, WORDS
from torch import Tensor, nn

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, dense_jacobian, flat_columns, pulled_back
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, NodeWeights, to_flat_order
from epk_gp.autodiff.uses import EmbeddingJacobian, ParameterGradients, by_parameter
from epk_gp.autodiff.verification import build_plan, plan_for
from epk_gp.core.model import FunctionalModel, functionalize
from loops import record


class TablesAndTokens(nn.Module):
    """Sums of tables, in place too, of a part of a parameter, and of types of tokens; a padding row, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=3), nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.types, self.learned = nn.Embedding(2, WIDTH), nn.Parameter(torch.randn(LENGTH + 2, WIDTH))
        self.register_buffer("numbers", torch.zeros(1, LENGTH, dtype=torch.int64))
        self.temperature, self.head = nn.Parameter(torch.tensor(1.3)), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        x = self.words(ids).add_(self.places(torch.arange(length)[None])).add_(0.5 * self.learned[:length])
        return self.head((self.mix(x) + self.types(self.numbers.expand(n, length))).tanh().mean(1) * self.temperature)


def assert_rows_have_their_gradients(model: FunctionalModel, net: nn.Module, X: Tensor, sizes: tuple[int, ...]) -> None:
    w = model.flatten(dict(net.named_parameters()))
    plan = build_plan(model, w, X)
    assert plan.dense_params == ()
    planned, loop = PlannedModel(model, plan), PlannedModel(model, replace(plan, supports_vmap=False))
    for E in sizes:
        rows = X[:E] if len(X) >= E else X.repeat(2, 1)[:E]
        cost = ContractionCost(1, 1, keeps_factors=sizes[0] == E)
        found = layer_jacobians(planned, WeightLocation(w), rows, all_outputs("logits"), cost)
        C = plan.num_outputs
        every = torch.eye(C, dtype=w.dtype)[:, None].expand(-1, E, -1)
        expected = dense_jacobian(loop, model.names, w, rows, every).values
        error = to_flat_order(found, flat_columns(planned, all_dense=False)) - expected
        assert error.abs().max() <= 1e-12 * max(1.0, float(expected.abs().max()))


def test_gradients_require_none_unless_a_graph_is_asked_for() -> None:
    """A cotangent is passed on as it is, and the zeros of an unused leaf require a gradient in torch before 2.10."""
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    cotangents = torch.eye(2).requires_grad_()
    gradients = {graph: pulled_back(used + 1, [used, unused], cotangents, graph) for graph in (False, True)}
    expected = torch.cat([torch.eye(2), torch.zeros(2, 2)], dim=1)
    assert all(torch.equal(found, expected) for found in gradients.values())
    assert [gradients[graph].requires_grad for graph in (False, True)] == [False, True]


OF_PEOPLE = ("nanoGPT not tied", "positions as a parameter", "slices of positions", "a learned token", "Llama")
LANGUAGE_MODELS = {name: {**BY_HAND, **BY_TRANSFORMERS}[name] for name in (*OF_PEOPLE, "GPT-2 eager", "BERT eager")}


@pytest.mark.parametrize("name", ["tables and tokens", *LANGUAGE_MODELS])
def test_every_parameter_of_a_language_model_has_its_rows_gradients(name: str) -> None:
    """Among the numbers of rows is that of the positions, so that neither can be taken for the other."""
    torch.manual_seed(0)
    net = LANGUAGE_MODELS.get(name, TablesAndTokens)().double().eval()
    X = torch.randint(WORDS, (2 * LENGTH, LENGTH), generator=torch.Generator().manual_seed(1))
    assert_rows_have_their_gradients(functionalize(net), net, X, (LENGTH, 1, 2 * LENGTH))


def test_a_table_is_written_out_and_multiplied_some_rows_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, H = torch.randint(9, (4, 5), generator=generator), torch.randn(6, 9 * 3, generator=generator)
    jacobian = EmbeddingJacobian(ids, torch.randn(1, 4, 5, 3, generator=generator), 9)
    whole = jacobian.to_dense()
    expected = torch.zeros(4, 9, 3)
    for point in range(4):
        for place, number in enumerate(ids[point]):
            expected[point, number] += jacobian.output_grads[0, point, place]
    assert torch.allclose(whole[0], expected.flatten(1))
    gradients = ParameterGradients(jacobian, 3)
    parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    assert torch.equal(torch.cat([gradients.written(rows) for rows in parts], dim=2), whole)
    columns = [slice(3 * rows.start, 3 * rows.stop) for rows in parts]
    products = sum(gradients.products(H[:, own], rows) for own, rows in zip(columns, parts, strict=True))
    assert torch.allclose(products, H @ expected.flatten(1).T, atol=1e-5)


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

"""Blocks are those of the definition, however many steps go together, and cost what they should."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp as epk
import reference
from epk_gp.core.plans import MemoryPlan
from epk_gp.quadrature.rules import Rule
from helpers import NETWORKS, assert_blocks, assert_close, gram_diagonal_blocks, make_case

RULE = epk.gauss_legendre(2)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("leaky_relu", "gelu")])
def test_blocks_over_both_copies_equal_dense_jacobians_and_are_a_kernel(name: str) -> None:
    case, is_train = make_case(name, steps=2), torch.tensor([False, True, True, False, False])
    X = torch.cat([case.test[:1], case.trajectory.inputs[:2], case.trajectory.inputs[:2]])
    points, some = epk.Points(X, is_train), epk.Points(X[:3], is_train[:3])
    for head in case.heads:
        kernel = epk.PathKernel(case.trajectory, head, RULE)
        expected = reference.gram_block(case.trajectory, points, points, head, RULE)
        assert_blocks(kernel, points, points, expected)
        assert_blocks(kernel, some, points, expected[:3])
        flat = kernel.block(points, points).flatten(2).flatten(0, 1)
        assert_close(flat, flat.T)
        eigenvalues = torch.linalg.eigvalsh(flat)
        assert eigenvalues.min() >= -1e-12 * eigenvalues.max()


@pytest.mark.parametrize("rule", [epk.adaptive(1e-3), epk.QuadratureRule.left_endpoint()], ids=["adaptive", "left"])
def test_a_trace_takes_the_rules_tiles_and_sums_of_other_blocks(rule, tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *args: 2)
    case = make_case("relu", steps=1)
    points = epk.Points(torch.cat([case.trajectory.inputs[:3], case.test[:1]]), torch.arange(4) < 3)
    kernel = epk.PathKernel(case.trajectory, rule=rule)
    expected = kernel.block_per_class(points, points).sum(0)
    assert_close(kernel.trace_block(points, points), expected)
    for settings in ({"accumulate": torch.float64}, {"checkpoint": tmp_path}, {"checkpoint": tmp_path}):
        assert_close(kernel.trace_block(points, points, **settings), expected)
    with pytest.raises(ValueError, match="must be of this very computation"):  # a trace's sums are no others
        kernel.block_per_class(points, points, checkpoint=tmp_path)
    narrow = epk.Points(points.X.float(), points.is_train)
    summed = kernel.trace_block(narrow, narrow, accumulate=torch.float64)
    assert_close(summed.float(), expected.float(), rounding=100)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation returned in one tensor."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numel = max(self.numel, found.untyped_storage().nbytes() // found.itemsize)
        return found


@pytest.mark.parametrize("kinds", [(False, True), (False, False), (True, True)])
def test_a_trace_has_no_tensor_with_all_outputs_of_all_pairs(kinds, monkeypatch):
    case, X = make_case("relu", steps=1), torch.randn(300, 8, dtype=torch.float64)
    monkeypatch.setattr("epk_gp.autodiff.representations._SCALE_AND_ADD", 0)  # layers are factored
    a, b, tiles, plain = epk.Points(X, kinds[0]), epk.Points(X, kinds[1]), list[int](), MemoryPlan.tile_points
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda plan, n, size: tiles.append(n) or plain(plan, n, size))
    for head in case.heads:
        kernel = epk.PathKernel(case.trajectory, head, RULE)
        kernel.trace_block(epk.Points(X[:2], True), epk.Points(X[:2], False))  # makes the plan
        tiles.clear()
        with LargestTensor() as of_trace:
            kernel.trace_block(a, b)
        with LargestTensor() as per_class:
            kernel.block_per_class(a, b)
        assert of_trace.numel == 300 * 300
        assert per_class.numel >= 3 * 300 * 300  # the negative control
        assert set(tiles) == {1, 3}  # sums per pair of points, from which the memory plan derives the size of a tile


def test_copies_of_one_input_are_different_points_and_one_dtype_near_another() -> None:
    """The negative control: freezing the gradient or not changes the kernel."""
    case = make_case("tanh")
    X = case.trajectory.inputs
    train, test = (gram_diagonal_blocks(case.trajectory, epk.Points(X, is_train)) for is_train in (True, False))
    assert (train - test).abs().max() > 1e-3 * train.abs().max()
    narrow = gram_diagonal_blocks(case.trajectory, epk.Points(X.float(), False))
    assert narrow.dtype == torch.float32
    assert_close(narrow, test.float(), rounding=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "cosine"])
def test_small_budget_changes_nothing_but_the_order_of_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name, steps=2)
    points = epk.Points(torch.cat([case.trajectory.inputs[:3], case.test[:3]]), torch.arange(6) < 3)
    whole = epk.gram_block(case.trajectory, points, points)
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *args: 2)
    assert_close(epk.gram_block(case.trajectory, points, points), whole)
    assert_close(gram_diagonal_blocks(case.trajectory, points), torch.einsum("ncnd->ncd", whole).contiguous())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lr", "fine", "rounding"), [
    ("relu", 0.05, epk.QuadratureRule.midpoint(1000), 1e11), ("attention", 0.2, epk.gauss_legendre(20), 1e5),
])  # fmt: skip
def test_adaptive_gram_equals_many_nodes(name: str, lr: float, fine: Rule, rounding: float) -> None:
    case = make_case(name, steps=2, lr=lr)
    X = torch.cat([case.test[:1], case.trajectory.inputs[:1]])
    a, b = epk.Points(case.test[:2], False), epk.Points(X, torch.tensor([False, True]))
    rules = epk.adaptive(1e-14), fine, epk.QuadratureRule.left_endpoint()
    found, exact, coarse = (epk.gram_block(case.trajectory, a, b, rule=rule) for rule in rules)
    assert_close(found, exact, rounding=rounding)
    assert (coarse - exact).abs().max() > 100 * (found - exact).abs().max()


def test_step_weights_replace_the_learning_rates() -> None:
    run, points = make_case("tanh").trajectory, epk.Points(make_case("tanh").test, False)
    etas, each = torch.tensor([0.0, 2.0, 0.5, 0.0], dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    K, one, other = (epk.gram_block(run, points, points, step_weights=weights) for weights in (etas, each[1], each[2]))
    assert_close(K, 2.0 * one + 0.5 * other)


COUNTS = (1, 3, 1 << 20)  # the last: all steps


def together(count: int):
    """Let as many steps go together as that, of networks of which several can."""
    return patch.object(MemoryPlan, "fitting_lines", lambda self, *sizes: count)


@pytest.mark.parametrize("name", ["wide", "relu", "norms", "attention", "tied", "twice", "cnn"])
@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")  # of the fixed rule
def test_blocks_and_contributions_are_those_of_the_definition(name):
    case, rule = make_case(name), epk.gauss_legendre(3)
    run, head = case.trajectory, case.heads[-1]
    test, train = epk.Points(case.test, is_train=False), epk.Points(run.inputs, is_train=True)
    unequal = replace(run, steps=tuple(replace(step, lr=step.lr * (1 + step.index)) for step in run.steps))
    expected = reference.gram_block(unequal, test, train, head, rule)
    samples = reference.contributions(run, case.test, head, rule)
    for count in COUNTS:
        with together(count):
            assert_close(epk.gram_block(unequal, test, train, head=head, rule=rule), expected)
            assert_close(epk.attribute(run, case.test, head=head, rule=rule).samples, samples)
            assert epk.attribute(run, case.test, head=head).max_error <= 1e-12
            assert epk.reconstruct(run, case.test, head=head).max_error <= 1e-12


class Positions(nn.Module):
    """A position is looked up by a range that no input carries, and as long as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(5, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = self.places(torch.arange(x.shape[1]))
        return self.out(torch.tanh(self.words(x) + places).mean(1))


def test_a_range_that_is_as_long_as_there_are_rows_is_none_of_them():
    torch.manual_seed(0)
    net, X = Positions().double(), torch.randint(5, (8, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    run = epk.train(net, X, torch.arange(8) % 3, steps=6, batch_size=4, optimizer=optimizer)
    for n in (1, 2, 3, 6):  # on 6 lines: 6, 12, ... rows
        with together(1):
            alone = epk.attribute(run, X[:n])
        for count in (2, 3, 6):
            with together(count):
                assert_close(epk.attribute(run, X[:n]).samples, alone.samples)


class Branch(nn.Module):
    """Calls a ReLU more where a weight is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.hidden(x))
        return self.out(torch.relu(x) if bool(self.out.bias[0] > 0) else x)


def test_another_branch_at_the_end_of_a_step_is_a_clear_error():
    torch.manual_seed(0)
    net, X = Branch().double(), torch.randn(6, 2, dtype=torch.float64)
    with torch.no_grad():
        net.out.bias.copy_(torch.tensor([-1e-3, 0.0]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    run = epk.train(net, X, torch.zeros(6, dtype=torch.int64), steps=2, optimizer=optimizer)
    for count in COUNTS:
        refused = pytest.raises(ValueError, match="must call the same functions at both ends of a step|tensors")
        with together(count), refused:
            epk.attribute(run, X[:1])

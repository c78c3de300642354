from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp as epk
import reference
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.plans import MemoryPlan
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.quadrature.rules import Rule
from helpers import NETWORKS, Case, assert_close, make_case

RULE = epk.gauss_legendre(2)
MIXES = {
    "train_train": (True, True),
    "test_train": (False, True),
    "train_test": (True, False),
    "test_test": (False, False),
    "mixed": (torch.tensor([True, False, False, True, False]), torch.tensor([False, True, True])),
}


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, steps=2)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("case", "mix"),
    [(name, "mixed") for name in NETWORKS]
    + [(name, mix) for name in ("relu", "cnn", "wide", "attention", "twice", "one_class") for mix in list(MIXES)[:-1]],
    indirect=["case"],
)
def test_gram_block_equals_dense_jacobians(case: Case, mix: str) -> None:
    left, right = MIXES[mix]
    a, b = epk.Points(case.test, left), epk.Points(case.trajectory.inputs[:3], right)
    for head in case.heads:
        expected = reference.gram_block(case.trajectory, a, b, head, RULE)
        assert_close(epk.gram_block(case.trajectory, a, b, head=head, rule=RULE), expected)
        per_class = gram_block_per_class(case.trajectory, a, b, head=head, rule=RULE)
        assert_close(per_class, torch.einsum("ncmc->cnm", expected).contiguous())
        trace = epk.PathKernel(case.trajectory, head, RULE).trace_block(a, b)
        assert_close(trace, torch.einsum("ncmc->nm", expected))


@pytest.mark.parametrize("name", ["wide", "wide_conv", "twice"])
@pytest.mark.parametrize("is_train", [True, False])
def test_a_trace_of_points_with_themselves_is_symmetric(
    name: str, is_train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 2)
    case = make_case(name, steps=2)
    points, others = (epk.Points(case.trajectory.inputs, is_train) for _ in range(2))
    for head in case.heads:
        kernel = epk.PathKernel(case.trajectory, head, RULE)
        own = kernel.trace_block(points, points)
        assert torch.equal(own, own.T)
        assert_close(own, kernel.trace_block(points, others))


@pytest.mark.parametrize("rule", [epk.adaptive(1e-3), epk.left_endpoint()], ids=["adaptive", "left"])
def test_a_trace_takes_the_rules_tiles_and_sums_of_other_blocks(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *args: 2)
    case = make_case("relu", steps=1)
    points = epk.Points(torch.cat([case.trajectory.inputs[:3], case.test[:1]]), torch.arange(4) < 3)
    kernel = epk.PathKernel(case.trajectory, rule=rule)
    expected = kernel.block_per_class(points, points).sum(0)
    assert_close(kernel.trace_block(points, points), expected)
    for settings in ({"accumulate": torch.float64}, {"checkpoint": tmp_path}, {"checkpoint": tmp_path}):
        assert_close(kernel.trace_block(points, points, epk.ComputeOptions(**settings)), expected)
    with pytest.raises(ValueError, match="must be of this very computation"):  # a trace's sums are no others
        kernel.block_per_class(points, points, epk.ComputeOptions(checkpoint=tmp_path))
    narrow = epk.Points(points.X.float(), points.is_train)
    summed = kernel.trace_block(narrow, narrow, epk.ComputeOptions(accumulate=torch.float64))
    assert_close(summed.float(), expected.float(), rounding=100)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation returned in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numel = max(self.numel, found.untyped_storage().nbytes() // found.itemsize)
        return found


@pytest.mark.parametrize("kinds", [(False, True), (False, False), (True, True)])
def test_a_trace_has_no_tensor_with_all_outputs_of_all_pairs(
    kinds: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("relu", steps=1)
    monkeypatch.setattr("epk_gp.autodiff.representations._SCALE_AND_ADD", 0)  # layers are factored
    X = torch.randn(300, 8, dtype=torch.float64)
    a, b = epk.Points(X, kinds[0]), epk.Points(X, kinds[1])
    tiles: list[int] = []
    plain = MemoryPlan.tile_points
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda plan, n, size: tiles.append(n) or plain(plan, n, size))
    for head in case.heads:
        kernel = epk.PathKernel(case.trajectory, head, RULE)
        largest = {}
        kernel.trace_block(epk.Points(X[:2], True), epk.Points(X[:2], False))  # makes the plan
        tiles.clear()
        for name in ("trace_block", "block_per_class"):
            with LargestTensor() as largest[name]:
                getattr(kernel, name)(a, b)
        assert largest["trace_block"].numel == 300 * 300
        assert largest["block_per_class"].numel >= 3 * 300 * 300  # the negative control
        assert set(tiles) == {1, 3}  # sums per pair of points, from which the memory plan derives the size of a tile


def test_gram_over_both_copies_is_a_kernel(case: Case) -> None:
    """Symmetric and positive semi-definite, whatever the rule's error; diagonal blocks agree."""
    X = torch.cat([case.trajectory.inputs[:4], case.trajectory.inputs[:4]])
    points = epk.Points(X, torch.arange(8) < 4)
    for head in case.heads:
        K = epk.gram_block(case.trajectory, points, points, head=head, rule=RULE)
        assert_close(
            gram_diagonal_blocks(case.trajectory, points, head=head, rule=RULE),
            torch.einsum("ncnd->ncd", K).contiguous(),
        )
        flat = K.flatten(2).flatten(0, 1)
        assert_close(flat, flat.T)
        eigenvalues = torch.linalg.eigvalsh(flat)
        assert eigenvalues.min() >= -1e-12 * eigenvalues.max()


@pytest.mark.slow
def test_an_adaptive_gram_is_a_kernel_to_its_tolerance_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of test copies have their own nodes, and so have points against training copies."""
    case = make_case("relu", steps=1, lr=0.5)
    X = torch.cat([case.trajectory.inputs[:2], case.trajectory.inputs[:4]])
    points = epk.Points(X, torch.arange(6) < 2)
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *args: 2)
    blocks = {}
    for tol in (0.1, 1e-10):
        K = epk.gram_block(case.trajectory, points, points, rule=epk.adaptive(tol)).flatten(2).flatten(0, 1)
        eigenvalues = torch.linalg.eigvalsh((K + K.T) / 2)
        assert eigenvalues.min() >= -tol * eigenvalues.max()
        blocks[tol] = K / eigenvalues.max()
    assert (
        blocks[0.1] - blocks[1e-10]
    ).abs().max() > 1e-6  # the negative control: a loose tolerance is seen in the entries


def test_copies_of_one_input_are_different_points() -> None:
    """The negative control: freezing the gradient or not changes the kernel."""
    case = make_case("tanh")
    X = case.trajectory.inputs
    train, test = (gram_diagonal_blocks(case.trajectory, epk.Points(X, is_train)) for is_train in (True, False))
    assert (train - test).abs().max() > 1e-3 * train.abs().max()


def test_averaged_jacobians_understate_the_test_variance() -> None:
    """The negative control: <Phi, Phi> is not the test x test block (docs/theory.md, section 2)."""
    case = make_case("tanh", lr=1.0)
    rule, s = epk.gauss_legendre(8), 0
    only_first = torch.zeros(case.trajectory.num_steps, dtype=torch.float64)
    only_first[s] = 1.0
    right = gram_diagonal_blocks(
        case.trajectory, epk.Points(case.test, False), head="logits", rule=rule, step_weights=only_first
    )
    phi = torch.stack(
        [sum(w * reference.jacobian(case.trajectory, s, t, x, "logits") for t, w in rule) for x in case.test]
    )
    short = right - phi @ phi.transpose(1, 2)
    assert torch.linalg.eigvalsh(short).min() > -1e-12
    assert short.diagonal(dim1=1, dim2=2).max() > 1e-4 * right.max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "cnn", "cosine", "transformer"])
def test_small_budget_changes_nothing_but_the_order_of_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name)
    points = epk.Points(torch.cat([case.trajectory.inputs, case.test]), torch.arange(12) < 7)
    whole = epk.gram_block(case.trajectory, points, points)
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *args: 2)
    assert_close(epk.gram_block(case.trajectory, points, points), whole)
    assert_close(gram_diagonal_blocks(case.trajectory, points), torch.einsum("ncnd->ncd", whole).contiguous())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_adaptive_gram_equals_many_exact_nodes(name: str) -> None:
    """Against composite midpoints so fine that a kink's share is below the tolerance."""
    case = make_case(name, steps=2, lr=0.05)
    a, b = (
        epk.Points(case.test[:2], False),
        epk.Points(torch.cat([case.test[:1], case.trajectory.inputs[:1]]), torch.tensor([False, True])),
    )
    found = epk.gram_block(case.trajectory, a, b, rule=epk.adaptive(1e-13))
    fine = epk.gram_block(case.trajectory, a, b, rule=epk.midpoint(1000))
    coarse = epk.gram_block(case.trajectory, a, b, rule=epk.left_endpoint())
    assert_close(found, fine, rounding=1e11)
    assert (coarse - fine).abs().max() > 100 * (found - fine).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tanh", "wide_conv", "cosine", "attention"])
def test_adaptive_gram_equals_gauss_nodes_where_all_is_smooth(name: str) -> None:
    case = make_case(name, steps=2)
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, torch.arange(7) < 3)
    found = epk.gram_block(case.trajectory, a, b, rule=epk.adaptive(1e-14))
    assert_close(found, epk.gram_block(case.trajectory, a, b, rule=epk.gauss_legendre(20)), rounding=1e5)


def test_step_weights_replace_the_learning_rates() -> None:
    case = make_case("tanh")
    points = epk.Points(case.test, False)
    etas = torch.tensor([0.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    single = [
        epk.gram_block(case.trajectory, points, points, step_weights=torch.eye(4, dtype=torch.float64)[s])
        for s in range(4)
    ]
    assert_close(epk.gram_block(case.trajectory, points, points, step_weights=etas), 2.0 * single[1] + 0.5 * single[2])


def test_float32_points_give_float32_blocks_near_the_float64_ones() -> None:
    case = make_case("relu")
    points = epk.Points(case.test, False)
    narrow = epk.Points(case.test.float(), False)
    found = epk.gram_block(case.trajectory, narrow, narrow)
    assert found.dtype == torch.float32
    assert_close(found, epk.gram_block(case.trajectory, points, points).float(), rounding=100)


def test_layers_are_factored_and_the_rest_is_not() -> None:
    """What the plan must find for the engine to be fast: no layer is left to dense Jacobians by mistake."""
    plan = plan_for((case := make_case("cnn")).trajectory, case.trajectory.model_for(case.test)).plan
    assert plan.bias_of == {f"{number}.weight": f"{number}.bias" for number in (0, 3, 5, 7)}
    assert plan.dense_params == ()
    assert plan.supports_interpolation
    assert plan.supports_jvp
    assert plan.supports_batched_vjp


def test_a_weight_outside_its_layer_is_not_factored() -> None:
    assert (
        "a.weight"
        in plan_for((case := make_case("tied")).trajectory, case.trajectory.model_for(case.test)).plan.dense_params
    )
    assert (
        "out.weight"
        in plan_for((case := make_case("cosine")).trajectory, case.trajectory.model_for(case.test)).plan.dense_params
    )

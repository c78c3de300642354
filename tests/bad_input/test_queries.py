"""Bad points, heads, rules and budgets at every function that queries a recorded run: one clear error each."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.kernel_machine.baselines import single_machine
from helpers import with_value
from loops import CASES, data, mlp, sgd, trained

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF = float("nan"), float("inf")
X, Y = data()


@pytest.fixture(scope="module")
def single_output():
    net = mlp(outputs=1)
    return epk.train(net, X, X[:, :1], optimizer=sgd(net), steps=1, loss=epk.MeanSquaredError())


ASK = {
    "network_outputs": lambda t, X, **k: epk.network_outputs(t, X, **k),
    "reconstruct": lambda t, X, **k: epk.reconstruct(t, X, **k),
    "attribute": lambda t, X, **k: epk.attribute(t, X, **k),
    "single_machine": lambda t, X, **k: single_machine(trained(CASES["full_batch"]), X, **k),
    "gram_block": lambda t, X, **k: epk.gram_block(t, epk.Points(X, True), epk.Points(X, False), **k),
    "gram_block_per_class": lambda t, X, **k: gram_block_per_class(t, epk.Points(X, True), epk.Points(X, False), **k),
    "gram_diagonal_blocks": lambda t, X, **k: gram_diagonal_blocks(t, epk.Points(X, False), **k),
    "path_features": lambda t, X, **k: epk.path_features(t, X, 16, **k),
}


GRAM = {name: ask for name, ask in ASK.items() if name.startswith("gram")}


every_question = pytest.mark.parametrize("ask", ASK.values(), ids=ASK.keys())


every_gram = pytest.mark.parametrize("ask", GRAM.values(), ids=GRAM.keys())


INPUTS = {
    "no_tensor": ([[1.0] * 4], TypeError, "X must be a torch.Tensor: got list"),
    "too_narrow": (X[:, :3], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(10, 3\)"),
    "too_deep": (X[None], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(1, 10, 4\)"),
    "one_point": (X[0], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(4,\)"),
    "scalar": (X[0, 0], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(\)"),
    "empty": (X[:0], ValueError, "X must hold at least one point: got an empty batch"),
    "integers": (X.long(), TypeError, "X must be of the training inputs' kind .torch.float64.: got torch.int64"),
    "half": (X.half(), TypeError, "X must be float32 or float64: got torch.float16"),
    "complex": (X + 0j, TypeError, "X must be of the training inputs' kind"),
    "nan": (with_value(X, NAN, 2), ValueError, "X must be finite: row 2 holds NaN or infinity"),
    "infinite": (with_value(X, INF, 5), ValueError, "X must be finite: row 5 holds NaN or infinity"),
}


@every_question
@pytest.mark.parametrize(("inputs", "error", "message"), INPUTS.values(), ids=INPUTS.keys())
def test_points_that_the_network_cannot_take_are_refused(trajectory, ask, inputs, error, message):
    with pytest.raises(error, match=message):
        ask(trajectory, inputs)


@every_question
@pytest.mark.parametrize("head", ["softmax", "", "LOGITS"])
def test_an_unknown_head_is_refused(trajectory, ask, head):
    with pytest.raises(
        ValueError, match=r"head must be one of \['logits', 'log_softmax'\]: got|needs head=\"log_softmax\""
    ):
        ask(trajectory, X, head=head)


@pytest.mark.parametrize("ask", [ask for name, ask in ASK.items() if name != "single_machine"])
def test_the_log_softmax_of_one_output_is_refused(single_output, ask):
    with pytest.raises(ValueError, match=r'head="log_softmax" needs at least 2 outputs.*Use head="logits"'):
        ask(single_output, X, head="log_softmax")


@pytest.mark.parametrize("ask", [ask for name, ask in ASK.items() if name not in ("network_outputs", "path_features")])
@pytest.mark.parametrize("rule", [4, "gauss", None, epk.gauss_legendre], ids=["number", "name", "none", "function"])
def test_what_is_no_rule_is_refused(trajectory, ask, rule):
    with pytest.raises(TypeError, match="rule must be a quadrature rule such as"):
        ask(trajectory, X, rule=rule)


@every_gram
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(6), r"step_weights must have shape \(7,\): got \(6,\)"),
        (torch.ones(7, 1), r"step_weights must have shape \(7,\): got \(7, 1\)"),
        (torch.tensor([1.0] * 6 + [-1e-9]), "step_weights must be finite and not negative"),
        (torch.tensor([NAN] + [1.0] * 6), "step_weights must be finite and not negative"),
        (torch.tensor([INF] + [1.0] * 6), "step_weights must be finite and not negative"),
    ],
    ids=["too_few", "column", "negative", "nan", "infinite"],
)
def test_bad_step_weights_are_refused(trajectory, ask, weights, message):
    with pytest.raises(ValueError, match=message):
        ask(trajectory, X, step_weights=weights)


@every_gram
@pytest.mark.parametrize("budget", [0, -1, (1 << 20) - 1])
def test_a_memory_budget_that_is_none_is_refused(trajectory, ask, budget):
    with pytest.raises(ValueError, match=f"memory_budget must be at least 1 MiB .*: got {budget}"):
        ask(trajectory, X, memory_budget=budget)


@pytest.mark.parametrize("block", [epk.gram_block, gram_block_per_class])
def test_points_of_two_dtypes_are_refused(trajectory, block):
    with pytest.raises(ValueError, match=r"share dtype and device: got torch.float64 on cpu and torch.float32 on cpu"):
        block(trajectory, epk.Points(X, True), epk.Points(X.float(), False))


@pytest.mark.parametrize("block", [epk.gram_block, gram_block_per_class])
def test_the_wrong_side_is_named(trajectory, block):
    with pytest.raises(ValueError, match=r"b.X must be finite: row 2"):
        block(trajectory, epk.Points(X, True), epk.Points(with_value(X, NAN, 2), False))


MASKS = {
    "too_short": (torch.ones(9, dtype=torch.bool), ValueError, r"one entry per point: got shape \(9,\) for 10 points"),
    "column": (torch.ones(10, 1, dtype=torch.bool), ValueError, r"one entry per point: got shape \(10, 1\) for 10"),
    "integers": (torch.ones(10, dtype=torch.int64), TypeError, "bool or a bool tensor: got torch.int64. Convert it"),
    "floats": (torch.ones(10), TypeError, "bool or a bool tensor: got torch.float32"),
    "list": ([True] * 10, TypeError, "bool or a bool tensor: got list"),
    "one": (1, TypeError, "bool or a bool tensor: got int"),
    "nothing": (None, TypeError, "bool or a bool tensor: got NoneType"),
}


@pytest.mark.parametrize(("mask", "error", "message"), MASKS.values(), ids=MASKS.keys())
def test_a_copy_mask_that_does_not_fit_is_refused(mask, error, message):
    with pytest.raises(error, match=f"is_train must .*{message}"):
        epk.Points(X, mask)


def test_a_run_on_integers_refuses_floats():
    trajectory = trained(CASES["integer_inputs"])
    with pytest.raises(TypeError, match="X must be of the training inputs' kind .torch.int64.: got torch.float64"):
        epk.network_outputs(trajectory, X[:, :3])

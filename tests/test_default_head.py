"""The head that nobody names follows the run's loss, at every public door."""

import ast
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.analysis.counterfactual import leave_one_out
from epk_gp.core.losses import NegativeLogLikelihood, as_loss, resolve_head
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.gram.thinning import thin_path
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import by_step
from epk_gp.kernel_machine.baselines import (
    chen_machine,
    domingos_machine,
    k_prime_block,
    single_machine,
    tangent_trajectory,
)
from report_cases import embedded

RULE = epk.gauss_legendre(2)
HALVES = torch.full((1, 6), 0.5, dtype=torch.float64)
TEST = torch.randn(2, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def recorded(loss: Any, outputs: int = 3, *, log_probabilities: bool = False) -> epk.Trajectory:
    """Record three steps on all of six points."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs), *[nn.LogSoftmax(dim=1)] * log_probabilities]
    net = nn.Sequential(*layers).double()
    X = torch.randn(6, 4, dtype=torch.float64)
    is_regression = isinstance(as_loss(loss), epk.MeanSquaredError | epk.PerSampleLoss)
    y = torch.randn(6, outputs, dtype=torch.float64) if is_regression else torch.arange(6) % outputs
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3, loss=loss)


def squared(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum(1)


@pytest.fixture(scope="module")
def regression() -> epk.Trajectory:
    return recorded(epk.MeanSquaredError())


@pytest.fixture(scope="module")
def classification() -> epk.Trajectory:
    return recorded(epk.CrossEntropy())


@pytest.fixture(scope="module")
def one_output() -> epk.Trajectory:
    return recorded(epk.MeanSquaredError(), 1)


def pair(run: epk.Trajectory) -> tuple[epk.Points, epk.Points]:
    return epk.Points(TEST, is_train=False), epk.Points(run.inputs, is_train=True)


def kernel_values(run: epk.Trajectory, **head: Any) -> Tensor:
    return epk.EPKKernel(run, rule=RULE, **head)(epk.test_copy(TEST)).to_dense()


def thinning_errors(run: epk.Trajectory, **head: Any) -> Tensor:
    thinned = thin_path(run, 3, TEST, rule=RULE, **head)
    return torch.tensor([thinned.error, thinned.max_error], dtype=torch.float64)


def reported(run: epk.Trajectory, **head: Any) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        file = epk.write_report(
            Path(folder) / "report.html", run, TEST, outputs="all", rule=RULE, kernel_points=0, **head
        )
        content = embedded(file)
    outputs = [output for point in content["points"] for output in point["explanations"].values()]
    return torch.tensor([output["running"] for output in outputs]).double() * content["quantum"]


DOORS: dict[str, Callable[..., Tensor]] = {
    "gram.path_kernel.PathKernel": lambda run, **h: epk.PathKernel(run, rule=RULE, **h).block(*pair(run)),
    "gram.path_kernel.gram_block": lambda run, **h: epk.gram_block(run, *pair(run), rule=RULE, **h),
    "gram.path_kernel.gram_block_per_class": lambda run, **h: gram_block_per_class(run, *pair(run), rule=RULE, **h),
    "gram.path_kernel.gram_diagonal_blocks": lambda run, **h: gram_diagonal_blocks(run, pair(run)[0], rule=RULE, **h),
    "gram.path_features.path_features": lambda run, **h: epk.path_features(run, TEST, 16, num_probe=0, **h) + 0,
    "gram.thinning.thin_path": thinning_errors,
    "kernels.epk.EPKKernel": kernel_values,
    "kernel_machine.reconstruct.reconstruct": lambda run, **h: epk.reconstruct(run, TEST, rule=RULE, **h).outputs,
    "kernel_machine.attribute.attribute": lambda run, **h: epk.attribute(run, TEST, rule=RULE, **h).samples,
    "kernel_machine.attribute.attribute_by": lambda run, **h: (
        attribute_by(run, TEST, [by_step(run)], rule=RULE, **h).values
    ),
    "kernel_machine.attribute.attribute_many": lambda run, **h: (
        attribute_many(run, TEST, [[]], rule=RULE, **h)[0].values
    ),
    "report.write.write_report": reported,
    "kernel_machine.influence.influence": lambda run, **h: epk.influence(run, TEST, **h).values,
    "kernel_machine.retrain.Retraining": lambda run, **h: epk.retrain(run, HALVES).outputs(TEST, **h),
    "analysis.counterfactual.leave_one_out": lambda run, **h: leave_one_out(run, TEST, **h),
    "kernel_machine.baselines.k_prime_block": lambda run, **h: k_prime_block(run, TEST, TEST, rule=RULE, **h),
}
# They have no kernel machine of a regression to give, and are tested by themselves below.
OTHER_DOORS = {
    "kernel_machine.single_machine.single_machine",
    "cli.gram_commands.gram",
    "cli.commands.attribute",
    "cli.commands.influence",
    "cli.commands.report",
    "cli.commands.verify",
    # names on pictures: None stands for outputs of an unknown kind
    "plots.contributions.attribution_figure",
    "plots.contributions.influence_figure",
    "plots.summaries.reconstruction_figure",
    "autodiff.cotangents.Cotangents",  # internal: None stands for other outputs than a head's
}
# What they compute has logits in its definition: the network's own outputs, a GP on logits, two machines of the logits.
LOGITS_DOORS = {
    "core.trajectory.network_outputs",
    "gp.models.LogitGP",
    "kernel_machine.baselines.chen_machine",
    "kernel_machine.baselines.domingos_machine",
}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())


def head_defaults() -> dict[str, str]:
    """Name everything public whose `head` has a default, in the source itself, with the default."""
    found = {}
    root = Path(epk.__file__).parent
    for file in root.rglob("*.py"):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found |= {f"{module}.{node.name}": ast.unparse(value) for value in _defaults_of_head(node)}
    return found


def _defaults_of_head(node: ast.FunctionDef | ast.ClassDef) -> list[ast.expr]:
    if isinstance(node, ast.ClassDef):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and part.value is not None]
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        own = [field.value for field in fields if ast.unparse(field.target) == "head"]
        return own + [value for method in methods for value in _defaults_of_head(method)]
    positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
    pairs = [*zip(positional, node.args.defaults, strict=True)]
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [value for argument, value in pairs if argument.arg == "head" and value is not None]


def test_every_default_of_a_head_is_tested_here():
    defaults = head_defaults()
    assert {name for name, default in defaults.items() if default == "None"} == DOORS.keys() | OTHER_DOORS
    assert {name for name, default in defaults.items() if default == "'logits'"} == LOGITS_DOORS
    assert len(defaults) == len(DOORS) + len(OTHER_DOORS) + len(LOGITS_DOORS)


@every_door
def test_a_regression_is_explained_by_its_outputs(regression, door):
    found = door(regression)
    assert torch.equal(found, door(regression, head="logits"))
    assert torch.equal(found, door(regression, head=None))
    other = door(regression, head="log_softmax")
    assert (found - other).abs().max() > 1e-3 * found.abs().max()  # the control: the head matters here


@every_door
def test_a_classification_is_explained_by_its_log_softmax(classification, door):
    found = door(classification)
    assert torch.equal(found, door(classification, head="log_softmax"))
    other = door(classification, head="logits")
    assert (found - other).abs().max() > 1e-3 * found.abs().max()


@every_door
def test_one_output_needs_no_head(one_output, door):
    assert torch.equal(door(one_output), door(one_output, head="logits"))


LOSSES = {
    "cross_entropy": (epk.CrossEntropy(), "log_softmax"),
    "cross_entropy_with_options": (epk.CrossEntropy("sum", (1.0, 2.0, 3.0), 0.1), "log_softmax"),
    "torch_cross_entropy": (as_loss(nn.CrossEntropyLoss()), "log_softmax"),
    "squared_error": (epk.MeanSquaredError(), "logits"),
    "torch_squared_error": (as_loss(nn.MSELoss()), "logits"),
    "log_probabilities": (NegativeLogLikelihood(), "logits"),
    "function": (epk.PerSampleLoss(F.cross_entropy, reduction="mean"), "logits"),
    "torch_module": (as_loss(nn.HuberLoss()), "logits"),
}


@pytest.mark.parametrize(("loss", "head"), LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_says_which_head(loss, head):
    assert resolve_head(None, loss, 3) == head
    assert resolve_head(None, loss, 1) == "logits"
    for named in ("logits", "log_softmax"):
        assert resolve_head(named, loss, 3) == named


@pytest.mark.parametrize(
    ("loss", "log_probabilities"),
    [(NegativeLogLikelihood(), True), (epk.PerSampleLoss(squared, reduction="mean"), False)],
    ids=["log_probabilities", "function"],
)
def test_a_run_on_another_loss_is_explained_by_its_outputs(loss, log_probabilities):
    run = recorded(loss, log_probabilities=log_probabilities)
    found = epk.reconstruct(run, TEST)
    assert torch.equal(found.network, epk.network_outputs(run, TEST))
    assert found.max_error < 1e-12


def test_the_single_machine_has_the_head_of_its_loss(classification):
    found = single_machine(classification, TEST)
    assert torch.equal(found.outputs, single_machine(classification, TEST, head="log_softmax").outputs)
    log_probabilities = recorded(NegativeLogLikelihood(), log_probabilities=True)
    found = single_machine(log_probabilities, TEST)
    assert torch.equal(found.outputs, single_machine(log_probabilities, TEST, head="logits").outputs)
    assert found.max_error < 1e-12


def test_what_is_about_logits_stays_so(classification):
    run, logits = classification, epk.network_outputs(classification, TEST, head="logits")
    assert torch.equal(epk.network_outputs(run, TEST), logits)
    assert torch.equal(chen_machine(run, TEST).network, logits)
    assert torch.equal(domingos_machine(run, TEST).network, logits)
    assert epk.LogitGP(run, rule=RULE).kernel.config.path_kernel.head == "logits"


def test_none_follows_the_loss_there_as_well(classification, regression):
    for run, head in ((classification, "log_softmax"), (regression, "logits")):
        f = epk.network_outputs(run, TEST, head=head)
        assert torch.equal(epk.network_outputs(run, TEST, head=None), f)
        assert torch.equal(domingos_machine(run, TEST, head=None).network, f)
        gp = epk.LogitGP(run, rule=RULE, head=None)
        assert gp.kernel.config.path_kernel.head == head
        assert torch.equal(gp.train_targets, epk.network_outputs(run, run.inputs, head=head))
    assert torch.equal(
        chen_machine(classification, TEST, head=None).network, epk.attribute(classification, TEST).network
    )


def test_an_object_stores_the_head_that_it_has(classification, regression):
    for run, head in ((classification, "log_softmax"), (regression, "logits")):
        kernel = epk.EPKKernel(run, rule=RULE)
        assert epk.PathKernel(run).head == head
        assert f"head='{head}'" in repr(epk.PathKernel(run))
        assert f"head='{head}'" in repr(kernel)
        assert kernel.config.cache_key == epk.EPKKernel(run, head=head, rule=RULE).config.cache_key


def test_a_tangent_kernel_has_the_head_of_its_run(classification, regression):
    for run, head in ((classification, "log_softmax"), (regression, "logits")):
        tangent = tangent_trajectory(run)
        assert torch.equal(epk.gram_block(tangent, *pair(run)), epk.gram_block(tangent, *pair(run), head=head))


@pytest.mark.parametrize("name", ["gram_block", "attribute"])
def test_partial_sums_belong_to_the_head_itself(regression, tmp_path: Path, name: str):
    def ask(**head: Any) -> Tensor:
        if name == "attribute":
            return epk.attribute(regression, TEST, checkpoint=tmp_path, **head).samples
        return epk.gram_block(regression, *pair(regression), checkpoint=tmp_path, **head)

    found = ask()
    assert torch.equal(ask(head="logits"), found)
    with pytest.raises(ValueError, match="it is of another"):
        ask(head="log_softmax")

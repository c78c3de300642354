"""Properties of every public door: its head follows the run's loss; what it cannot take is refused in one sentence."""

import ast
import functools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import DOORS, Door, sides
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.losses import NegativeLogLikelihood, as_loss, resolve_head
from epk_gp.kernel_machine.reconstruct import single_machine, tangent_trajectory
from helpers import assert_close, gram_block_per_class, with_value
from loops import CASES, data, trained

NAN, INF = float("nan"), float("inf")
X, Y = data()
TEST = X[:2] + 0.3
# They have no kernel machine of a regression to give, and are tested by themselves below.
OTHER_DOORS = {
    "kernel_machine.reconstruct.single_machine",
    "kernel_machine.tokens.attribute_tokens",
    "kernel_machine.attribute.plan_attribution",  # a cost, of the same request as `attribute`
    "trained.between.between",  # of no run: tests/trained
    "datamodels.fit.datamodel",  # log-odds, unless classes are asked for: tests/datamodel
    "cli.attribute.attribute",
    # names on pictures: None stands for outputs of an unknown kind
    "plots.contributions.attribution_figure",
    "autodiff.dense.Cotangents",  # internal: None stands for other outputs than a head's
}
HEAD_DOORS = {name: door for name, door in DOORS.items() if door.head is None and name != "single_machine"}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())
every_head_door = pytest.mark.parametrize("door", HEAD_DOORS.values(), ids=HEAD_DOORS.keys())


@functools.cache
def recorded(loss: Any, outputs: int = 3, *, log_probabilities: bool = False) -> epk.Trajectory:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs), *[nn.LogSoftmax(dim=1)] * log_probabilities]
    net = nn.Sequential(*layers).double()
    is_regression = isinstance(as_loss(loss), epk.MeanSquaredError | epk.PerSampleLoss)
    y = torch.randn(6, outputs, dtype=torch.float64) if is_regression else torch.arange(6) % outputs
    return epk.train(net, X[:6], y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3, loss=loss)


def with_heads() -> tuple[tuple[epk.Trajectory, str], ...]:
    return (recorded(epk.CrossEntropy()), "log_softmax"), (recorded(epk.MeanSquaredError()), "logits")


def head_defaults() -> dict[str, str]:
    """Name everything public whose `head` has a default, in the source itself, with the default."""
    root = Path(epk.__file__).parent
    return {
        f"{'.'.join(file.relative_to(root).with_suffix('').parts)}.{node.name}": ast.unparse(value)
        for file in root.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        for value in _defaults_of_head(node)
    }


def _defaults_of_head(node: ast.FunctionDef | ast.ClassDef) -> Iterator[ast.expr]:
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and part.value is not None and ast.unparse(part.target) == "head":
            yield part.value
        elif isinstance(part, ast.arguments):
            optional = part.args[len(part.args) - len(part.defaults) :] + part.kwonlyargs
            pairs = zip(optional, [*part.defaults, *part.kw_defaults], strict=True)
            yield from (value for argument, value in pairs if argument.arg == "head" and value is not None)


def test_every_default_of_a_head_is_tested_here() -> None:
    defaults = head_defaults()
    variants = {"PathKernel.block_per_class", "PathKernel.diagonal_blocks"}
    variants |= {"attribute by steps", "attribute by samples, and by steps"}
    doors = {door.name for door in HEAD_DOORS.values()} - variants
    assert {name for name, default in defaults.items() if default == "None"} == doors | OTHER_DOORS
    of_networks = {"trained.ntk.ntk", "trained.ntk.NTKKernel"}  # of no run: tests/trained
    logits = {door.name for door in DOORS.values() if door.head == "logits"} | of_networks
    assert {name for name, default in defaults.items() if default == "'logits'"} == logits
    assert len(defaults) == len(doors) + len(OTHER_DOORS) + len(logits)


@every_head_door
def test_a_door_explains_the_head_of_the_run_s_loss(door: Door) -> None:
    one_output = recorded(epk.MeanSquaredError(), 1)
    for run, head in with_heads():
        found, other = door.numbers(run, TEST), "logits" if head == "log_softmax" else "log_softmax"
        assert torch.equal(found, door.numbers(run, TEST, head=head))
        assert torch.equal(found, door.numbers(run, TEST, head=None))
        control = door.numbers(run, TEST, head=other)
        assert (found - control).abs().max() > 1e-3 * found.abs().max()  # the control: the head matters here
    assert torch.equal(door.numbers(one_output, TEST), door.numbers(one_output, TEST, head="logits"))


LOSSES = {
    "cross_entropy": (epk.CrossEntropy(), "log_softmax"),
    "torch_cross_entropy": (as_loss(nn.CrossEntropyLoss()), "log_softmax"),
    "squared_error": (epk.MeanSquaredError(), "logits"),
    "log_probabilities": (NegativeLogLikelihood(), "logits"),
    "function": (epk.PerSampleLoss(F.cross_entropy, reduction="mean"), "logits"),
    "torch_module": (as_loss(nn.HuberLoss()), "logits"),
}


@pytest.mark.parametrize(("loss", "head"), LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_says_which_head(loss: Any, head: str) -> None:
    assert resolve_head(None, loss, 3) == head
    assert resolve_head(None, loss, 1) == "logits"
    for named in ("logits", "log_softmax"):
        assert resolve_head(named, loss, 3) == named


def test_the_single_machine_has_the_head_of_its_loss() -> None:
    log_probabilities = recorded(NegativeLogLikelihood(), log_probabilities=True)
    for run, head in ((recorded(epk.CrossEntropy()), "log_softmax"), (log_probabilities, "logits")):
        found = single_machine(run, TEST)
        assert torch.equal(found.outputs, single_machine(run, TEST, head=head).outputs)
    assert found.max_error < 1e-12


def test_what_is_about_logits_stays_so_and_none_follows_the_loss() -> None:
    classification = recorded(epk.CrossEntropy())
    logits = epk.network_outputs(classification, TEST, head="logits")
    assert torch.equal(epk.network_outputs(classification, TEST), logits)
    assert epk.LogitGP(classification).kernel.config.path_kernel.head == "logits"
    for run, head in with_heads():
        f = epk.network_outputs(run, TEST, head=head)
        assert torch.equal(epk.network_outputs(run, TEST, head=None), f)
        gp = epk.LogitGP(run, head=None)
        assert gp.kernel.config.path_kernel.head == head
        assert torch.equal(gp.train_targets, epk.network_outputs(run, run.inputs, head=head))


def test_an_object_stores_the_head_that_it_has() -> None:
    for run, head in with_heads():
        kernel, rule = epk.EPKKernel(run), epk.gauss_legendre(2)
        assert epk.PathKernel(run).head == head
        assert f"head='{head}'" in repr(epk.PathKernel(run))
        assert f"head='{head}'" in repr(kernel)
        assert kernel.config.cache_key == epk.EPKKernel(run, head=head).config.cache_key
        tangent = tangent_trajectory(run)
        block = epk.gram_block(tangent, *sides(run, TEST), rule=rule)
        assert torch.equal(block, epk.gram_block(tangent, *sides(run, TEST), rule=rule, head=head))


@pytest.mark.parametrize("name", ["gram_block", "attribute"])
def test_partial_sums_belong_to_the_head_itself(tmp_path: Path, name: str) -> None:
    door, regression = DOORS[name], recorded(epk.MeanSquaredError())
    found = door.values(door.ask(regression, TEST, checkpoint=tmp_path))
    assert torch.equal(door.values(door.ask(regression, TEST, checkpoint=tmp_path, head="logits")), found)
    with pytest.raises(ValueError, match="it is of another"):
        door.ask(regression, TEST, checkpoint=tmp_path, head="log_softmax")


class Inline:
    """An executor that computes at once, in this process."""

    def submit(self, function: Any, /, *args: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(function(*args))
        return future


@pytest.mark.parametrize("door", [pytest.param(d, id=name) for name, d in DOORS.items() if "checkpoint" in d.takes])
def test_numbers_do_not_depend_on_how_they_are_computed(door: Door, run: epk.Trajectory, tmp_path: Path) -> None:
    found = door.numbers(run, TEST)
    for options in ({"checkpoint": tmp_path}, {"checkpoint": tmp_path}, {"executor": Inline()}):
        assert torch.equal(door.numbers(run, TEST, **options), found), options
    assert_close(door.numbers(run, TEST, memory_budget=1 << 20), found)


POINTS = {
    "no_tensor": ([[1.0] * 4], TypeError, "X.* must be a torch.Tensor: got list"),
    "too_narrow": (X[:, :3], ValueError, r"X.* must have shape \(n, 4\) like the training inputs: got \(10, 3\)"),
    "too_deep": (X[None], ValueError, r"X.* must have shape \(n, 4\) like the training inputs: got \(1, 10, 4\)"),
    "one_point": (X[0], ValueError, r"X.* must have shape \(n, 4\) like the training inputs: got \(4,\)"),
    "scalar": (X[0, 0], ValueError, r"X.* must have shape \(n, 4\) like the training inputs: got \(\)"),
    "empty": (X[:0], ValueError, "X.* must hold at least one point: got an empty batch"),
    "integers": (X.long(), TypeError, "X.* must be of the training inputs' kind .torch.float64.: got torch.int64"),
    "half": (X.half(), TypeError, "X.* must be float32 or float64: got torch.float16"),
    "complex": (X + 0j, TypeError, "X.* must be of the training inputs' kind"),
    "nan": (with_value(X, NAN, 2), ValueError, "X.* must be finite: row 2 holds NaN or infinity"),
    "infinite": (with_value(X, INF, 5), ValueError, "X.* must be finite: row 5 holds NaN or infinity"),
}
HEAD = r"head must be one of \['logits', 'log_softmax'\]: got|needs head=\"log_softmax\""
RULE = "rule must be a quadrature rule|a kernel needs the same nodes at all points, as in"
ONE_OUTPUT = r'head="log_softmax" needs at least 2 outputs.*Use head="logits"'
STEP_WEIGHTS = {
    "too_few": (torch.ones(5), r"step_weights must have shape \(6,\): got \(5,\)"),
    "column": (torch.ones(6, 1), r"step_weights must have shape \(6,\): got \(6, 1\)"),
    "negative": (torch.tensor([1.0] * 5 + [-1e-9]), "step_weights must be finite and not negative"),
    "nan": (torch.tensor([NAN] + [1.0] * 5), "step_weights must be finite and not negative"),
    "infinite": (torch.tensor([INF] + [1.0] * 5), "step_weights must be finite and not negative"),
}


@pytest.fixture(scope="module")
def run() -> epk.Trajectory:
    """Of full batches: the single machine needs them."""
    return trained(replace(CASES["full_batch"], steps=6))


@pytest.mark.usefixtures("unchecked")
@every_door
def test_what_a_door_cannot_take_is_refused_in_one_sentence(door: Door, run: epk.Trajectory) -> None:
    one_output = recorded(epk.MeanSquaredError(), 1)
    found: dict[str, str | None] = {}
    if door.points:
        for case, (points, error, message) in POINTS.items():
            found[case] = door.refusal(run, points, error, message)
    for head in ("softmax", "", "LOGITS"):
        found[f"head {head!r}"] = door.refusal(run, TEST, ValueError, HEAD, head=head)
    if door.name != "kernel_machine.reconstruct.single_machine":
        found["one output"] = door.refusal(one_output, TEST, ValueError, ONE_OUTPUT, head="log_softmax")
    if "rule" in door.takes:
        for rule in (4, "gauss", None, epk.gauss_legendre):
            found[f"rule {rule}"] = door.refusal(run, TEST, TypeError, RULE, rule=rule)
    if "memory_budget" in door.takes:
        for budget in (0, -1, (1 << 20) - 1):
            message = f"memory_budget must be at least 1 MiB .1048576 bytes.: got {budget}"
            found[f"budget {budget}"] = door.refusal(run, TEST, ValueError, message, memory_budget=budget)
        message = "memory_budget must be a whole number of bytes: got 2500000000.0"
        found["a budget with a fraction"] = door.refusal(run, TEST, TypeError, message, memory_budget=2.5e9)
    if "step_weights" in door.takes:
        for case, (weights, message) in STEP_WEIGHTS.items():
            found[f"weights {case}"] = door.refusal(run, TEST, ValueError, message, step_weights=weights)
    if not door.name.startswith("attribute by") and door is not DOORS["Retraining"]:  # the run is asked before
        found["no run"] = door.refusal(None, TEST, TypeError, "trajectory must be an epk_gp.Trajectory: got NoneType")
    assert not {case: fault for case, fault in found.items() if fault is not None}


def test_a_door_that_takes_everything_is_found(run: epk.Trajectory) -> None:
    """The negative control."""
    assert DOORS["network_outputs"].refusal(run, TEST, ValueError, "must") == "accepts it"
    assert str(DOORS["network_outputs"].refusal(run, X[:0], ValueError, "another")).startswith("says: X must hold")
    assert str(DOORS["network_outputs"].refusal(run, None, ValueError, "must")).startswith("raises TypeError")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("block", [epk.gram_block, gram_block_per_class])
def test_both_sides_of_a_block_are_checked(block: Any, run: epk.Trajectory) -> None:
    a = epk.Points(X, is_train=True)
    with pytest.raises(ValueError, match=r"share dtype and device: got torch.float64 on cpu and torch.float32 on cpu"):
        block(run, a, epk.Points(X.float(), is_train=False))
    with pytest.raises(ValueError, match=r"b.X must be finite: row 2"):
        block(run, a, epk.Points(with_value(X, NAN, 2), is_train=False))


MASKS = {
    "too_short": (torch.ones(9, dtype=torch.bool), ValueError, r"one entry per point: got shape \(9,\) for 10 points"),
    "column": (torch.ones(10, 1, dtype=torch.bool), ValueError, r"one entry per point: got shape \(10, 1\) for 10"),
    "integers": (torch.ones(10, dtype=torch.int64), TypeError, "bool or a bool tensor: got torch.int64. Convert it"),
    "one": (1, TypeError, "bool or a bool tensor: got int"),
    "nothing": (None, TypeError, "bool or a bool tensor: got NoneType"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("mask", "error", "message"), MASKS.values(), ids=MASKS.keys())
def test_a_copy_mask_that_does_not_fit_is_refused(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"is_train must .*{message}"):
        epk.Points(X, mask)


@pytest.mark.usefixtures("unchecked")
def test_a_run_on_integers_refuses_floats() -> None:
    with pytest.raises(TypeError, match="X must be of the training inputs' kind .torch.int64.: got torch.float64"):
        epk.network_outputs(trained(CASES["integer_inputs"]), X[:, :3])


def of_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@every_door
def test_a_door_gives_the_same_without_gradients(door: Door, run: epk.Trajectory) -> None:
    """As in the test and predict steps of Lightning; points may have been made there, and are asked about elsewhere."""
    found = door.numbers(run, TEST)
    for mode, points in ((torch.no_grad(), TEST), (torch.inference_mode(), TEST), (nullcontext(), None)):
        with mode:
            again = door.numbers(run, of_inference_mode(TEST) if points is None else points)
        assert torch.equal(again.detach(), found.detach()), mode


def validated(run: epk.Trajectory, X: Tensor, y: Tensor) -> Tensor:
    classifier = epk.UncertainClassifier(run, nodes=2).fit(X, y)
    return classifier.uncertainty(X[:3]).out_of_distribution


def fitted(estimator: Any, X: Tensor, y: Tensor) -> Tensor:
    own = estimator(steps=3, random_state=0, batch_size=None).fit(X.numpy(), y.numpy())
    return own.attribute(X[:2].numpy()).samples


def small() -> nn.Module:
    """Return a network, made in normal mode: torch trains no other."""
    with torch.inference_mode(mode=False):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def retold(X: Tensor, y: Tensor) -> epk.Trajectory:
    net = small()
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)


def ends(change: Any) -> list[dict[str, Tensor]]:
    return [{name: change(value + k / 10) for name, value in small().state_dict().items()} for k in range(2)]


def process(run: epk.Trajectory, x: Tensor) -> Tensor:
    gp = epk.LogitGP(run, points=[0, 2], nodes=2)
    gp.fit(3)
    distribution = gp.eval()(epk.test_copy(x))
    return torch.cat([distribution.mean.flatten(), distribution.variance.flatten()])


OBJECTS = {  # functions of a run and of what changes tensors
    "train": lambda run, as_made: epk.attribute(retold(as_made(X), as_made(Y)), TEST).samples,
    "classifier": lambda run, as_made: fitted(epk.EPKClassifier, X, Y),
    "regressor": lambda run, as_made: fitted(epk.EPKRegressor, X, X[:, 0]),
    "validated": lambda run, as_made: validated(run, as_made(X.repeat(3, 1) + 0.1), as_made(Y.repeat(3))),
    "process": lambda run, as_made: process(run, as_made(TEST)),
    "states": lambda run, as_made: epk.between(small(), ends(as_made), as_made(TEST)).pieces,
    "states and data": lambda run, as_made: (
        epk.between(small(), ends(as_made), TEST, data=(as_made(X), as_made(Y)), lr=0.1).samples
    ),
    "tangent kernel": lambda run, as_made: epk.ntk(small(), as_made(TEST), as_made(X)),
    "lazy tangent kernel": lambda run, as_made: epk.NTKKernel(small(), outputs=1)(as_made(TEST)).to_dense(),
    "several inputs": lambda run, as_made: epk.Points((as_made(X), as_made(Y)), as_made(Y > 0)).X,
    "function": lambda run, as_made: (
        epk.influence(run, TEST, function=epk.RowFunction.log_probability(as_made(Y[:2]))).values
    ),
    "own influence": lambda run, as_made: epk.influence(run, own=as_made(torch.arange(3))).values,
    "next to label": lambda run, as_made: (
        epk.next_to_label(
            epk.UncertainClassifier(run, nodes=2).fit(X.repeat(3, 1) + 0.1, Y.repeat(3)), as_made(X - 0.1), 3
        ).scores
    ),
    "label errors": lambda run, as_made: torch.as_tensor(epk.label_errors(run).scores),
    "retrained run": lambda run, as_made: (
        epk.attribute(epk.retrain(run, as_made(torch.full((1, len(X)), 0.5).double())).run(0), TEST).samples
    ),
    "layerwise": lambda run, as_made: epk.attribute(run, as_made(TEST), path=epk.layerwise()).samples,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what so few points and steps can tell
@pytest.mark.parametrize("ask", OBJECTS.values(), ids=OBJECTS.keys())
def test_objects_are_the_same_without_gradients(ask: Any, run: epk.Trajectory) -> None:
    """What is made, fitted and asked in these modes; and data that were made in inference mode."""
    found = ask(run, lambda x: x)
    for mode in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with mode:
            again = ask(run, of_inference_mode)
        assert torch.equal(again.detach(), found.detach()), mode


def test_a_run_is_recorded_and_read_around_passes_in_inference_mode() -> None:
    """A recorder that is made in it, around a loop that leaves it; the loop looks at the network in it."""

    def contributions(mode: Any) -> Tensor:
        net = small()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with mode():
            recorder = epk.Recorder(net, optimizer, X, Y)
            with torch.inference_mode(mode=False), torch.enable_grad(), recorder:
                for _ in range(2):
                    optimizer.zero_grad()
                    F.cross_entropy(net(X), Y).backward()
                    recorder.batch(torch.arange(len(X)))
                    optimizer.step()
                    with mode():
                        net(TEST)
            return epk.attribute(recorder.trajectory, TEST).samples

    assert torch.equal(contributions(torch.inference_mode), contributions(nullcontext))

"""Random small problems, answered with one state of a run at a time and with several evaluated together.

Steps do not depend on each other in the sums that the package takes, so that any number of states gives the same
numbers to rounding. A seed decides everything: network, loop, optimizer, loss, batches, question, rule, path, budget.
"""

import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from odd_networks import INPUTS, rows
from odd_parts import CLASSES, OPTIMIZERS, POINTS
from odd_programs import MEMORY, is_clear
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import averaged_trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.axes import by_label, by_layer, by_parameter, by_sample, by_step

ASKED = 3  # points
COUNTS: tuple[int | None, ...] = (1, 2, 7, None)  # of states that are evaluated together; None: all of a run
RATIOS = ("amplification", "growth", "adjoint_norms", "std")  # what is no term and no output
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of the largest entry


@contextmanager
def states_together(count: int | None) -> Iterator[None]:
    """Evaluate so many states of a run together, of networks of which several can be; None for all of them."""
    most = count or 1 << 20
    choices = {
        "epk_gp.core.plans.MemoryPlan.fitting_lines": lambda self, *sizes: most,  # attributions and reconstructions
        "epk_gp.core.plans.MemoryPlan.stacked_weights": lambda self, *sizes: most,  # kernels, steps that are replayed
        "epk_gp.gram.planned_kernel._FEW_STEPS": 1,
        "epk_gp.gram.planned_kernel.MOST_STEPS": most,
        "epk_gp.gram.planned_kernel._PRODUCTS": 1 << 40,
        "epk_gp.kernel_machine.loss_products.rows_per_pass": lambda *sizes: POINTS * most,
        "epk_gp.kernel_machine.influence_pass.MAX_STEP_BATCH": most,
    }
    with ExitStack() as stack:
        for name, choice in choices.items():
            stack.enter_context(patch(name, choice))
        yield


# ---- problems ------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """A network, a loop and questions, drawn from a seed."""

    seed: int
    draw: random.Random = field(repr=False)
    inputs: str = ""
    network: str = ""
    loss: str = ""
    reduction: str = "mean"
    optimizers: tuple[tuple[str, str], ...] = ()  # name and options
    decay: float = 0.0
    batch: int = POINTS
    steps: int = 8
    accumulated: int = 1
    schedules: bool = False
    dtype: torch.dtype = torch.float64
    stored: str | None = None  # None (in memory), "disk" or "thinned"
    of: str = "run"  # "run", "until" or "average"
    question: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def record(self, folder: Path) -> epk.Trajectory:
        """Train, and return what is asked about."""
        X, y = self.data
        torch.manual_seed(self.seed)
        net = self.make()
        trained = [p for p in net.parameters() if p.requires_grad]
        halves = [trained] if len(self.optimizers) == 1 or len(trained) == 1 else [trained[:1], trained[1:]]
        optimizers = []
        for (name, options), part in zip(self.optimizers, halves, strict=False):  # one for one parameter
            kind, rate, choices = OPTIMIZERS[name]
            optimizers.append(kind(part, lr=0.5 * rate, weight_decay=self.decay, **choices[int(options)]))
        kept = {"folder": folder / "run", "storage": epk.Storage(steps=3)} if self.stored else {}
        if self.stored == "thinned":
            kept["storage"] = epk.Storage(steps=3, keep_every=3)
        options = {"loss": self.package_loss, **kept}
        generator, left = torch.Generator().manual_seed(self.seed), []
        with epk.Recorder(net, optimizers if len(optimizers) > 1 else optimizers[0], X, y, **options) as recorder:
            for step in range(self.steps):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                    if self.schedules:
                        for group in optimizer.param_groups:
                            group["lr"] *= 0.9 if step % 3 else 1.1
                for _ in range(self.accumulated):
                    left = left or list(torch.randperm(POINTS, generator=generator).split(self.batch))
                    rows = left.pop(0)  # the last batch of an epoch is smaller
                    (self.loss_of(net(X[rows]), y[rows]) / self.accumulated).backward()
                    recorder.batch(rows, weight=1 / self.accumulated)
                for optimizer in optimizers:
                    optimizer.step()
        run = recorder.trajectory
        if self.stored is not None:
            loss = self.package_loss if self.loss == "huber" else None
            run = epk.load_trajectory(folder / "run", self.make(), loss=loss)
        if self.of == "until":
            return run.until(max(1, self.steps - 2))
        if self.of == "average":
            return averaged_trajectory(run, torch.full((self.steps,), 0.3, dtype=torch.float64))
        return run

    def make(self) -> nn.Module:
        """Make the network."""
        torch.manual_seed(self.seed)
        networks = INPUTS[self.inputs][0](random.Random(self.seed))
        return networks[self.network]().to(self.dtype)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(self.seed)
        X = INPUTS[self.inputs][1](POINTS, generator)
        C = 1 if self.network == "one_output" else CLASSES
        numbers = torch.randn(POINTS, C, generator=generator, dtype=torch.float64).to(self.dtype)
        is_class = self.loss in ("cross_entropy", "smoothed", "weighted")
        y = torch.randint(C, (POINTS,), generator=generator) if is_class else numbers
        return X.to(self.dtype) if X.is_floating_point() else X, y

    @property
    def points(self) -> Tensor:
        """The points that are asked about: others, and one of the data."""
        X = INPUTS[self.inputs][1](ASKED - 1, torch.Generator().manual_seed(self.seed + 1))
        return torch.cat([X.to(self.dtype) if X.is_floating_point() else X, self.data[0][:1]])

    @property
    def package_loss(self) -> Any:
        """The loss in the package's words."""
        match self.loss:
            case "squares":
                return epk.MeanSquaredError(self.reduction)
            case "huber":
                return nn.HuberLoss(reduction=self.reduction)
            case "weighted":
                return epk.CrossEntropy(self.reduction, class_weights=(0.5, 1.0, 2.0))
        return epk.CrossEntropy(self.reduction, label_smoothing=0.1 if self.loss == "smoothed" else 0.0)

    def loss_of(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch as torch has it."""
        if self.loss == "squares":
            return F.mse_loss(z, y, reduction=self.reduction)
        if self.loss == "huber":
            return F.huber_loss(z, y, reduction=self.reduction)
        smoothing = 0.1 if self.loss == "smoothed" else 0.0
        weight = torch.tensor([0.5, 1.0, 2.0], dtype=z.dtype) if self.loss == "weighted" else None
        return F.cross_entropy(z, y, weight=weight, label_smoothing=smoothing, reduction=self.reduction)

    def ask(self, run: epk.Trajectory, folder: Path) -> dict[str, Any]:
        """Ask, and return what comes back by name."""
        X, options = self.points, dict(self.options)
        if options.pop("checkpoint", False):
            shutil.rmtree(folder / "sums", ignore_errors=True)
            options["checkpoint"] = folder / "sums"
        match self.question:
            case "attribute":
                return _fields(epk.attribute(run, X, **options))
            case "axes":
                axes = {axis.__name__: axis for axis in (by_sample, by_step, by_layer, by_parameter, by_label)}
                groupings = [[axes[name](run) for name in names] for names in options.pop("groupings")]
                results = epk.attribute(run, X, by=groupings, **options)
                return {f"{n}.{name}": value for n, r in enumerate(results) for name, value in _fields(r).items()}
            case "gram":
                return {"block": epk.gram_block(run, *self._copies(run), **options)}
            case "symmetric":
                a = self._copies(run)[0]
                return {"block": epk.gram_block(run, a, a, **options)}
            case "per_class" | "trace":
                kernel = PathKernel(run, options.pop("head"), options.pop("rule"), path=options.pop("path"))
                block = kernel.block_per_class if self.question == "per_class" else kernel.trace_block
                return {"block": block(*self._copies(run), **options)}
            case "diagonal":
                kernel = PathKernel(run, options.pop("head"), options.pop("rule"), path=options.pop("path"))
                return {"blocks": kernel.diagonal_blocks(self._copies(run)[0], **options)}
            case "features":
                features = epk.path_features(run, X, 64, num_probe=0, **options)
                return {"features": torch.Tensor(features.as_subclass(torch.Tensor))}
            case "reconstruct":
                return _fields(epk.reconstruct(run, X, **options))
            case "kernel":
                flat = X.flatten(1)
                kernel = epk.EPKKernel(run, **options)
                a = epk.test_copy(flat).requires_grad_(flat.is_floating_point())
                values = kernel(a, epk.train_copy(run.inputs[:4].flatten(1))).to_dense()
                if not flat.is_floating_point():
                    return {"values": values}
                return {"values": values.detach(), "gradient": torch.autograd.grad(values.square().sum(), a)[0]}
            case "influence":
                axes = {"label": by_label, "step": by_step, "sample": by_sample}
                by = [axes[name](run) for name in options.pop("axes")]
                return _fields(epk.influence(run, X, by=by or None, **options))
            case "self_influence":
                return {"values": epk.influence(run, own=True, **options).values[:, 0, 0]}
            case "retrain":
                weights = 2 * torch.rand(2, POINTS, generator=torch.Generator().manual_seed(self.seed)).double()
                result = epk.retrain(run, weights, **options)
                return {"outputs": result.outputs(X), "certified": result.certified}
            case "between":
                net, states = self.make(), []
                for s in sorted({0, run.num_steps // 2, run.num_steps}):
                    nn.utils.vector_to_parameters(run.states[s], [p for p in net.parameters() if p.requires_grad])
                    states.append({name: value.clone() for name, value in net.state_dict().items()})
                return _fields(epk.between(net, states, X, **options))
        raise ValueError(self.question)

    def _copies(self, run: epk.Trajectory) -> tuple[epk.Points, epk.Points]:
        """Return two sets of points, of either copy or of both."""
        draw = random.Random(self.seed + 2)
        both = torch.cat([self.points, run.inputs[:4]])
        kinds = [draw.choice([True, False, None]) for _ in range(2)]
        masks = [torch.arange(len(both)) % 2 == 0 if kind is None else kind for kind in kinds]
        return epk.Points(both, masks[0]), epk.Points(both[:5], masks[1] if kinds[1] is not None else masks[1][:5])


def _fields(result: Any) -> dict[str, Any]:
    """Return the numbers of a result, and whether it is certified."""
    values = {name: value for name, value in vars(result).items() if isinstance(value, Tensor)}
    return values | {"certified": getattr(result, "certified", None)}


def draw_problem(seed: int) -> Problem:
    """Draw a problem."""
    draw = random.Random(seed)
    problem = Problem(seed, draw, inputs=draw.choice(["rows", "rows", "rows", "images", "series", "series", "tokens"]))
    problem.network = draw.choice(list(INPUTS[problem.inputs][0](random.Random(seed))))
    is_one = problem.network == "one_output"
    losses = ["squares", "huber"] if is_one else ["cross_entropy", "cross_entropy", "smoothed", "weighted", "squares"]
    problem.loss, problem.reduction = draw.choice(losses), draw.choice(["mean", "mean", "sum"])
    names = draw.choices(list(OPTIMIZERS), k=2 if draw.random() < 0.1 else 1)
    if draw.random() < 0.5:
        names = [draw.choice(["SGD", "Adam"])]
    problem.optimizers = tuple((name, str(draw.randrange(len(OPTIMIZERS[name][2])))) for name in names)
    problem.decay = draw.choice([0.0, 0.0, 0.05])
    problem.batch, problem.steps = draw.choice([1, 3, 4, 7, POINTS]), draw.choice([1, 2, 5, 8, 8, 13, 21])
    if "batch_norm" in problem.network or problem.network == "both":
        problem.batch = draw.choice([4, 8, POINTS])  # statistics of a single row are none
    problem.accumulated = draw.choice([1, 1, 1, 2])
    problem.schedules = draw.random() < 0.2
    problem.dtype = torch.float32 if draw.random() < 0.1 else torch.float64
    problem.stored = draw.choice([None, None, None, "disk", "thinned"])
    problem.question = draw.choice(list(OPTIONS))
    of_average = problem.question in ("attribute", "axes", "reconstruct", "influence", "retrain")
    problem.of = draw.choice(["run", "run", "run", "until", "average" if of_average else "run"])
    problem.options = OPTIONS[problem.question](problem, draw)
    return problem


# ---- questions -----------------------------------------------------------------------------------------------------


def _rule(draw: random.Random, *, fixed: bool = False) -> Any:
    rules = [epk.gauss_legendre(n) for n in (1, 2, 4)] + [
        epk.QuadratureRule.left_endpoint(),
        epk.QuadratureRule.left_riemann(3),
        epk.QuadratureRule.midpoint(2),
    ]
    adaptive = [epk.adaptive(1e-9, max_evaluations=64), epk.adaptive(1e-9, order=2), epk.adaptive(1e-6, order=7)]
    return draw.choice(rules if fixed or draw.random() < 0.6 else adaptive)


def _path(draw: random.Random, *, layerwise: bool = False) -> Any:
    paths = [epk.straight(), epk.straight(), epk.chords(2), epk.chords(5)]
    return draw.choice([*paths, epk.layerwise(), epk.layerwise(3)] if layerwise else paths)


def _shared(draw: random.Random, *, checkpoint: bool = True) -> dict[str, Any]:
    """Draw what all questions take."""
    options: dict[str, Any] = {}
    if draw.random() < 0.4:
        options["memory_budget"] = draw.choice([1 << 20, 2 << 20, 8 << 20])
    if checkpoint and draw.random() < 0.1:
        options["checkpoint"] = True
    return options


def _head(problem: Problem, draw: random.Random) -> str | None:
    return None if problem.network == "one_output" else draw.choice([None, "logits", "log_softmax"])


def _of_attribution(problem: Problem, draw: random.Random) -> dict[str, Any]:
    options = _shared(draw) | {"path": _path(draw, layerwise=True), "rule": draw.choice([epk.adaptive(), _rule(draw)])}
    C = 1 if problem.network == "one_output" else CLASSES
    match draw.choice(["outputs", "outputs", "classes", "function"]):
        case "classes":
            options["classes"] = torch.tensor([draw.randrange(C) for _ in range(ASKED)])
        case "function":
            choices: list[Any] = [lambda z: z.square(), lambda z: z.logsumexp(dim=1), lambda z: z[:, 0] * z[:, -1]]
            labels = torch.tensor([draw.randrange(C) for _ in range(ASKED)])
            choices += [epk.RowFunction(lambda z, y: F.cross_entropy(z, y, reduction="none"), labels)]
            return options | {"function": draw.choice(choices)}
    return options | {"head": _head(problem, draw)}


def _of_axes(problem: Problem, draw: random.Random) -> dict[str, Any]:
    kinds = ["by_sample", "by_step", "by_layer", "by_parameter"]
    if problem.data[1].ndim == 1:
        kinds.append("by_label")
    groupings = [draw.sample(kinds, draw.randint(1, 2)) for _ in range(draw.randint(1, 2))]
    return _of_attribution(problem, draw) | {"groupings": groupings}


def _of_gram(problem: Problem, draw: random.Random) -> dict[str, Any]:
    shared = _shared(draw, checkpoint=problem.question in ("gram", "symmetric"))
    if problem.network in rows(draw) and draw.random() < 0.3:  # of others it takes minutes: all nodes are shared
        problem.steps = min(problem.steps, 8)
        return shared | {"head": _head(problem, draw), "rule": epk.adaptive(1e-9), "path": _path(draw)}
    return shared | {"head": _head(problem, draw), "rule": _rule(draw, fixed=True), "path": _path(draw)}


def _of_features(problem: Problem, draw: random.Random) -> dict[str, Any]:
    nodes = draw.choice([None, 3, 20])
    options = _shared(draw, checkpoint=False) | {"nodes": nodes, "head": _head(problem, draw)}
    return options | {"is_train": draw.random() < 0.3, "path": epk.straight() if nodes is None else _path(draw)}


def _of_reconstruction(problem: Problem, draw: random.Random) -> dict[str, Any]:
    rule = draw.choice([epk.adaptive(), _rule(draw)])
    return _shared(draw) | {"head": _head(problem, draw), "rule": rule, "path": _path(draw)}


def _of_kernel(problem: Problem, draw: random.Random) -> dict[str, Any]:
    problem.steps = min(problem.steps, 5)  # derivatives take long
    outputs = draw.choice(["full", "independent", "trace", 0])
    normalize = draw.choice([None, "cosine", "mean_diagonal"])
    options = {"outputs": outputs, "normalize": normalize, "rule": _rule(draw, fixed=True), "path": _path(draw)}
    return _shared(draw, checkpoint=False) | options | {"head": _head(problem, draw), "cache_bytes": 0}


def _of_influence(problem: Problem, draw: random.Random) -> dict[str, Any]:
    axes = draw.choice([[], [], ["step"], ["sample", "step"]])
    if problem.data[1].ndim == 1:
        axes = draw.choice([axes, ["label"]])
    options = _of_attribution(problem, draw) | {"axes": axes}
    del options["path"], options["rule"]
    if draw.random() < 0.2:
        options["truncate"] = draw.randint(1, problem.steps)
    return options


OPTIONS: dict[str, Callable[[Problem, random.Random], dict[str, Any]]] = {
    "attribute": _of_attribution,
    "axes": _of_axes,
    "gram": _of_gram,
    "symmetric": _of_gram,
    "per_class": _of_gram,
    "trace": _of_gram,
    "diagonal": _of_gram,
    "features": _of_features,
    "reconstruct": _of_reconstruction,
    "kernel": _of_kernel,
    "influence": _of_influence,
    "self_influence": lambda problem, draw: _shared(draw),
    "retrain": lambda problem, draw: _shared(draw),
    "between": lambda problem, draw: _shared(draw, checkpoint=False) | {"head": _head(problem, draw)},
}


# ---- outcomes ------------------------------------------------------------------------------------------------------


def answers(problem: Problem) -> dict[int | None, dict[str, Any] | str]:
    """Return the answers by the number of states together: numbers, or the words of an error of the package's own."""
    found: dict[int | None, dict[str, Any] | str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            run = problem.record(folder)
        except Exception as error:
            if not is_clear(error):
                raise
            return {count: f"{type(error).__name__}: {error}" for count in COUNTS}
        for count in COUNTS:
            with states_together(count):
                try:
                    found[count] = problem.ask(run, folder)
                except Exception as error:
                    if not is_clear(error):
                        raise
                    found[count] = f"{type(error).__name__}: {error}"
    return found


def outcome(problem: Problem) -> str:
    """Return "right" or "refused", or what was wrong, with the number of states after a colon."""
    try:
        found = answers(problem)
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    one = found[1]
    for count in COUNTS[1:]:
        difference = difference_of(one, found[count], TOLERANCE[problem.dtype])
        if difference:
            return f"wrong: with {count or 'all'} states together: {difference}"
    return "refused" if isinstance(one, str) else "right"


def difference_of(one: dict[str, Any] | str, other: dict[str, Any] | str, tolerance: float) -> str:
    """Return in words what differs, or an empty text."""
    if isinstance(one, str) or isinstance(other, str):
        return "" if one == other else f"{_in_words(one)} and {_in_words(other)}"
    for name, value in one.items():
        if not isinstance(value, Tensor):
            if value != other[name]:
                return f"{name} is {value} and {other[name]}"
            continue
        a, b = value.detach(), other[name].detach()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} has shape {tuple(a.shape)} and {tuple(b.shape)}, {a.dtype} and {b.dtype}"
        if not a.is_floating_point() or not a.numel():
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"{name} is finite in other places"
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        error, largest = float((a - b).abs().max()), float(a.abs().max())
        if error > tolerance * largest and error > tolerance * _unit(one):
            return f"{name} is off by {error / max(largest, 1e-300):.2g} of its largest entry, {largest:.2g}"
    return ""


def _unit(numbers: dict[str, Any]) -> float:
    """Return the largest entry of an answer but its ratios: of terms that sum to outputs, one may be rounding alone."""
    terms = (v.detach() for name, v in numbers.items() if isinstance(v, Tensor) and name.split(".")[-1] not in RATIOS)
    return max((float(v.abs().max()) for v in terms if v.numel()), default=0.0)


def _in_words(answer: dict[str, Any] | str) -> str:
    return f"an error ({answer})" if isinstance(answer, str) else "numbers"


def count_outcomes(count: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Count the outcomes of some problems, and describe those that are wrong.

    Args:
        count: Number of problems.
        first: The first seed.
    """
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        problem = draw_problem(seed)
        found = outcome(problem)
        counts[found.split(":")[0]] += 1
        if ":" in found:
            wrong.append(f"seed {seed}: {found}: {problem}")
    return counts, wrong

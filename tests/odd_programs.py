"""Odd programs: training loops that do what the package did not expect, and questions about them with known answers.

The truth is brute force: plain loops with a weight for each sample, central differences, per-sample gradients pushed
through the optimizer by hand, Gauss-Legendre along the recorded steps, an explicit Gram matrix. It shares no code with
the package. `odd_themes` draws programs from a seed.
"""

import os
import random
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from odd_loops import OddLoop
from odd_parts import AVERAGE, BY_ROW, CLASSES, LINEAR, MIXING, POINTS
from odd_steps import ByHand
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.core.show import CertificateWarning
from epk_gp.core.states import averaged_trajectory
from epk_gp.kernel_machine.axes import by_label, by_step
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
SMALLEST = 1e-5  # of a truth: what is smaller is compared with this
Numbers = Callable[[nn.Module], Tensor]


@dataclass
class Program:
    """A loop and a question."""

    theme: str  # what is odd
    loop: OddLoop  # the loop
    question: str  # what is asked: a name in `QUESTIONS`
    draw: random.Random  # source of the rest
    function: str | None = None  # name of a function of the outputs, of influence
    chosen: bool = False  # whether one class per point is asked about
    by: str | None = None  # "label", "step" or "both": by what influence is split
    truncate: int | None = None  # number of steps that influence goes through
    sample_weights: str = "random"  # of `retrain`: "ones", "random", "zeros", "threes" or "huge"
    stored: str | None = None  # how the run is kept: None (in memory), "disk" or "thinned"
    files: str | None = None  # what happens to them: "trained_again", "partial_sums", "pieces" or "other_momentum"
    executor: bool = False  # whether a thread computes
    checkpoint: bool = False  # whether there is a checkpoint, from which the same question is asked again
    path: str = "straight"  # of attribution: "straight", "chords" or "layerwise"
    head: str | None = None  # of the outputs
    resumes: bool = False  # whether the recording is interrupted and resumed
    of_average: bool = False  # whether influence and retraining are those of the averaged weights

    # ---- the package -------------------------------------------------------------------------------------------

    def record(self, folder: Path, loop: OddLoop | None = None) -> epk.Trajectory:
        """Record the loop with the package."""
        loop = self.loop if loop is None else loop
        X, y = loop.data
        options: dict[str, Any] = {"loss": loss_of(loop), "check_every": self.draw.choice([1, None])}
        if loop.clipping is not None and loop.clipping.is_stated:
            clip = loop.clipping
            options["clip"] = ClipValue(clip.bound) if clip.kind == "value" else ClipNorm(clip.bound, clip.norm_type)
        if loop.group_added is not None:
            options["trained"] = [name for name, _ in loop.make()[0].named_parameters() if name.startswith("0.")]
        if self.stored is not None:
            thinned = {"disk": {}, "thinned": {"keep_every": 3}}
            options["folder"] = folder / "run"
            options["storage"] = epk.Storage(steps=self.draw.choice([1, 3]), **thinned[self.stored])

        def recorder_of(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> epk.Recorder:
            return epk.Recorder(net, optimizers if len(optimizers) > 1 else optimizers[0], X, y, **options)

        if self.resumes:
            options["resume"] = True
            loop.run(recorder_of=recorder_of, until=loop.steps // 2)
        ended = loop.run(recorder_of=recorder_of, until=loop.steps if self.resumes else None, is_resumed=self.resumes)
        if self.stored is None or (self.files != "other_momentum" and self.draw.random() < 0.5):
            return ended.recorder.trajectory
        loop = replace(self.loop, momentum=0.4) if self.files == "other_momentum" else self.loop
        return epk.load_trajectory(folder / "run", loop.make()[0])

    def ask(self, trajectory: epk.Trajectory, folder: Path) -> tuple[Tensor, Any]:
        """Ask the package.

        Returns:
            The numbers, and the result that they stand in.
        """
        options: dict[str, Any] = {}
        if self.executor:
            options["executor"] = ThreadPoolExecutor(1)
        if self.files == "trained_again":
            if self.draw.random() < 0.5:
                self._answer(trajectory, options)
            shutil.rmtree(folder / "run")
            self.record(folder, replace(self.loop, init=1))
        if self.files == "pieces":  # each of them takes the place of another one, or of an older one of other weights
            options |= {"checkpoint": folder / "own", "memory_budget": 1 << 20}
            self._answer(trajectory, options)
            pieces = sorted((folder / "own").rglob("*.safetensors"))
            contents = [piece.read_bytes() for piece in pieces]
            for piece, content in zip(pieces, contents[1:] + contents[:1], strict=True):
                piece.write_bytes(content)
        if self.files == "partial_sums":
            other = replace(self, loop=replace(self.loop, init=1), stored=None)
            for name, trajectory_of in (("other", other.record(folder)), ("own", trajectory)):
                options["checkpoint"] = folder / name
                self._answer(trajectory_of, options)
            for file in (folder / "other").rglob("*.safetensors"):
                shutil.copy(file, folder / "own" / file.relative_to(folder / "other"))
        if self.checkpoint:
            options["checkpoint"] = folder / "own"
            self._answer(trajectory, options)
        return self._answer(trajectory, options)

    def _answer(self, trajectory: epk.Trajectory, options: dict[str, Any]) -> tuple[Tensor, Any]:
        X, head = self.loop.test_points, self.head
        if self.of_average or self.question == "averaged":
            a = torch.full((trajectory.num_steps,), AVERAGE, dtype=torch.float64)
            trajectory = averaged_trajectory(trajectory, a)
        match self.question:
            case "influence" | "smoothing":
                if self.function is not None:
                    options |= {"function": (MIXING | BY_ROW)[self.function]}
                if self.chosen:
                    options |= {"classes": torch.tensor([0, 2, 1])}
                if self.truncate is not None:
                    options |= {"truncate": self.truncate}
                axes = {"label": [by_label], "step": [by_step], "both": [by_label, by_step]}
                if self.by is not None:
                    options |= {"by": [axis(trajectory) for axis in axes[self.by]]}
                if self.question == "smoothing":
                    options |= {"smoothing": self.smoothing}
                result = epk.influence(trajectory, X, head=None if self.function else head, **options)
                return result.values.flatten(2), result
            case "self_influence":
                return epk.influence(trajectory, own=True, **options).values[:, 0, 0], None
            case "retrain":
                result = epk.retrain(trajectory, self.weights, **options)
                return result.outputs(X, head=head), result
            case "reconstruct":
                result = epk.reconstruct(trajectory, X, head=head, **options)
                return result.outputs, result
            case "attribute" | "averaged":
                paths = {"straight": epk.straight(), "chords": epk.chords(4), "layerwise": epk.layerwise(2)}
                result = epk.attribute(trajectory, X, head=head, path=paths[self.path], **options)
                return torch.cat([result.samples, result.decay[:, :, None], result.total[:, :, None]], dim=2), result
            case "gram":
                points = (epk.Points(X, False), epk.Points(self.loop.data[0][:3], True))
                rule = epk.gauss_legendre(2)
                return epk.gram_block(trajectory, *points, head=head, rule=rule, **options).flatten(2), None
        raise ValueError(self.question)

    @property
    def smoothing(self) -> epk.Smoothing:
        high = 4.0 if self.sample_weights == "threes" else 2.0
        return epk.Smoothing(num_runs=2, low=0.2, high=high, seed=self.loop.seed % 1000)

    @property
    def weights(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.loop.seed)
        rows = torch.rand(2, POINTS, generator=generator, dtype=torch.float64)
        ones = torch.ones_like(rows)
        choices = {"ones": ones, "zeros": (rows > 0.3).double(), "threes": 3.0 * ones, "huge": 1e80 * rows}
        return choices.get(self.sample_weights, 2 * rows)

    # ---- the truth ---------------------------------------------------------------------------------------------

    def truths(self) -> Iterator[Tensor]:
        """Yield the answer by brute force, by several step sizes where it is of central differences."""
        loop, ones = self.loop, torch.ones(self.loop.steps, POINTS, dtype=torch.float64)
        match self.question:
            case "retrain":
                nets = [self.trained(row.expand(loop.steps, POINTS)) for row in self.weights]
                yield torch.stack([self.outputs(net).detach() for net in nets])
            case "influence":
                yield from self.slopes(ones, self.directions, self.numbers)
            case "smoothing":
                runs = [
                    self.slopes(weights.expand(loop.steps, POINTS), self.directions, self.numbers)
                    for weights in self.smoothing.weights(POINTS)
                ]
                for of_size in zip(*runs, strict=True):
                    yield torch.stack(of_size).mean(dim=0)
            case "self_influence":
                X, y = loop.data

                def own_losses(net: nn.Module) -> Tensor:
                    return loop.losses(net(X), y)

                yield from (slopes.diagonal() for slopes in self.slopes(ones, self.directions, own_losses))
            case "reconstruct":
                yield self.outputs(loop.run().net).detach()
            case "gram":
                yield ByHand(loop).gram(self.loop.test_points, loop.data[0][:3], self.actual_head)
            case "attribute" | "averaged":
                hand = ByHand(loop, average=AVERAGE if self.question == "averaged" else None)
                every = 4 if self.path == "chords" else 1
                if self.is_followed:
                    for count in (8, 16, 40):
                        yield hand.contributions(self.loop.test_points, self.actual_head, count, every)
                else:
                    yield hand.ends(self.loop.test_points, self.actual_head)[:, :, None]

    @property
    def is_followed(self) -> bool:
        """Whether the contributions of each sample are known by hand, not their sum alone."""
        loop = self.loop
        smooth = loop.net_kind in ("mlp", "tied", "batch_norm", "layer_norm", "dropout", "convolution", "weight_norm")
        is_linear = set(loop.optimizers) <= set(LINEAR) and not loop.steps_before
        return is_linear and smooth and self.path in ("straight", "chords")

    @property
    def actual_head(self) -> str:
        if self.function is not None:  # it takes what the network returns
            return "logits"
        return self.head or ("logits" if self.loop.loss == "squares" else "log_softmax")

    def outputs(self, net: nn.Module) -> Tensor:
        z = net.eval()(self.loop.test_points)
        return z.log_softmax(dim=1) if self.actual_head == "log_softmax" else z

    def numbers(self, net: nn.Module) -> Tensor:
        f = self.outputs(net)
        if self.chosen:
            return f.gather(1, torch.tensor([[0], [2], [1]]))
        if self.function is None:
            return f
        value = (MIXING | BY_ROW)[self.function](f)
        return value.reshape(1, 1) if value.ndim == 0 else value.reshape(len(f), -1)

    @property
    def directions(self) -> Tensor:
        """The changes of the weights of steps and samples in which influence differentiates, (D, S, M)."""
        steps = self.loop.steps
        samples = torch.eye(POINTS, dtype=torch.float64)[:, None, :].expand(-1, steps, -1).clone()
        if self.truncate is not None:
            samples[:, : max(0, steps - self.truncate)] = 0
        if self.by is None:
            return samples
        labels = torch.stack([samples[torch.arange(POINTS) % CLASSES == c].sum(dim=0) for c in range(CLASSES)])
        if self.by == "label":
            return labels
        one_step = torch.eye(steps, dtype=torch.float64)[:, :, None]
        if self.by == "step":
            return samples.sum(dim=0) * one_step
        return (labels[:, None] * one_step).flatten(0, 1)

    def trained(self, weights: Tensor) -> nn.Module:
        """Return the network that a loop with other weights of the samples ends with, or its average."""
        ended = self.loop.run(weights)
        if self.of_average:
            for p, average in zip(ended.net.parameters(), ended.average, strict=True):
                p.data = average
        return ended.net.eval()

    def slopes(self, weights: Tensor, directions: Tensor, numbers: Numbers) -> Iterator[Tensor]:
        """Differentiate by central differences of several sizes: where one crosses a kink, another does not."""
        for size in (1e-5, 1e-4, 1e-6):
            columns = []
            for d in directions:
                ends = [numbers(self.trained(weights + sign * size * d)).detach() for sign in (1, -1)]
                columns.append((ends[0] - ends[1]) / (2 * size))
            yield torch.stack(columns, dim=-1)


def loss_of(loop: OddLoop) -> Any:
    if loop.loss == "squares":
        return epk.MeanSquaredError(loop.reduction)
    if loop.loss == "weighted":
        return epk.CrossEntropy(loop.reduction, class_weights=(0.5, 1.0, 2.0))
    return epk.CrossEntropy(loop.reduction, label_smoothing=0.1 if loop.loss == "smoothed" else 0.0)


def outcome(program: Program) -> str:
    """Run a program.

    Returns:
        "right"; "refused" (an error of the package's own); "uncertified" (a result says it is not certified, or warns);
        or what was wrong, which begins with "raw" (an error that is not the package's own) or "silent".
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trajectory = program.record(Path(name))
            caught.clear()
            answer, result = program.ask(trajectory, Path(name))
        except Exception as error:
            return "refused" if is_clear(error) else f"raw: {type(error).__name__}: {error}"
    if any(issubclass(warning.category, CertificateWarning) for warning in caught):
        return "uncertified"
    if not getattr(result, "certified", True):
        return "silent: not certified, and no warning"
    if program.question in ("attribute", "averaged") and not program.is_followed:
        answer = answer[:, :, -1:]
    truths: list[Tensor] = []
    tolerance = TOLERANCE[program.loop.dtype]
    for truth in program.truths():
        if error_of(answer, truth) <= tolerance:
            return "right"
        truths.append(truth)
    if program.loop.clipping is not None and not program.loop.clipping.is_stated and "clip" in str(result):
        return "uncertified"  # a bound that was neither stated nor seen: the result says that it knows of none
    spread = min((error_of(a, b) for a, b in combinations(truths, 2)), default=0.0)  # what differences can tell
    error = min(error_of(answer, truth) for truth in truths)
    return "right" if error <= min(spread, 1e-3) else f"silent: off by {error:.2g}"


def error_of(answer: Tensor, truth: Tensor) -> float:
    """Return max |difference| / max |truth|; infinity where something is not finite."""
    truth = truth.detach().double()
    answer = answer.reshape(truth.shape).detach().double()
    if not (torch.isfinite(answer).all() and torch.isfinite(truth).all()):
        return float("inf")
    return float((answer - truth).abs().max() / truth.abs().max().clamp(min=SMALLEST))


def is_clear(error: BaseException) -> bool:
    """Whether an error was raised by the package in words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_own = "epk_gp" in Path(last.filename).parts and (last.line or "").lstrip().startswith("raise")
    return is_own and isinstance(error, (ValueError, TypeError, RuntimeError, OSError))

"""Odd programs: training loops that do what the package did not expect, and questions about them with known answers.

A seed decides everything: the loop (`odd_loops`), the question, and how it is asked. The truth is brute force: plain
loops with a weight for each sample, central differences, per-sample gradients pushed through the optimizer by hand,
Gauss-Legendre along the recorded steps, an explicit Gram matrix. It shares no code with the package.
"""

import os
import random
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from odd_loops import CHANGES, CLASSES, LINEAR, OPTIMIZERS, POINTS, Clipping, OddLoop
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.core.averaging import averaged_trajectory
from epk_gp.core.certificate import CertificateWarning
from epk_gp.kernel_machine.axes import by_label, by_step
from epk_gp.training.clipping import ClipNorm, ClipValue

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
AVERAGE = 0.3  # coefficient of the averages of weights
SMALLEST = 1e-5  # of a truth: what is smaller is compared with this
Numbers = Callable[[nn.Module], Tensor]

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda f: torch.cat([f[:1], f[1:] - f[:-1]]),
    "cumsum": lambda f: f.cumsum(0),
    "centred": lambda f: f - f.mean(dim=0),
    "from the last": lambda f: torch.cat([f[:1], f[1:] - f[-1:]]),
    "flipped": lambda f: f.flip(0),
    "times the second": lambda f: torch.cat([f[:1], f[1:2], f[2:] * f[1:2]]),
    "softmax over rows": lambda f: torch.cat([f[:1].exp(), f[1:].softmax(dim=0)]),
}
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "margin": lambda f: f[:, 0] - f[:, 1],
    "squares": lambda f: f.square(),
    "entropy": lambda f: -(f.softmax(dim=1) * f.log_softmax(dim=1)).sum(dim=1),
    "mean square": lambda f: f.square().mean(),
}


@dataclass
class Program:
    """A loop and a question.

    Attributes:
        theme: What is odd.
        loop: The loop.
        question: What is asked: a name in `QUESTIONS`.
        function: Name of a function of the outputs, of influence.
        chosen: Whether one class per point is asked about.
        by: "label", "step" or "both": by what influence is split.
        truncate: Number of steps that influence goes through.
        sample_weights: Of `retrain`: "ones", "random", "zeros", "threes" or "huge".
        stored: How the run is kept: None (in memory), "disk", "thinned" or "rounded".
        files: What happens to them: None, "trained_again", "partial_sums", "pieces" or "other_momentum".
        executor: Whether a thread computes.
        checkpoint: Whether there is a checkpoint, from which the same question is asked again.
        path: Of attribution: "straight", "chords", "manhattan" or "layerwise".
        head: Of the outputs.
        resumes: Whether the recording is interrupted and resumed.
        of_average: Whether influence and retraining are those of the averaged weights.
        draw: Source of the rest.
    """

    theme: str
    loop: OddLoop
    question: str
    draw: random.Random
    function: str | None = None
    chosen: bool = False
    by: str | None = None
    truncate: int | None = None
    sample_weights: str = "random"
    stored: str | None = None
    files: str | None = None
    executor: bool = False
    checkpoint: bool = False
    path: str = "straight"
    head: str | None = None
    resumes: bool = False
    of_average: bool = False

    def __str__(self) -> str:
        names = (
            "function",
            "chosen",
            "by",
            "truncate",
            "stored",
            "files",
            "executor",
            "checkpoint",
            "path",
            "head",
            "resumes",
            "of_average",
        )
        own = ", ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) not in (None, False))
        weights = f" weights={self.sample_weights}" if self.question == "retrain" else ""
        return f"[{self.theme}] {self.question}{weights} ({own}) of {self.loop}"

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
            thinned = {
                "disk": {},
                "thinned": {"keep_every": 3},
                "rounded": {"keep_every": 2, "weights_dtype": torch.bfloat16},
            }
            options["path"] = folder / "run"
            options["storage"] = epk.Storage(steps=self.draw.choice([1, 3]), **thinned[self.stored])

        def recorder_of(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> epk.Recorder:
            return epk.Recorder(net, optimizers if len(optimizers) > 1 else optimizers[0], X, y, **options)

        if self.resumes:
            options["resume"] = True
            loop.run(recorder_of=recorder_of, until=loop.steps // 2)
        ended = loop.run(recorder_of=recorder_of, until=loop.steps if self.resumes else None, is_resumed=self.resumes)
        if self.stored is None or (self.files != "other_momentum" and self.draw.random() < 0.5):
            return ended.recorder.trajectory
        return self.load(folder / "run")

    def load(self, path: Path) -> epk.Trajectory:
        loop = replace(self.loop, momentum=0.4) if self.files == "other_momentum" else self.loop
        return epk.load_trajectory(path, loop.make()[0])

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
                result = epk.influence(trajectory, X, head=head, **options)
                return result.values.flatten(2), result
            case "self_influence":
                return epk.self_influence(trajectory, **options), None
            case "retrain":
                result = epk.retrain(trajectory, self.weights, **options)
                return result.outputs(X, head=head), result
            case "reconstruct":
                result = epk.reconstruct(trajectory, X, head=head, **options)
                return result.outputs, result
            case "attribute" | "averaged":
                paths = {
                    "straight": epk.straight(),
                    "chords": epk.chords(4),
                    "manhattan": epk.manhattan(),
                    "layerwise": epk.layerwise(2),
                }
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
        match self.sample_weights:
            case "ones":
                return torch.ones_like(rows)
            case "zeros":
                return (rows > 0.3).double()
            case "threes":
                return 3.0 * torch.ones_like(rows)
            case "huge":
                return 1e80 * rows
        return 2 * rows

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
        return (
            set(loop.optimizers) <= set(LINEAR)
            and smooth
            and not loop.steps_before
            and self.path in ("straight", "chords")
        )

    @property
    def actual_head(self) -> str:
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
        watch = Averager() if self.of_average else None
        net = self.loop.run(weights, watch=watch).net.eval()
        if watch is not None:
            with torch.no_grad():
                for p, average in zip(net.parameters(), watch.weights, strict=True):
                    p.copy_(average)
        return net

    def slopes(self, weights: Tensor, directions: Tensor, numbers: Numbers) -> Iterator[Tensor]:
        """Differentiate by central differences of several sizes: where one crosses a kink, another does not."""
        for size in (1e-5, 1e-4, 1e-6):
            columns = []
            for d in directions:
                ends = [numbers(self.trained(weights + sign * size * d)).detach() for sign in (1, -1)]
                columns.append((ends[0] - ends[1]) / (2 * size))
            yield torch.stack(columns, dim=-1)


class Averager:
    """Averages the weights of a loop."""

    def begin(self, net: nn.Module) -> None:
        self.weights = [p.detach().clone() for p in net.parameters()]

    def gradients(self, net: nn.Module, batch: Tensor, terms: Tensor) -> None:
        """Ignore them."""

    def before_step(self, net: nn.Module) -> None:
        """Do nothing."""

    def after_step(self, net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        for average, p in zip(self.weights, net.parameters(), strict=True):
            average.lerp_(p.detach(), AVERAGE)


@dataclass
class ByHand:
    """A loop whose steps are split by hand into shares of the samples.

    Attributes:
        loop: The loop.
        average: Coefficient a of the average of the weights; None for the trained weights.
    """

    loop: OddLoop
    average: float | None = None

    def __post_init__(self) -> None:
        self.grads: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.states: list[dict[str, Tensor]] = []
        self.shares: list[dict[str, Tensor]] = []
        self.rates: list[float] = []
        self.net = self.loop.run(watch=self).net.eval()

    def begin(self, net: nn.Module) -> None:
        self.states.append(state_of(net))
        self._clear(net)

    def gradients(self, net: nn.Module, batch: Tensor, terms: Tensor) -> None:
        trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        for i, term in zip(batch.tolist(), terms, strict=True):
            own = torch.autograd.grad(term, list(trained.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(trained, own, strict=True):
                if g is not None:
                    self.grads[name][i] += g

    def before_step(self, net: nn.Module) -> None:
        self.before = {name: p.detach().clone() for name, p in net.named_parameters()}

    def after_step(self, net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        names = {id(p): name for name, p in net.named_parameters()}
        shares = {name: torch.zeros_like(torch.cat([g, g[:1]])) for name, g in self.grads.items()}
        self.rates.append(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups if kind in LINEAR else []:
                for p in group["params"]:
                    if p.grad is not None:
                        shares[names[id(p)]] = self._share(kind, group, optimizer.state[p], names[id(p)], p)
        self.shares.append(shares)
        self.states.append(state_of(net))
        self._clear(net)

    def _clear(self, net: nn.Module) -> None:
        self.grads = {name: p.new_zeros(POINTS, *p.shape).detach() for name, p in net.named_parameters()}

    def _share(self, kind: str, group: dict[str, Any], state: dict[str, Any], name: str, p: Tensor) -> Tensor:
        """Return the shares of samples, and of weight decay, of a step of a parameter."""
        g, w = self.grads[name], self.before[name]
        total = g.sum(dim=0)
        factor = torch.where(total == 0, 1.0, p.grad / total)  # of clipping
        h = torch.cat([g * factor * (-1 if group["maximize"] else 1), (group["weight_decay"] * w)[None]])
        decoupled = torch.zeros_like(h)
        lr = float(group["lr"])
        if kind == "AdamW":
            h[-1] = 0
            decoupled[-1] = -lr * group["weight_decay"] * w
        if kind == "SGD":
            if not group["momentum"]:
                return -lr * h
            m = h if name not in self.buffers else group["momentum"] * self.buffers[name] + (1 - group["dampening"]) * h
            self.buffers[name] = m
            return -lr * (h + group["momentum"] * m if group["nesterov"] else m)
        if kind in ("Adam", "AdamW"):
            b1, b2 = group["betas"]
            t = float(state["step"])
            m = b1 * self.buffers.get(name, torch.zeros_like(h)) + (1 - b1) * h
            self.buffers[name] = m
            v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
            return decoupled - lr / (1 - b1**t) * m / ((v / (1 - b2**t)).sqrt() + group["eps"])
        if kind == "RMSprop":
            v = state["square_avg"] - (state["grad_avg"].square() if group["centered"] else 0)
            h = h / (v.sqrt() + group["eps"])
            if group["momentum"] > 0:
                h = group["momentum"] * self.buffers.get(name, torch.zeros_like(h)) + h
                self.buffers[name] = h
            return -lr * h
        rate = lr / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        return -rate * h / (state["sum"].sqrt() + group["eps"])

    def averaged(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the states of the path, and the shares of its steps."""
        if self.average is None:
            return self.states, self.shares
        a, path = self.average, [self.states[0]]
        lead: dict[str, Tensor] = {name: torch.zeros_like(d) for name, d in self.shares[0].items()}
        shares = []
        for state, made in zip(self.states[1:], self.shares, strict=True):
            path.append({n: (1 - a) * path[-1][n] + a * v if n in made else v for n, v in state.items()})
            shares.append({name: a * (d + lead[name]) for name, d in made.items()})
            lead = {name: (1 - a) * (d + lead[name]) for name, d in made.items()}
        return path, shares

    def outputs(self, state: dict[str, Tensor], X: Tensor, head: str) -> Tensor:
        z = torch.func.functional_call(self.net, state, (X,))
        return z.log_softmax(dim=1) if head == "log_softmax" else z

    def ends(self, X: Tensor, head: str) -> Tensor:
        """Return the outputs at the end of the path."""
        return self.outputs(self.averaged()[0][-1], X, head).detach()

    def jacobian(self, state: dict[str, Tensor], X: Tensor, head: str) -> dict[str, Tensor]:
        """Return the derivatives of the outputs in the parameters, (n, C, ...)."""
        leaves = {name: value.detach() for name, value in state.items()}
        leaves |= {name: leaves[name].clone().requires_grad_() for name in self.shares[0]}
        f = self.outputs(leaves, X, head)
        wanted = [leaves[name] for name in self.shares[0]]
        rows = [torch.autograd.grad(v, wanted, retain_graph=True, materialize_grads=True) for v in f.flatten()]
        return {
            name: torch.stack(column).reshape(*f.shape, *column[0].shape)
            for name, column in zip(self.shares[0], zip(*rows, strict=True), strict=True)
        }

    def contributions(self, X: Tensor, head: str, num_nodes: int, every: int) -> Tensor:
        """Return the shares of samples and weight decay of each output, and the output, (n, C, M + 2)."""
        states, shares = self.averaged()
        total = torch.zeros(len(X), CLASSES, POINTS + 1, dtype=torch.float64)
        for first in range(0, len(shares), every):
            start, end = states[first], states[min(first + every, len(shares))]
            moved = {n: sum(made[n] for made in shares[first : first + every]) for n in shares[0]}
            for t, weight in nodes(num_nodes):
                J = self.jacobian({n: start[n] + t * (end[n] - start[n]) for n in start}, X, head)
                for name, d in moved.items():
                    total += weight * torch.einsum("ncp,mp->ncm", J[name].flatten(2), d.flatten(1)).double()
        return torch.cat([total, self.ends(X, head)[:, :, None].double()], dim=2)

    def gram(self, a: Tensor, b: Tensor, head: str) -> Tensor:
        """Return the kernel of test copies and training copies, (n, C, m * C)."""
        K = torch.zeros((), dtype=torch.float64)
        for start, end, rate in zip(self.states, self.states[1:], self.rates, strict=False):
            right = self.jacobian(start, b, head)
            for t, weight in nodes(2):
                left = self.jacobian({n: start[n] + t * (end[n] - start[n]) for n in start}, a, head)
                for name in self.shares[0]:
                    products = torch.einsum("ncp,mdp->ncmd", left[name].flatten(2), right[name].flatten(2))
                    K = K + rate * weight * products
        return K.flatten(2)


def state_of(net: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: value.detach().clone() for name, value in tensors.items() if value.is_floating_point()}


def nodes(count: int) -> list[tuple[float, float]]:
    places, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(places, weights, strict=True)]


def loss_of(loop: OddLoop) -> Any:
    if loop.loss == "squares":
        return epk.MeanSquaredError(loop.reduction)
    if loop.loss == "weighted":
        return epk.CrossEntropy(loop.reduction, class_weights=(0.5, 1.0, 2.0))
    return epk.CrossEntropy(loop.reduction, label_smoothing=0.1 if loop.loss == "smoothed" else 0.0)


# ---- drawing ---------------------------------------------------------------------------------------------------

DERIVATIVES = ("influence", "influence", "self_influence", "smoothing", "retrain")
SUMS = ("attribute", "attribute", "reconstruct", "gram", "averaged")
ALL = (*DERIVATIVES, *SUMS)


def draw_program(seed: int, theme: str | None = None) -> Program:
    """Draw a program; its theme is what is odd."""
    theme = THEMES[seed % len(THEMES)] if theme is None else theme
    draw = random.Random(seed)
    name = draw.choice(list(OPTIMIZERS))
    if theme == "groups":
        name = draw.choice(["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor", "Adadelta"])
    if theme == "before":
        name = draw.choice(["RMSprop", "Adagrad", "Adadelta", "Adafactor", "Adam", "SGD"])
    loop = OddLoop(
        seed=draw.randrange(1 << 30),
        activation=draw.choice([nn.Tanh, nn.Tanh, nn.GELU, nn.Softplus]),
        net_kind=draw.choice(["mlp", "mlp", "mlp", "tied", "layer_norm", "batch_norm", "dropout", "convolution"]),
        loss=draw.choice(["cross_entropy", "cross_entropy", "smoothed", "weighted", "squares"]),
        reduction=draw.choice(["mean", "mean", "sum"]),
        optimizers=(name,),
        options=(draw.choice(OPTIMIZERS[name][2]),),
        decay=draw.choice([0.0, 0.0, 0.05]),
        steps=draw.randint(4, 7),
        batch=draw.choice([4, 5, None]),
        accumulated=draw.choice([1, 1, 1, 2]),
    )
    if loop.reduction == "sum" and name in ("SGD", "ASGD"):
        loop.rate = 0.2
    if draw.random() < 0.25:
        loop.schedule = tuple(draw.choice([0.5, 1.0, 1.5]) for _ in range(loop.steps))
    program = Program(theme, loop, draw.choice(ALL), draw)
    program.head = draw.choice([None, None, "logits"])
    program.stored = draw.choice([None, None, None, "disk"])
    PLANT[theme](program)
    if program.question in ("influence", "smoothing") and program.function is None:
        variant = draw.choice([None, None, "function", "chosen", "by", "truncate"])
        if variant == "function":
            program.function = draw.choice(list(BY_ROW))
        program.chosen = variant == "chosen"
        if variant == "by" and loop.loss != "squares" and not loop.ignored:
            program.by = draw.choice(["label", "step", "both"])
        if variant == "truncate" and program.question == "influence":
            program.truncate = draw.randint(1, loop.steps)
    if program.question == "attribute":
        program.path = draw.choice(["straight", "straight", "chords", "manhattan", "layerwise"])
    if draw.random() < 0.1 and program.files is None:
        program.checkpoint = True
    if program.question == "gram" and len(loop.optimizers) > 1:
        program.question = "attribute"
    return program


def plant_nothing(program: Program) -> None:
    draw, loop = program.draw, program.loop
    if draw.random() < 0.2:
        loop.clipping = clipping(program, draw.choice(["value", "norm"]), 2.0, is_reached=True, is_stated=True)
    if draw.random() < 0.2 and loop.net_kind == "mlp":
        other = draw.choice(["SGD", "Adam"])
        loop.optimizers, loop.options = (*loop.optimizers, other), (*loop.options, {})
    if draw.random() < 0.2:
        loop.passes = "evaluation"
    if draw.random() < 0.1:
        loop.seen, loop.inputs = draw.choice(["normalised", "noise"]), 8
    program.of_average = draw.random() < 0.1 and program.question in DERIVATIVES
    if draw.random() < 0.15:
        program.stored = "disk"
        program.resumes = draw.random() < 0.5


def plant_options(program: Program) -> None:
    draw, loop = program.draw, program.loop
    name, value = draw.choice(CHANGES[loop.optimizers[0]])
    if name == "nesterov":
        loop.options = ({"momentum": 0.9},)
    if name == "dampening":
        loop.options = ({"momentum": 0.9},)
    if name == "momentum" and loop.optimizers[0] == "RMSprop":  # torch makes the buffer at the first step only
        loop.options = ({"momentum": 0.9},)
    if name == "amsgrad":
        loop.options = ({"amsgrad": True},)
    loop.change = (name, value, draw.randint(1, loop.steps - 2))
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_groups(program: Program) -> None:
    draw, loop = program.draw, program.loop
    loop.net_kind = draw.choice(["mlp", "mlp", "layer_norm", "convolution_"])
    if loop.net_kind == "convolution_":
        loop.net_kind = "mlp"
    if draw.random() < 0.8:
        loop.group_added = draw.randint(1, loop.steps - 2)
    else:
        loop.frozen_from = draw.randint(1, loop.steps - 2)
        loop.sets_to_none = draw.random() < 0.7
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_before(program: Program) -> None:
    program.loop.steps_before = program.draw.randint(1, 3)
    program.question = program.draw.choice((*DERIVATIVES, *ALL))


def plant_passes(program: Program) -> None:
    draw, loop = program.draw, program.loop
    loop.net_kind = "batch_norm"
    loop.passes = draw.choice(["no_grad", "no_grad", "unused", "reset", "reset"])
    loop.passes_at = draw.randrange(loop.steps)
    program.question = draw.choice((*DERIVATIVES, *ALL))
    program.sample_weights = draw.choice(["ones", "random"])


def clipping(program: Program, kind: str, norm_type: float, *, is_reached: bool, is_stated: bool) -> Clipping:
    norms = program.loop.run().norms
    place = 0 if kind == "value" or norm_type == float("inf") else int(norm_type)
    sizes = sorted(norm[place] for norm in norms)
    bound = 0.7 * sizes[len(sizes) // 2] if is_reached else 1.2 * sizes[-1]
    return Clipping(kind, float(f"{bound:.3g}"), norm_type, is_stated)


def plant_clipping(program: Program) -> None:
    draw, loop = program.draw, program.loop
    kind, norm_type = draw.choice([("value", 2.0), *(("norm", p) for p in (2.0, float("inf"), 1.0, 3.0))])
    is_reached, is_stated = draw.random() < 0.5, draw.random() < 0.6
    loop.clipping = clipping(program, kind, norm_type, is_reached=is_reached, is_stated=is_stated)
    loop.clips_part = draw.random() < 0.1 and loop.net_kind in ("mlp", "batch_norm", "layer_norm")
    program.question = draw.choice((*DERIVATIVES, *ALL))
    if draw.random() < 0.7:
        program.sample_weights = "threes"


def plant_parametrization(program: Program) -> None:
    program.loop.net_kind = program.draw.choice(["weight_norm", "weight_norm", "spectral_norm", "orthogonal"])
    program.question = program.draw.choice((*DERIVATIVES, *ALL))


def plant_swapped(program: Program) -> None:
    program.stored = program.draw.choice(["disk", "disk", "thinned"])
    program.files = "trained_again"


def plant_partial_sums(program: Program) -> None:
    program.files = program.draw.choice(["partial_sums", "partial_sums", "pieces"])


def plant_function(program: Program) -> None:
    program.question = program.draw.choice(["influence", "influence", "smoothing"])
    program.function = program.draw.choice(list(MIXING))


def plant_divergence(program: Program) -> None:
    loop = program.loop
    program.question, program.sample_weights = "retrain", "huge"
    loop.optimizers, loop.options, loop.loss = ("SGD",), ({},), "squares"


def plant_indices(program: Program) -> None:
    draw, loop = program.draw, program.loop
    loop.seen, loop.inputs = draw.choice(["normalised", "noise", "same"]), 8
    loop.announced = draw.choice(["counted", "within_subset", "shuffled"])
    loop.steps, loop.batch = 7, 5
    loop.schedule = ()
    program.question = draw.choice([*DERIVATIVES, *SUMS[:-2]])


def plant_estimator(program: Program) -> None:
    program.loop.net_kind = program.draw.choice(["straight_through", "stop_gradient", "fake_quant", "embedding"])


def plant_thinned(program: Program) -> None:
    program.stored = program.draw.choice(["thinned", "rounded"])


def plant_loaded(program: Program) -> None:
    draw, loop = program.draw, program.loop
    program.stored, program.files, loop.net_kind = "disk", "other_momentum", "batch_norm"
    program.question = draw.choice([*DERIVATIVES, *SUMS])
    program.sample_weights = draw.choice(["ones", "random"])


def plant_rarities(program: Program) -> None:
    """What the package knows, in combinations that few loops have; float32 with the tolerance of float32."""
    draw, loop = program.draw, program.loop
    loop.splits_groups = draw.random() < 0.3
    loop.repeats = draw.random() < 0.4
    loop.row_weights = draw.random() < 0.3
    loop.ignored = draw.random() < 0.3 and loop.loss in ("cross_entropy", "smoothed")
    loop.sets_to_none = draw.random() < 0.5
    if draw.random() < 0.3:
        loop.schedule = tuple(draw.choice([0.0, 1.0, 1.5]) for _ in range(loop.steps))
    if loop.net_kind == "batch_norm" and draw.random() < 0.5:
        loop.momentum = None
    program.executor = draw.random() < 0.1
    program.of_average = draw.random() < 0.3 and program.question in DERIVATIVES
    if draw.random() < 0.4:
        program.stored = draw.choice(["disk", "thinned"])
        program.resumes = draw.random() < 0.7
    if draw.random() < 0.2 and not program.of_average:
        loop.dtype = torch.float32
        program.question = draw.choice(["retrain", *SUMS])


def plant_mixture(program: Program) -> None:
    """Several odd things at once."""
    for theme in program.draw.sample(["options", "groups", "clipping", "passes", "thinned", "parametrization"], 2):
        PLANT[theme](program)
    loop = program.loop
    if loop.net_kind != "mlp":
        loop.group_added = None


PLANT: dict[str, Callable[[Program], None]] = {
    "options": plant_options,
    "groups": plant_groups,
    "before": plant_before,
    "passes": plant_passes,
    "clipping": plant_clipping,
    "parametrization": plant_parametrization,
    "swapped": plant_swapped,
    "function": plant_function,
    "partial_sums": plant_partial_sums,
    "divergence": plant_divergence,
    "indices": plant_indices,
    "estimator": plant_estimator,
    "thinned": plant_thinned,
    "loaded": plant_loaded,
    "rarities": plant_rarities,
    "mixture": plant_mixture,
    "sound": plant_nothing,
}
THEMES = tuple(PLANT)


# ---- outcomes --------------------------------------------------------------------------------------------------


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
    for truth in program.truths():
        if error_of(answer, truth) <= TOLERANCE[program.loop.dtype]:
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


# Which programs stand in one row of the table of docs/reliability.md.
ROWS = {
    "options changed in the loop, groups added, steps before the recording, clipping": (
        "options",
        "groups",
        "before",
        "clipping",
    ),
    "forward passes without a loss, parametrizations, straight-through estimators, mixtures of all": (
        "passes",
        "loaded",
        "parametrization",
        "estimator",
        "rarities",
        "mixture",
    ),
    "folders trained again, partial sums of other jobs, states that were left out": (
        "swapped",
        "partial_sums",
        "thinned",
    ),
    "wrong indices under normalisation and noise, functions that mix rows, divergence": (
        "indices",
        "function",
        "divergence",
    ),
    "nothing odd": ("sound",),
}


def count_outcomes(themes: tuple[str, ...], count: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Count the outcomes of some programs, and describe those that are wrong.

    Args:
        themes: Their themes, in turn.
        count: Number of programs.
        first: The first seed.
    """
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        program = draw_program(seed, themes[seed % len(themes)])
        found = outcome(program)
        counts[found.split(":")[0]] += 1
        if ":" in found:
            wrong.append(f"seed {seed}: {found}: {program}")
    return counts, wrong

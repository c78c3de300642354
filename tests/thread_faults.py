"""Every public function as a call on a run that threads share, and the count of wrong results in several threads."""

import copy
import hashlib
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from doors import DOORS, Door
from thread_tools import SECONDS, THREADS, at_once, content, switching_often
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import epk_gp as epk
import helpers
from epk_gp import QuadratureRule
from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges
from epk_gp.analysis.maps import principal_plane, uncertainty_on_plane
from epk_gp.analysis.measures import calibration, gram_spectrum, ood_metrics
from epk_gp.datasets import three_gaussians
from epk_gp.gp.regression import leave_one_out
from epk_gp.kernel_machine.axes import by_label, by_layer, by_parameter, by_sample
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.storage.run import check_run
from helpers import gram_block_per_class


class Remembers(nn.Module):
    """A network whose forward pass leaves something on the module, and reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.relu(self.hidden(x))
        return self.out(torch.tanh(self.last))


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "remembers": (Remembers, (8,)),
    "experts": (lambda: helpers.SplitWhereNegative(8, 3, below=-0.9), (8,)),  # a plan's rows need not show the branch
    "weight_norm": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3))), (8,)),
    "max_pool": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)), (2, 8, 8)
    ),
}  # fmt: skip
NAMES = (
    "relu", "tanh", "max_pool", "cnn", "transformer", "attention", "frozen_batch_norm", "twice", "cosine",
    "remembers", "experts", "weight_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """What the threads share: a run in memory, on disk, and with fewer states; kernels, and a Gaussian process."""

    run: epk.Trajectory
    test: Tensor
    stored: epk.Trajectory
    fewer: epk.Trajectory
    folder: Path
    build: Callable[[], nn.Module]
    kernels: dict[str, epk.EPKKernel]
    gp: epk.LogitGP

    @property
    def points(self) -> tuple[epk.Points, epk.Points]:
        return epk.Points(self.test, False), epk.Points(self.run.inputs, True)


RULE = epk.gauss_legendre(2)
MODES: tuple[Any, ...] = ("full", "independent", "trace", 1)
KERNELS = {f"{mode}{' normalized' if by else ''}": (mode, by) for mode in MODES for by in (None, "mean_diagonal")}


def share(name: str, folder: Path) -> Shared:
    """Record a network three times, in memory and on disk; nothing is found out about the network yet.

    Networks are copies: drawing weights would move torch's random numbers, which a pass in another thread may need.
    """
    draw, shape = {**helpers.NETWORKS, **OWN}[name]
    torch.manual_seed(0)
    build = partial(copy.deepcopy, draw())
    generator = torch.Generator().manual_seed(0)
    if shape is None:
        X, test = (torch.randint(0, 20, (n, 7), generator=generator) for n in (7, 5))
    else:
        X, test = (torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in (7, 5))
    y = torch.arange(7) % 3
    runs = []
    for options in (
        {},
        {"folder": folder / "plain", "storage": epk.Storage(steps=1)},
        {"folder": folder / "fewer", "storage": epk.Storage(steps=2, keep_every=2)},
    ):
        net = build().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        runs.append(epk.train(net, X, y, optimizer=optimizer, steps=3, **options))
    stored, fewer = (epk.load_trajectory(folder / part, build().double()) for part in ("plain", "fewer"))
    kernels = {name: epk.EPKKernel(runs[0], mode, rule=RULE, normalize=by) for name, (mode, by) in KERNELS.items()}
    gp = epk.LogitGP(runs[0], rule=RULE, points=[0, 2, 4])
    return Shared(runs[0], test, stored, fewer, folder, build, kernels, gp)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _gradient(values: Callable[[Shared, Tensor], Tensor]) -> Callable[[Shared], Tensor]:
    def work(shared: Shared) -> Tensor:
        x = epk.test_copy(shared.test.double())
        if not shared.test.is_floating_point():
            return x
        (gradient,) = torch.autograd.grad(values(shared, x.requires_grad_()).sum(), x)
        return gradient

    return work


def _kernel(name: str) -> Callable[[Shared], object]:
    def work(shared: Shared) -> object:
        x, y = epk.test_copy(shared.test.double()), epk.train_copy(shared.run.inputs.double())
        kernel = shared.kernels[name]
        return kernel(x, y).to_dense(), kernel(x, diag=True), kernel(y).to_dense(), kernel.scale

    return work


def _own_gp(outputs: Any, **options: Any) -> Callable[[Shared], object]:
    def work(shared: Shared) -> object:
        gp = epk.LogitGP(shared.run, outputs, rule=epk.gauss_legendre(1), points=[0, 1, 5], **options)
        losses = gp.fit(2)
        posterior = gp.logit_posterior(shared.test)
        return losses, posterior, leave_one_out(gp), gp.covar_module.outputscale

    return work


def _train(shared: Shared) -> object:
    """A training whose initial weights are given: torch's global generator is the process's."""
    net = shared.build().double()
    with torch.no_grad():
        for value, start in zip(net.parameters(), shared.run.weights(0).values(), strict=True):
            value.copy_(start)
    X, y, optimizer = shared.run.inputs, shared.run.targets, torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, X, y, optimizer=optimizer, steps=2, batch_size=3, generator=_seed())
    return run.digest, list(run.states), run.steps


def _per_class(shared: Shared) -> object:
    a, b = shared.points
    cross, gram = (gram_block_per_class(shared.run, left, b, rule=RULE) for left in (a, b))
    return cross, gram_spectrum(gram[0])


def _breakdown(shared: Shared) -> object:
    run, X = shared.run, shared.test
    samples, ranges = epk.attribute(run, X, by=[[by_sample(run)], [step_ranges(run)]], rule=RULE)
    return samples, ranges, prediction_breakdown(samples, ranges, torch.zeros(len(X), dtype=torch.int64))


def _check(shared: Shared) -> object:
    found = check_run(shared.folder / "plain")
    return found.finished, [step.lr for step in found.steps], found.num_steps, found.files


def _report(shared: Shared) -> object:
    with tempfile.TemporaryDirectory(dir=shared.folder) as folder:
        options = {"explained": 1, "outputs": 1, "rule": RULE, "kernel_points": 2}
        file = epk.write_report(Path(folder) / "report.html", shared.run, shared.test, **options)
        return hashlib.sha256(file.read_bytes()).hexdigest()


def _statistics(shared: Shared) -> object:
    z = epk.network_outputs(shared.run, shared.run.inputs, head="log_softmax")
    y = shared.run.targets
    return calibration(z.exp(), y), ood_metrics(z[:3, 0], z[3:, 0]), three_gaussians(3, dim=4).inputs


def _asked(door: Door) -> Callable[[Shared], object]:
    return lambda s: door.ask(s.run, s.test, **door.options(rule=RULE))


CALLS: dict[str, Callable[[Shared], object]] = {
    **{name: _asked(door) for name, door in DOORS.items() if name not in ("write_report", "EPKKernel", "LogitGP")},
    "gram_block, adaptive": lambda s: epk.gram_block(s.run, *s.points, rule=epk.adaptive(1e-8)),
    "gram_block, stored": lambda s: epk.gram_block(s.stored, *s.points, rule=RULE),
    "gram_block, fewer states": lambda s: epk.gram_block(s.fewer, *s.points, rule=RULE),
    "network_outputs": lambda s: [
        epk.network_outputs(s.run, s.test, state=n, head=head) for n in (0, 1, -1) for head in ("logits", "log_softmax")
    ],
    "reconstruct, adaptive": lambda s: epk.reconstruct(s.run, s.test),
    "attribute, adaptive": lambda s: epk.attribute(s.run, s.test),
    "reconstruct, fixed, fewer states": lambda s: epk.reconstruct(s.fewer, s.test, rule=QuadratureRule.left_riemann(2)),
    "attribute, logits, stored": lambda s: epk.attribute(s.stored, s.test, head="logits", rule=RULE),
    "write_report": _report,
    "self_influence": lambda s: epk.influence(s.run, own=True).values,
    "retrain, its runs": lambda s: epk.retrain(s.run, torch.full((2, s.run.num_points), 0.5).double()).states,
    "attribute by labels, parameters and layers": lambda s: [
        epk.attribute(s.run, s.test, by=[axis(s.run)], rule=RULE) for axis in (by_label, by_parameter, by_layer)
    ],
    "attribute in two ways, breakdown": _breakdown,
    "tangent_trajectory": lambda s: epk.gram_block(
        tangent_trajectory(s.run), *s.points, rule=QuadratureRule.left_endpoint()
    ),
    **{f"EPKKernel {name}": _kernel(name) for name in KERNELS},
    "EPKKernel, gradient": _gradient(lambda s, x: s.kernels["trace"](x, epk.train_copy(s.run.inputs)).to_dense()),
    "LogitGP.logit_posterior": lambda s: s.gp.logit_posterior(s.test),
    "LogitGP, called": lambda s: [(p.mean, p.variance) for p in [s.gp(s.test.flatten(1).double())]],
    "LogitGP.fit": _own_gp("full"),
    "LogitGP.fit, independent": _own_gp("independent", mean="zero", targets="dirichlet"),
    "leave_one_out": lambda s: leave_one_out(s.gp),
    "sampling": lambda s: s.gp.logit_posterior(s.test).softmax_uncertainty(32, _seed()),
    "uncertainty_on_plane": lambda s: [
        uncertainty_on_plane(s.gp, principal_plane(s.run.inputs), size=2, num_samples=8, generator=_seed())
        if s.test.is_floating_point()
        else None
    ],
    "per_class": _per_class,
    "statistics": _statistics,
    "load_trajectory": lambda s: list(epk.load_trajectory(s.folder / "fewer", s.build().double()).states),
    "check_run": _check,
    "train": _train,
    "Trajectory": lambda s: (
        s.fewer.is_vanilla_gd, s.fewer.weights(2), s.fewer.dtype, s.fewer.step_sizes, repr(s.fewer),
        list(s.fewer.updates),
    ),
}  # fmt: skip


@dataclass
class Count:
    calls: int
    faults: list[str]


def outcome(call: str, shared: Shared) -> object:
    try:
        return content(CALLS[call](shared))
    except Exception as error:
        return content(error)


def expected_results(name: str, calls: Sequence[str] = tuple(CALLS)) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        shared = share(name, Path(folder))
        return {call: outcome(call, shared) for call in calls}


def count_faults(
    name: str, calls: Sequence[str], expected: dict[str, object], *, count: int = THREADS, seed: int | None = None
) -> Count:
    """Make each call `count` times in as many threads, on a run of which nothing is known yet.

    Args:
        name: The network.
        calls: Names of calls; each thread makes all of them.
        expected: What they return in one thread.
        count: Number of threads.
        seed: Each thread makes the calls in a random order of its own; all in the given order if None.
    """
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        shared = share(name, Path(folder))

        def task(number: int) -> dict[str, object]:
            order = list(calls)
            if seed is not None:
                random.Random(seed * count + number).shuffle(order)
            found: dict[str, object] = {}
            for call in order:
                found[call] = outcome(call, shared)
            return found

        with switching_often():
            tasks = [lambda number=number: task(number) for number in range(count)]  # type: ignore[misc]
            results = at_once(tasks, seconds=max(SECONDS, 10 * len(calls)))  # a thread has a result after all its calls
    for result in results:
        if isinstance(result, BaseException):
            faults += [f"{name}: {result!r}"] * len(calls)
            continue
        for call, found in result.items():
            if found != expected[call]:
                error = isinstance(found, tuple) and isinstance(found[0], type)
                faults.append(f"{name}, {call}: {found if error else 'other bytes'}")
    return Count(count * len(calls), faults)


def count_thread_faults(rounds: int, names: Sequence[str] = NAMES) -> Count:
    """Make every call on every network in 8 threads, in another order in each.

    Args:
        rounds: How often, each time with fresh runs.
        names: The networks.

    Returns:
        The number of calls, and what was wrong.
    """
    total = Count(0, [])
    for name in names:
        expected = expected_results(name)
        for number in range(rounds):
            one = count_faults(name, tuple(CALLS), expected, seed=number)
            total.calls += one.calls
            total.faults += one.faults
    return total

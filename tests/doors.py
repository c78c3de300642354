"""The public doors: what users ask of a recorded run about some points, and what each of them takes.

tests/test_doors.py and tests/test_threads.py run over this table: a new function goes in here.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.score_check import leave_one_out
from epk_gp.kernel_machine.axes import by_sample, by_step
from epk_gp.kernel_machine.reconstruct import single_machine
from helpers import gram_block_per_class as per_class
from helpers import gram_diagonal_blocks as diagonal
from helpers import refusal
from report_cases import embedded

HEAD = frozenset({"head"})
RULE = HEAD | {"rule"}
KERNEL = RULE | {"step_weights"}
COMPUTED = frozenset({"memory_budget", "checkpoint", "executor"})
GRAM, SUMS = KERNEL | COMPUTED, RULE | COMPUTED


@dataclass(frozen=True)
class Door:
    """A public function or method.

    Attributes:
        name: Where it is defined.
        ask: The call, of a run and points.
        takes: Options that all doors treat alike.
        values: Its numbers, in what it returns.
        head: Its head where none is given: that of the run's loss, or the logits.
        points: Whether it checks points as the others do.
    """

    name: str
    ask: Callable[..., Any]
    takes: frozenset[str] = SUMS
    values: Callable[[Any], Tensor] = lambda result: result
    head: str | None = None
    points: bool = True

    def options(self, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in self.takes}

    def numbers(self, run: epk.Trajectory, X: Tensor, **options: Any) -> Tensor:
        return self.values(self.ask(run, X, **self.options(rule=epk.gauss_legendre(2), **options)))

    def refusal(self, run: epk.Trajectory, X: Any, error: type[Exception], message: str, **options: Any) -> str | None:
        return refusal(error, message, self.ask, run, X, **options)


def sides(run: epk.Trajectory, X: Any) -> tuple[epk.Points, epk.Points]:
    """Test copies of the points, and training copies of the run's."""
    return epk.Points(X, is_train=False), epk.Points(X if run is None else run.inputs, is_train=True)


def features(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return epk.path_features(run, X, 16, num_probe=0, **options)


def epk_kernel(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return epk.EPKKernel(run, **options)(epk.test_copy(X)).to_dense()


def logit_gp(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return epk.LogitGP(run, points=[0, 2], **options).logit_posterior(X)


def by_steps(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return epk.attribute(run, X, by=[by_step(run)], **options)


def report(run: epk.Trajectory, X: Any, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = epk.write_report(Path(folder) / "report.html", run, X, outputs="all", kernel_points=0, **options)
        return embedded(file)


def report_sums(content: Mapping[str, Any]) -> Tensor:
    outputs = [output for point in content["points"] for output in point["explanations"].values()]
    return torch.tensor([output["running"] for output in outputs]).double() * content["quantum"]


def scores_check(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    shape = (len(X), run.num_outputs, run.num_points) if isinstance(X, Tensor) and X.ndim and run else (1, 1, 1)
    unasked = {"contributions": False, "derivatives": False, "retrainings": 0, "left_out": 0, "removals": 0}
    return epk.check_scores(run, torch.zeros(shape), X, **unasked, **options)


def half_retrained(run: epk.Trajectory) -> Any:
    return epk.retrain(run, torch.full((1, run.num_points), 0.5, dtype=torch.float64))


def samples_and_steps(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return epk.attribute(run, X, by=[[by_sample(run)], [by_step(run)]], **options)


DOORS = {
    door.name.rpartition(".")[2]: door
    for door in (
        Door("gram.path_kernel.gram_block", lambda run, X, **o: epk.gram_block(run, *sides(run, X), **o), GRAM),
        Door("PathKernel.block_per_class", lambda run, X, **o: per_class(run, *sides(run, X), **o), GRAM),
        Door("PathKernel.diagonal_blocks", lambda run, X, **o: diagonal(run, sides(run, X)[0], **o), GRAM),
        Door("gram.path_kernel.PathKernel", lambda run, X, **o: epk.PathKernel(run, **o).block(*sides(run, X)), KERNEL),
        Door("gram.path_features.path_features", features, HEAD | COMPUTED, lambda features: features + 0),
        Door("kernels.epk.EPKKernel", epk_kernel, RULE | {"memory_budget"}, points=False),
        Door("kernel_machine.reconstruct.reconstruct", epk.reconstruct, values=lambda result: result.outputs),
        Door("kernel_machine.attribute.attribute", epk.attribute, values=lambda parts: parts.samples),
        Door("attribute by steps", by_steps, values=lambda parts: parts.values),
        Door("attribute by samples, and by steps", samples_and_steps, values=lambda splits: splits[0].values),
        Door("report.write.write_report", report, RULE, report_sums),
        Door("kernel_machine.influence.influence", epk.influence, HEAD | COMPUTED, lambda effect: effect.values),
        Door("kernel_machine.retrain.Retraining", lambda run, X, **o: half_retrained(run).outputs(X, **o), HEAD),
        Door("analysis.score_check.leave_one_out", leave_one_out, HEAD),
        Door("analysis.score_check.check_scores", scores_check, HEAD, lambda check: check.change),
        Door("kernel_machine.reconstruct.single_machine", single_machine, RULE, lambda machine: machine.outputs),
        Door("core.trajectory.network_outputs", epk.network_outputs, HEAD, head="logits"),
        Door("gp.models.LogitGP", logit_gp, RULE | {"memory_budget"}, lambda posterior: posterior.mean, "logits"),
    )
}

"""The public doors: what users ask of a recorded run about some points, and what each of them takes.

tests/test_doors.py and tests/test_threads.py run over this table: a new function goes in here.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.counterfactual import leave_one_out
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import by_sample, by_step
from epk_gp.kernel_machine.baselines import single_machine
from report_cases import embedded

GRAM = frozenset({"head", "rule", "step_weights", "memory_budget"})
SUMS = frozenset({"head", "rule", "memory_budget"})


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
        """Those of some options that the door takes."""
        return {name: value for name, value in options.items() if name in self.takes}

    def numbers(self, run: epk.Trajectory, X: Tensor, **options: Any) -> Tensor:
        return self.values(self.ask(run, X, **self.options(rule=epk.gauss_legendre(2), **options)))

    def refusal(self, run: epk.Trajectory, X: Any, error: type[Exception], message: str, **options: Any) -> str | None:
        """None if the door refuses a question as it should; else what it does instead."""
        try:
            self.ask(run, X, **options)
        except error as refused:
            return None if re.search(message, str(refused)) else f"says: {refused}"
        except Exception as other:
            return f"raises {other!r}"
        return "accepts it"


def sides(run: epk.Trajectory, X: Any) -> tuple[epk.Points, epk.Points]:
    """Test copies of the points, and training copies of the run's."""
    return epk.Points(X, is_train=False), epk.Points(X if run is None else run.inputs, is_train=True)


def report(run: epk.Trajectory, X: Any, **options: Any) -> dict[str, Any]:
    """The content of a report."""
    with tempfile.TemporaryDirectory() as folder:
        file = epk.write_report(Path(folder) / "report.html", run, X, outputs="all", kernel_points=0, **options)
        return embedded(file)


def report_sums(content: Mapping[str, Any]) -> Tensor:
    outputs = [output for point in content["points"] for output in point["explanations"].values()]
    return torch.tensor([output["running"] for output in outputs]).double() * content["quantum"]


def half_retrained(run: epk.Trajectory) -> Any:
    return epk.retrain(run, torch.full((1, run.num_points), 0.5, dtype=torch.float64))


def samples_and_steps(run: epk.Trajectory, X: Any, **options: Any) -> Any:
    return attribute_many(run, X, [[by_sample(run)], [by_step(run)]], **options)


DOORS = {
    door.name.rpartition(".")[2]: door
    for door in (
        Door("gram.path_kernel.gram_block", lambda run, X, **o: epk.gram_block(run, *sides(run, X), **o), GRAM),
        Door(
            "gram.path_kernel.gram_block_per_class",
            lambda run, X, **o: gram_block_per_class(run, *sides(run, X), **o),
            GRAM,
        ),
        Door(
            "gram.path_kernel.gram_diagonal_blocks",
            lambda run, X, **o: gram_diagonal_blocks(run, epk.Points(X, is_train=False), **o),
            GRAM,
        ),
        Door(
            "gram.path_kernel.PathKernel",
            lambda run, X, **o: epk.PathKernel(run, **o).block(*sides(run, X)),
            frozenset({"head", "rule", "step_weights"}),
        ),
        Door(
            "gram.path_features.path_features",
            lambda run, X, **o: epk.path_features(run, X, 16, num_probe=0, **o),
            frozenset({"head", "memory_budget"}),
            lambda features: features + 0,
        ),
        Door(
            "kernels.epk.EPKKernel",
            lambda run, X, **o: epk.EPKKernel(run, **o)(epk.test_copy(X)).to_dense(),
            points=False,
        ),
        Door("kernel_machine.reconstruct.reconstruct", epk.reconstruct, values=lambda result: result.outputs),
        Door("kernel_machine.attribute.attribute", epk.attribute, values=lambda parts: parts.samples),
        Door(
            "kernel_machine.attribute.attribute_by",
            lambda run, X, **o: attribute_by(run, X, [by_step(run)], **o),
            values=lambda parts: parts.values,
        ),
        Door("kernel_machine.attribute.attribute_many", samples_and_steps, values=lambda splits: splits[0].values),
        Door("report.write.write_report", report, frozenset({"head", "rule"}), report_sums),
        Door(
            "kernel_machine.influence.influence",
            epk.influence,
            frozenset({"head", "memory_budget"}),
            lambda effect: effect.values,
        ),
        Door(
            "kernel_machine.retrain.Retraining",
            lambda run, X, **o: half_retrained(run).outputs(X, **o),
            frozenset({"head"}),
        ),
        Door("analysis.counterfactual.leave_one_out", leave_one_out, frozenset({"head"})),
        Door(
            "kernel_machine.baselines.single_machine",
            single_machine,
            frozenset({"head", "rule"}),
            lambda machine: machine.outputs,
        ),
        Door("core.trajectory.network_outputs", epk.network_outputs, frozenset({"head"}), head="logits"),
        Door(
            "gp.models.LogitGP",
            lambda run, X, **o: epk.LogitGP(run, points=[0, 2], **o).logit_posterior(X),
            values=lambda posterior: posterior.mean,
            head="logits",
        ),
    )
}

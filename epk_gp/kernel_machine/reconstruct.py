"""The network as an ensemble of kernel machines, one per step (Theorem 3.6, Bell et al. 2023)."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.directional import WeightSegment
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.averages import PredictedPath
from epk_gp.core.gradients import ReplayedStep, has_memory, replayed_steps
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.plans import integration_points, panel_points
from epk_gp.core.show import Displayed, Entry, ProgressBar, Summary, count, kind_of, progress_bar
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, leaves_unexplained, network_outputs
from epk_gp.distributed.job import Place
from epk_gp.distributed.planned_pieces import PlannedPieces
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import step_ranges
from epk_gp.kernel_machine.axes import number_row, place_table, shown_places
from epk_gp.kernel_machine.certification import (
    IntegrationRecord,
    StepMismatches,
    certificate_entries,
    coarsest_dtype,
    describe_findings,
    sum_tolerance,
    warn_if_uncertified,
)
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.paths import (
    WeightPath,
    lines_of_stretch,
    num_segments,
    path_identity,
    require_integrable,
    straight,
    stretch_of,
)
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.quadrature.status import QuadratureStatus


class ReconstructionSums:
    """What steps add to the outputs of some points, and what their integrals left.

    Args:
        num_points: Number n of points.
        num_outputs: Number C of outputs.
        record: What the integrals left: nothing yet.
        mismatches: The differences of steps from recorded ones: none yet.

    Attributes:
        total: What the steps add to the outputs, (n, C) float64.
        sizes: Sum of its terms' absolute values, (n, C).
        residuals: Sum of the residuals of each point, (n,).
        evaluations: Gradients evaluated, over all points.
    """

    def __init__(
        self, num_points: int, num_outputs: int, record: IntegrationRecord, mismatches: StepMismatches
    ) -> None:
        self.total = torch.zeros(num_points, num_outputs, dtype=torch.float64)
        self.sizes, self.residuals = torch.zeros_like(self.total), torch.zeros(num_points, dtype=torch.float64)
        self.record, self.mismatches, self.evaluations = record, mismatches, 0.0

    def to(self, device: torch.device) -> "ReconstructionSums":
        """Move the sums to a device."""
        self.total, self.sizes, self.residuals = (x.to(device) for x in (self.total, self.sizes, self.residuals))
        return self

    def merge(self, other: "ReconstructionSums", rows: Int64[Tensor, " rows"]) -> None:
        """Add what other steps add to some of the points."""
        self.total[rows] += other.total
        self.sizes[rows] += other.sizes
        self.residuals[rows] += other.residuals
        self.record.merge(other.record)
        self.mismatches.merge(other.mismatches)
        self.evaluations += other.evaluations

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors, for a file."""
        numbers = torch.tensor([self.evaluations], dtype=torch.float64)
        own = {"total": self.total, "sizes": self.sizes, "residuals": self.residuals, "evaluations": numbers}
        return own | self.record.state() | self.mismatches.state()

    def load(self, state: dict[str, Tensor]) -> "ReconstructionSums":
        """Take everything from a file."""
        self.total, self.sizes, self.residuals = (
            state[name].to(self.total) for name in ("total", "sizes", "residuals")
        )
        self.evaluations = float(state["evaluations"])
        self.record.load(state)
        self.mismatches.load(state)
        return self


@dataclass(frozen=True, eq=False)
class ReconstructionPieces(PlannedPieces):
    """A reconstruction as pieces: a panel of points, and a range of steps.

    Ranges of steps begin where chords do. Steps with momentum, and those of averaged weights, cannot be replayed from
    the middle of a run: all of them are one range, and the points are divided into more panels.

    Attributes:
        kernel: The run's path kernel: trajectory, head, and how each step's integral is taken.
        X: n inputs.
        options: How to compute, without an executor.
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    options: ComputeOptions

    @classmethod
    def of(cls, net: PlannedModel, kernel: PathKernel, X: Tensor, options: ComputeOptions) -> "ReconstructionPieces":
        """Return the pieces of a reconstruction."""
        own = replace(options, executor=None, progress=False, checkpoint=None)
        return cls(kernel, X, own, plan=net.plan)

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.kernel.trajectory, self.X

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Sum a range of steps at the points of a panel."""
        panel, number = place
        (sums,) = self.sum_steps(self.ranges[number], [self.panels[panel]])
        return sums.state()

    def new_sums(self, num_points: int) -> ReconstructionSums:
        """Return sums of nothing."""
        trajectory, rule = self.kernel.trajectory, self.kernel.rule
        record = IntegrationRecord(rule, max(1, self._num_segments))
        mismatches = StepMismatches(coarsest_dtype(trajectory, self._outputs))
        return ReconstructionSums(num_points, trajectory.num_outputs, record, mismatches).to(self.X.device)

    def sum_steps(
        self, steps: slice, panels: Sequence[Tensor], bar: ProgressBar | None = None
    ) -> list[ReconstructionSums]:
        """Walk along some steps, and sum what they add at the points of each panel (row numbers)."""
        kernel, trajectory, net = self.kernel, self.kernel.trajectory, self.net
        found = [self.new_sums(len(rows)) for rows in panels]
        path, start, change = PredictedPath(trajectory), None, None
        for replayed in replayed_steps(trajectory, net.model, self.X, steps):
            is_amplified = found[0].mismatches.add(trajectory, net.model, replayed)
            if is_amplified:  # the rounding is a part of the sum
                end = flat_weights(trajectory.trained, replayed.step.index + 1, self.X)
                replayed = replace(replayed, d=end - replayed.w)
            w, d = _replayed_step(net, kernel, path, replayed)
            start, change = (w, d) if start is None or change is None else (start, change + d)
            index = replayed.step.index
            if index == stretch_of(kernel.path, index, trajectory.num_steps)[-1]:
                self._integrate_stretch(start, change, found, panels)
                start, change = None, None
            if bar is not None:
                bar.update()
        return found

    def _integrate_stretch(
        self,
        start: Float[Tensor, " PQ"],
        change: Float[Tensor, " PQ"],
        found: Sequence[ReconstructionSums],
        panels: Sequence[Tensor],
    ) -> None:
        """Add what one stretch of the path adds at the points of each panel."""
        kernel, net, half = self.kernel, self.net, self.options.memory_budget // 2  # the other half is the panel's
        for _, w, d in lines_of_stretch(kernel.path, net.model, start, change):
            segment = WeightSegment(net, w, d, kernel.head, half)
            for sums, rows in zip(found, panels, strict=True):
                integral = integrate(segment, self.X[rows], kernel.rule, self._num_segments)
                sums.total += integral.total
                sums.residuals += integral.residual
                sums.sizes += integral.total.abs()
                sums.record.add(integral)
                sums.evaluations += float(integral.evaluations.sum())

    @cached_property
    def panels(self) -> list[Int64[Tensor, " rows"]]:
        """The points of each panel."""
        C, (n, *_), point = self.kernel.trajectory.num_outputs, self.X.shape, self.X[0].nbytes
        size = integration_points(
            self.options.memory_budget, self.kernel.rule.typical_nodes, point, C * self._outputs.itemsize
        )
        if len(self.ranges) == 1:
            size = min(size, panel_points(n, point))
        return list(torch.arange(n, device=self.X.device).split(size))

    @cached_property
    def ranges(self) -> list[slice]:
        """The steps of each range."""
        trajectory = self.kernel.trajectory
        if has_memory(trajectory):
            return [slice(0, trajectory.num_steps)]
        return step_ranges(trajectory.num_steps, every=self.kernel.path.every)

    def identity(self) -> str:
        """Fingerprint of everything on which the sums depend."""
        kernel = self.kernel
        return fingerprint(
            "reconstruction", kernel.trajectory.digest, kernel.head, kernel.rule, self.options.memory_budget, self.X,
            *path_identity(kernel.path),
        )  # fmt: skip

    @cached_property
    def _num_segments(self) -> int:
        """Straight lines of the path, which share the rule's tolerance."""
        return num_segments(self.kernel.path, self.net.model, self.kernel.trajectory.num_steps)

    @property
    def _outputs(self) -> Float[Tensor, "0 C"]:
        """Outputs of no points."""
        return torch.empty(0, self.kernel.trajectory.num_outputs, dtype=self.net.model.spec.dtype)


def sum_over_steps(
    net: PlannedModel, kernel: PathKernel, X: Shaped[Tensor, "n ..."], options: ComputeOptions
) -> ReconstructionSums:
    """Sum what all steps add to the outputs at n points."""
    pieces = ReconstructionPieces.of(net, kernel, X, options)
    total = pieces.new_sums(len(X))
    if options.executor is None and options.checkpoint is None:
        with progress_bar(kernel.trajectory.num_steps, "reconstruction", unit="step", shown=options.progress) as bar:
            for steps in pieces.ranges:
                for rows, sums in zip(pieces.panels, pieces.sum_steps(steps, pieces.panels, bar), strict=True):
                    total.merge(sums, rows)
        return total
    places = [(panel, number) for number in range(len(pieces.ranges)) for panel in range(len(pieces.panels))]
    num_bytes = len(pieces.panels[0]) * (2 * kernel.trajectory.num_outputs + 1) * 8
    results = pieces.results("steps", places, options, pieces.identity, num_bytes)
    with closing(results), progress_bar(len(places), "reconstruction", unit="piece", shown=options.progress) as bar:
        for (panel, _), state in zip(places, results, strict=True):
            rows = pieces.panels[panel]
            total.merge(pieces.new_sums(len(rows)).load(state), rows)
            bar.update()
    return total


def _replayed_step(
    net: PlannedModel, kernel: PathKernel, path: PredictedPath, replayed: ReplayedStep
) -> tuple[Float[Tensor, " PQ"], Float[Tensor, " PQ"]]:
    """Return where a replayed step of the path starts, and how far it goes: statistics move as recorded.

    The weights move as update rule and gradients say. Where the run accepts steps that these do not explain, and where
    a preconditioner amplifies their rounding, they move as recorded, so that the sum holds what is unexplained too; by
    how much is in the certificate.
    """
    trajectory, P, index = kernel.trajectory, net.model.num_weights, replayed.step.index
    w, d = path.step(index, replayed.w, replayed.d)
    if leaves_unexplained(trajectory):
        d = flat_weights(trajectory, index + 1, w) - w
    if net.model.statistics:
        start, end = (flat_state(trajectory, s, w)[P:] for s in (index, index + 1))
        w, d = torch.cat([w[:P], start]), torch.cat([d, end - start])
    return w, d


@dataclass(frozen=True, eq=False, repr=False)
class Reconstruction(Displayed):
    """A kernel machine's outputs beside the network's, with the certificate.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: f at the initial weights, the machine's b(x), (n, C).
        max_error: Largest |outputs - network|.
        max_residual: Largest |f(w_{s+1}) - f(w_s) - integral| of a (point, step), or of a chord: the quadrature's
            error, known without the sum.
        total_residual: Largest sum of these over the steps of one point: an upper bound on the quadrature's share of
            the error.
        evaluations: Gradients evaluated per point and step, on average.
        max_step_mismatch: Largest difference, over weights and steps, between a recorded step and the one that the
            training gradients give: rounding of the weights' dtype.
        residual_ratio: Largest ratio of the residual of a (point, step) to what the rule's tolerance (1e-12 for a fixed
            rule) or rounding allows.
        mismatch_ratio: Largest ratio of a step's mismatch to what rounding of weights and gradients explains.
        worst_step: The step that has it; -1 for a run without steps.
        error_tolerance: What `max_error` may be where both are at most 1.
        statuses: Number of (point, step) pairs, or of points and chords, by the reason why the rule stopped refining
            them.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    max_error: float
    max_residual: float
    total_residual: float
    evaluations: float
    max_step_mismatch: float
    residual_ratio: float
    mismatch_ratio: float
    worst_step: int
    error_tolerance: float
    statuses: Mapping[QuadratureStatus, int]

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance.

        The residual alone sees the quadrature only; a step that is not the stated loss's on the stated data shows in
        the mismatch. All concern the sum, not each kernel value.
        """
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Why the result is not certified, with numbers; empty if it is."""
        return describe_findings(self)

    def _summary(self) -> Summary:
        (n, C), places = self.network.shape, shown_places(self.network)
        rows = [
            number_row("initial", places, self.initial),
            number_row("kernel machine", places, self.outputs),
            number_row("network", places, self.network),
            number_row("difference", places, self.outputs[: len(places)] - self.network[: len(places)]),
        ]
        return Summary(
            f"Reconstruction of {count(n, 'point')} × {count(C, 'output')}",
            (
                *certificate_entries(self),
                Entry("shape of outputs", f"{tuple(self.outputs.shape)}", kind_of(self.outputs)),
            ),
            place_table(self.network, places, rows),
        )


def reconstruct(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    **options: Unpack[ComputeSettings],
) -> Reconstruction:
    """Evaluate the ensemble of kernel machines, one per step (Theorem 3.6, Bell et al. 2023).

        f(x) = f_{w_0}(x) + sum_s sum_i K_s(x, x_i) alpha_{s,i}
             = f_{w_0}(x) + sum_s <Phi_s(x), sum_i J_s(x_i)^T alpha_{s,i}>

    The training side of every step is recomputed from the training data; recorded weights only say where the
    gradients are taken. Works for every head, loss and batch size. The certificate concerns the sum, not each kernel
    value.

    Args:
        trajectory: Training run with S steps.
        X: n inputs, of the structure of the training inputs.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken, or each chord's.
        path: Along which the points are integrated. The sum is as exact for `chords(every=k)`, at fewer evaluations,
            and for `manhattan()`. `layerwise()` is for attributions: without their samples there is nothing to sum.
        options: `memory_budget` (beside it, one gradient of the training data), `progress`, `checkpoint` and
            `executor`; see `ComputeOptions`.

    Returns:
        Outputs and certificate, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, or the head, the rule or the path is unknown.
    """
    parsed = parse_options("reconstruct", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    require_integrable(path, "reconstruct")
    X = kernel.parse_inputs(X)
    result = with_plan(trajectory, trajectory.model_for(X), lambda net: _reconstruct(net, kernel, X, parsed))
    warn_if_uncertified("the reconstruction", result)
    return result


def _reconstruct(net: PlannedModel, kernel: PathKernel, X: Tensor, options: ComputeOptions) -> Reconstruction:
    trajectory, head = kernel.trajectory, kernel.head
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    sums, steps = sum_over_steps(net, kernel, X, options), max(1, trajectory.num_steps)
    outputs = (initial + sums.total).to(initial.dtype)
    terms = initial.abs().double() + network.abs() + sums.sizes
    return Reconstruction(
        outputs=outputs,
        network=network,
        initial=initial,
        max_error=float((outputs - network).abs().max()),
        max_residual=sums.record.max_residual,
        total_residual=float(sums.residuals.max()),
        evaluations=sums.evaluations / len(X) / steps,
        max_step_mismatch=sums.mismatches.largest,
        residual_ratio=sums.record.residual_ratio,
        mismatch_ratio=sums.mismatches.ratio,
        worst_step=sums.mismatches.worst_step,
        error_tolerance=sum_tolerance(kernel.rule, coarsest_dtype(trajectory, initial), terms, steps),
        statuses=dict(sums.record.statuses),
    )

"""The network as an ensemble of kernel machines, one per step, and as a single one (Theorems 3.6, 3.7, Bell et al.)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel, WeightSegment
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import ComputeOptions, ComputeSettings, door, parse_options
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, sample_weights, soft_targets
from epk_gp.core.plans import MAX_STEP_BATCH, integration_points, panel_points
from epk_gp.core.replayed_steps import RunReplay, replayed_steps
from epk_gp.core.show import Entry, Summary, Tabular, count, kind_of
from epk_gp.core.states import PredictedPath, described_states
from epk_gp.core.step import tensor_bytes
from epk_gp.core.trajectory import (
    Trajectory,
    flat_state,
    flat_weights,
    has_coarse_steps,
    has_memory,
    held_coefficients,
    parse_inputs,
)
from epk_gp.gram.path_kernel import PathKernel, require_training
from epk_gp.gram.planned_kernel import MOST_STEPS
from epk_gp.gram.sketch import run_of_states
from epk_gp.gram.tiles import step_ranges
from epk_gp.kernel_machine import certificate
from epk_gp.kernel_machine.axes import PointsTable
from epk_gp.kernel_machine.terms import PathWork
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import AdaptiveRule, Rule, WeightPath, adaptive, require_integrable, straight, stretch_of
from epk_gp.work.run import Piece, Place, Sums, run


@dataclass(frozen=True, eq=False)
class ReconstructionWork(PathWork):
    """A reconstruction: panels of points, and ranges of steps. One panel has all points if no piece is kept.

    Ranges of steps begin where chords do. Steps with momentum, and those of averaged weights, cannot be replayed from
    the middle of a run: all of them form one range, and the points are divided into more panels.

    Attributes:
        is_apart: Whether the points that are integrated together go along the run separately.
    """

    is_apart: bool

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces, panel by panel."""
        return self.pieces_of(self.named("steps"), len(self.panels))

    @property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a panel."""
        return 8 * len(self.panels[0]) * (2 * self.kernel.trajectory.num_outputs + 1)

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return self.fingerprint_with("reconstruction")

    def nothing(self, num_points: int) -> Sums:
        """Return sums of no steps."""
        zeros = self.X.new_zeros(num_points, self.kernel.trajectory.num_outputs, dtype=torch.float64)
        return Sums({"total": zeros, "sizes": zeros.clone(), "residuals": zeros[:, 0].clone()})

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Walk along a range of steps, and sum their contributions at the points of a panel."""
        panel, number = place
        kernel, trajectory, net = self.kernel, self.kernel.trajectory, self.net
        X = self.X.split(len(self.panels[0]))[panel]
        sums = saved if saved.steps and not has_memory(trajectory) else self.nothing(len(X))
        path, start, change, lines = PredictedPath(trajectory), None, None, list[tuple[Tensor, Tensor]]()
        begin = self.ranges[number].start + sums.steps
        ratios = sums.largest.setdefault("mismatch_ratios", torch.zeros(trajectory.num_steps, dtype=torch.float64))
        largest = sums.largest.setdefault("mismatch", torch.zeros(1, dtype=torch.float64))
        yield sums
        plan, steps = net.memory_plan(self.memory_budget), self.ranges[number]
        run = RunReplay(trajectory, net.model, self.X, plan, within=steps)
        for replayed in replayed_steps(run, slice(begin, steps.stop)):
            mismatches, index = certificate.StepMismatches(), replayed.step.index
            is_amplified, w, d = mismatches.add(trajectory, net.model, replayed), replayed.w, replayed.d
            ratios[index] = mismatches.ratio
            largest.copy_(torch.maximum(largest, torch.full_like(largest, mismatches.largest)))
            if is_amplified:  # the rounding is part of the sum
                d = flat_weights(trajectory.trained, index + 1, w) - w
            w, d = path.step(index, w, d)
            # the part that update rule and gradients do not explain is one too; statistics change as recorded
            if _leaves_unexplained(trajectory):
                d = flat_weights(trajectory, index + 1, w) - w
            if net.model.statistics:
                before, after = (flat_state(trajectory, s, w)[len(w) :] for s in (index, index + 1))
                w, d = torch.cat([w, before]), torch.cat([d, after - before])
            start, change = (w, d) if start is None or change is None else (start, change + d)
            if index != stretch_of(kernel.path, index, trajectory.num_steps)[-1]:
                continue
            lines.append((start, change))
            start, change = None, None
            is_last = index + 1 == min(self.ranges[number].stop, trajectory.num_steps)
            if not is_last and (index // kernel.path.every + 1) % self.lines_together:
                continue
            w, d = lines[0] if len(lines) == 1 else map(torch.stack, zip(*lines, strict=True))
            segment = WeightSegment(net, w, d, kernel.head, self.memory_budget // 2)  # the rest is for the panel
            for rows in torch.arange(len(X), device=X.device).split(self.points_together):
                integral = integrate(segment, X[rows], kernel.rule, self.num_stretches)
                total = integral.total.unflatten(0, (len(lines), -1))
                sums.added["total"][rows] += total.sum(dim=0)
                sums.added["sizes"][rows] += total.abs().sum(dim=0)
                sums.added["residuals"][rows] += integral.residual.unflatten(0, (len(lines), -1)).sum(dim=0)
                sums.merge(certificate.integral_sums(integral, kernel.rule, self.num_stretches))
            lines.clear()
            sums.steps = index + 1 - self.ranges[number].start
            yield sums

    @cached_property
    def points_together(self) -> int:
        """Number of points that are integrated together."""
        size, point = self._fitting_points, self.X[0].nbytes
        return min(size, panel_points(len(self.X), point)) if len(self.ranges) == 1 else size

    @cached_property
    def _fitting_points(self) -> int:
        num_bytes = self.kernel.trajectory.num_outputs * self.net.itemsize
        return integration_points(self.memory_budget, self.kernel.rule.typical_nodes, self.X[0].nbytes, num_bytes)

    @cached_property
    def lines_together(self) -> int:
        """Number of stretches of the path that are integrated together."""
        rows = 2 * min(self._fitting_points, len(self.X)) * self.kernel.rule.num_contractions
        return self.net.memory_plan(self.memory_budget).lines_together(rows, 1, 0)

    @cached_property
    def panels(self) -> list[Int64[Tensor, " rows"]]:
        """The points of each panel."""
        size = self.points_together if self.is_apart else len(self.X)
        return list(torch.arange(len(self.X), device=self.X.device).split(size))

    @cached_property
    def ranges(self) -> list[slice]:
        """The steps of each range."""
        trajectory = self.kernel.trajectory
        if has_memory(trajectory):
            return [slice(0, trajectory.num_steps)]
        together = MOST_STEPS if self.lines_together > 1 else MAX_STEP_BATCH
        return step_ranges(trajectory.num_steps, every=self.kernel.path.every, together=together)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Reconstruction(Tabular, certificate.Certificate):
    """A kernel machine's outputs next to the network's, with the certificate.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: f at the initial weights, the machine's b(x), (n, C).
        total_residual: Largest sum of quadrature residuals over the steps of one point: an upper bound on the error by
            quadrature, known without the sum.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    total_residual: float
    _columns = ("initial", "outputs", "network")

    def _summary(self) -> Summary:
        (n, C), table = self.network.shape, PointsTable(self.network)
        shown = len(table.places)
        rows = [
            table.row("initial", self.initial),
            table.row("kernel machine", self.outputs),
            table.row("network", self.network),
            table.row("difference", self.outputs[:shown] - self.network[:shown]),
        ]
        shape = Entry("shape of outputs", f"{tuple(self.outputs.shape)}", kind_of(self.outputs))
        title = f"Reconstruction of {count(n, 'point')} × {count(C, 'output')}"
        return Summary(title, (*self.entries(n), shape), table.table(rows))


@door
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

    The training side of every step is recomputed from the training data; recorded weights only determine where the
    gradients are taken. It works for every head, loss and batch size. The certificate concerns the sum, not each kernel
    value.

    Args:
        trajectory: Training run with S steps.
        X: n inputs, with the structure of the training inputs.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        rule: Quadrature rule for the integral of each step, or of each chord.
        path: The path along which the points are integrated. The sum is just as exact for `chords(every=k)`, with fewer
            evaluations. `layerwise()` is for attributions: without their samples there is nothing to sum.
        options: `memory_budget` (plus one gradient of the training data), `progress`, `checkpoint` and `executor`; see
            `ComputeOptions`.

    Returns:
        Outputs and certificate, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, or the head, the rule or the path is unknown.
    """
    parsed = parse_options("reconstruct", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    require_training(trajectory, "epk_gp.reconstruct")
    require_integrable(path, "reconstruct")
    X = parse_inputs(trajectory, X)
    result = with_plan(lambda net: _reconstruct(net, kernel, X, parsed), X, trajectory)
    certificate.warn_unless_certified("the reconstruction", result.findings)
    return result


def _leaves_unexplained(trajectory: Trajectory) -> bool:
    """Return whether steps may differ from the update rule's on exact gradients by more than their dtype's rounding.

    They may if steps are coarse, and if one ends at a kept state after recomputed states.
    """
    return hasattr(trajectory.trained.states, "at") or has_coarse_steps(trajectory)


def _reconstruct(net: PlannedModel, kernel: PathKernel, X: Tensor, options: ComputeOptions) -> Reconstruction:
    trajectory, (initial, network) = kernel.trajectory, kernel.end_outputs(X)
    is_apart = options.executor is not None or options.checkpoint is not None
    work = ReconstructionWork(kernel, X, options.memory_budget, is_apart, plan=net.plan)
    sums, steps = work.nothing(len(X)), max(1, trajectory.num_steps)
    for piece, found in run(work, options, "reconstruction"):
        rows = work.panels[piece.place[0]]
        for name in ("total", "sizes", "residuals"):  # the results of each point
            sums.added[name][rows] += found.added.pop(name)
        sums.merge(found)
    outputs, ratios = (initial + sums.added["total"]).to(initial.dtype), sums.largest["mismatch_ratios"]
    terms = initial.abs().double() + network.abs() + sums.added["sizes"]
    return Reconstruction(
        outputs=outputs,
        network=network,
        initial=initial,
        max_error=float((outputs - network).abs().max()),
        error_tolerance=certificate.sum_tolerance(kernel.rule, trajectory, net.coarsest_dtype, terms),
        total_residual=float(sums.added["residuals"].max()),
        max_step_mismatch=float(sums.largest["mismatch"]),
        mismatch_ratio=float(ratios.max()) if len(ratios) else 0.0,
        worst_step=int(ratios.argmax()) if len(ratios) else -1,
        explains=trajectory.explained,
        path=str(kernel.path),
        states=described_states(trajectory),
        precision=certificate.described_precision(net),
        **certificate.integral_facts(sums, len(X) * steps),
    )


def tangent_trajectory(trajectory: Trajectory, state: int = -1) -> Trajectory:
    """Return a run of one step of length zero, whose path kernel is the NTK (Jacot et al. 2018) at that state.

        K(x, x') = J_{w_s}(x) J_{w_s}(x')^T

    Every function that takes a run also takes this one: `gram_block`, `EPKKernel`, `LogitGP` (whose initial and trained
    network are both f_{w_s}). Training and test copies have the same gradients.

    Args:
        trajectory: The run.
        state: s in 0 .. S, negative from the end.

    Returns:
        A run from w_s to w_s in one step of size 1, with its own digest.

    Raises:
        IndexError: The state does not exist.
    """
    count = trajectory.num_steps + 1
    if not -count <= state < count:
        raise IndexError(f"state must lie in 0..{trajectory.num_steps} (or be negative): got {state}.")
    w = flat_state(trajectory, state % count, trajectory.states[0])
    identity = trajectory.digest.encode() + bytes(tensor_bytes(w))
    return run_of_states(trajectory, [w, w], 1.0, "none (NTK)", identity)


@dataclass(frozen=True, eq=False, repr=False)
class SingleMachine(Tabular):
    """f(x) = b(x) + sum_i K(x, x_i) a_i with one kernel for the whole run.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: b(x), (n, C).
        coefficients: a_i, (M, C).
        max_error: Largest |outputs - network|.
        error_tolerance: Largest allowed error: the rule's tolerance (1e-12 for a fixed rule), and rounding.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    coefficients: Float[Tensor, "M C"]
    max_error: float
    error_tolerance: float
    _columns = ("initial", "outputs", "network")

    @property
    def certified(self) -> bool:
        """Whether the sum is the network's output up to tolerance."""
        return self.max_error <= self.error_tolerance


def single_machine(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    **options: Unpack[ComputeSettings],
) -> SingleMachine:
    """Evaluate the single kernel machine (Theorem 3.7, Bell et al. 2023), if it exists.

        f(x) = f_{w_0}(x) + sum_i K(x, x_i) a_i,   a_i = c_i q_i,   K with eta_s = eps_s

    It needs coefficients that are the same at all steps: cross entropy, the log-softmax head, and every step on all
    points.

    Args:
        trajectory: Training run.
        X: n inputs, taken as test copies.
        head: Must be "log_softmax" for cross entropy; any for `NegativeLogLikelihood`. None follows the loss.
        rule: Quadrature rule for the integral of each step, or of each chord.
        path: The path of test copies. The theorem holds along all paths, with the kernel of the path.
        options: `memory_budget` and `progress`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `gram_block`; also if the theorem does not hold, with the reason.
    """
    parsed = parse_options("single_machine", ("checkpoint", "accumulate"), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    require_integrable(path, "single_machine")
    X = parse_inputs(trajectory, X)
    spec = trajectory.model.spec_for(X)
    coefficients = _constant_coefficients(trajectory, kernel.head, spec.dtype).to(X.device)
    initial, network = kernel.end_outputs(X)
    outputs = initial.clone()
    block_bytes = trajectory.num_outputs**2 * initial.element_size() * len(X)  # one training point's kernel values
    size = max(1, parsed.memory_budget // (4 * block_bytes))
    training = spec.cast(trajectory.inputs)
    for part in torch.arange(len(training), device=X.device).split(size):
        K = kernel.block(Points(X, is_train=False), Points(training[part], is_train=True), **parsed.settings)
        outputs += torch.einsum("ncmd,md->nc", K, coefficients[part])
    error, terms = float((outputs - network).abs().max()), initial.abs() + network.abs() + outputs.abs()
    allowed = certificate.sum_tolerance(rule, trajectory, initial.dtype, terms)
    result = SingleMachine(outputs, network, initial, coefficients, error, allowed)
    if not result.certified:
        advice = "" if isinstance(rule, AdaptiveRule) else " (a fixed rule: epk_gp.adaptive() chooses its nodes)"
        finding = f"its sum misses the network's output by {error:.2e}, more than {allowed:.2e}{advice}"
        certificate.warn_unless_certified("the single kernel machine", [finding])
    return result


def _constant_coefficients(trajectory: Trajectory, head: Head, dtype: torch.dtype) -> Float[Tensor, "M C"]:
    """Return c_i q_i, after checking that the theorem holds."""
    advice = "Use epk_gp.reconstruct: the ensemble over steps (Theorem 3.6) is exact there."
    loss, reason = trajectory.loss, ""
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            f"the single kernel machine needs a loss derivative that stays constant: that of {loss} moves. {advice}"
        )
    if not trajectory.loss_takes_outputs:
        reason = f"a loss of the outputs (n, C) alone: {loss} takes what the network returned"
    elif head != "log_softmax" and isinstance(loss, CrossEntropy):
        reason = 'head="log_softmax": with respect to the logits the loss derivative p - y moves'
    every = torch.arange(trajectory.num_points)
    for step in () if reason else trajectory.steps:
        u, batch = held_coefficients(trajectory, step.index), step.batch
        is_plain = trajectory.is_vanilla_gd and float(u.lr[0] * u.grad_scale[0]) == step.lr
        if batch is not None and not torch.equal(batch.sort().values.cpu(), every):
            reason = f"every step to use all training points: step {step.index} used {len(batch)} of {len(every)}"
        elif not is_plain or step.sample_weights is not None:
            reason = (
                f"steps of plain gradient descent on the loss itself: step {step.index} of {trajectory.update_rule} "
                "has momentum, decay, clipping, accumulated batches, preconditioned gradients, or forward passes with "
                "dropout, moving statistics or other rows"
            )
        if reason:
            break
    if reason:
        raise ValueError(f"the single kernel machine needs {reason}. {advice}")
    q = soft_targets(loss, trajectory.targets, trajectory.inputs.new_zeros(0, trajectory.num_outputs, dtype=dtype))
    return sample_weights(loss, trajectory.targets).to(q)[:, None] * q

"""Certificates: limits for the effects of quadrature and rounding on a sum over the run."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.gradients import CANCELLATION_FACTOR
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import rows_of_weights
from epk_gp.core.replayed_steps import ReplayedStep, RunReplay, replay_rounding, replayed_steps
from epk_gp.core.show import Entry, certificate_entry, number, warn_uncertified
from epk_gp.core.states import JUMP_SHARE, law_of_step, recomputation_of
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, step_coefficients
from epk_gp.core.update_law import UpdateLaw
from epk_gp.optimizers.update_rules import ClipNorm, largest_entry, move_by_rounding, predict_step, relative_rounding
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureStatus, Rule, straight
from epk_gp.work.run import Sums

_FIXED_RULE_TOLERANCE = 1e-12  # the limit for a fixed rule: the default of the adaptive one

# Largest error of an interval of a step, in units of the rule's tolerance, or of `Integral.rounding`. The adaptive rule
# accepts 1 and a quarter of that, and more if rounding inside the network is larger.
_TOLERANCES = 8

# Largest error of a sum in eps of its terms' sizes, per step, because rounding of steps adds up at random. In float64
# it is more than rounding: a relative gradient error of 1e-9 is still detected.
_SUM_ROUNDING = {torch.float32: 64, torch.float64: 2**16}


def warn_unless_certified(name: str, findings: Sequence[str]) -> None:
    """Emit a `CertificateWarning` with the findings of a result, if there are any."""
    if findings:
        warn_uncertified(f"{name} is not certified: {'; '.join(findings)}.")


def integral_sums(integral: Integral, rule: Rule, num_steps: int) -> Sums:
    """Return residuals, statuses and numbers of evaluations of the integrals of some points over one stretch.

    Args:
        integral: The integrals.
        rule: The quadrature rule; a fixed rule is compared with the adaptive one's default tolerance.
        num_steps: Number of stretches that share the rule's tolerance.
    """
    allowed = integral.num_intervals * integral.rounding.clamp(min=_TOLERANCES * _tolerance(rule) / max(1, num_steps))
    largest = torch.stack([integral.residual.max(), (integral.residual / allowed).max()])
    counts = torch.bincount(integral.status, minlength=len(QuadratureStatus))
    added = {"statuses": counts, "evaluations": integral.evaluations.sum().double()}
    return Sums(added, {"integration": largest.double()})


# Share of the explained rounding up to which the rounding of an earlier step is reused: a choice.
_CLEARLY = 0.25
_MEASURED_EVERY = 16  # steps between measurements of rounding that a preconditioner amplifies: a choice


def _mismatch_ratio(
    run: Trajectory,
    model: FunctionalModel,
    replayed: ReplayedStep,
    difference: Float[Tensor, " P"],
    dtype: torch.dtype,
    known: Float[Tensor, " L"] | None = None,
) -> tuple[float, Float[Tensor, " L"] | None]:
    """Return the largest difference of a recorded step from the replayed one, in units of the expected rounding.

    The rounding of the step is measured only if the difference is larger than `replay_rounding`: the step is recomputed
    from the gradient of the rows in reverse order, at weights that are moved by their own rounding. This is done
    parameter by parameter: rounding that a preconditioner amplifies in one parameter does not explain differences in
    the others.

    Args:
        run: The run.
        model: Its network in the dtype of the computation.
        replayed: The step.
        difference: The recorded step minus the replayed one.
        dtype: The coarser of the dtypes of run and computation.
        known: The rounding of the gradients of a recent step; it is not measured again if this step's amplification of
            it explains the difference clearly.

    Returns:
        The ratio; and the rounding of each parameter's gradient, if it is known.
    """
    w, d, step = replayed.w, replayed.d, replayed.step
    largest, plain = float(largest_entry(difference)), replay_rounding(replayed.w, replayed.d, dtype)
    if largest <= plain:
        return (largest / plain if largest else 0.0), known
    differences = _largest_by_parameter(model, difference)

    def ratio(rounding: Tensor) -> float:
        # a small parameter can agree by chance
        allowed = (CANCELLATION_FACTOR * torch.maximum(rounding, rounding.median())).clamp(min=plain)
        return float(torch.where(differences == 0, 0.0, differences / allowed).max())

    coefficients = step_coefficients(run, step.index, w)
    unit = torch.arange(len(w), dtype=w.dtype, device=w.device).cos()  # any signs, but no zeros
    ends = (predict_step(coefficients, model.sizes, w, c * unit, replayed.momentum)[0] for c in (0, 1))
    amplification = _largest_by_parameter(model, torch.sub(*ends)).clamp(min=torch.finfo(w.dtype).tiny)
    if known is not None and (found := ratio(known * amplification)) <= _CLEARLY:
        return found, known
    state = flat_state(run, step.index, w)
    moved = torch.cat([move_by_rounding(w, torch.finfo(dtype).eps), state[len(w) :]])
    g, _ = RunReplay(run, model, w).gradient_at(_moved_passes(step, dtype), moved, reverse=True)
    again, _ = predict_step(coefficients, model.sizes, w, g, replayed.momentum)
    rounding = _largest_by_parameter(model, run.with_move(step, w, again) - d)
    return ratio(rounding), rounding / amplification


def _moved_passes(step: Step, dtype: torch.dtype) -> Step:
    """Move the weights that passes of a step saw, and their recorded output gradients, by their rounding.

    Sums of output gradients alone, as in the last bias, do not depend on the weights: their terms are moved by a few
    eps, because otherwise the sums may agree exactly.
    """

    def moved(value: Tensor, eps: float) -> Tensor:
        return move_by_rounding(value.flatten(), eps).view_as(value)

    eps, passes = torch.finfo(dtype).eps, list[ForwardPass]()
    for p in step.passes:
        stored = p.cotangents
        stored = None if stored is None else SeenRows(stored.index, moved(stored.values, 8 * eps))
        weights = None if p.weights is None else moved(p.weights, eps)
        passes.append(replace(p, weights=weights, cotangents=stored))
    return replace(step, passes=tuple(passes))


def _largest_by_parameter(model: FunctionalModel, values: Float[Tensor, " P"]) -> Float[Tensor, " L"]:
    parts = values.split([size for size in model.sizes if size])
    return torch.stack([largest_entry(part) for part in parts]) if parts else values.new_zeros(1)


@dataclass
class StepMismatches:
    """The differences of recorded steps from replayed ones, in the weights.

    Attributes:
        largest: Largest difference, over weights and steps; NaN stays.
        ratio: Largest ratio of a step's difference to what rounding explains; NaN stays.
        worst_step: The step with the largest ratio; -1 before the first one.
        options_step: The first step that differs by more than rounding from the step by the optimizer's recorded
            options (`ReplayedStep.by_options`); -1 if there is none.
        is_exact: Whether only rounding counts as explained, even if the run may leave a share unexplained.
        moved: A mask of the weights that gradients moved, (P,), if that was examined.
        varies_mask: Whether the loop set the gradient of a weight to 0 in some steps, and not in others.
        clipped_alone: The only clipped step of a run whose clipping is not stated; -1 if there is no such step.
    """

    largest: float = 0.0
    ratio: float = 0.0
    worst_step: int = -1
    options_step: int = -1
    is_exact: bool = False
    moved: Bool[Tensor, " P"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    varies_mask: bool = False
    clipped_alone: int = -1
    _rounding: Float[Tensor, " L"] | None = None  # rounding of each parameter's gradient in a recent step

    def add(self, trajectory: Trajectory, model: FunctionalModel, replayed: ReplayedStep) -> bool:
        """Compare a step with the recorded one, in the precision of the training; and its moving statistics.

        Returns:
            Whether rounding explains the step, but is more than a small share of it: a preconditioner has amplified the
            rounding of a gradient that consists of rounding only (a bias in front of BatchNorm under Adam).
        """
        trajectory, index, w = trajectory.trained, replayed.step.index, replayed.w
        dtype = coarsest_dtype(trajectory, model.spec.dtype)
        change, recomputation = flat_weights(trajectory, index + 1, w) - w, law_of_step(trajectory, index, model.spec)
        difference = change - (replayed.as_trained if recomputation is None else replayed.d)
        mismatch = float(largest_entry(difference))
        accepted, statistics_error = trajectory.unexplained, replayed.statistics_error
        if self.is_exact and accepted is not None:  # rounding of rates to float32, or products under autocast
            eps = [torch.finfo(forward.autocast).eps for forward in replayed.step.passes if forward.autocast]
            accepted = min(accepted, max([relative_rounding(torch.float32), *eps]))
        if recomputation is not None:  # recorded statistics, at weights that differ from the recorded ones
            statistics_error *= min(1.0, relative_rounding(trajectory.dtype) / JUMP_SHARE[trajectory.dtype])

        def explained(difference: Tensor) -> float:
            if accepted is not None and difference.norm() <= accepted * change.norm():
                return float(difference.norm() / (accepted * change.norm().double()).clamp(min=1e-300))
            known = self._rounding if index % _MEASURED_EVERY else None
            ratio, self._rounding = _mismatch_ratio(trajectory, model, replayed, difference, dtype, known)
            return ratio

        if recomputation is not None and recomputation.is_kept(index + 1):
            ratio = float(difference.norm()) / max(recomputation.allowed_jump(index, dtype, w, accepted), 1e-300)
        else:
            ratio = explained(difference)
        if replayed.by_options is not None and self.options_step < 0:
            missed = replayed.as_trained - replayed.by_options
            # torch rounds rates to float32 if options are tensors
            allowed = relative_rounding(torch.float32) * largest_entry(replayed.as_trained)
            if not largest_entry(missed) <= allowed and not explained(missed) <= 1:
                self.options_step = index
        ratio = larger(ratio, statistics_error)
        self.largest = larger(self.largest, mismatch)
        if self.worst_step < 0 or not ratio <= self.ratio:
            self.ratio, self.worst_step = larger(self.ratio, ratio), index
        is_exact = recomputation is not None or replayed.as_trained is replayed.d
        left = mismatch if is_exact else float(largest_entry(change - replayed.d))
        return ratio <= 1 and left > replay_rounding(replayed.w, replayed.d, dtype)

    @property
    def retraining_findings(self) -> list[str]:
        """Reasons that a retrained run may differ, in words; empty if there are none."""
        varies = ["which entries of the gradient the loop sets to 0 changes along the run: it is held as recorded"]
        return self.findings + varies * self.varies_mask

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the certificate's numbers about the steps."""
        return {"max_step_mismatch": self.largest, "mismatch_ratio": self.ratio, "worst_step": self.worst_step}

    @property
    def findings(self) -> list[str]:
        """Reasons that the steps are not those of gradients and optimizer, in words; empty if there are none."""
        findings = []
        if not self.ratio <= 1:
            held = "; how that part would follow from other weights of the samples is not known" * self.is_exact
            findings.append(mismatch_finding(self.worst_step, self.ratio, self.largest) + held)
        if self.options_step >= 0:
            findings.append(
                f"step {self.options_step} is not the one that the optimizer's recorded options, its state since the "
                "first step and the clipping of gradients give: how steps follow from other gradients is not known"
            )
        if self.clipped_alone >= 0:
            findings.append(
                f"step {self.clipped_alone} alone was clipped, which does not show by which norm: state clip="
            )
        return findings


class StepResiduals:
    """rho_s = w_{s+1} - w_s - (the update by the training gradients), for all steps of a run.

    The run is replayed once, and every step is compared with the recorded one. The residuals of a run in float64 that
    may leave nothing unexplained are rounding, and are kept only if a preconditioner amplifies them: if one is larger,
    the comparison reports it. For a run whose states are computed by the update rule, the steps that end at a kept
    state have residuals, the jumps; the steps between are the rule's steps on the gradients of this computation.

    Args:
        run: Computes the gradients of the recorded run.
        max_rows: Number of residuals of all weights that are held in memory; more are put into a temporary file.
        keeps: Whether residuals are kept.
        keeps_all: Whether every step has a residual larger than float64's rounding.

    Attributes:
        mismatches: The comparison.
        seconds: Duration of the replay: about as long as the training, in the dtype of the computation.
    """

    def __init__(self, run: RunReplay, max_rows: int, *, keeps: bool, keeps_all: bool) -> None:
        trajectory, model = run.trajectory, run.model
        begun, like = time.monotonic(), torch.zeros(0, dtype=model.spec.dtype, device=model.spec.device)
        self.mismatches, self._sizes = StepMismatches(), model.sizes
        self._rows, self._amplified = dict[int, Tensor](), dict[int, dict[int, Tensor]]()
        rows: Tensor | None = None
        recomputation, dtype = recomputation_of(trajectory), coarsest_dtype(trajectory, model.spec.dtype)
        most, count = trajectory.num_steps if keeps_all or not recomputation else len(recomputation.kept.numbers), 0
        for replayed in replayed_steps(run):
            index = replayed.step.index
            is_amplified = self.mismatches.add(trajectory, model, replayed)
            law = law_of_step(trajectory, index, model.spec)
            is_kept = keeps_all if law is None else law.is_kept(index + 1)
            if keeps and (is_amplified or is_kept):
                residual = (flat_weights(trajectory, index + 1, run.reference) - replayed.w).sub_(replayed.d)
                if not is_kept:  # residuals of the parameters whose rounding is amplified
                    plain = replay_rounding(replayed.w, replayed.d, dtype)
                    parts = enumerate(residual.to(like).split(self._sizes))
                    own = {k: part.clone() for k, part in parts if part.numel() and largest_entry(part) > plain}
                    self._amplified[index] = own
                    continue
                # room for all kept residuals; memory, or a temporary file, is only used where they are written
                rows = rows_of_weights(most, model.num_weights, like, max_rows) if rows is None else rows
                rows[count] = residual.to(rows)
                self._rows[index], count = rows[count], count + 1
        self._like, self.seconds = like, time.monotonic() - begun

    def __getitem__(self, s: int) -> Float[Tensor, " P"] | None:
        """Return rho_s; None if it is zero up to rounding."""
        if s not in self._amplified:
            return self._rows.get(s)
        whole = self._like.new_zeros(sum(self._sizes))
        parts = whole.split(self._sizes)
        for k, values in self._amplified[s].items():
            parts[k].copy_(values)
        return whole


def run_findings(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the reasons against any result that names samples: their indices may be wrong."""
    return () if trajectory.identity_finding is None else (trajectory.identity_finding,)


def step_mismatches(trajectory: Trajectory, law: UpdateLaw, run: RunReplay) -> StepMismatches:
    """Compare all recorded steps with those by gradients, the recorded options and clipping.

    Args:
        trajectory: The run.
        law: Its steps as functions, in the dtype and on the device of the computation.
        run: Computes the gradients.
    """
    model, mismatches = run.model, StepMismatches(is_exact=True)
    by_mask, all_moved = torch.zeros(2, sum(law.sizes), dtype=torch.bool, device=law.reference.device), False
    for replayed in replayed_steps(run, law=law):
        mismatches.add(trajectory, model, replayed)
        own = law.step(replayed.step.index)
        scale = own.recorded["grad_scale"]
        if not (all_moved and bool(scale.all())):  # otherwise there is nothing new
            size = replayed.gradient.abs()
            is_seen = size > relative_rounding(trajectory.dtype) * size.max()
            is_seen = is_seen if own.is_moved is None else is_seen & own.is_moved
            by_mask |= is_seen & torch.stack([scale == 0, scale != 0])
            all_moved = bool(by_mask[1].all())
    mismatches.moved, mismatches.varies_mask = by_mask[1], bool(by_mask.all(dim=0).any())
    if isinstance(law.clip, ClipNorm) and len(law.clipped_steps) == 1 and law.trajectory.clip is None:
        mismatches.clipped_alone = law.clipped_steps[0]
    return mismatches


def mismatch_finding(step: int, ratio: float, largest: float) -> str:
    """Describe the difference between a recorded and a replayed step."""
    return (
        f"step {step} differs from the step that the loss's gradient on the recorded batch gives by {ratio:.2g} times "
        f"what rounding explains (largest difference of a step {largest:.2e})"
    )


def _tolerance(rule: Rule) -> float:
    return rule.tol if isinstance(rule, AdaptiveRule) else _FIXED_RULE_TOLERANCE


def _is_larger(a: float, b: float) -> bool:
    return math.isnan(a) or a >= b


def larger(a: float, b: float) -> float:
    """Return the larger of two numbers, and NaN if one of them is NaN: Python's max() may drop it."""
    return a if _is_larger(a, b) else b


def coarsest_dtype(trajectory: Trajectory, dtype: torch.dtype) -> torch.dtype:
    """Return float32 if the run or the computation uses it, otherwise float64; `dtype` is the computation's."""
    return torch.float32 if torch.float32 in (trajectory.dtype, dtype) else torch.float64


def sum_tolerance(rule: Rule, trajectory: Trajectory, dtype: torch.dtype, terms: Float[Tensor, "n C"]) -> float:
    """Return the largest allowed difference between the terms of a prediction and the network's output.

    Args:
        rule: Quadrature rule of the steps.
        trajectory: The run; each step carries the rounding of the weights.
        dtype: Dtype of the computation.
        terms: Sum of the terms' absolute values.
    """
    size, dtype = max(trajectory.model.output_size, float(terms.max())), coarsest_dtype(trajectory, dtype)
    rounding = _SUM_ROUNDING[dtype] * torch.finfo(dtype).eps * size * math.sqrt(max(1, trajectory.num_steps))
    return _TOLERANCES * _tolerance(rule) + rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate:
    """The evidence that a sum over a run equals the network's output.

    Attributes:
        max_error: Largest |sum - network|.
        error_tolerance: Largest allowed error if both ratios are at most 1.
        max_residual: Largest quadrature residual |f(w_{s+1}) - f(w_s) - integral| of a (point, step), or of a chord.
        residual_ratio: Largest ratio of a residual to the limit by the rule's tolerance (1e-12 for a fixed rule) or
            rounding.
        max_step_mismatch: Largest difference, over weights and steps, between a recorded step and the step by the
            training gradients: rounding of the weights' dtype.
        mismatch_ratio: Largest ratio of such a difference to the expected rounding of weights and gradients.
        worst_step: The step with this ratio; -1 for a run without steps.
        evaluations: Gradients evaluated per point and step to choose nodes, on average; per output of a point and step
            if outputs went through the run separately to keep to the memory budget.
        statuses: Number of (point, step) pairs, or of points and chords, by the reason that the rule stopped refining
            them.
        unexplained_share: Share of the change of all outputs that is unexplained; 0 if it is at most 1 %, or at most
            the share that the run accepts.
        run_findings: Reasons in the recorded run against results that name samples.
        explains: The state whose network the result explains (`Trajectory.explained`).
        path: Description of the path along which points were integrated.
        states: Reason that states between kept ones may differ from the recorded ones; empty if they do not.
        precision: Description of the outputs' rounding, if it is not that of the computation; otherwise empty.
    """

    max_error: float
    error_tolerance: float
    max_residual: float
    residual_ratio: float
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    evaluations: float
    statuses: Mapping[QuadratureStatus, int]
    unexplained_share: float = 0.0
    run_findings: tuple[str, ...] = ()
    explains: str = ""
    path: str = str(straight())
    states: str = ""
    precision: str = ""

    @classmethod
    def of(cls, result: "Certificate") -> "Certificate":
        """Return the certificate of a result, without the result."""
        return Certificate(**{field.name: getattr(result, field.name) for field in fields(Certificate)})

    def merged(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both: each error keeps the tolerance with which it was compared."""
        has_larger_error = _is_larger(self.max_error / self.error_tolerance, other.max_error / other.error_tolerance)
        sums = self if has_larger_error else other
        steps = self if _is_larger(self.mismatch_ratio, other.mismatch_ratio) else other
        names = ("max_residual", "residual_ratio", "max_step_mismatch", "evaluations", "unexplained_share")
        return Certificate(
            max_error=sums.max_error,
            error_tolerance=sums.error_tolerance,
            mismatch_ratio=steps.mismatch_ratio,
            worst_step=steps.worst_step,
            statuses=Counter(self.statuses) + Counter(other.statuses),
            run_findings=self.run_findings or other.run_findings,
            explains=self.explains or other.explains,
            path=self.path,
            states=self.states or other.states,
            precision=self.precision or other.precision,
            **{name: larger(getattr(self, name), getattr(other, name)) for name in names},
        )

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance, and little of the outputs' change is unexplained.

        The residual tests the quadrature only; a step that does not follow the stated loss on the stated data shows in
        the mismatch. All of these concern the sum, not each kernel value or contribution.
        """
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Reasons that the result is not certified, with numbers; empty if it is certified."""
        findings = []
        if not self.residual_ratio <= 1:
            findings.append(
                f"the quadrature of a step leaves {self.residual_ratio:.2g} times what tolerance and rounding allow "
                f"(largest residual {self.max_residual:.2e}{_describe_statuses(self.statuses)})"
            )
        if not self.mismatch_ratio <= 1:
            findings.append(mismatch_finding(self.worst_step, self.mismatch_ratio, self.max_step_mismatch))
        if not self.max_error <= self.error_tolerance:
            findings.append(
                f"the sum misses the network's output by {self.max_error:.2e}, more than {self.error_tolerance:.2e}"
            )
        if self.unexplained_share > 0:
            findings.append(
                f"{self.unexplained_share:.1%} of the change of the outputs is `unexplained`: gradients of the "
                "training data do not make that part of the steps, such as rounding that Adam amplifies in a bias in "
                "front of BatchNorm (bias=False removes it; attribute(by=[by_parameter(run)]) says where it is)"
            )
        if self.states and findings:
            findings.append(self.states)
        return [*findings, *self.run_findings]

    def entries(self, num_points: int) -> tuple[Entry, ...]:
        """Return a summary's entries about the certificate, with its numbers."""
        if not num_points:
            return (Entry("certificate", "none: there are no points"),)
        return (
            certificate_entry(self.findings, "quadrature, steps and sum are within tolerance"),
            Entry("explains", self.explains),
            *([] if self.path == str(straight()) else [Entry("path", self.path)]),
            *(Entry(name, text) for name in ("states", "precision") if (text := getattr(self, name))),
            Entry("largest error", number(self.max_error), f"|sum - network|; at most {number(self.error_tolerance)}"),
            Entry("largest residual", number(self.max_residual), "quadrature of a point and a step"),
            Entry("largest mismatch of a step", number(self.max_step_mismatch), "recorded against replayed weights"),
            Entry("evaluations", number(self.evaluations), "per point and step, on average"),
        )


def described_precision(net: PlannedModel) -> str:
    """Describe the rounding of a network's outputs if it is not that of the computation; otherwise ""."""
    text = "float32's: the network casts to float32 inside; net.float(), recorded so, is as exact and costs less"
    return "" if net.coarsest_dtype == net.model.spec.dtype else text


def integral_facts(sums: Sums, num_pairs: int) -> dict[str, Any]:
    """Return the certificate's entries about the integrals of a run.

    Args:
        sums: The joined results of `integral_sums`; empty for a run without steps.
        num_pairs: Number of points times number of steps.
    """
    counts, (residual, ratio) = sums.added.get("statuses", torch.zeros(0)), sums.largest.get("integration", (0.0, 0.0))
    return {
        "max_residual": float(residual),
        "residual_ratio": float(ratio),
        "statuses": {QuadratureStatus(status): count for status, count in enumerate(counts.tolist()) if count},
        "evaluations": float(sums.added.get("evaluations", 0.0)) / num_pairs,
    }


def _describe_statuses(statuses: Mapping[QuadratureStatus, int]) -> str:
    """Describe the statuses that explain large residuals; empty if there are none."""
    if QuadratureStatus.FIXED in statuses:
        return "; a fixed rule: epk_gp.adaptive() chooses its nodes by the residual"
    notable = {status: count for status, count in statuses.items() if status is not QuadratureStatus.CONVERGED}
    reasons = ", ".join(f"{count} {status.name}" for status, count in sorted(notable.items()))
    if QuadratureStatus.INCONSISTENT_DERIVATIVE in notable:
        reasons += ": the derivative is not the outputs' (a stop-gradient such as detach(), rounding), or they jump,"
    return f"; {reasons} of {sum(statuses.values())} pairs of a point and a step" if notable else ""

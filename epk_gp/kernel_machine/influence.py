"""Influence: the derivative of a trained network's outputs in the weights of its training samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel, all_outputs, chosen_outputs
from epk_gp.autodiff.scalars import Function, RowFunction, ask, with_leaves
from epk_gp.autodiff.verification import plan_for, with_plan
from epk_gp.core import checks
from epk_gp.core.graphs import rows_of, tensors_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head, apply_head, loss_terms, resolve_head
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.show import Entry, Summary, Tabular, certificate_entry, count, kind_of, number
from epk_gp.core.torch_overrides import disable_fused_attention, warn_unless_plain
from epk_gp.core.trajectory import (
    Trajectory,
    flat_state,
    flat_weights,
    network_outputs,
    parse_inputs,
    validate_trajectory,
    warn_unless_live,
)
from epk_gp.core.update_law import UpdateLaw
from epk_gp.kernel_machine import retrain
from epk_gp.kernel_machine.axes import Axis, CombinedAxes, PointsTable, by_sample, group_name, in_words, parse_axes
from epk_gp.kernel_machine.certificate import StepMismatches, run_findings, step_mismatches, warn_unless_certified
from epk_gp.kernel_machine.curvature import curvature_error
from epk_gp.kernel_machine.influence_pass import InfluenceWork
from epk_gp.work.run import run

_ITSELF = Axis("sample", torch.zeros(1, dtype=torch.int64), ("itself",))  # for `own`: one weight for each sample
_SMALLEST = 1e-6  # smallest drawn weight, relative to the range: the derivative in a weight needs its sample


@dataclass(frozen=True)
class Smoothing:
    """Averaging of the derivative over runs whose samples have random weights.

    The derivative at the recorded weights describes one point: where ReLUs switch, or training amplifies small changes,
    it says little about larger changes. The average of the derivatives of runs with other weights is that of a smooth
    function, the mean over the weights. Every second run has mirrored weights, low + high - weights. For three or more
    runs the mean is trimmed, entry by entry: an eighth of the runs, and at least one, is left out on each side, because
    the derivative under Adam is huge where a small gradient is about to change its sign.

    Gradients are clipped to the bound that was given to the recorder (`clip=`), or that a recorded step reached. A
    bound that is neither stated nor reached is not known, and runs with large weights may exceed it.

    Attributes:
        num_runs: Number of runs; each of them is retrained and costs as much as `influence`.
        low: Smallest weight.
        high: Largest weight. Weights from 0 to 2 predict small changes; weights from 0 to 1 predict leaving out half.
        seed: Seed of the weights.
    """

    num_runs: int = 8
    low: float = 0.0
    high: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise if weights cannot be drawn.

        Raises:
            TypeError: A number has a wrong type.
            ValueError: There is no run, or the range of the weights is empty or contains negative numbers.
        """
        checks.validate_count(self.num_runs, "num_runs")
        checks.validate_integer(self.seed, "seed")
        if not 0 <= self.low < self.high < float("inf"):
            raise ValueError(f"weights must be drawn between 0 <= low < high: got {self.low} and {self.high}.")

    def weights(self, num_samples: int) -> Iterator[Float64[Tensor, " M"]]:
        """Yield the weights of the samples of each run."""
        generator = torch.Generator().manual_seed(self.seed)
        share = torch.ones(num_samples, dtype=torch.float64)
        for draw in range(self.num_runs):
            is_mirrored = draw % 2 == 1
            share = 1 - share if is_mirrored else torch.rand(num_samples, generator=generator, dtype=torch.float64)
            yield self.low + (self.high - self.low) * share.clamp(min=_SMALLEST)

    def average(self, values: Float[Tensor, "runs *rest"]) -> Float[Tensor, "*rest"]:
        """Return the trimmed mean over runs."""
        count = len(values)
        trimmed = max(1, count // 8) if count > 2 else 0
        return values.sort(dim=0).values[trimmed : count - trimmed].mean(dim=0)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Influence(Tabular):
    """The dependence of a trained network's numbers on the weights of its training samples.

    Attributes:
        outputs: The numbers, (n, K): the network's outputs, or the results of `function`.
        values: Their derivatives, (n, K, M), or (n, K, G_1, G_2, ...) over the axes' groups; with `own` those of each
            sample's loss in its own weight, (n, 1, 1). A weight multiplies the loss terms of its sample; the divisor of
            a mean over a batch stays. `-values` predicts the effect of leaving a sample out.
        adjoint_norms: Norm of the derivative of each number in the weights w_0 .. w_S of the run, (n, K, S + 1). If it
            grows by orders of magnitude towards the beginning, training amplifies small changes, and the derivative
            says little about large ones.
        axes: The axes along which the values are split.
        max_step_mismatch: Largest difference between a recorded step and the step by the training gradients.
        mismatch_ratio: Largest ratio of such a difference to the expected rounding.
        worst_step: The step with this ratio; -1 for a run without steps.
        findings: Reasons that the result is not certified, in words; empty if it is certified.
        clipping: Source of the bound of gradient clipping, in words.
        explained: The kind of the K numbers of an input: "output", or "number" for the results of a function.
        is_own: Whether each number is the loss of a training sample, and its value the derivative in this sample's own
            weight (`influence(own=)`).
    """

    outputs: Float[Tensor, "n K"]
    values: Float[Tensor, "n K *groups"]
    adjoint_norms: Float[Tensor, "n K S1"]
    axes: tuple[Axis, ...]
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    findings: tuple[str, ...] = ()
    clipping: str = ""
    explained: str = "output"
    is_own: bool = False

    @property
    def certified(self) -> bool:
        """Whether every recorded step follows from the training gradients, and no part of it is held as recorded."""
        return not self.findings

    @property
    def growth(self) -> Float[Tensor, "n K"]:
        """Ratio of the largest derivative in the weights along the run to the derivative in the trained weights."""
        norms = self.adjoint_norms
        return norms.amax(dim=2) / norms[:, :, -1].clamp(min=torch.finfo(norms.dtype).tiny)

    @property
    def std(self) -> Float[Tensor, "n K"]:
        """Jackknife standard deviation sqrt(sum_i values_i^2), (n, K): the spread of each number under retraining.

        Its order over numbers is more reliable than its size (docs/theory.md, section 10).

        Raises:
            ValueError: The values are not split by samples alone.
        """
        if not self._is_by_sample:
            raise ValueError(
                "std needs the derivative in each sample's weight: it is split by others. Leave by= and own= out."
            )
        return self.values.square().sum(dim=2).sqrt()

    def predict(self, weights: Float[Tensor, "... M"]) -> Float[Tensor, "... n K"]:
        """Predict the numbers of networks that are trained with other weights of the samples, to first order.

        Args:
            weights: One weight per training sample, (M,) or (m, M): 1 as recorded, 0 to leave a sample out.

        Raises:
            TypeError: The weights are not a tensor.
            ValueError: The values are not split by samples alone, or there is not one weight per sample.
        """
        checks.validate_tensor(weights, "weights")
        M = self.values.shape[2]
        if not self._is_by_sample or weights.ndim == 0 or weights.shape[-1] != M:
            raise ValueError(
                "predict() needs the derivative in each sample's weight (leave by= and own= out), and one weight per "
                f"sample, (..., {M}): got shape {tuple(weights.shape)}."
            )
        if not torch.isfinite(weights).all():
            raise ValueError("weights must be finite: they hold NaN or infinity.")
        changes = torch.einsum("...i,nki->...nk", weights.to(self.values) - 1, self.values)
        return self.outputs + changes

    @property
    def _is_by_sample(self) -> bool:
        each = [axis.kind for axis in self.axes] == ["sample"] and len(self.axes[0].names) == len(self.axes[0].group)
        return each and not self.is_own

    def _frame(self) -> tuple[Any, ...]:
        terms = {"outputs": self.outputs, "values": self.values}
        return PointsTable(self.outputs, self.explained).frame(terms, self.axes)

    def _summary(self) -> Summary:
        (n, K), table = self.outputs.shape, PointsTable(self.outputs, self.explained)
        by_point = ("outputs", "values", "adjoint_norms")
        head = replace(self, **{name: getattr(self, name)[: len(table.places)] for name in by_point})
        deviations = [table.row("jackknife standard deviation", head.std)] if self._is_by_sample else []
        rows = [table.row("value", head.outputs), *deviations, table.row("growth along the run", head.growth)]
        if self.is_own:
            rows.append(table.row("derivative in its own weight", head.values[..., 0]))
        else:
            rows += table.largest("largest derivatives", head.values, partial(group_name, self.axes))
        every = "every recorded step is the one that the training gradients give, and nothing of it is held"
        title = (
            f"Influence of {count(n, 'training sample')}, each on its own loss"
            if self.is_own
            else f"Influence of {in_words(self.axes)} on {count(n, 'point')} × {count(K, self.explained)}"
        )
        entries = (
            certificate_entry(self.findings, every),
            Entry("largest mismatch of a step", number(self.max_step_mismatch), "recorded against replayed weights"),
            Entry("gradient clipping", self.clipping),
            Entry("shape of values", f"{tuple(self.values.shape)}", kind_of(self.values)),
        )
        return Summary(title, entries, table.table(rows))


# A question: the run whose network gives the numbers, with its inputs; the numbers, (n, K), or () for all inputs
# together; and their derivatives in this network's outputs, (n, K, C).
Question = tuple[Trajectory, Shaped[Tensor, "n ..."], Float[Tensor, "..."], Float[Tensor, "n K C"]]


@checks.door
def influence(
    trajectory: Trajectory,
    X: Inputs | None = None,
    *,
    own: bool | Int64[Tensor, " n"] = False,
    head: Head | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    by: Sequence[Axis] | None = None,
    smoothing: Smoothing | None = None,
    truncate: int | None = None,
    **options: Unpack[checks.ComputeSettings],
) -> Influence:
    """Differentiate a trained network's outputs in the weight of each training sample, through the whole training.

        df(w_S) / dc_i = sum_s lambda_{s+1} dT_s / dc_i,   lambda_s = lambda_{s+1} dT_s / dw,   w_{s+1} = T_s(w_s, c)

    T_s is the recorded step: its batch, rows as seen, random numbers, and the optimizer with its momentum, weight
    decay, gradient clipping and preconditioner, including its own dependence on the gradients (docs/theory.md, section
    10). Contributions (`attribute`) state each sample's share of the prediction; influence predicts the prediction
    without the sample, to first order.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, with the structure of the training inputs; None with `own`.
        own: True differentiates the loss of every training sample in its own weight (self-influence), in one pass:
            `values` is (M, 1, 1). Indices (n,) choose some of the samples. A value is negative if training on the
            sample lowers its loss: the more negative it is, the more the prediction depends on the sample itself, as
            for a wrong label.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        classes: One output per input; K is then 1 in the result. All C outputs by default, some at a time if the
            adjoints of all outputs of a point do not fit into `memory_budget`.
        function: The function to differentiate instead of the outputs, as in `attribute`: it maps the network's result
            for n rows of inputs to numbers, (n,) or (n, K), row by row; or it maps all inputs together to one number,
            (), such as their mean loss.
        by: Axes of samples and steps: `by_sample(trajectory)`, `by_label`, `by_step`, or your own axes. By default each
            sample.
        smoothing: Average the derivative over retrained runs with random weights of the samples. They do not know a
            bound of gradient clipping that was neither stated nor reached (`retrain`).
        truncate: Go through the last `truncate` steps only: the weights count there, and are 1 before.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        The derivatives, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs; the head or an axis is unknown; a class is out of
            range; the function returns another shape, or mixes rows; the run does not contain the options of its
            optimizer; or the loss has no second derivatives, because torch can differentiate an operation of the
            network only once.
    """
    parsed = checks.parse_options("influence", ("accumulate",), **options)
    is_own = not (isinstance(own, bool | np.bool_) and not own)
    if is_own and any(given is not None for given in (X, head, classes, function, by, smoothing)):
        raise ValueError(
            "own= asks for the losses of training samples: X, head, classes, function, by and smoothing "
            "must be left out."
        )
    validate_trajectory(trajectory)
    retrain.require_loss_as_function(trajectory, "epk_gp.influence")
    warn_unless_live(trajectory)
    if is_own:
        result = _own_influence(trajectory, own, truncate, parsed)
        warn_unless_certified("the influence", result.findings)
        return result
    if X is None:
        raise TypeError("influence() must be given the inputs X whose outputs it explains, or own=True: got neither.")
    X = parse_inputs(trajectory, X).detach()
    axes = parse_axes(trajectory, [by_sample(trajectory)] if by is None else by)
    if any(axis.kind == "parameter" for axis in axes):
        raise ValueError(
            "by must hold axes of samples and steps: the derivative goes through all parameters together, and has no "
            "part of one. Leave by_parameter and by_layer out; epk_gp.attribute(by=) splits contributions by them."
        )
    question = _question(trajectory, X, head, classes, function)
    if smoothing is None:
        result = _differentiate(question, parsed, axes=axes, truncate=truncate)
        warn_unless_certified("the influence", result.findings)
        return result
    if not isinstance(smoothing, Smoothing):
        raise TypeError(f"smoothing must be an epk_gp.Smoothing or None: got {smoothing!r}.")
    law, found = UpdateLaw(trajectory, flat_weights(trajectory, 0, X)), list[Influence]()
    retrain.require_replays(law)
    # a retrained run agrees with the network that trained it; only the recorded run can tell whether that network is
    # right
    net = plan_for(trajectory, trajectory.model_for(X))
    replay = RunReplay(trajectory, net.model, X, net.memory_plan(parsed.memory_budget))
    findings = step_mismatches(trajectory, law, replay).retraining_findings
    for index, weights in enumerate(smoothing.weights(trajectory.num_points)):
        weights = weights.to(trajectory.device)
        run, (_, difference) = retrain.retrained_run(retrain.StackedTraining(trajectory), weights, parsed.memory_budget)
        again = _question(run, X, head, classes, function)
        folder = None if parsed.checkpoint is None else Path(parsed.checkpoint) / f"run-{index}"
        effect = _differentiate(
            again, replace(parsed, checkpoint=folder), axes=axes, factors=1 / weights, truncate=truncate
        )
        found.append(effect)
        findings += [f"of run {index} {finding}" for finding in effect.findings]
        if not difference <= retrain.REPLAY_TOLERANCE[run.dtype]:
            findings.append(
                f"a replay with all weights 1 beside run {index} ends {float(difference):.2g} of the way that the "
                "weights went from the recorded network"
            )
    worst = max(found, key=lambda result: (math.isnan(result.mismatch_ratio), result.mismatch_ratio))
    warn_unless_certified("the influence", findings)
    return replace(
        worst,
        outputs=question[2].reshape(worst.outputs.shape),
        findings=tuple(findings),
        values=smoothing.average(torch.stack([result.values for result in found])),
        adjoint_norms=torch.stack([result.adjoint_norms for result in found]).mean(dim=0),
    )


def _own_influence(trajectory: Trajectory, own: Any, truncate: int | None, options: checks.ComputeOptions) -> Influence:
    """Differentiate the loss of each sample in its own weight, for `influence(own=)`."""
    M = trajectory.num_points
    every = isinstance(own, bool | np.bool_)  # not False, as the caller has made sure
    rows = checks.parse_indices(torch.arange(M) if every else own, M, "own", trajectory.inputs.device)
    X, y = trajectory.inputs[rows], trajectory.targets[rows]
    losses = RowFunction(partial(loss_terms, trajectory.model.signature, trajectory.loss), y)
    question = _question(trajectory, X, None, None, losses)
    found = _differentiate(question, options, axes=(by_sample(trajectory),), own=rows, truncate=truncate)
    return found.labelled(point=rows.tolist())


def _differentiate(
    question: Question,
    options: checks.ComputeOptions,
    *,
    axes: tuple[Axis, ...],
    own: Int64[Tensor, " n"] | None = None,
    factors: Float[Tensor, " M"] | None = None,
    truncate: int | None = None,
) -> Influence:
    """Go through a run for a question; other arguments as in `InfluenceWork`."""
    asked, X, outputs, cotangents = question
    trajectory, is_asked = asked.recorded, asked.asked_of is not None
    if truncate is not None:
        checks.validate_count(truncate, "truncate")
    steps = trajectory.num_steps if truncate is None else min(int(truncate), trajectory.num_steps)
    is_joint = outputs.ndim == 0
    shown = outputs.reshape(1, 1) if is_joint else outputs

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> Influence:
        work = InfluenceWork(
            asked, X, cotangents, is_joint, axes, own, factors, steps, options.memory_budget,
            plan=net.plan, recorded_plan=recorded_net.plan if is_asked else None,
        )  # fmt: skip
        with disable_fused_attention():
            blocks = [sums for _, sums in run(work, options, "influence")]
        values, norms = (torch.cat([sums.added[name] for sums in blocks]) for name in ("values", "norms"))
        mismatches = step_mismatches(trajectory, work.law, work.replay)
        values = values.reshape(*shown.shape, *values.shape[1:])
        split = CombinedAxes(trajectory, axes).unflatten
        is_unexplained = any(bool(sums.largest["unexplained"]) for sums in blocks)
        held = [*work.law.held, *(["moving statistics"] if is_unexplained else [])]
        error = curvature_error(trajectory, recorded_net, work.memory, mismatches.moved)
        return Influence(
            outputs=shown,
            values=split(values, "step", "sample") if own is None else values[:, :, 0],
            adjoint_norms=norms.reshape(*shown.shape, -1),
            axes=axes if own is None else (_ITSELF,),
            is_own=own is not None,
            findings=tuple(_findings(trajectory, mismatches, held, error, values)),
            clipping=work.law.clipping,
            explained="number" if is_asked else "output",
            **mismatches.numbers,
        )

    return with_plan(compute, X, asked, trajectory)


def _findings(
    trajectory: Trajectory, mismatches: StepMismatches, held: Sequence[str], error: float, values: Tensor
) -> Iterator[str]:
    """Yield the reasons that derivatives are not certified.

    Args:
        trajectory: The run.
        mismatches: The mismatches of its steps.
        held: Parts of the training that are held as recorded: preconditioners by name, and "moving statistics".
        error: Relative difference between torch's derivative of the gradient and finite differences, in one direction.
        values: The derivatives.
    """
    if held:
        yield f"how {', '.join(held)} would change with the gradients is not known: the derivative holds it as recorded"
    yield from mismatches.findings
    if not error <= 0:
        yield (
            f"torch's derivative of the gradient differs by {error:.2g} of its size from finite differences: the "
            "gradient is that of no function (a straight-through estimator, fake quantisation, a stop-gradient such as "
            "detach(), scale_grad_by_freq), or torch's second derivative of an operation is wrong"
        )
    yield from run_findings(trajectory)
    if not bool(torch.isfinite(values).all()):
        yield "the derivative is not finite: it explodes along the run (`adjoint_norms`)"


def _question(
    trajectory: Trajectory, X: Tensor, head: Head | None, classes: Int64[Tensor, " n"] | None, function: Function | None
) -> Question:
    """Return the differentiated numbers of a request, after checking it."""
    if function is not None:
        if classes is not None or head is not None:
            raise ValueError("head or classes, and function, must not be given together: let the function choose.")
        if (joint := _joint_question(trajectory, X, function)) is not None:
            return joint
        run, X = ask(trajectory, X, function)
        f = network_outputs(run, X)
        return run, X, f, torch.eye(f.shape[1]).to(f).expand(len(f), -1, -1)
    head, z = resolve_head(head, trajectory.loss, trajectory.num_outputs), network_outputs(trajectory, X)
    f = apply_head(z, head)
    if classes is None:
        return trajectory, X, f, all_outputs(head).of_logits(z).transpose(0, 1)
    checks.validate_labels(classes, *z.shape, name="classes")
    classes = classes.to(z.device, torch.int64)
    cotangents = chosen_outputs(head, classes).of_logits(z).transpose(0, 1)
    return trajectory, X, f.gather(1, classes[:, None]), cotangents


def _joint_question(trajectory: Trajectory, X: Tensor, function: Function) -> Question | None:
    """Return the question for one number of all inputs together; None if the function does not return one."""
    model, asked = trajectory.model_for(X), RowFunction.of(function)
    params = model.unflatten(flat_state(trajectory, trajectory.num_steps, X))
    warn_unless_plain(partial(model, params), X, model.module, model.signature.rows_per_call)
    with torch.no_grad():
        returned = model.returned(params, X)
        returned, leaves = with_leaves(returned, len(X))
    with torch.enable_grad(), disable_fused_attention():
        try:
            value = asked.function(returned, *(model.spec.cast(data) for data in asked.data))
        # errors of a function are reported when it is called row by row
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            return None
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            return None
        found = torch.autograd.grad(value, leaves, materialize_grads=True)
    cotangents = torch.cat([gradient.detach().reshape(len(X), -1) for gradient in found], dim=1)
    return *ask(trajectory, X, _all_numbers), value.detach(), cotangents[:, None].to(model.spec.dtype)


def _all_numbers(returned: Any) -> Float[Tensor, "n D"]:
    """Return all numbers that a network returned for each row, side by side."""
    return rows_of(returned, next(len(z) for z in tensors_of(returned) if z.ndim))

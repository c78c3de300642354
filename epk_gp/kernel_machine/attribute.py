"""Exact contributions of each training point to each output of each prediction, and their cost before they are made."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Unpack, overload

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.jacobians import secant_jacobians
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.scalars import Function, ask
from epk_gp.autodiff.secants import UnsupportedAverageError
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import ComputeOptions, ComputeSettings, door, parse_options, validate_count, validate_labels
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.plans import MAPPED_ADJOINTS
from epk_gp.core.show import Entry, Summary, Tabular, count, kind_of, number
from epk_gp.core.states import described_states, recomputation_of
from epk_gp.core.trajectory import Trajectory, flat_state, parse_inputs
from epk_gp.gram.path_kernel import PathKernel, require_training
from epk_gp.kernel_machine import certificate
from epk_gp.kernel_machine.adjoint import AdjointTerms
from epk_gp.kernel_machine.axes import Axis, PointsTable, by_sample, every_sample, group_name, in_words, parse_axes
from epk_gp.kernel_machine.descent import FactoredTerms, points_at_a_time
from epk_gp.kernel_machine.terms import (
    TERMS,
    AttributionWork,
    GroupedSums,
    Groupings,
    Predictions,
    TermSums,
    is_plain_descent,
    leaves_residuals,
    sources_of,
)
from epk_gp.quadrature.rules import Rule, WeightPath, adaptive, layerwise, straight

# A result with a larger amplification warns that its terms cancel: small networks have 1.5 to 7, ResNets 20 to 40.
_LARGE_AMPLIFICATION = 10
_LARGE_SHARE = 0.01  # share of the outputs' change from which `unexplained` is a finding


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CertifiedTerms(Tabular, certificate.Certificate):
    """The common part of all attributions: the ends of the path, and the certificate of the sum of the terms.

    Attributes:
        initial: f at the initial weights, (n, C).
        network: Outputs of the trained network, (n, C).
        amplification: Sum of the absolute contributions of samples, step by step, divided by the sum of the absolute
            changes by the steps' weights, (n, C): the ratio of the terms' sizes to their sum.
        sources: Contributions of data outside the training set, by name: rows "not of the data set", which the recorder
            got as -1. Empty for a run without such rows. Split like `decay`.
        explained: The kind of the C numbers of a point: "output", or "number" for the results of a function.
    """

    initial: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    amplification: Float[Tensor, "n C"]
    sources: Mapping[str, Float[Tensor, "n C *ones"]] = field(default_factory=dict)
    explained: str = "output"
    _names: ClassVar[Iterable[str]]

    @property
    def _terms(self) -> dict[str, Tensor]:
        """All terms by name; their sum with `initial` is the network's output."""
        return {name: getattr(self, name) for name in self._names} | dict(self.sources)

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + torch.stack([_summed(term) for term in self._terms.values()]).sum(dim=0)

    def _frame(self) -> tuple[Any, ...]:
        axes = self.axes if isinstance(self, GroupedAttribution) else [every_sample(self._terms["samples"].shape[2])]
        return PointsTable(self.network, self.explained).frame({"initial": self.initial, **self._terms}, axes)

    def _shown(self, split: str, terms: Mapping[str, Tensor], largest: str, name_of: Callable[[int], str]) -> Summary:
        """Return the summary of terms in addition to the initial outputs; the first term is split into groups.

        Args:
            split: Description of the groups.
            terms: The terms.
            largest: Name of the rows of the largest groups.
            name_of: Maps the number of a group to its name.
        """
        (n, C), table = self.network.shape, PointsTable(self.network, self.explained)
        entries = self.entries(len(self.network))
        if self.amplification.numel():
            size, advice = float(self.amplification.max()), ""
            if size > _LARGE_AMPLIFICATION:
                advice = (
                    ": contributions are so many times larger than what they sum to, and cancel, so that one alone "
                    "says little; sum them over groups, take the difference of two classes, or ask epk_gp.influence"
                )
            entries = (*entries, Entry("amplification", number(size), f"at most{advice}"))
        name, values = next(iter(terms.items()))
        shape = Entry(f"shape of {name}", f"{tuple(values.shape)}", kind_of(values))
        sums = table.sums({"initial": self.initial, **terms})
        rows = [*sums, table.row("network", self.network), *table.largest(largest, values, name_of)]
        title = f"Attribution of {count(n, 'point')} × {count(C, self.explained)} to {split}"
        return Summary(title, (*entries, shape), table.table(rows))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Attribution(CertifiedTerms):
    """The terms of a prediction; with `initial` they sum to the network's output, as do the columns of `to_frame()`.

    Attributes:
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, coupled or decoupled, (n, C).
        statistics: Contribution of the moving statistics of normalisations, (n, C); 0 for a network without them.
        unexplained: Contribution of the difference between the recorded steps and the update rule on exact gradients,
            (n, C): rounding in less than float64, and the share that the run's `unexplained` accepts. In float64
            without such a share it is rounding, and set to 0.
    """

    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    statistics: Float[Tensor, "n C"]
    unexplained: Float[Tensor, "n C"]
    _names = ("samples", "decay", "statistics", "unexplained")

    def top(self, k: int) -> Int64[Tensor, "n C k"]:
        """Return the training points with the largest contributions by absolute value, the largest first.

        Args:
            k: Number of points; all points if there are fewer.

        Raises:
            TypeError, ValueError: `k` is not a number of points.
        """
        validate_count(k, "k")
        return self.samples.abs().topk(min(k, self.samples.shape[2]), dim=2).indices

    def _summary(self) -> Summary:
        samples = count(self.samples.shape[2], "training sample")
        return self._shown(samples, self._terms, "largest samples", "#{}".format)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class GroupedAttribution(CertifiedTerms):
    """The terms of a prediction, split along chosen axes; with `initial` they sum to the network's output.

    The columns of `to_frame()` have the same sum.

    Attributes:
        values: Contributions of the training data, (n, C, G_1, G_2, ...) over the axes' groups, in their order.
        decay: Contribution of weight decay, split in the same way; axes of training samples have length 1.
        statistics: Contribution of the moving statistics, split in the same way; axes of parameters have length 1.
        statistics_of_no_sample: The part of `statistics` that belongs to no sample of a batch: from forward passes that
            were not announced, and from statistics outside batch normalisation; axes of samples and parameters have
            length 1.
        unexplained: Contribution of the unexplained part of the steps (see `Attribution`), split like `decay`.
        axes: The axes.
    """

    values: Float[Tensor, "n C *groups"]
    decay: Float[Tensor, "n C *ones"]
    statistics: Float[Tensor, "n C *samples"]
    statistics_of_no_sample: Float[Tensor, "n C *steps"]
    unexplained: Float[Tensor, "n C *ones"]
    axes: tuple[Axis, ...]
    _names = TERMS

    def _summary(self) -> Summary:
        kinds = ", ".join(axis.kind for axis in self.axes)
        terms = {name.replace("_", " ").replace("values", "training data"): term for name, term in self._terms.items()}
        return self._shown(in_words(self.axes), terms, f"largest by {kinds}", partial(group_name, self.axes))


By = Sequence[Axis] | Sequence[Sequence[Axis]]  # the axes of one result, or of several


class AttributionSettings(ComputeSettings, total=False):
    """Keyword arguments of `attribute` other than `by`."""

    head: Head | None
    rule: Rule
    path: WeightPath | None
    classes: Int64[Tensor, " n"] | None
    function: Function | None


@overload
def attribute(
    trajectory: Trajectory, X: Inputs, *, by: None = None, **options: Unpack[AttributionSettings]
) -> Attribution: ...


@overload
def attribute(
    trajectory: Trajectory, X: Inputs, *, by: Sequence[Axis], **options: Unpack[AttributionSettings]
) -> GroupedAttribution: ...


@overload
def attribute(
    trajectory: Trajectory, X: Inputs, *, by: Sequence[Sequence[Axis]], **options: Unpack[AttributionSettings]
) -> tuple[GroupedAttribution, ...]: ...


@door
def attribute(
    trajectory: Trajectory,
    X: Inputs,
    *,
    by: By | None = None,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    **options: Unpack[ComputeSettings],
) -> Attribution | GroupedAttribution | tuple[GroupedAttribution, ...]:
    """Split predictions into exact contributions of the training points, or along any axes.

        samples[n, :, i] = -sum_r c_{r,i} <Psi_r(x_n), grad_w loss_i(w_r)>,   Psi_r = sum_{s >= r} A_{s,r}^T Phi_s

    Theorem 3.6 of Bell et al. (2023) covers gradient descent; docs/theory.md, section 4, covers momentum and recorded
    preconditioners, whose own dependence on the data is held as recorded and not attributed; docs/theory.md, section 7,
    covers dropout, batch statistics and augmented rows. The terms sum to the prediction; they are not the effects of
    leaving points out.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, with the structure of the training inputs, taken as test copies.
        by: The axes along which contributions are split: a list of `by_sample(trajectory)`, `by_label`, `by_step`,
            `by_layer`, `by_parameter`, or your own axes. Axes of the same kind are combined: a term counts where all
            its groups meet. Only the result is held in memory, never sample x step x parameter x output. A list of such
            lists gives several results from one pass over the run. None splits by sample.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        rule: Quadrature rule for the integral of each step, or of each chord.
        path: The path along which the points are integrated. Other paths give other contributions with the same sum,
            just as exactly: `chords(every=k)` with fewer evaluations, `layerwise(every=k)` with two for k steps,
            without an integral (`rule` then sets only the tolerance of the certificate). None takes `straight()`, and
            `layerwise()` for networks of a million weights or more that support it. The result names its path.
        classes: One output per input, at 1 / C of the cost: C is then 1 in the result. All C outputs by default; if the
            adjoints of all outputs of a point do not fit into `memory_budget`, the outputs go through the run in
            several groups, and a larger budget is faster.
        function: The function to explain instead of the outputs: it maps the network's result for n rows of inputs to
            numbers, (n,) or (n, K), row by row; K then replaces C. For data that belong to the rows, pass an
            `epk_gp.RowFunction`: `log_probability`, `logit_difference`, `loss_value`, or your own. All positions of a
            text share one pass.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        All terms, in the dtype of X: an `Attribution` without `by`, a `GroupedAttribution` for a list of axes, or a
        tuple of them for several lists.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, the head, the rule or the path is unknown, a class is
            out of range, or an axis does not belong to this run; or the function mixes rows, cannot be differentiated,
            or returns another shape or NaN.
    """
    parsed = parse_options("attribute", ("accumulate",), **options)
    kernel, X, groupings = parse_request(trajectory, X, by, (head, rule, path), (classes, function))
    results, _ = split_predictions(kernel, X, groupings, classes, parsed, splits_statistics=by is not None)
    if by is None:
        return Attribution(**terms_by_sample(results[0]))
    return results if _is_several(by) else results[0]


def terms_by_sample(parts: GroupedAttribution) -> dict[str, Any]:
    """Return the fields of an `Attribution`, given the same split along `by_sample`."""
    shared = {field.name: getattr(parts, field.name) for field in fields(CertifiedTerms)}
    shared["sources"] = {name: term.squeeze(2) for name, term in parts.sources.items()}
    result = Attribution(
        samples=parts.values,
        decay=parts.decay.squeeze(2),
        statistics=parts.statistics.sum(dim=2) + parts.statistics_of_no_sample.squeeze(2),
        unexplained=parts.unexplained.squeeze(2),
        **shared,
    )
    return vars(result) | {"max_error": _largest_error(result)}


_LARGE = 1_000_000  # number of weights from which the default path is layerwise: a choice


def default_path(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> WeightPath:
    """Return the default path of attributions: `layerwise()` for large networks that support it.

    Args:
        trajectory: The run.
        X: Inputs; the first one is tested on the first step.
    """
    is_small = trajectory.model.num_weights < _LARGE or not trajectory.num_steps or not len(X)
    return straight() if is_small else averaged_path(trajectory, X)


def averaged_path(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> WeightPath:
    """Return `layerwise()` for a network that supports it, otherwise `straight()`. Arguments: as in `default_path`."""

    def compute(net: PlannedModel) -> WeightPath:
        if not net.plan.supports_interpolation:
            return straight()
        w, end = (flat_state(trajectory, s, X) for s in (0, 1))
        try:
            secant_jacobians(net, (w, end - w), X[:1], Cotangents(lambda z: z[None]), ContractionCost(1, 1), "logits")
        except (UnsupportedAverageError, UnsupportedParameterUseError):
            return straight()
        return layerwise()

    return with_plan(compute, X, trajectory)


def changed_kernel(kernel: PathKernel, **changes: Any) -> PathKernel:
    """Return a kernel with other attributes, without repeating the warning that the user's network differs."""
    kernel = copy.copy(kernel)
    vars(kernel).update(changes)
    return kernel


Integrated = tuple[Head | None, Rule, WeightPath | None]  # head, rule and path of a request
Explained = tuple[Int64[Tensor, " n"] | None, Function | None]  # classes and function of a request


def parse_request(
    trajectory: Trajectory, X: Inputs, by: By | None, integrated: Integrated, explained: Explained
) -> tuple[PathKernel, Shaped[Tensor, "n ..."], Groupings]:
    """Return the kernel and the inputs of a request, and the axes of each result; arguments as in `attribute`.

    If a function is explained, kernel and inputs are those of the run of the question (`ask`).

    Raises:
        TypeError, ValueError: See `attribute`; or a head or classes are combined with a function.
    """
    (head, rule, path), (classes, function) = integrated, explained
    if function is not None and not (head is None and classes is None):
        raise ValueError("head or classes, and function, must not be given together: let the function choose outputs.")
    kernel = PathKernel(trajectory, head, rule, path=straight() if path is None else path)
    require_training(trajectory, "an attribution")
    X = parse_inputs(trajectory, X).detach()
    own = [by_sample(trajectory)] if by is None else by
    groupings = tuple(parse_axes(trajectory, axes) for axes in (own if _is_several(own) else [own]))
    if function is not None:
        asked, X = ask(trajectory, X, function)
        kernel = changed_kernel(kernel, trajectory=asked, head="logits")
    elif classes is not None:
        validate_labels(classes, len(X), trajectory.num_outputs, name="classes")
    if path is None:
        kernel = changed_kernel(kernel, path=default_path(kernel.trajectory, X))
    return kernel, X, groupings


def _is_several(by: object) -> bool:
    """Return whether there are several lists of axes, one for each result."""
    return isinstance(by, list | tuple) and bool(by) and all(isinstance(entry, list | tuple) for entry in by)


def attribution_work(
    net: PlannedModel,
    kernel: PathKernel,
    X: Shaped[Tensor, "n ..."],
    groupings: Groupings,
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
    *,
    recorded_net: PlannedModel,
    splits_statistics: bool = True,
    kind: Callable[..., AttributionWork] | None = None,
) -> AttributionWork:
    """Return the pass over the run that adds up all terms, of the given kind if any; arguments must be checked."""
    classes = None if classes is None else classes.to(X.device, torch.int64)
    asked = net, kernel.trajectory, kernel.head, kernel.rule, kernel.path, options.memory_budget
    whole = Predictions(*asked, X.detach(), classes, recorded_net)
    K, shared = whole.num_outputs, (kernel, whole.X, options.memory_budget, classes, groupings, splits_statistics)
    is_asked = kernel.trajectory.asked_of is not None
    if kind is None and not is_asked and whole.lines_together == 1 and is_plain_descent(whole, groupings):
        return FactoredTerms(*shared, K, points_at_a_time(whole), plan=net.plan)
    outputs_per_row = K if whole.memory.adjoint_points(K) else 1  # if the adjoints of all outputs of a point do not fit
    mapped = MAPPED_ADJOINTS // outputs_per_row if X.device.type == "cpu" else 0
    rows_per_block = max(mapped, whole.memory.adjoint_points(outputs_per_row), 1)
    recorded_plan = recorded_net.plan if is_asked else None
    kind = AdjointTerms if kind is None else kind
    return kind(*shared, outputs_per_row, rows_per_block, plan=net.plan, recorded_plan=recorded_plan)


def split_predictions(
    kernel: PathKernel,
    X: Shaped[Tensor, "n ..."],
    groupings: Groupings,
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
    **asked: Any,
) -> tuple[tuple[GroupedAttribution, ...], TermSums]:
    """Split predictions in several ways: return the results, and the sums from which they are made.

    Args:
        kernel: The kernel; kernel, inputs and groupings come from `parse_request`.
        X: Inputs.
        groupings: Axes of each result.
        classes: One output of each input, or all.
        options: Options of the computation.
        asked: Keyword arguments of `attribution_work`.
    """
    run, request = kernel.trajectory, (kernel, X, groupings, classes, options)

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> tuple[tuple[GroupedAttribution, ...], TermSums]:
        return _split(attribution_work(net, *request, recorded_net=recorded_net, **asked), options)

    results, totals = with_plan(compute, X, run, run.recorded)
    certificate.warn_unless_certified("the attribution", results[0].findings)  # all results are sums of the same terms
    return results, totals


def _split(work: AttributionWork, options: ComputeOptions) -> tuple[tuple[GroupedAttribution, ...], TermSums]:
    whole, trajectory, kernel = work.whole, work.kernel.trajectory, work.kernel
    initial, network, totals, rest = work.summed(options, "attribution")
    mismatches, ends = work.residuals.mismatches, (work.as_rows(initial), work.as_rows(network))
    steps = max(1, trajectory.num_steps)
    numbers = certificate.integral_facts(rest, work.num_rows * steps) | mismatches.numbers

    def tolerance(own: GroupedSums) -> float:
        return certificate.sum_tolerance(kernel.rule, trajectory, whole.net.coarsest_dtype, own.size_of_terms(*ends))

    if isinstance(work, FactoredTerms):  # it is the remainder of other terms, and must be rounding
        largest = tolerance(totals.grouped[0])
        for own in totals.grouped:
            if not own.sums["unexplained"].flatten(2).sum(dim=2).abs().max() <= largest:
                own.sums["unexplained"].zero_()
    shared = {"initial": initial, "network": network, "amplification": totals.amplification.reshape(initial.shape)}
    facts = {
        "run_findings": certificate.run_findings(whole.recorded),
        "explains": trajectory.explained,
        "path": str(kernel.path),
    }
    facts["explained"] = "output" if trajectory.asked_of is None else "number"
    facts |= {"states": described_states(trajectory), "precision": certificate.described_precision(whole.net)}
    results = tuple(
        _result(own, tolerance(own), trajectory.unexplained or 0.0, {**shared, **numbers, **facts})
        for own in totals.grouped
    )
    return results, totals


def _result(own: GroupedSums, tolerance: float, accepted: float, shared: Mapping[str, Any]) -> GroupedAttribution:
    """Return one result: its terms and certificate, with the facts that all results share.

    Args:
        own: Its sums.
        tolerance: Allowed difference from the network's outputs.
        accepted: Share of the outputs' change that the run accepts as unexplained.
        shared: Facts that all results share.
    """
    of_points = {name: rows.reshape(*shared["initial"].shape, *rows.shape[2:]) for name, rows in own.sums.items()}
    kinds_of = TERMS | sources_of(own.trajectory)
    terms: dict[str, Any] = {name: own.combined.unflatten(of_points[name], *kinds) for name, kinds in kinds_of.items()}
    terms["sources"] = {name: terms.pop(name) for name in own.trajectory.sources}
    result = GroupedAttribution(**terms, axes=own.axes, max_error=0.0, error_tolerance=tolerance, **shared)
    unexplained = _summed(result.unexplained).abs()
    change, left = float((result.network - result.initial).abs().sum()), float(unexplained.sum())
    is_small = left <= max(_LARGE_SHARE, accepted) * change or float(unexplained.max()) <= tolerance
    return replace(result, max_error=_largest_error(result), unexplained_share=0.0 if is_small else left / change)


def _summed(term: Float[Tensor, "n C *groups"]) -> Float[Tensor, "n C"]:
    return term.reshape(*term.shape[:2], math.prod(term.shape[2:])).sum(dim=2)


def _largest_error(result: Attribution | GroupedAttribution) -> float:
    """Return the largest |total - network|; 0 without points."""
    errors = (result.total - result.network).abs()
    return float(errors.max()) if errors.numel() else 0.0


@dataclass(frozen=True)
class Plan:
    """The division of an attribution into pieces, and its cost.

    Attributes:
        pieces: Number of pieces, which workers share: more workers than pieces do not help.
        result_bytes: Bytes of the result.
        piece_bytes: Bytes of the largest piece.
        disk_bytes: Bytes of the run's chunks and, at most, of temporary files.
        memory_bytes: Bytes of the vectors of weights in memory: adjoints, residuals, states.
        trainings: Operations of its parts, as multiples of the run's training: "states" made again, "steps" compared
            with the recorded ones, the "test side", the "training side".
    """

    pieces: int
    result_bytes: int
    piece_bytes: int
    disk_bytes: int
    memory_bytes: int
    trainings: Mapping[str, float]


def plan_attribution(
    trajectory: Trajectory,
    X: Inputs,
    *,
    by: By | None = None,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    **options: Unpack[ComputeSettings],
) -> Plan:
    """Count the cost of `attribute` with the same arguments, without computing it.

    Args:
        trajectory: The run.
        X: n inputs, taken as test copies.
        by: The argument of `attribute`.
        head: The argument of `attribute`.
        rule: The argument of `attribute`.
        path: The argument of `attribute`.
        classes: The argument of `attribute`.
        function: The argument of `attribute`.
        options: `memory_budget`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `attribute`.
    """
    parsed = parse_options("plan_attribution", ("accumulate", "checkpoint", "executor"), **options)
    kernel, X, groupings = parse_request(trajectory, X, by, (head, rule, path), (classes, function))
    run = kernel.trajectory

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> Plan:
        asked = (net, kernel, X, groupings, classes, parsed)
        return _counted(attribution_work(*asked, recorded_net=recorded_net, splits_statistics=by is not None))

    return with_plan(compute, X, run, run.recorded)


def _counted(work: AttributionWork) -> Plan:
    """Return the plan of an attribution; docs/capabilities/long-runs.md explains the letters."""
    whole, P, blocks = work.whole, work.whole.net.model.num_weights, len(work.blocks)
    run, itemsize, k = whole.recorded.trained, whole.net.itemsize, len(work.X) * whole.num_outputs
    S, kept, made, states = run.num_steps, run.states, 0, 0
    if (recomputation := recomputation_of(run)) is not None:
        kept, replay = recomputation.kept, recomputation.computation(0, whole.net.model.spec)
        made = (1 + (len(replay.bounds) > len(kept.numbers))) * (1 + blocks)
        states = 2 * replay.step_bytes * max((end - first for first, end in pairwise(replay.bounds)), default=0)
    adjoints = 3 * P * itemsize * min(k, work.rows_per_block * work.outputs_per_row)
    vectors = [adjoints, S * P * itemsize * leaves_residuals(whole)]
    B = sum(run.num_points if step.batch is None else len(step.batch) for step in run.steps) / max(1, S)
    T = run.targets[:1].numel() if run.targets.ndim > 1 and not run.targets.is_floating_point() else 1
    nodes = 2 if whole.is_layerwise else work.kernel.rule.typical_nodes
    test = k * nodes / max(1.0, B) * work.num_stretches / max(1, S)
    return Plan(
        pieces=sum(1 for _ in work.pieces),
        result_bytes=work.num_bytes(work.num_rows),
        piece_bytes=work.piece_bytes,
        disk_bytes=sum(chunk.bytes for chunk in getattr(kept, "chunks", ()))
        + sum(size for size in vectors if size > work.memory_budget),
        memory_bytes=states + sum(size for size in vectors if size <= work.memory_budget),
        trainings={"states": float(made), "steps": 1.0, "test side": test, "training side": blocks + k / (3 * T)},
    )

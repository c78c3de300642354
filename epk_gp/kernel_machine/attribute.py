"""Exact contributions: what each training point added to each output of each prediction."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, secant_jacobians
from epk_gp.autodiff.representations import ContractionCost, LeftFactor
from epk_gp.autodiff.verification import planned
from epk_gp.core.checks import ComputeOptions, ComputeSettings, parse_options, validate_labels
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.show import Displayed, Entry, Summary, count, kind_of, number
from epk_gp.core.states import described_states
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients, network_outputs
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, add_to_averages
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import MAX_RANGES, step_ranges
from epk_gp.kernel_machine.adjoint import AdjointTerms
from epk_gp.kernel_machine.axes import Axis, PointsTable, by_sample, group_name, in_words, validate_axes
from epk_gp.kernel_machine.certificate import (
    Certificate,
    integral_facts,
    run_findings,
    sum_tolerance,
    warn_unless_certified,
)
from epk_gp.kernel_machine.terms import (
    TERMS,
    AttributionWork,
    GroupedSums,
    Groupings,
    IntegratedLine,
    Predictions,
    TermSums,
    integrate_stretch,
    is_plain_descent,
    layers_of,
    leaves_residuals,
    sources_of,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import Rule, WeightPath, adaptive, layerwise, straight, stretches_of
from epk_gp.work.run import Advice, Sums, run

# Above this amplification a result says that its terms cancel: small networks have 1.5 to 7, ResNets 20 to 40.
_LARGE_AMPLIFICATION = 10
_LARGE_SHARE = 0.01  # of the change of the outputs, by which `unexplained` is a finding


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CertifiedTerms(Displayed, Certificate):
    """What all attributions have: the ends of the path, and the certificate of the sum of the terms.

    Attributes:
        initial: f at the initial weights, (n, C).
        network: Outputs of the trained network, (n, C).
        amplification: Sum of the absolute contributions of samples, steps apart, over the sum of the absolute changes
            that the steps' weights made, (n, C): how much larger the terms are than what they sum to.
        sources: Contributions of what is no training point, by name: rows "not of the data set", which the recorder got
            as -1. Empty for a run without. Split as `decay`.
    """

    initial: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    amplification: Float[Tensor, "n C"]
    sources: Mapping[str, Float[Tensor, "n C *ones"]] = field(default_factory=dict)
    _names: ClassVar[Iterable[str]]

    @property
    def _terms(self) -> dict[str, Tensor]:
        """All terms by name; with `initial` they sum to the network's output."""
        return {name: getattr(self, name) for name in self._names} | dict(self.sources)

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + torch.stack([_summed(term) for term in self._terms.values()]).sum(dim=0)

    def _shown(self, split: str, terms: Mapping[str, Tensor], largest: str, name_of: Callable[[int], str]) -> Summary:
        """Return what is shown of terms beside the initial outputs, the first of which is split into groups.

        Args:
            split: By what, in words.
            terms: The terms.
            largest: Name of the rows of the largest groups.
            name_of: Maps the number of a group to its name.
        """
        (n, C), table, entries = self.network.shape, PointsTable(self.network), self.entries(len(self.network))
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
        title = f"Attribution of {count(n, 'point')} × {count(C, 'output')} to {split}"
        return Summary(title, (*entries, shape), table.table(rows))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Attribution(CertifiedTerms):
    """The terms of a prediction; with `initial` they sum to the network's output.

    Attributes:
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, coupled or decoupled, (n, C).
        statistics: Contribution of the moving statistics of normalisations, (n, C); 0 for a network without them.
        unexplained: Contribution of what update rule and exact gradients leave of the steps, (n, C): rounding in less
            than float64, and what the run's `unexplained` accepts. In float64 without that it is rounding, taken as 0.
    """

    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    statistics: Float[Tensor, "n C"]
    unexplained: Float[Tensor, "n C"]
    _names = ("samples", "decay", "statistics", "unexplained")

    def _summary(self) -> Summary:
        samples = count(self.samples.shape[2], "training sample")
        return self._shown(samples, self._terms, "largest samples", "#{}".format)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class GroupedAttribution(CertifiedTerms):
    """The terms of a prediction, split along chosen axes; with `initial` they sum to the network's output.

    Attributes:
        values: Contributions of the training data, (n, C, G_1, G_2, ...) over the axes' groups, in their order.
        decay: Contribution of weight decay, split likewise; axes of training samples have length 1.
        statistics: Contribution of the moving statistics, split likewise; axes of parameters have length 1.
        statistics_of_no_sample: What of it belongs to no sample of a batch: forward passes that were not announced, and
            statistics that are no batch normalisation's; axes of samples and parameters have length 1.
        unexplained: Contribution of what update rule and exact gradients leave of the steps, split as `decay`.
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


def attribute(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Attribution:
    """Split predictions into exact contributions of the training points.

        samples[n, :, i] = -sum_r c_{r,i} <Psi_r(x_n), grad_w loss_i(w_r)>,   Psi_r = sum_{s >= r} A_{s,r}^T Phi_s

    Theorem 3.6 of Bell et al. (2023) for gradient descent; docs/theory.md, section 4, for momentum and recorded
    preconditioners, whose own dependence on the data is held as recorded and not attributed;
    docs/theory.md, section 7, for dropout, batch statistics and augmented rows. The terms sum to the prediction; they
    are not the effects of leaving points out.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, of the structure of the training inputs, taken as test copies.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken, or each chord's.
        path: Along which the points are integrated. Other paths give other contributions with the same sum, as exactly:
            `chords(every=k)` at fewer evaluations, `layerwise(every=k)` at two for k steps, without an integral (`rule`
            then sets the tolerance of the certificate alone). None takes `straight()`; for networks of a million
            weights and more `layerwise()` where they support it. The result names its path.
        classes: One output per input, at a C-th of the cost: C is then 1 in the result. All C outputs by default; where
            the adjoints of all of a point do not fit into `memory_budget`, outputs go through the run apart, some at a
            time, and a larger budget is faster.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        All terms, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, the head, the rule or the path is unknown, or a class
            is out of range.
    """
    parsed = parse_options("attribute", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=straight() if path is None else path)
    (parts,) = _attribute(kernel, X, ((by_sample(trajectory),),), classes, parsed, path, splits_statistics=False)
    shared = {field.name: getattr(parts, field.name) for field in fields(CertifiedTerms)}
    shared["sources"] = {name: term.squeeze(2) for name, term in parts.sources.items()}
    result = Attribution(
        samples=parts.values,
        decay=parts.decay.squeeze(2),
        statistics=parts.statistics.sum(dim=2) + parts.statistics_of_no_sample.squeeze(2),
        unexplained=parts.unexplained.squeeze(2),
        **shared,
    )
    return replace(result, max_error=_largest_error(result))


def attribute_by(
    trajectory: Trajectory,
    X: Inputs,
    by: Sequence[Axis],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> GroupedAttribution:
    """Split predictions into exact contributions along any axes: samples, labels, steps, layers, parameters.

    Only the result that is asked for is ever held, not sample x step x parameter x output.

    Args:
        trajectory: Training run.
        X: n inputs, of the structure of the training inputs, taken as test copies.
        by: `by_sample(trajectory)`, `by_label`, `by_step`, `by_layer`, `by_parameter`, or axes of one's own. Axes of
            the same kind are combined: a term counts where all its groups meet.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: As of `attribute`.
        path: As of `attribute`.
        classes: One output per input; C is then 1 in the result.
        options: As `attribute`.

    Raises:
        TypeError, ValueError: As `attribute`; an axis does not belong to this run.
    """
    return attribute_many(trajectory, X, [by], head=head, rule=rule, path=path, classes=classes, **options)[0]


def attribute_many(
    trajectory: Trajectory,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> tuple[GroupedAttribution, ...]:
    """Split predictions in several ways in one pass over the run: one result per grouping, as `attribute_by`.

    Raises:
        TypeError, ValueError: As `attribute_by`.
    """
    parsed = parse_options("attribute_many", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=straight() if path is None else path)
    return _attribute(kernel, X, groupings, classes, parsed, path)


_LARGE = 1_000_000  # weights from which on the default path is layerwise: a choice


def default_path(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> WeightPath:
    """Return the path that attributions take by default: `layerwise()` for large networks that it can average.

    Args:
        trajectory: The run.
        X: Inputs, of which the first is tried on the first step.
    """
    if trajectory.model.num_weights < _LARGE or not trajectory.num_steps or not len(X):
        return straight()
    with planned(trajectory, X) as net:
        if not net.plan.supports_interpolation:
            return straight()
        w, end = (flat_state(trajectory, s, X) for s in (0, 1))
        try:
            secant_jacobians(net, (w, end - w), X[:1], Cotangents(lambda z: z[None]), ContractionCost(1, 1), "logits")
        except (ValueError, RuntimeError):  # something in it has no average
            return straight()
    return layerwise()


def parse_request(
    kernel: PathKernel, X: Inputs, groupings: Sequence[Sequence[Axis]], classes: object
) -> tuple[Shaped[Tensor, "n ..."], Groupings]:
    """Return inputs as one tensor and the axes of each result, or raise if predictions cannot be split in these ways.

    Raises:
        TypeError, ValueError: An axis does not belong to the run; `classes` are not one output per input.
    """
    X, axes = kernel.parse_inputs(X), tuple(map(tuple, groupings))
    for by in axes:
        validate_axes(kernel.trajectory, by)
    if classes is not None:
        validate_labels(classes, len(X), kernel.trajectory.num_outputs, name="classes")
    return X, axes


def attribution_work(
    net: PlannedModel,
    kernel: PathKernel,
    X: Shaped[Tensor, "n ..."],
    groupings: Groupings,
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
    *,
    splits_statistics: bool = True,
) -> AttributionWork:
    """Return the pass over the run that adds up all terms; its arguments were checked."""
    classes = None if classes is None else classes.to(X.device, torch.int64)
    whole = Predictions(net, kernel, X.detach(), classes, options.memory_budget)
    K, shared = whole.num_outputs, (kernel, whole.X, options.memory_budget, classes, groupings, splits_statistics)
    if is_plain_descent(whole, groupings):
        return FactoredTerms(*shared, K, points_at_a_time(whole), plan=net.plan)
    outputs_per_row = K if whole.memory.adjoint_points(K) else 1  # where those of all of a point do not fit
    rows_per_block = max(1, whole.memory.adjoint_points(outputs_per_row))
    return AdjointTerms(*shared, outputs_per_row, rows_per_block, plan=net.plan)


def _attribute(
    kernel: PathKernel,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
    path: WeightPath | None,
    *,
    splits_statistics: bool = True,
) -> tuple[GroupedAttribution, ...]:
    X, axes = parse_request(kernel, X, groupings, classes)
    if path is None:
        kernel = copy.copy(kernel)  # made anew, it would say a second time that the user's network is another one
        vars(kernel)["path"] = default_path(kernel.trajectory, X)
    while True:
        with planned(kernel.trajectory, X) as net:
            work = attribution_work(net, kernel, X, axes, classes, options, splits_statistics=splits_statistics)
            results = _split(work, options)
            if results:  # all are sums of the same terms
                warn_unless_certified("the attribution", results[0].findings)
            return results


def _split(work: AttributionWork, options: ComputeOptions) -> tuple[GroupedAttribution, ...]:
    whole, trajectory, X, kernel = work.whole, work.kernel.trajectory, work.X, work.kernel
    initial, network = (
        whole.select_outputs(network_outputs(trajectory, X, state=state, head=kernel.head)) for state in (0, -1)
    )
    totals, rest = TermSums(trajectory, work.groupings, work.as_rows(initial)), Sums()
    ways = ["progress=True shows how far it is"]
    if not whole.is_layerwise and whole.net.plan.supports_interpolation:
        ways.insert(0, "path=epk_gp.layerwise() takes two evaluations for each point and step, along another path")
    if whole.num_outputs > 1:
        ways.insert(0, "classes= explains one output of each point")

    def trainings(seconds: float) -> float:
        return seconds / (work.residuals.seconds * whole.num_outputs * len(X))

    for piece, sums in run(work, options, "attribution", advice=Advice("; ".join(ways), trainings)):
        rows = work.blocks[piece.place[0]]
        for name, total in totals.named.items():
            total[rows] += sums.added.pop(name)
        rest.merge(sums)
    mismatches, ends = work.residuals.mismatches, (work.as_rows(initial), work.as_rows(network))
    steps = max(1, trajectory.num_steps)
    numbers = integral_facts(rest, work.num_rows * steps) | mismatches.numbers

    def tolerance(own: GroupedSums) -> float:
        return sum_tolerance(kernel.rule, trajectory, initial.dtype, own.size_of_terms(*ends))

    if isinstance(work, FactoredTerms):  # it is what other terms leave: must be rounding, or the sum misses the outputs
        largest = tolerance(totals.grouped[0])
        for own in totals.grouped:
            if not own.sums["unexplained"].flatten(2).sum(dim=2).abs().max() <= largest:
                own.sums["unexplained"].zero_()
    shared = {"initial": initial, "network": network, "amplification": totals.amplification.reshape(initial.shape)}
    facts = {"run_findings": run_findings(trajectory), "explains": trajectory.explained}
    facts |= {"path": str(kernel.path), "states": described_states(trajectory)}
    return tuple(
        _result(own, tolerance(own), trajectory.unexplained or 0.0, {**shared, **numbers, **facts})
        for own in totals.grouped
    )


def _result(own: GroupedSums, tolerance: float, accepted: float, shared: Mapping[str, Any]) -> GroupedAttribution:
    """Return one result: its terms and certificate, beside what all of them share.

    Args:
        own: Its sums.
        tolerance: By how much they may miss the network's outputs.
        accepted: Share of the outputs' change that the run accepts as unexplained.
        shared: What all results share.
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


# Under plain gradient descent: layers stay factored, nothing of the size of the weights is kept.


def vanilla_lr(trajectory: Trajectory, step: Step) -> float:
    """Return eps_s, where a plain step is -eps_s times the batch gradient; clipping and sign are part of it."""
    u = held_coefficients(trajectory, step.index)
    return float(u.lr[0]) * float(u.grad_scale[0])


def points_at_a_time(block: Predictions) -> int:
    """Count the points that are computed together; an upper bound: with all C outputs, also where one is asked for."""
    every = Cotangents(all_outputs("logits").of_logits, are_constant=True)
    at = WeightLocation(flat_state(block.trajectory, 0, block.X))
    jacobians = layer_jacobians(block.net, at, block.X[:1], every, block.cost)
    return block.memory.vanilla_gd_points(sum(jacobian.nbytes for jacobian in jacobians))


class FactoredTerms(AttributionWork):
    """The terms of plain gradient descent: sample i adds -eps_s c_i <Phi_s, grad loss_i>.

    In less than float64 the rounding of a step is what its integral leaves over the samples' contributions; that of a
    chord belongs to its last step.
    """

    keeps_residuals = False

    @cached_property
    def ranges(self) -> list[slice]:
        """Several ranges of steps where points make few blocks, so that workers share the steps.

        As many as keep the sums of all within the memory budget.
        """
        most = min(MAX_RANGES // len(self.blocks), self.memory_budget // (self.rows_per_block * self.num_bytes(1)))
        return step_ranges(self.kernel.trajectory.num_steps, most, self.kernel.path.every)

    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through a range of steps, and add every term to the totals."""
        trajectory, layers_of_parts = block.trajectory, layers_of(block, self.parts) or []
        steps = range(trajectory.num_steps)[self.ranges[number]][sums.steps :]
        for stretch in stretches_of(self.kernel.path, trajectory.num_steps, slice(steps.start, steps.stop)):
            line = integrate_stretch(block, stretch, self.rows_per_block)
            total = block.select_outputs(line.integral.total)
            changes = total.new_zeros(len(stretch), *total.shape)
            for s, samples, values in _sample_terms(line, stretch, layers_of_parts, self.rows_per_block):
                totals.add_samples(s, samples, values)
                changes[s - stretch.start] += values.sum(dim=(2, 3))
            for change in changes:
                # the integral of a step is its change; of a chord it is that of all its steps
                totals.add_change(total if len(stretch) == 1 else change)
            if leaves_residuals(block):
                totals.add("unexplained", stretch[-1], (total - changes.sum(dim=0)).unsqueeze(2))
            yield line.integral, len(stretch), None


# Output gradients at some nodes of a stretch; averages of layers that commute with the average, by number of the layer,
# over these nodes and all before; and whether no more nodes follow.
LeftSide = tuple[list[NodeBatch], dict[int, LeftFactor], bool]


def _left_sides(line: IntegratedLine, num_bytes: int) -> Iterator[LeftSide]:
    """Compute the output gradients at as many nodes of a line at a time as fit."""
    averages: dict[int, LeftFactor] = {}
    batches, size = list[NodeBatch](), 0
    for batch in line.node_batches():
        own = sum(jacobian.nbytes for jacobian in batch.jacobians)
        if batches and size + own > num_bytes:
            yield batches, averages, False
            batches, size = [], 0
        add_to_averages(averages, batch)
        batches.append(batch)
        size += own
    yield batches, averages, True


def _sample_terms(
    line: IntegratedLine, stretch: range, layers_of_parts: Sequence[Sequence[int]], points_per_block: int
) -> Iterator[tuple[int, Int64[Tensor, " B"], Float[Tensor, "N K B G"]]]:
    """Yield the contributions of some samples at a time of the steps of a stretch: step, samples, and what they add.

    Output gradients at all nodes are held where they fit. Where they do not, they are computed again for as many
    samples as fit.
    """
    block, N, num_parts = line.block, len(line.block.X), len(layers_of_parts)
    trajectory, memory, K = block.trajectory, block.memory, block.num_outputs

    @lru_cache(maxsize=1)  # a step has many blocks, one after the other
    def data_of(s: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = flat_state(trajectory, s, block.X)
        return w, *batch_of(trajectory, trajectory.steps[s], w)

    def contributions(s: int, rows: Tensor, left: LeftSide) -> Float[Tensor, "N K b G"]:
        """Return what some rows of a step add at some nodes, by parts of the network."""
        (w, X, y, c), (batches, averages, is_last) = data_of(s), left
        cotangents = weighted_loss(trajectory.loss, y[rows], c[rows])
        right = layer_jacobians(block.net, WeightLocation(w), X[rows], cotangents, block.cost)
        eta, values = -vanilla_lr(trajectory, trajectory.steps[s]), w.new_empty(N, K, len(rows), num_parts)
        for part, layers in enumerate(layers_of_parts):
            tile = GramAccumulator((K, N, 1, len(rows)), w)
            for batch in batches:
                tile.add_nodes(batch, right, eta, averages, layers)
            for layer in [layer for layer in averages if is_last and layer in layers]:
                averages[layer].add_inner(right[layer], tile, eta, layer=layer, same_points=False)
            values[..., part] = tile.result()[:, :, 0].transpose(0, 1)
        return values

    size = num_samples = memory.vanilla_gd_samples(points_per_block, N, K, num_parts)
    waiting = _left_sides(line, memory.node_bytes)
    first = next(waiting)
    held = [first] if first[2] else []
    if not held:
        num_samples = memory.vanilla_gd_samples(trajectory.num_points, N, K, num_parts)
    lefts: Iterator[LeftSide] = chain([first], waiting)
    del first
    for blocks in _packed_blocks(block, stretch, size, num_samples):
        sums = dict[int, Tensor]()
        for left in held or lefts:
            for place, (s, rows) in enumerate(blocks):
                values = contributions(s, rows, left)
                sums[place] = sums[place].add_(values) if place in sums else values
        for place, total in sums.items():
            (s, rows), batch = blocks[place], trajectory.steps[blocks[place][0]].batch
            yield s, rows if batch is None else batch.to(rows.device)[rows], total
        lefts = _left_sides(line, memory.node_bytes)  # for the next samples, if nothing is held


def _packed_blocks(
    block: Predictions, steps: range, size: int, num_samples: int
) -> Iterator[list[tuple[int, Int64[Tensor, " b"]]]]:
    """Divide the rows of each step into blocks of a size, and put blocks together, of so many samples at most."""
    pack, count = list[tuple[int, Tensor]](), 0
    for s in steps:
        batch = block.trajectory.steps[s].batch
        num_rows = block.trajectory.num_points if batch is None else len(batch)
        for rows in torch.arange(num_rows, device=block.X.device).split(size):
            if pack and count + len(rows) > num_samples:
                yield pack
                pack, count = [], 0
            pack.append((s, rows))
            count += len(rows)
    if pack:
        yield pack

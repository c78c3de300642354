"""Explained outputs: one pass over the run for as many points as fit into memory, kept as views in fixed point."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.verification import filter_own_warnings
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeOptions
from epk_gp.core.show import CertificateWarning
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute_many
from epk_gp.quadrature.paths import WeightPath
from epk_gp.quadrature.rules import Rule
from epk_gp.report.certificate import Certificate
from epk_gp.report.divisions import Divisions
from epk_gp.report.fixed_point import significant
from epk_gp.report.views import RealTerms, SampleFacts, all_views, is_margin

_BYTES = 24  # of a sample, layer and range of steps: the sum, what is added to it, and its multiple of the quantum


@dataclass(frozen=True, eq=False)
class Asked:
    """What is explained, and how.

    Attributes:
        trajectory: The run, with M training samples.
        X: The n points whose outputs are explained.
        rows: The point of each of the k explained outputs, ascending.
        classes: The index of each of them.
        head: What the outputs are.
        rule: How each step's integral is taken.
        path: Along which the points are integrated.
        labels: Classes of the training samples; None where they have none.
        top: Number of samples that a view names of either sign.
        influence: Derivatives of each output in the samples' weights; None where they were not computed.
        options: How to compute.
    """

    trajectory: Trajectory
    X: Shaped[Tensor, "n ..."]
    rows: Int64[Tensor, " k"]
    classes: Int64[Tensor, " k"]
    head: Head
    rule: Rule
    path: WeightPath
    labels: Int64[Tensor, " M"] | None
    top: int
    influence: Sequence[Float[Tensor, " M"] | None]
    options: ComputeOptions


@dataclass(frozen=True, eq=False)
class Explanations:
    """The explained outputs, in the order of their points.

    Attributes:
        quantum: What all their numbers are multiples of.
        outputs: For each output its point, its index and its content: initial and final value, running sum, views, and
            how much larger the samples' contributions are, step by step, than what they sum to.
        certificate: Of all of them.
        largest_rounding: Largest term of rounding in them, in quanta.
    """

    quantum: float
    outputs: tuple[tuple[int, int, dict[str, Any]], ...]
    certificate: Certificate
    largest_rounding: int


def explain(asked: Asked, divisions: Divisions) -> Explanations:
    """Attribute the outputs that are asked for.

    Raises:
        TypeError, ValueError: As `epk_gp.attribute`; or terms are not finite, or of very different sizes.
    """
    found: list[tuple[int, int, dict[str, Any]]] = []
    certificates: list[Certificate] = []
    quantum, largest = 0.0, 0
    for chosen in _chunks(asked, divisions):
        parts = _attribute(asked, divisions, chosen)
        certificates.append(Certificate.of(parts))
        for number, k in enumerate(chosen.tolist()):
            row, output = int(asked.rows[k]), int(asked.classes[k])
            terms = _terms(parts, number)
            quantum = quantum or terms.quantum
            rounded = terms.rounded(quantum)
            facts = SampleFacts(asked.labels, asked.trajectory.num_outputs, asked.influence[k])
            views = all_views(rounded, facts, asked.top)
            largest = max(largest, *(abs(view["rounding"]) for key, view in views.items() if is_margin(key)))
            ends = {"initial": rounded.running[0], "network": rounded.running[-1], "running": list(rounded.running)}
            amplification = significant(float(parts.amplification[number, 0]), 3)
            found.append((row, output, ends | {"amplification": amplification, "views": views}))
    return Explanations(quantum, tuple(found), reduce(Certificate.merged, certificates), largest)


def _chunks(asked: Asked, divisions: Divisions) -> Iterator[Int64[Tensor, " m"]]:
    """Divide the outputs into parts whose contributions fit into the memory budget, at least one output each."""
    cells = asked.trajectory.num_points * (len(divisions.layers) + 1) * len(divisions.ranges)
    size = max(1, asked.options.memory_budget // (_BYTES * cells))
    return iter(torch.arange(len(asked.rows)).split(size))


def _attribute(asked: Asked, divisions: Divisions, chosen: Tensor) -> GroupedAttribution:
    options, first = asked.options, int(chosen[0])
    if options.checkpoint is not None:
        options = replace(options, checkpoint=Path(options.checkpoint) / f"outputs-{first}")
    with filter_own_warnings("ignore", CertificateWarning):  # `write_report` says it once for all outputs
        (parts,) = attribute_many(
            asked.trajectory,
            asked.X[asked.rows[chosen].to(asked.X.device)],
            [divisions.axes],
            head=asked.head,
            rule=asked.rule,
            path=asked.path,
            classes=asked.classes[chosen],
            memory_budget=options.memory_budget,
            progress=options.progress,
            checkpoint=options.checkpoint,
            executor=options.executor,
        )
    return parts


def _terms(parts: GroupedAttribution, number: int) -> RealTerms:
    """Select one output: its axes are samples, layers where they are told apart, and ranges of steps."""
    terms = (parts.values, parts.decay, parts.statistics, parts.statistics_of_no_sample, parts.unexplained)
    whole = len(parts.axes) == 2  # a layer axis of length 1 then
    samples, decay, statistics, of_no_sample, unexplained = (
        (term.unsqueeze(3) if whole else term)[number, 0] for term in terms
    )
    return RealTerms(
        samples=samples,
        decay=decay[0],
        statistics=statistics[:, 0].sum(dim=0) + of_no_sample[0, 0],
        unexplained=unexplained[0],
        initial=float(parts.initial[number, 0]),
        network=float(parts.network[number, 0]),
    )

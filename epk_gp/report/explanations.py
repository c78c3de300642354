"""Explained outputs: their terms by samples, layers and ranges of steps, as views whose sums are exact.

All numbers of a report are multiples of its quantum. The contributions of each sample, layer and range are rounded;
every other number of a view is a sum of these, so that views agree with each other exactly. The difference between
these sums and the output is "rounding": a few quanta, or, if the certificate does not hold, also the error of the sum,
in the last range of steps.
"""

import math
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute
from epk_gp.kernel_machine.axes import Axis, by_layer, by_sample, by_step
from epk_gp.kernel_machine.certificate import Certificate
from epk_gp.quadrature.rules import Rule, WeightPath
from epk_gp.report.request import ReportRequest, influence_on

LARGEST = 2**53  # below it every integer is exact as a double, JavaScript's number type
NUM_RANGES = 8  # ranges of steps, of about equal length
MAX_LAYERS = 12  # more modules are joined, by their names or by neighbourhood
ALL = "*"  # stands for all layers, or all ranges of steps, in the key of a view

# Largest ratio of the absolute contributions to one output to those of the first explained output.
_MARGIN = 1000
_FINEST = -15  # smallest power of ten
_BYTES = 24  # bytes per sample, layer and range of steps: sum, addition, and multiple of the quantum


def divide(trajectory: Trajectory) -> tuple[Axis, Axis, Axis]:
    """Return the axes along which a report splits contributions: training samples, layers and ranges of steps."""
    S = trajectory.num_steps
    count = max(1, min(NUM_RANGES, S))
    ranges = by_step(trajectory, [round(S * r / count) for r in range(1, count)])
    return by_sample(trajectory), _layer_axis(trajectory), ranges


def _layer_axis(trajectory: Trajectory) -> Axis:
    """Join the parameters of a module, and many modules by the beginning of their names, or neighbouring modules."""
    axis = by_layer(trajectory)
    names = list(axis.names)
    for depth in range(max(name.count(".") for name in names), 0, -1):
        if len(set(names)) > MAX_LAYERS:
            names = [".".join(name.split(".")[:depth]) for name in axis.names]
    distinct = list(dict.fromkeys(names))
    if len(distinct) <= MAX_LAYERS:
        kinds = [type(trajectory.model.module.get_submodule(name)).__name__ for name in distinct]
        titles = [f"{name} ({kind})" if name else kind for name, kind in zip(distinct, kinds, strict=True)]
        place = {name: k for k, name in enumerate(distinct)}
    else:
        place = {name: MAX_LAYERS * k // len(distinct) for k, name in enumerate(distinct)}
        members = [[name for name in distinct if place[name] == k] for k in range(MAX_LAYERS)]
        titles = [m[0] if len(m) == 1 else f"{m[0]} to {m[-1]}" for m in members]
    return Axis("parameter", torch.tensor([place[name] for name in names])[axis.group], tuple(titles))


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of one output of one point as multiples of a quantum, over M samples, L layers and R ranges of steps.

    Attributes:
        quantum: The quantum.
        samples: (M, L, R).
        decay: (L, R).
        statistics: (R,); they belong to no layer.
        unexplained: (L, R).
        running: The output before training, and with the terms of each range added, (R + 1,): with momentum a batch
            also acts in later steps, and its terms count for its own range. The last one is the trained network's
            output.
        sources: (L, R); data outside the training set, all together; None without any.
    """

    quantum: float
    samples: Int64[Tensor, "M L R"]
    decay: Int64[Tensor, "L R"]
    statistics: Int64[Tensor, " R"]
    unexplained: Int64[Tensor, "L R"]
    running: tuple[int, ...]
    sources: Int64[Tensor, "L R"] | None = None


class Explained(NamedTuple):
    """The content of each output by its point and index, the quantum of all numbers, and the certificate of all.

    Findings are the reasons that they are not certified; empty if they are.
    """

    outputs: dict[tuple[int, int], dict[str, Any]]
    quantum: float
    certificate: Certificate
    findings: list[str]


def explain(
    request: ReportRequest, axes: tuple[Axis, Axis, Axis], rule: Rule, path: WeightPath | None, top: int
) -> Explained:
    """Attribute the outputs of a report, in as few passes over the run as the memory budget allows.

    The content of an output has its initial and final value, its running sum, its views, and the ratio of the sizes of
    the samples' contributions, step by step, to their sum.

    Raises:
        TypeError, ValueError: As in `epk_gp.attribute`; or terms are not finite, or of very different sizes.
    """
    trajectory, budget, influence = request.trajectory, request.options.memory_budget, influence_on(request)
    outputs: dict[tuple[int, int], dict[str, Any]] = {}
    certificates: list[Certificate] = []
    quantum = 0.0
    cells = trajectory.num_points * (len(axes[1].names) + 1) * len(axes[2].names)
    K = 1 if request.function is None else request.network.shape[1]  # for a function, all numbers of a point together
    for chosen in torch.arange(len(request.rows)).split(K * max(1, budget // (_BYTES * cells * K))):
        points, classes = request.points[request.rows[chosen[::K]]], request.classes[chosen]
        asked = request.asked(f"outputs-{int(chosen[0])}", points, classes)
        with filter_own_warnings("ignore", CertificateWarning):  # `write_report` warns once for all outputs
            result = attribute(trajectory, by=axes, rule=rule, path=path, **asked)
        certificates.append(Certificate.of(result))
        for number, k in enumerate(chosen.tolist()):
            terms = rounded_terms(result, divmod(number, K), quantum)
            quantum = terms.quantum
            outputs[int(request.rows[k]), int(request.classes[k])] = {
                "initial": terms.running[0],
                "network": terms.running[-1],
                "running": list(terms.running),
                "amplification": significant(float(result.amplification[divmod(number, K)]), 3),
                "views": all_views(terms, top, request.training_labels, trajectory.num_outputs, influence[k]),
            }
    certificate = reduce(Certificate.merged, certificates)
    return Explained(outputs, quantum, certificate, certificate.findings)


def rounded_terms(result: GroupedAttribution, place: tuple[int, int], quantum: float) -> Terms:
    """Round the terms of one output of a point to multiples of a quantum; 0 chooses a quantum.

    Raises:
        ValueError: The terms are too large for the quantum.
    """
    statistics = result.statistics[place][:, 0].sum(dim=0) + result.statistics_of_no_sample[place][0, 0]
    terms = [result.values[place], result.decay[place][0], statistics, result.unexplained[place][0]]
    if result.sources:
        terms.append(torch.stack([*result.sources.values()]).sum(dim=0)[place][0])
    initial, network = float(result.initial[place]), float(result.network[place])
    size = sum(float(term.double().abs().sum()) for term in terms)
    quantum = quantum or choose_quantum(size + abs(initial) + abs(network))
    of_ranges = [term.double().reshape(-1, term.shape[-1]).sum(dim=0) for term in terms]
    running = torch.stack(of_ranges).sum(dim=0).cumsum(dim=0) + initial
    ends = [initial, *running[:-1].tolist(), network]
    samples, decay, moved, unexplained, *others = (to_units(term, quantum) for term in terms)
    whole = tuple(round(value / quantum) for value in ends)
    return Terms(quantum, samples, decay, moved, unexplained, whole, others[0] if others else None)


def all_views(
    terms: Terms,
    top: int,
    labels: Int64[Tensor, " M"] | None = None,
    num_classes: int = 0,
    influence: Float[Tensor, " M"] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return all views by their keys, "layer|range"; "*" stands for all layers or all ranges.

    Args:
        terms: The terms.
        top: Number of samples named in a view for each sign.
        labels: Classes of the training samples; None if they have none.
        num_classes: C.
        influence: Derivatives of the output in the samples' weights, for the whole training: they appear only in the
            view of all layers and ranges.
    """
    L, R = terms.decay.shape
    places = product((None, *range(L)), (None, *range(R)))
    views = {(layer, r): _view(terms, layer, r, top, labels, num_classes) for layer, r in places}
    if influence is not None:
        for named in (views[None, None]["raised"], views[None, None]["lowered"]):
            named[:] = [[index, value, significant(float(influence[index]))] for index, value, _ in named]
    return {"|".join(ALL if i is None else str(i) for i in key): view for key, view in views.items()}


def is_margin(key: str) -> bool:
    """Return whether a view covers all layers or all ranges of steps."""
    return ALL in key.split("|")


def shorten(view: dict[str, Any], top: int) -> dict[str, Any]:
    """Return a view that names at most this many samples for each sign: the others are in the sums of the rest."""
    shortened = dict(view)
    for side in ("raised", "lowered"):
        kept, moved = view[side][:top], view[side][top:]
        count, total = view[f"rest_{side}"]
        shortened |= {side: kept, f"rest_{side}": [count + len(moved), total + sum(value for _, value, _ in moved)]}
    return shortened


def _view(terms: Terms, layer: int | None, r: int | None, top: int, labels: Tensor | None, C: int) -> dict[str, Any]:
    """Return the view of one layer and one range of steps; None stands for all of them."""
    layers, ranges = (slice(None) if i is None else slice(i, i + 1) for i in (layer, r))
    cells = terms.samples[:, layers, ranges]
    samples = cells.sum(dim=(1, 2))
    raised, rest_raised = _ranked(samples, 1, top)
    lowered, rest_lowered = _ranked(samples, -1, top)
    by_label = None
    if labels is not None:  # ignored labels such as -100 are not classes, and their samples have no terms
        known = (labels >= 0) & (labels < C)
        by_label = torch.zeros(C, dtype=torch.int64).index_add_(0, labels[known], samples[known]).tolist()
    others = {
        "decay": int(terms.decay[layers, ranges].sum()),
        "statistics": int(terms.statistics[ranges].sum()) if layer is None else 0,
        "unexplained": int(terms.unexplained[layers, ranges].sum()),
    }
    if terms.sources is not None:
        others["sources"] = int(terms.sources[layers, ranges].sum())

    total = terms_sum = int(samples.sum()) + sum(others.values())
    if layer is None:  # the change of the output as a reference for the terms; one layer has no output
        first, last = (0, -1) if r is None else (r, r + 1)
        total = terms.running[last] - terms.running[first]
    return {
        "raised": raised, "lowered": lowered, "rest_raised": rest_raised, "rest_lowered": rest_lowered,
        "labels": by_label,
        "layers": cells.sum(dim=(0, 2)).tolist() if layer is None else None,
        "ranges": cells.sum(dim=(0, 1)).tolist() if r is None else None,
        **others, "rounding": total - terms_sum, "total": total,
    }  # fmt: skip


def _ranked(samples: Tensor, sign: int, top: int) -> tuple[list[list[Any]], list[int]]:
    """Return the largest entries of a sign, with their index, and number and sum of the others."""
    of_sign = (sign * samples).clamp(min=0)
    values, order = of_sign.topk(min(top, len(samples)))
    named = [[i, sign * v, None] for i, v in zip(order.tolist(), values.tolist(), strict=True) if v > 0]
    rest = [int((of_sign > 0).sum()) - len(named), sign * int(of_sign.sum()) - sum(value for _, value, _ in named)]
    return named, rest


def choose_quantum(size: float) -> float:
    """Return the smallest power of ten for which sums of terms are exact in JavaScript.

    Args:
        size: Sum of the absolute terms of one output; the sum for another output may be a thousand times larger.

    Raises:
        ValueError: The size is not finite, or so large that sums in integers are not exact.
    """
    largest = LARGEST / _MARGIN
    if not size <= largest:
        raise ValueError(
            f"the absolute terms of an output must sum to at most {largest:.0e} to be shown: got {size}. Look for "
            "outputs that are not finite, or train on targets of another unit."
        )
    return float(f"1e{max(_FINEST, math.ceil(math.log10(max(size, 1e-300) / largest)))}")


def to_units(values: Float[Tensor, "*shape"], quantum: float) -> Int64[Tensor, "*shape"]:
    """Round to multiples of a quantum.

    Raises:
        ValueError: The sum of the absolute values is too large to be exact in JavaScript.
    """
    units = values.detach().cpu().double() / quantum
    if not float(units.abs().sum()) < LARGEST:
        raise ValueError(
            f"the terms of one output must sum to less than {LARGEST * quantum:.2g}, which its size lets one expect: "
            f"their absolute values sum to {float(units.abs().sum()) * quantum:.2g}. Explain this point by itself."
        )
    return units.round().to(torch.int64)


def significant(value: float, digits: int = 5) -> float:
    """Round a number that is not part of a sum to a few significant digits, which keeps the file small."""
    return float(f"{value:.{digits}g}")

"""Scores of training samples from any system, judged by exact contributions, exact derivatives, and retraining.

Scores are larger for samples that raise a number more: contributions, or the derivative in a sample's weight. They are
compared with retrained networks (`retrain`) point by point, so that every figure has a spread.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.stats import bootstrap
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from epk_gp.analysis.measures import is_constant, rank_correlations, row_correlations
from epk_gp.autodiff.scalars import Function
from epk_gp.core.checks import (
    ComputeSettings,
    door,
    parse_indices,
    parse_options,
    validate_count,
    validate_tensor,
)
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import ClassLoss, Head, ignored_class
from epk_gp.core.replayed_steps import RunReplay, replayed_steps
from epk_gp.core.show import NAME_LENGTH, Entry, Summary, Table, Tabular, count, shortened
from epk_gp.core.trajectory import Trajectory, network_outputs, parse_inputs
from epk_gp.kernel_machine.attribute import attribute, parse_request
from epk_gp.kernel_machine.influence import influence
from epk_gp.kernel_machine.retrain import Retraining, retrain
from epk_gp.quadrature.rules import adaptive, straight

_TOP, _LISTED = 10, 5  # samples of a query that are removed together; samples named in a finding
_NEAR, _COARSE, _MISSED = 0.9, 0.03, 0.01  # cosine and error for reporting a scale and rounding; share of change
_CHANCE, _SHUFFLES, _RESAMPLES = 0.01, 199, 199  # share of shuffles with equal agreement; draws of the bootstrap
_FITS, _MATCHED, _DISTINCT = 0.25, 256, 16  # remaining share of squared distances; profiles; scores of a dtype
_MUTUAL, _FAINT, _PATH, _RANKED = 0.8, 0.01, 0.99, 3  # share of moved profiles that are each other's nearest (half are
# by chance); size of a faint query; cosine of contributions along another path; networks that a rank correlation needs
_QUIET = "Nothing exact was compared.", "No fault was found."  # without and with exact numbers


@dataclass(frozen=True, eq=False, repr=False)
class Agreement(Tabular):
    """The agreement of scores with effects, test point by test point.

    Attributes:
        per_point: Spearman's rank correlation at each test point, (n,); NaN if scores or effects are constant.
    """

    per_point: Float64[Tensor, " n"]
    _columns = ("per_point",)

    @property
    def mean(self) -> float:
        """Mean over the test points that have a correlation."""
        return float(self.per_point.nanmean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over test points; NaN for fewer than two."""
        values = self.per_point[~self.per_point.isnan()]
        return float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")


def leave_one_out(
    trajectory: Trajectory,
    X: Inputs,
    *,
    samples: Int64[Tensor, " k"] | None = None,
    head: Head | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "n C k"]:
    """Train once without each sample, and return the sample's effect on the outputs: f minus f without it.

    Args:
        trajectory: Training run.
        X: n inputs, with the structure of the training inputs.
        samples: Indices of the samples; all by default.
        head: "logits" or "log_softmax"; None follows the loss.
        options: The options of `retrain`.

    Raises:
        TypeError, ValueError: As in `retrain`; or a sample is not one of the run's.
    """
    X = parse_inputs(trajectory, X)
    M = trajectory.num_points
    chosen = torch.arange(M) if samples is None else parse_indices(samples, M, "samples")
    outputs = retrain(trajectory, without(M, chosen[:, None]), **options).outputs(X, head=head)
    return (network_outputs(trajectory, X, head=head)[None] - outputs).permute(1, 2, 0)


def without(num_samples: int, places: Int64[Tensor, "m k"]) -> Float64[Tensor, "m M"]:
    """Return weights of samples: 0 for the samples that each of m networks leaves out, and 1 for the others."""
    return torch.ones(len(places), num_samples, dtype=torch.float64).scatter_(1, places.cpu(), 0.0)


def random_subsets(num_samples: int, num_subsets: int, *, share: float = 0.5, seed: int = 0) -> Float64[Tensor, "m M"]:
    """Draw subsets of the training samples, as weights of 0 and 1.

    Args:
        num_samples: M.
        num_subsets: m.
        share: Share of the samples that are kept, the alpha of the linear datamodeling score.
        seed: Seed of the draw.

    Raises:
        TypeError: A number has a wrong type.
        ValueError: A number is not positive, or the share is not between 0 and 1 or keeps no or all samples.
    """
    validate_count(num_samples, "num_samples")
    validate_count(num_subsets, "num_subsets")
    kept = round(share * num_samples)
    if not 0 < kept < num_samples:
        raise ValueError(f"share must keep some of {num_samples} samples and leave out others: got {share}.")
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(num_subsets, num_samples, dtype=torch.float64)
    for row in weights:
        row[torch.randperm(num_samples, generator=generator)[:kept]] = 1
    return weights


def rank_agreement(scores: Float[Tensor, "n M"], effects: Float[Tensor, "n M"]) -> Agreement:
    """Correlate the ranks of scores with those of effects, such as `leave_one_out`'s, at each test point.

    Raises:
        TypeError: An argument is not a tensor of floating-point numbers.
        ValueError: The shapes differ, or there are fewer than two samples.
    """
    validate_tensor(scores, "scores", ndim=2, floating=True)
    validate_tensor(effects, "effects", ndim=2, floating=True)
    return Agreement(rank_correlations(scores, effects))


def datamodeling_score(
    scores: Float[Tensor, "n M"], subsets: Float[Tensor, "m M"], outcomes: Float[Tensor, "m n"]
) -> Agreement:
    """Compute the linear datamodeling score (Park et al. 2023): do sums of scores rank subsets as training does?

    Args:
        scores: Score of each sample for each test point.
        subsets: Weights of the samples, 1 for the samples in a subset (`random_subsets`).
        outcomes: The number at each test point after training on each subset.

    Raises:
        TypeError: An argument is not a tensor of floating-point numbers.
        ValueError: The shapes do not fit.
    """
    for value, name in ((scores, "scores"), (subsets, "subsets"), (outcomes, "outcomes")):
        validate_tensor(value, name, ndim=2, floating=True)
    if subsets.shape[1] != scores.shape[1] or outcomes.shape != (len(subsets), len(scores)):
        raise ValueError(
            "scores (n, M), subsets (m, M) and outcomes (m, n) must fit: got "
            f"{tuple(scores.shape)}, {tuple(subsets.shape)} and {tuple(outcomes.shape)}."
        )
    return rank_agreement(scores @ subsets.to(scores).T, outcomes.T.to(scores))


class Cost(NamedTuple):
    """Cost of a check: seconds, and the equivalent number of trainings of the recorded network."""

    seconds: float
    trainings: float


@dataclass(frozen=True, eq=False)
class CheckedScores:
    """One system's scores of M samples for q queries, and findings about them.

    Attributes:
        scores: The scores in float64; NaN and infinity are 0.
        miss: Sum of the scores minus the change of the explained number, (q,).
        likeness: Similarity to exact "contributions" and "derivatives", by query, (q,) each, NaN if a side is constant:
            "cosine"; "pearson" and "spearman" over samples; "sign", the share of samples whose signs agree; "slope",
            the factor of the exact numbers by least squares; "error", the remainder, by norms; and "chance", (): the
            share of shuffles of the samples that reach the mean of |pearson|.
        findings: Suspicious facts, in sentences with the evidence; empty if there are none.
        lds: Linear datamodeling score; None without retrainings.
        lds_interval: 95 % interval by a bootstrap of its mean over the retrainings.
        left_out: Rank correlation with the effects of leaving out single samples.
        left_out_interval: The same interval over the samples.
        predicted: Change of the number without a query's 10 highest samples, as predicted by the scores, (r,).
        measured: Change of the number after training without them, (r,).
    """

    scores: Float64[Tensor, "q M"]
    miss: Float64[Tensor, " q"]
    likeness: Mapping[str, Mapping[str, Float64[Tensor, " q"]]]
    findings: tuple[str, ...] = ()
    lds: Agreement | None = None
    lds_interval: tuple[float, float] = (float("nan"), float("nan"))
    left_out: Agreement | None = None
    left_out_interval: tuple[float, float] = (float("nan"), float("nan"))
    predicted: Float64[Tensor, " r"] | None = None
    measured: Float64[Tensor, " r"] | None = None

    @property
    def nearest(self) -> str:
        """The kind of exact numbers most like the scores, "contributions" or "derivatives", by mean |cosine|."""
        return max(self.likeness, key=lambda kind: self.likeness[kind]["cosine"].abs().nanmean(), default="")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreCheck(Tabular):
    """The quality of scores of training samples, compared with exact numbers.

    Attributes:
        systems: The judged scores, by name.
        references: The same for "exact contributions" and "exact derivatives", if they were computed.
        change: Change of the explained number of each query by training, (q,).
        costs: Cost of each check, by name.
        notes: Parts that were not computed, or are not certified, with reasons.
    """

    systems: dict[str, CheckedScores]
    references: dict[str, CheckedScores]
    change: Float64[Tensor, " q"]
    costs: Mapping[str, Cost]
    notes: tuple[str, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """Suspicious facts about any of the scores; empty if there are none."""
        return tuple(f"{k}: " * (len(self.systems) > 1) + line for k, a in self.systems.items() for line in a.findings)

    def _frame(self) -> tuple[Any, ...]:
        checked, unknown = self.systems | self.references, torch.full_like(self.change, torch.nan)
        columns = [
            {f"{kind} {key}": v for kind, own in a.likeness.items() for key, v in own.items() if v.ndim}
            for a in checked.values()
        ]
        for found, a in zip(columns, checked.values(), strict=True):
            found |= {name: own.per_point for name, own in (("LDS", a.lds), ("left out", a.left_out)) if own}
            found |= {"change": self.change, "miss": a.miss}
        names = dict.fromkeys(name for found in columns[::-1] for name in found)
        terms = {name: torch.stack([found.get(name, unknown) for found in columns]) for name in names}
        return {"system": [*checked], "query": range(len(unknown))}, terms, ()

    def _summary(self) -> Summary:
        entries = [Entry(name, " ".join(a.findings) or _QUIET[bool(a.likeness)]) for name, a in self.systems.items()]
        entries += [Entry("note", note) for note in self.notes]
        entries += [Entry(f"cost of {k}", f"{a:.2g} s = {b:.2g} trainings") for k, (a, b) in self.costs.items()]
        columns = ("", "sum misses", "contributions", "derivatives", "LDS", "left out", f"without top {_TOP}")
        note = "Means over queries: cosine, × slope; LDS in 95 % of draws; change of the number, predicted / measured."
        rows = tuple(self._row(name, each) for name, each in (self.systems | self.references).items())
        title = f"Scores for {count(len(self.change), 'explained number')}, checked"
        return Summary(title, tuple(entries), Table(columns, rows, note))

    def _row(self, name: str, a: CheckedScores) -> tuple[str, ...]:
        cells = dict.fromkeys(("sums", "contributions", "derivatives", "lds", "left out", "top"), "–")
        cells["sums"], (low, high) = f"{100 * _relative(a.miss, self.change):.3g} %", a.lds_interval
        cells |= {k: f"{b['cosine'].nanmean():.2f} ×{b['slope'].nanmedian():.2g}" for k, b in a.likeness.items()}
        cells |= {"lds": f"{a.lds.mean:.2f} [{low:.2f}, {high:.2f}]"} if a.lds else {}
        cells |= {"left out": f"{a.left_out.mean:.2f}"} if a.left_out else {}
        if a.predicted is not None and a.measured is not None:
            cells["top"] = f"{a.predicted.nanmean():.2g} / {a.measured.nanmean():.2g}"
        return shortened(name, NAME_LENGTH), *cells.values()


@door
def check_scores(
    trajectory: Trajectory,
    scores: Any,
    X: Inputs,
    *,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    head: Head | None = None,
    contributions: bool = True,
    derivatives: bool = True,
    retrainings: int = 50,
    share: float = 0.5,
    left_out: int = 20,
    removals: int = 5,
    seed: int = 0,
    **options: Unpack[ComputeSettings],
) -> ScoreCheck:
    """Judge scores of training samples from any system, by exact numbers and by retraining.

    A positive score means that the presence of a sample raises the explained number. For a system that explains the
    loss instead, or the effect of leaving a sample out, change the sign, or pass
    `function=epk_gp.RowFunction.loss_value(targets)`.

    Args:
        trajectory: The recorded run, with its M training samples in the order of the scores.
        scores: (n, M), or (n, C, M) for all outputs, as an array or tensor of any precision; or several by name.
        X: The n inputs that the scores explain, with the structure of the training inputs.
        classes: The output of each input that the scores explain; not needed if there is only one.
        function: The explained function, if not the outputs, such as `RowFunction.log_probability(answers)`
            (`attribute`).
        head: "logits" or "log_softmax"; None follows the loss, as in `attribute`.
        contributions: Compare with exact contributions, at the cost of `attribute`.
        derivatives: Compare with exact derivatives, at the cost of `influence`.
        retrainings: Number of networks that are trained on random subsets, for the linear datamodeling score; 0 for
            none.
        share: Share of the samples that a subset keeps.
        left_out: Number of random samples that are left out one by one, a network each; 0 for none.
        removals: Number of first queries whose 10 highest samples (at most half of all) are removed together, a network
            each for every system; 0 for none.
        seed: Seed of subsets, samples that are left out, shuffles and bootstrap.
        options: `memory_budget`, `progress` and `executor`; see `ComputeOptions`.

    Returns:
        All numbers, and findings in sentences. It prints as a table; `epk_gp.plots.scores.check_figure` draws it.

    Raises:
        TypeError, ValueError: As in `attribute`; or the scores do not fit the run and the inputs, or are not numbers.
    """
    parse_options("check_scores", ("accumulate", "checkpoint"), **options)
    for name, value in (("retrainings", retrainings), ("left_out", left_out), ("removals", removals), ("seed", seed)):
        validate_count(value, name, minimum=0)
    kernel, rows, _ = parse_request(trajectory, X, None, (head, adaptive(), straight()), (classes, function))
    validate_count(trajectory.num_points, "trajectory.num_points", minimum=2)
    run, n, M, rng = kernel.trajectory, len(rows), trajectory.num_points, np.random.default_rng(seed)

    def explained(z: Tensor) -> Tensor:
        return (z.flatten(-2) if classes is None else z[..., torch.arange(n), classes.cpu()]).double().cpu()

    given = scores if isinstance(scores, Mapping) else {"scores": scores}
    raw = {str(name): _parsed(name, s, (n, run.num_outputs if classes is None else 1, M)) for name, s in given.items()}
    if not raw or len(raw) < len(given):
        raise ValueError(f"scores must hold those of one system at least, under names that differ: got {list(given)}.")
    start, end = map(explained, kernel.end_outputs(rows))
    judged = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in raw.items()}
    tops = torch.cat([s[:removals].topk(min(_TOP, M // 2), dim=1).indices for s in judged.values()])
    singles = torch.from_numpy(rng.permutation(M)[:left_out, None])
    weights = {"LDS": random_subsets(M, max(1, retrainings), share=share, seed=seed)[:retrainings]}
    weights |= {"left out": without(M, singles), f"top {_TOP}": without(M, tops)}
    asked: dict[str, Any] = {"X": X, "classes": classes, "function": function, "head": head}
    ways: dict[str, Any] = {"contributions": partial(attribute, **asked), "derivatives": partial(influence, **asked)}
    ways |= {name: partial(retrain, weights=rows) for name, rows in weights.items()}
    wanted = contributions, derivatives, *map(len, weights.values())
    training, costs = _seconds_of_step(trajectory, rows) * max(1, trajectory.num_steps), dict[str, Cost]()
    truths, outcomes, notes = dict[str, Tensor](), dict[str, Tensor](), list[str]()
    for name, compute in (way for way, is_wanted in zip(ways.items(), wanted, strict=True) if is_wanted):
        begin = time.perf_counter()
        try:
            found = compute(trajectory, **options)
        except ValueError as error:
            notes.append(f"{name}: {error}")
            continue
        costs[name] = Cost(seconds := time.perf_counter() - begin, seconds / training)
        notes += [f"{name} not certified: {finding}" for finding in found.findings]
        if isinstance(found, Retraining):
            outcomes[name] = outcome = explained(replace(found, trajectory=run).outputs(rows, head=kernel.head))
            good, least = int(outcome.isfinite().all(dim=1).sum()), _RANKED if name in ("LDS", "left out") else 1
            short = f"{name}: {good} of {len(outcome)} networks have finite outputs; {least} are needed."
            notes += [short] * (good < max(len(outcome), least))
            continue
        values = found.samples if name == "contributions" else found.values
        truths |= {name: values.flatten(0, 1).double().cpu()} if values.isfinite().all() else {}
        notes += [f"{name}: not compared, because they are not finite."] * (name not in truths)

    checked, size = dict[str, CheckedScores](), len(tops) // len(judged)
    references = {f"exact {kind}": truth for kind, truth in truths.items() if f"exact {kind}" not in raw}
    for k, (name, s) in enumerate((judged | references).items()):
        like, found = {kind: _likeness(s, truth, rng) for kind, truth in truths.items()}, dict[str, Any]()
        for field, check in (("lds", "LDS"), ("left_out", "left out")):
            found |= _agreement(field, s, weights[check], outcomes[check] - end, seed) if check in outcomes else {}
        if f"top {_TOP}" in outcomes and name in raw:
            own = slice(k * size, (k + 1) * size)
            found["predicted"] = ((weights[f"top {_TOP}"][own] - 1) * s[:size]).sum(dim=1)
            found["measured"] = (outcomes[f"top {_TOP}"][own] - end).diagonal()
        each = CheckedScores(s, s.sum(dim=1) - (end - start), like, **found)
        checked[name] = replace(each, findings=tuple(_findings(trajectory, raw.get(name, s), each, truths, rng)))
    return ScoreCheck({name: checked.pop(name) for name in raw}, checked, end - start, costs, tuple(notes))


def _seconds_of_step(trajectory: Trajectory, X: Tensor) -> float:
    """Return the seconds of a step that is compared with the recorded one, over a second, in the precision of X."""
    begin, count = time.perf_counter(), 0
    for _ in replayed_steps(RunReplay(trajectory, trajectory.model_for(X), X)):
        count += 1
        if time.perf_counter() - begin > 1.0:
            break
    return (time.perf_counter() - begin) / max(1, count)


def _findings(
    run: Trajectory, raw: Tensor, each: CheckedScores, truths: Mapping[str, Tensor], rng: np.random.Generator
) -> Iterator[str]:
    """Yield suspicious facts about scores, given also in their original form and with the exact numbers."""
    s, like, exact = each.scores, each.likeness, 1e-4 if run.dtype == torch.float64 else 1e-3
    if bool((wrong := ~raw.isfinite()).any()):
        yield f"{int(wrong.sum())} scores of {_listed('samples', wrong.any(dim=0))} are NaN or infinite: taken as 0."
    if bool((flat := is_constant(s)).any()):
        yield f"All samples have one score for {_listed('queries', flat)}."
    if not truths or bool(flat.all()):
        return
    varied = [t.std(dim=0, correction=0) > exact * t.abs().amax(dim=0) for t in truths.values()]
    if bool((alike := is_constant(s.T) & torch.stack(varied).all(dim=0)).any()):
        yield f"All queries have one score for {_listed('samples', alike)}."
    unseen = ~torch.cat([*truths.values()]).any(dim=0) & (s.abs().amax(dim=0) > exact * s.abs().max())
    if bool(unseen.any()):
        yield f"Nothing was learned from {_listed('samples', unseen)}, which have scores: their exact numbers are 0."
    stored = [str(dtype)[6:] for dtype in (torch.bfloat16, torch.float16) if torch.equal(s, s.to(dtype).double())]
    if stored and len(s.unique()) > _DISTINCT and not torch.equal(s, s.round()):
        yield f"The precision is low: every score is a number of {stored[0]}."
    sizes = truths[each.nearest].norm(dim=1)  # faint queries, whose terms cancel, have the rounding of others
    off = like[each.nearest]["error"] * (sizes / (_FAINT * sizes.max())).clamp(max=1) > exact
    disorder = dict(_disorder(s, truths, rng)) if bool(off.any()) else {}
    yield from disorder
    kind = next(iter(disorder.values()), each.nearest)
    cosines, slopes, errors = (like[kind][name] for name in ("cosine", "slope", "error"))
    clear = [float(a["pearson"].nanmean()) for a in like.values() if float(a["chance"]) <= _CHANCE]
    sign = -1 if clear and max(clear) < 0 else 1
    if sign < 0:
        found = ", ".join(f"{float(a['pearson'].nanmean()):.2f} with exact {name}" for name, a in like.items())
        yield f"The sign looks turned: the correlation is {found}."
    elif not clear and not disorder and float(cosines.abs().nanmean()) < _NEAR:
        least = 100 * min(float(a["chance"]) for a in like.values())
        yield f"They agree with nothing exact beyond chance: {least:.0f} % of shuffled scores do as well."
        return
    total, sums = sign * s.sum(dim=1), truths.get("contributions", s).sum(dim=1)
    missed, k = _relative(total - sums, sums), int((total - sums).abs().argmax())
    if kind == "contributions" and missed > _MISSED:
        instead = f"(query {k}: {float(total[k]):.4g} instead of {float(sums[k]):.4g})"
        yield f"Their sums miss those of exact contributions by {missed:.2g} times their size {instead}."
    if isinstance(run.loss, ClassLoss) and run.targets.ndim > 1 and bool(off.any()):
        ignored = (run.targets == ignored_class(run.loss)).flatten(1).sum(dim=1).double().cpu()
        differs = (s - truths[kind]).norm(dim=0)
        growth = rank_agreement(differs[None], ignored[None]).mean
        if growth > max(0.5, 3.3 * len(ignored) ** -0.5):  # by chance one in a thousand
            yield f"Padding may be counted: what differs grows with ignored positions (rank correlation {growth:.2f})."
    # the remainder after scaling shows how exact the scores are
    allowed = torch.minimum(exact + errors, 0.02 + 2 * (1 - cosines.abs()))
    far = (cosines.abs() > _NEAR) & ((sign * slopes - 1).abs() > allowed)
    if not disorder and bool(far.any()):
        low, middle, high = (sign * slopes[far]).quantile(slopes.new_tensor([0, 0.5, 1])).tolist()
        yield f"The scale is off: {_subject(far)} {middle:.4g} times the exact {kind}, from {low:.4g} to {high:.4g}."
    is_path = kind == "contributions" and missed <= exact / 10  # other contributions have the same sum
    off &= ~flat & ~wrong.any(dim=1) & ~((cosines > _PATH) & is_path)
    if not disorder and bool(off.any()):
        error, cosine = float(errors[off].median()), float(cosines[off].abs().mean())
        hint = "; rounding to bfloat16 may leave 0.002, coarse rules or few checkpoints more" if error < _COARSE else ""
        hint = "; their sum is right: another path, or a fault" if is_path else hint
        found = f"not the exact {kind}, the nearest: cosine {cosine:.3f}, relative error {error:.2g}{hint}"
        yield f"{_subject(off).capitalize()} {found}."


def _disorder(s: Tensor, truths: Mapping[str, Tensor], rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Report samples or queries in a wrong order, and its kind: their scores are the exact numbers of others.

    A sample's profile is its scores for all queries, each query's scores scaled to norm 1; a query's profile is its
    scores.
    """
    sides = [(kind, sign * normalize(s), normalize(t)) for kind, t in truths.items() for sign in (1, -1)]
    for plural in ("samples", "queries"):
        pairs = [(kind, *((S.T, T.T) if plural == "samples" else (S, T))) for kind, S, T in sides]
        ratio, rows, places, kind = min(((*_fit(S, T, rng), kind) for kind, S, T in pairs), key=lambda fit: fit[0])
        if ratio < _FITS and int((moved := rows != places).sum()) > 1:  # an order moves at least two
            named = [f"#{i} that of #{j}" for i, j in torch.stack((rows, places), 1)[moved][:_LISTED].tolist()]
            found = f"{int(moved.sum())} of {len(rows)} are nearest the exact {kind} of another one"
            yield f"The {plural} look out of order: {found} ({', '.join(named)}).", kind


def _fit(S: Tensor, T: Tensor, rng: np.random.Generator) -> tuple[float, Tensor, Tensor]:
    """Find the nearest exact profile for each profile of scores.

    Returns:
        The sum of their squared distances, relative to the least of three: the distance to the profiles' own ones, the
        distance to profiles that are mixed of different ones, and the profiles' own size (infinite unless the scores
        nearest to the nearest profile are mostly the profile itself); the profiles; and their nearest ones.
    """
    rows = torch.from_numpy(rng.permutation(S.any(dim=1).nonzero()[:, 0])[:_MATCHED])  # profiles of zeros have no order
    distances, by_chance = (torch.cdist(S[rows], a).square() for a in (T, torch.from_numpy(rng.permuted(T, axis=0))))
    own, (best, places) = (S - T)[rows].square().sum(dim=1), distances.min(dim=1)
    limit = min(own.sum(), by_chance.amin(dim=1).sum(), S[rows].square().sum())
    places = torch.where(best < own, places, rows)
    mutual = (torch.cdist(T[places], S).argmin(dim=1) == rows)[places != rows].double().mean()
    return float(best.sum() / limit) if mutual > _MUTUAL else float("inf"), rows, places


def _likeness(s: Tensor, t: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    pearson, slope = row_correlations(s, t), (s * t).sum(dim=1) / t.square().sum(dim=1)
    shuffled = [row_correlations(s[:, rng.permutation(s.shape[1])], t).nanmean() for _ in range(_SHUFFLES)]
    reached = (torch.stack(shuffled).abs() >= pearson.nanmean().abs()).sum()
    error = (s - slope[:, None] * t).norm(dim=1) / (slope[:, None] * t).norm(dim=1)
    like = {"cosine": cosine_similarity(s, t, eps=0.0), "pearson": pearson, "spearman": rank_agreement(s, t).per_point}
    like["sign"] = ((s.sign() == t.sign()) & (t != 0)).sum(dim=1) / (t != 0).sum(dim=1)
    return like | {"slope": slope, "error": error, "chance": (1 + reached) / (1 + _SHUFFLES)}


def _agreement(field: str, s: Tensor, weights: Tensor, changes: Tensor, seed: int) -> dict[str, Any]:
    """Compare changes of the numbers of networks that did not diverge with the predictions of scores for their weights.

    Returns:
        The rank correlation, and its 95 % interval by a bootstrap over networks, under a field's names.
    """
    good = changes.isfinite().all(dim=1)
    predicted, measured = s @ (weights[good] - 1).T, changes[good].T

    def mean(drawn: np.ndarray) -> float:
        return float(rank_agreement(predicted[:, drawn], measured[:, drawn]).per_point.nanmean().nan_to_num())

    if len(measured.T) < _RANKED:
        return {}
    low, high = bootstrap(
        (np.arange(predicted.shape[1]),), mean, vectorized=False, n_resamples=_RESAMPLES, method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return {field: rank_agreement(predicted, measured), f"{field}_interval": (float(low), float(high))}


def _parsed(name: Any, values: Any, shape: tuple[int, int, int]) -> Tensor:
    """Return scores in float64 on the CPU, with a row for each explained number, (n * K, M)."""
    (n, K, M), dense = shape, None if np.ma.isMaskedArray(values) else values
    dense = values.detach().cpu().double().numpy() if isinstance(values, Tensor) and not values.is_complex() else dense
    try:
        found = torch.from_numpy(np.asarray(dense).astype(np.float64, casting="same_kind"))  # numbers only
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an unmasked array of real numbers: got {type(values).__name__}.") from error
    if tuple(found.shape) not in (shape, (n * K, M) if K == 1 else shape):
        wanted = f"({n}, {M})" if K == 1 else f"({n}, {K}, {M}), or ({n}, {M}) with classes= or function="
        raise ValueError(f"{name} must have the shape (inputs, samples), {wanted}: got {tuple(found.shape)}.")
    return found.reshape(n * K, M)


def _relative(difference: Tensor, size: Tensor) -> float:
    return float(difference.norm() / size.norm().clamp(min=torch.finfo(size.dtype).tiny))


def _subject(places: Bool[Tensor, " q"]) -> str:
    return "they are" if bool(places.all()) else f"{_listed('queries', places)} are"


def _listed(noun: str, places: Bool[Tensor, " m"]) -> str:
    numbers = [f"#{i}" for i in places.nonzero()[:, 0].tolist()]
    return f"{noun} {', '.join(numbers[:_LISTED])}{', ...' * (len(numbers) > _LISTED)}"

"""Scores of samples, judged: exact ones pass, planted faults are named, and what retraining says is a plain loop's."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from shown_results import shown
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from weighted_loops import CLASSES, POINTS, WeightedLoop

import epk_gp as epk
from epk_gp.analysis import score_check
from epk_gp.analysis.score_check import ScoreCheck, random_subsets
from helpers import make_case

QUIET = {"retrainings": 0, "left_out": 0, "removals": 0}
NODES, WEIGHTS = ((1 + torch.tensor([-1.0, 1.0]) * 0.6**0.5) / 2).double(), (5 / 18, 5 / 18)  # and 4/9 at the middle
IGNORED, WORDS, LENGTH = -100, 9, 6


class Words(nn.Module):
    """Each position sees the mean of the words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, dtype=torch.float64)[:, None]
        return self.out(torch.tanh(self.hidden(h)))


def texts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return words 1 .. 8 and the next ones; texts end at random places."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (n, LENGTH + 1), generator=generator)
    is_padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
    return words[:, :-1].masked_fill(is_padding, 0), words[:, 1:].masked_fill(is_padding, IGNORED)


@dataclass(frozen=True)
class Problem:
    run: epk.Trajectory
    net: nn.Module
    X: Tensor
    asked: dict[str, Any]
    number: Callable[[Tensor], Tensor]  # of returned outputs of X
    row_loss: Callable[[Tensor, Tensor], Tensor]  # of the outputs of one sample and its target
    divisor: Callable[[Tensor], float]  # of the sum of the rows' losses, from the targets of a batch
    betas: tuple[float, float] | None
    lr: float

    def check(self, scores: Any, **options: Any) -> ScoreCheck:
        return epk.check_scores(self.run, scores, self.X, **{**QUIET, **self.asked, **options})

    @functools.cached_property
    def contributions(self) -> Tensor:
        return epk.attribute(self.run, self.X, **self.asked).samples[:, 0]

    @functools.cached_property
    def derivatives(self) -> Tensor:
        return epk.influence(self.run, self.X, **self.asked).values[:, 0]


def flat(values: dict[str, Tensor], start: int = 1) -> Tensor:
    return torch.cat([value.flatten(start) for value in values.values()], dim=start)


def by_hand(
    problem: Problem, *, rounding: torch.dtype = torch.float64, forget_at: int | None = None,
    row_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute contributions as another system might: row by row, with the optimizer's memory of each row.

    Args:
        problem: The problem.
        rounding: What gradients of rows are rounded to.
        forget_at: Step at which the memory of Adam is lost, as by a restart without the optimizer's state.
        row_loss: Of the rows, in place of the problem's; Adam's preconditioner stays that of the run.
    """
    run, net = problem.run, problem.net
    X, y = run.inputs, run.targets

    def gradients(weights: dict[str, Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def of_row(x: Tensor, target: Tensor) -> dict[str, Tensor]:
            return grad(lambda w: loss(functional_call(net, w, (x[None],)), target[None]))(weights)

        return flat(vmap(of_row)(X, y)).to(rounding).double()

    def derivative(weights: dict[str, Tensor]) -> Tensor:
        return flat(jacrev(lambda w: problem.number(functional_call(net, w, (problem.X,))))(weights))

    scores = torch.zeros(len(problem.X), len(X), dtype=torch.float64)
    first = second = torch.zeros(())
    for step, recorded in enumerate(run.steps):
        start, end = ({k: v.clone() for k, v in run.weights(s).items()} for s in (step, step + 1))
        rows = recorded.batch
        share = torch.zeros(len(X), dtype=torch.float64)
        share[rows] = 1 / problem.divisor(y[rows])
        each = share[:, None] * gradients(start, row_loss or problem.row_loss)
        if problem.betas is None:
            moves = -problem.lr * each
        else:
            age = step if forget_at is None or step < forget_at else step - forget_at
            a, b = problem.betas
            first, second = (torch.zeros_like(each), torch.zeros_like(each[0])) if age == 0 else (first, second)
            whole = each if row_loss is None else share[:, None] * gradients(start, problem.row_loss)
            first, second = a * first + (1 - a) * each, b * second + (1 - b) * whole.sum(0) ** 2
            scale = (second / (1 - b ** (age + 1))).sqrt() + 1e-8
            moves = -problem.lr * first / (1 - a ** (age + 1)) / scale
        nodes = [(float(t), c) for t, c in zip([*NODES, 0.5], [*WEIGHTS, 4 / 9], strict=True)]
        mean = sum(c * derivative({k: torch.lerp(start[k], end[k], t) for k in start}) for t, c in nodes)
        scores += mean @ moves.T
    return scores


def recorded(
    net: nn.Module, X: Tensor, y: Tensor, X_test: Tensor, asked: dict[str, Any], number: Any, **options: Any
) -> Problem:
    betas, lr, loss = options.pop("betas"), options.pop("lr"), options.pop("loss")
    parameters = list(net.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=lr)
    if betas is not None:
        optimizer = torch.optim.Adam(parameters, lr=lr, betas=betas)
    terms = {key: options.pop(key) for key in ("row_loss", "divisor")}
    generator = torch.Generator().manual_seed(3)
    run = epk.train(
        net, X, y, optimizer=optimizer, steps=16, batch_size=len(X) // 2, loss=loss, generator=generator, **options
    )
    return Problem(run, net, X_test, asked, number, betas=betas, lr=lr, **terms)


@functools.cache
def classes(betas: tuple[float, float] | None = (0.9, 0.99)) -> Problem:
    torch.manual_seed(0)
    net, X, y = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(30, 4), None
    y = X[:, :3].argmax(dim=1)
    X_test, asked = X[:8].double() + 0.2, y[:8]
    return recorded(
        net, X.double(), y, X_test, {"classes": asked, "head": "log_softmax"},
        lambda z: z.log_softmax(1).gather(1, asked[:, None])[:, 0], betas=betas, lr=0.03 if betas else 0.5,
        loss=epk.CrossEntropy(), row_loss=lambda z, y: F.cross_entropy(z, y), divisor=len,
    )  # fmt: skip


def without_memory() -> Problem:
    return classes(None)


@functools.cache
def language() -> Problem:
    torch.manual_seed(0)
    net, (X, y), (X_test, answers) = Words().double(), texts(30, 1), texts(8, 2)
    asked = epk.RowFunction.log_probability(answers)

    def number(z: Tensor) -> Tensor:
        return -F.cross_entropy(z.mT, answers, reduction="none", ignore_index=IGNORED).sum(dim=1)

    return recorded(
        net, X, y, X_test, {"function": asked}, number, betas=(0.9, 0.99), lr=0.03, loss=nn.CrossEntropyLoss(),
        row_loss=lambda z, y: F.cross_entropy(z.mT, y, reduction="sum"), output=lambda z: z[:, -1],
        divisor=lambda y: int((y != IGNORED).sum()),
    )  # fmt: skip


def padding_counts(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.mT, y.where(y != IGNORED, 0), reduction="sum")


def order(problem: Problem) -> Tensor:
    return torch.randperm(problem.run.num_points, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("problem", [classes, language, without_memory], ids=["Adam", "text", "SGD"])
def test_what_is_exact_passes_whoever_computed_it(problem: Any) -> None:
    problem = problem()
    own = by_hand(problem)
    assert torch.allclose(own, problem.contributions, atol=1e-6 * float(own.abs().max()), rtol=0)
    layerwise = epk.attribute(problem.run, problem.X, path=epk.layerwise(), **problem.asked).samples[:, 0]
    scores = {
        "by hand": own.numpy(), "float32": own.float(), "derivatives": problem.derivatives, "another path": layerwise,
        "contributions": problem.contributions.tolist(),
    }  # fmt: skip
    check = problem.check(scores)
    assert check.findings == ()
    assert {name: each.nearest for name, each in check.systems.items()} == {
        name: "derivatives" if name == "derivatives" else "contributions" for name in scores
    }
    assert float(check.systems["by hand"].miss.abs().max()) < 1e-6 * float(check.change.abs().max())
    assert float(check.systems["derivatives"].miss.norm()) > 0.1 * float(check.change.norm())


@pytest.mark.parametrize("name", ["relu", "gelu", "cnn", "attention", "transformer", "one_class", "norms", "cosine"])
def test_no_false_alarm_on_several_networks(name: str) -> None:
    case = make_case(name)
    parts, effect = epk.attribute(case.trajectory, case.test), epk.influence(case.trajectory, case.test)
    check = epk.check_scores(case.trajectory, {"a": parts.samples, "b": effect.values}, case.test, **QUIET)
    assert check.findings == ()
    assert torch.equal(check.change, (parts.network - parts.initial).flatten())


def stored(dtype: torch.dtype) -> Callable[[Problem], Tensor]:
    return lambda p: p.contributions.to(dtype)


FAULTS: dict[str, tuple[Any, ...]] = {  # how scores are changed, what is said, and of which problem
    "gradients in bfloat16": (
        lambda p: by_hand(p, rounding=torch.bfloat16), "relative error 0.0.*; rounding to bfloat16",
    ),
    "gradients in bfloat16, SGD": (
        lambda p: by_hand(p, rounding=torch.bfloat16), "error 0.00.*; rounding to bfloat16", without_memory,
    ),
    "stored in bfloat16": (stored(torch.bfloat16), "every score is a number of bfloat16"),
    "stored in float16": (stored(torch.float16), "every score is a number of float16"),
    "without Adam's state": (lambda p: by_hand(p, forget_at=8), "sums miss those of exact contributions by"),
    "padding counts": (lambda p: by_hand(p, row_loss=padding_counts), "Padding may be counted", language),
    "samples shuffled": (
        lambda p: p.contributions[:, order(p)], "samples look out of order: .* the exact contributions",
    ),
    "samples of derivatives shifted, turned and scaled": (
        lambda p: -0.1 * p.derivatives.roll(1, 1), "samples look out of order: 30 of 30 .* exact derivatives",
    ),
    "samples of texts shuffled": (lambda p: p.derivatives[:, order(p)], "samples look out of order", language),
    "two samples swapped": (
        lambda p: p.contributions[:, [1, 0, *range(2, 30)]],
        r"samples look out of order: 2 of 30 .* \(#[01] that of #[01], #[01] that of #[01]\)",
    ),
    "half of it is noise": (
        lambda p: p.derivatives + p.derivatives.std() * torch.randn(8, 30, generator=torch.Generator()),
        "They are not the exact derivatives, the nearest: cosine 0.[678]",
    ),
    "queries shuffled": (lambda p: p.derivatives.roll(1, 0), "queries look out of order: 8 of 8"),
    "sign turned": (lambda p: -p.contributions, "sign looks turned: .* -1.00 with exact contributions"),
    "sign of derivatives turned": (lambda p: -p.derivatives, "turned: .* -1.00 with exact derivatives", language),
    "divided by the number of samples": (
        lambda p: p.contributions / 30, "scale is off: they are 0.03333 times the exact contributions",
    ),
    "2 % too large": (lambda p: 1.02 * p.contributions, "off: they are 1.02 times the exact contrib"),
    "a mean over one sample less": (lambda p: 0.995 * p.derivatives, "off: they are 0.995 times the exact d"),
    "0.1 % too large, of texts": (lambda p: 1.001 * p.derivatives, "off: they are 1.001 times the exact d", language),
    "0.5 % too large, in bfloat16": (
        lambda p: (1.005 * p.derivatives).bfloat16(), r"scale is off: .* 1.00\d* times the exact derivatives",
    ),
    "queries normalised": (lambda p: F.normalize(p.derivatives), "scale is off: .* times the exact derivatives, from"),
    "NaN": (
        lambda p: p.contributions.index_fill(1, torch.tensor([3, 5]), float("nan")),
        "16 scores of samples #3, #5 are NaN",
    ),
    "a constant sample": (
        lambda p: p.contributions.index_fill(1, torch.tensor([4]), 0.0), "All queries have one score for samples #4",
    ),
    "a constant query": (lambda p: p.contributions.index_fill(0, torch.tensor([2]), 0.1), "one score for queries #2"),
    "zeros": (lambda p: 0 * p.contributions, "one score for queries #0, #1, #2, #3, #4, ..."),
    "random": (
        lambda p: torch.randn(p.contributions.shape, generator=torch.Generator().manual_seed(1)),
        "agree with nothing exact beyond chance",
    ),
}  # fmt: skip


@functools.cache
def of_faulty(make: Callable[[], Problem]) -> tuple[ScoreCheck, str]:
    """Check the scores with each of a problem's faults, and show the check."""
    problem = make()
    planted = {name: plant(problem) for name, (plant, _, *own) in FAULTS.items() if [make] == (own or [classes])}
    check = problem.check(planted)
    return check, " ".join(str(check).split())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    _, words, *others = FAULTS[name]
    check, text = of_faulty(*(others or [classes]))
    findings = check.systems[name].findings
    assert re.search(words, " ".join(findings)), findings
    assert all(found in text for found in findings)


def of_queries(values: Tensor, queries: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    return values.index_copy(0, torch.tensor(queries), change(values[queries]))


def noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype) * like.std()


def test_wrong_queries_among_sound_ones_are_named() -> None:
    problem = classes()
    others = problem.asked | {"classes": (problem.asked["classes"] + 1) % 3}
    wrong = {
        "contributions": epk.attribute(problem.run, problem.X, **others).samples[:, 0],
        "derivatives": epk.influence(problem.run, problem.X, **others).values[:, 0],
    }
    planted, words = dict[str, Tensor](), dict[str, str]()
    for kind, of_wrong_classes in wrong.items():
        sound = getattr(problem, kind)
        for queries in ([3], [3, 5, 6]):
            named = ", ".join(f"#{q}" for q in queries)
            is_none, is_scaled = f"Queries {named} are not the exact {kind}", f"scale is off: queries {named} are"
            faults: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
                "random": (noise, is_none),
                "wrong class": (lambda s, own=of_wrong_classes, queries=queries: own[queries], is_none),
                "samples shuffled": (lambda s: s[:, order(problem)], is_none),
                "turned": (lambda s: -s, f"{is_scaled} -1 times the exact {kind}"),
                "times 3": (lambda s: 3 * s, f"{is_scaled} 3 times the exact {kind}"),
            }
            for name, (change, said) in faults.items():
                planted[f"{name}, {kind} {named}"] = of_queries(sound, queries, change)
                words[f"{name}, {kind} {named}"] = said
        planted[f"swapped {kind}"] = sound[[0, 1, 2, 5, 4, 3, 6, 7]]
    planted["half"] = of_queries(problem.derivatives, [0, 2, 4, 6], torch.neg)
    check = problem.check(planted)
    for name, said in words.items():
        found = " ".join(check.systems[name].findings)
        assert said in found, (name, found)
        assert "out of order" not in found
    for kind in wrong:
        swapped = check.systems[f"swapped {kind}"].findings
        assert "The queries look out of order: 2 of 8" in " ".join(swapped)
        assert not [found for found in swapped if "samples" in found]
    assert check.systems["half"].nearest == "derivatives"  # half of the queries turned leave the kind as it is
    half = " ".join(check.systems["half"].findings)
    assert "queries #0, #2, #4, #6 are -1 times the exact derivatives" in half


def test_a_right_sum_does_not_make_contributions() -> None:
    problem = classes()
    noisy = noise(problem.contributions)
    found = problem.check(problem.contributions + noisy - noisy.mean(dim=1, keepdim=True)).findings
    assert len(found) == 1
    assert re.search(
        "not the exact contributions.*cosine 0.[5-8].*their sum is right: another path, or a fault", found[0]
    )


def test_scores_in_order_are_not_called_out_of_order() -> None:
    torch.manual_seed(0)
    net, X = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.randn(100, 4).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    run = epk.train(net, X, X[:, :1].sin(), optimizer=optimizer, steps=10, batch_size=50, loss=nn.MSELoss())
    far, near = X[:8] + 0.3, X[:1] + 1e-3 * torch.randn(3, 4).double()
    factors = torch.exp(0.4 * torch.randn(100).double())
    for inputs in (far, near):
        exact = {"a": epk.attribute(run, inputs).samples[:, 0], "b": epk.influence(run, inputs).values[:, 0]}
        scores = {f"{name}, scaled by sample": values * factors for name, values in exact.items()}
        half = torch.randperm(100)[:50]
        scores |= {f"{name}, half of it 0": values.index_fill(1, half, 0.0) for name, values in exact.items()}
        check = epk.check_scores(run, scores, inputs, **QUIET)
        assert not [found for found in check.findings if "out of order" in found]
        assert all(each.findings for each in check.systems.values())
        shuffled = epk.check_scores(run, {k: s[:, torch.randperm(100)] for k, s in exact.items()}, inputs, **QUIET)
        assert sum("samples look out of order" in found for found in shuffled.findings) == 2


def test_exact_scores_of_equal_queries_pass_and_one_sample_is_refused() -> None:
    run, X = classes().run, classes().X[[0, 0]]
    scores = {"a": epk.attribute(run, X).samples, "b": epk.influence(run, X).values}
    assert epk.check_scores(run, scores, X, **QUIET).findings == ()
    net = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    X, y = torch.ones(1, 2).double(), torch.zeros(1, dtype=torch.int64)
    run = epk.train(net, X, y, optimizer=optimizer, steps=3, batch_size=1, loss=epk.CrossEntropy())
    with pytest.raises(ValueError, match="trajectory.num_points must be at least 2: got 1"):
        epk.check_scores(run, torch.zeros(1, 2, 1), X, **QUIET)


def test_with_weight_decay_sums_are_compared_with_those_of_exact_contributions() -> None:
    torch.manual_seed(0)
    net, X = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), torch.randn(30, 4).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.3)
    run = epk.train(net, X, X[:, :1].sin(), optimizer=optimizer, steps=20, batch_size=15, loss=nn.MSELoss())
    exact = epk.attribute(run, X[:5]).samples[:, 0]
    check = epk.check_scores(run, {"exact": exact, "twice": 2 * exact}, X[:5], **QUIET)
    assert float(check.systems["exact"].miss.norm() / check.change.norm()) > 0.1
    assert check.systems["exact"].findings == ()
    k = int(exact.sum(dim=1).abs().argmax())
    total = float(exact[k].sum())
    words = (
        f"miss those of exact contributions by 1 times their size (query {k}: {2 * total:.4g} instead of {total:.4g})"
    )
    assert words in check.systems["twice"].findings[0]


def test_sums_are_not_held_against_scores_that_are_derivatives() -> None:
    problem = classes()
    shifted = problem.check(problem.derivatives.roll(1, 1)).findings
    assert not [found for found in shifted if "sums" in found]
    alone = " ".join(problem.check(problem.derivatives, derivatives=False).findings)
    assert "no contributions" not in alone


def test_what_was_not_compared_is_said() -> None:
    run, scores = LOOP.record(), torch.randn(SHAPE, dtype=torch.float64)
    options = QUIET | {"contributions": False, "derivatives": False}
    assert "No fault was found" not in str(epk.check_scores(run, scores, LOOP.test_points, **options))
    assert "Nothing exact was compared." in str(epk.check_scores(run, scores, LOOP.test_points, **options))
    few = epk.check_scores(run, scores, LOOP.test_points, **options | {"retrainings": 2, "left_out": 2})
    assert few.notes == tuple(
        f"{name}: 2 of 2 networks have finite outputs; 3 are needed." for name in ("LDS", "left out")
    )


def test_networks_that_diverge_and_numbers_that_are_not_finite_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(compute: Any, field: str) -> Any:
        def spoiled(*args: Any, **options: Any) -> Any:
            found = compute(*args, **options)
            values = getattr(found, field).clone()
            values[0, ..., 0] = float("nan")
            return replace(found, **{field: values})

        return spoiled

    run, scores = LOOP.record(), torch.randn(SHAPE, dtype=torch.float64)
    monkeypatch.setattr(score_check, "influence", broken(score_check.influence, "values"))
    outputs = score_check.Retraining.outputs
    monkeypatch.setattr(
        score_check.Retraining, "outputs",
        lambda *args, **options: outputs(*args, **options).index_fill(0, torch.tensor([1]), float("nan")),
    )  # fmt: skip
    check = epk.check_scores(run, scores, LOOP.test_points, **QUIET | {"retrainings": 5})
    assert list(check.references) == ["exact contributions"]
    assert check.notes == (
        "derivatives: not compared, because they are not finite.",
        "LDS: 4 of 5 networks have finite outputs; 3 are needed.",
    )  # fmt: skip


def test_samples_that_no_step_saw_have_no_scores() -> None:
    X, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(X[:6]), y[:6]).backward()
            recorder.batch(torch.arange(6))
            optimizer.step()
    run = recorder.trajectory
    scores = epk.attribute(run, X[:3]).samples
    assert epk.check_scores(run, scores, X[:3], **QUIET).findings == ()
    scores[:, :, 6] = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2) * scores.abs().max()
    found = epk.check_scores(run, scores, X[:3], **QUIET).findings
    assert found[0].startswith("Nothing was learned from samples #6, which have scores")


def test_likeness_is_that_of_scipy_query_by_query() -> None:
    problem = classes()
    like = problem.check(problem.derivatives).systems["scores"].likeness["contributions"]
    for q, (a, b) in enumerate(zip(problem.derivatives, problem.contributions, strict=True)):
        slope = float(a @ b / (b @ b))
        expected = {
            "pearson": pearsonr(a, b).statistic, "spearman": spearmanr(a, b).statistic, "slope": slope,
            "cosine": float(F.cosine_similarity(a, b, dim=0)), "sign": float((a.sign() == b.sign()).double().mean()),
            "error": float((a - slope * b).norm() / (slope * b).norm()),
        }  # fmt: skip
        assert {name: float(like[name][q]) for name in expected} == pytest.approx(expected)


LOOP = WeightedLoop(lambda p: torch.optim.AdamW(p, lr=0.05))
SHAPE = 3, CLASSES, POINTS


def test_retraining_says_what_a_plain_loop_says() -> None:
    run, answers, scores = LOOP.record(), torch.tensor([0, 2, 1]), torch.randn(SHAPE[0], POINTS, dtype=torch.float64)
    options = {"retrainings": 12, "left_out": POINTS, "removals": 2, "share": 0.75, "seed": 7}
    check = epk.check_scores(run, scores, LOOP.test_points, classes=answers, **options)
    found, every = check.systems["scores"], LOOP.outputs(torch.ones(POINTS, dtype=torch.float64))

    def outcome(weights: Tensor) -> Tensor:
        return LOOP.outputs(weights)[torch.arange(3), answers]

    subsets = random_subsets(POINTS, 12, share=0.75, seed=7)
    after = torch.stack([outcome(subset) for subset in subsets])
    lds = [spearmanr((subsets @ s).numpy(), after[:, q].numpy()).statistic for q, s in enumerate(scores)]
    assert found.lds.per_point.tolist() == pytest.approx(lds)
    low, high = found.lds_interval
    assert -1 <= low < found.lds.mean < high <= 1
    ones = torch.ones(POINTS, dtype=torch.float64)
    full = outcome(ones)
    effects = torch.stack([full - outcome(ones.index_fill(0, torch.tensor([i]), 0.0)) for i in range(POINTS)])
    left_out = [spearmanr(s.numpy(), effects[:, q].numpy()).statistic for q, s in enumerate(scores)]
    assert found.left_out.per_point.tolist() == pytest.approx(left_out)
    for q in range(2):
        top = scores[q].topk(POINTS // 2)  # 10 are more than half of them
        assert float(found.predicted[q]) == pytest.approx(-float(top.values.sum()))
        measured = outcome(ones.index_fill(0, top.indices, 0.0))[q] - full[q]
        assert float(found.measured[q]) == pytest.approx(float(measured))
    assert every.shape == (3, CLASSES)
    assert list(check.costs) == ["contributions", "derivatives", "LDS", "left out", "top 10"]
    assert all(cost.seconds > 0 and cost.trainings > 0 for cost in check.costs.values())
    again = epk.check_scores(run, scores, LOOP.test_points, classes=answers, **options)
    assert again.systems["scores"].lds_interval == found.lds_interval


def test_each_check_is_left_out_on_request_and_several_systems_stand_in_one_table() -> None:
    run, scores = LOOP.record(), torch.randn(SHAPE, dtype=torch.float64)
    check = epk.check_scores(run, scores, LOOP.test_points, contributions=False, derivatives=False, **QUIET)
    assert (check.costs, check.references, check.findings) == ({}, {}, ())
    exact = epk.influence(run, LOOP.test_points).values
    both = epk.check_scores(
        run, {"turned": -exact, "exact": exact}, LOOP.test_points, contributions=False, retrainings=8, left_out=4
    )
    assert list(both.references) == ["exact derivatives"]
    assert [found.partition(":")[0] for found in both.findings] == ["turned"]
    rows = shown(both)
    assert rows["exact"][0] == "No fault was found."
    assert rows["exact derivatives"][1:3] == ["–", "1.00 ×1"]
    low, high = both.systems["exact"].lds_interval
    assert f"{both.systems['exact'].lds.mean:.2f} [{low:.2f}, {high:.2f}]" in rows["exact"]
    assert both.systems["turned"].lds.mean == pytest.approx(-both.systems["exact"].lds.mean)
    assert both.systems["exact"].lds.mean > 0.7


def test_a_run_whose_loss_is_not_stated_is_judged_by_contributions_and_says_why_not_by_others() -> None:
    run = LOOP.record(loss=None)
    scores = epk.attribute(run, LOOP.test_points).samples
    check = epk.check_scores(run, scores, LOOP.test_points)
    assert (check.findings, list(check.references)) == ((), ["exact contributions"])
    assert [note.partition(":")[0] for note in check.notes] == ["derivatives", "LDS", "left out", "top 10"]


@pytest.mark.usefixtures("unchecked")
def test_scores_that_cannot_be_judged_are_refused_in_a_sentence() -> None:
    run, X, good = LOOP.record(), LOOP.test_points, torch.zeros(SHAPE)
    one = {"classes": torch.zeros(3, dtype=torch.int64)}
    for error, message, scores, options in (
        (ValueError, r"\(3, 3, 12\), or \(3, 12\) with classes= or function=: got \(3, 12\)", good[:, 0], {}),
        (ValueError, r"\(3, 12\): got \(12, 3\)", good[:, 0].T, one),
        (ValueError, r"\(3, 12\): got \(2, 12\)\.", good[:2, 0], one),
        (TypeError, "must be an unmasked array of real numbers: got str", "scores", one),
        (TypeError, "unmasked array of real numbers: got MaskedArray", np.ma.masked_less(good.numpy(), 1), {}),
        (TypeError, "unmasked array of real numbers: got list", good.numpy().astype(str).tolist(), {}),
        (TypeError, "unmasked array of real numbers: got list", [[[None] * 12] * 3] * 3, {}),
        (TypeError, "unmasked array of real numbers: got list", [[1.0], [1.0, 2.0]], {}),
        (TypeError, "unmasked array of real numbers: got Tensor", good + 1j, {}),
        (TypeError, "unmasked array of real numbers: got ndarray", good.numpy() + 1j, {}),
        (ValueError, "of one system at least, under names that differ: got \\[\\]", {}, one),
        (ValueError, r"under names that differ: got \[1, '1'\]", {1: good, "1": good}, {}),
        (ValueError, "retrainings must be at least 0: got -1", good, {"retrainings": -1}),
        (TypeError, "seed must be a whole number", good, {"seed": 0.5}),
        (TypeError, "unexpected keyword argument 'checkpoint'", good, {"checkpoint": "folder"}),
        (ValueError, "must not be given together", good, one | {"function": lambda z: z[:, 0]}),
        (ValueError, "X must have shape", good, {"X": X[:, :2]}),
    ):
        with pytest.raises(error, match=message):
            epk.check_scores(run, scores, options.pop("X", X), **{**QUIET, **options})

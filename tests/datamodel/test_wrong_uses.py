"""What a datamodel cannot take is refused in one sentence, which says what must hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datamodel_cases import Loop, mlp, vectors

import epk_gp as epk
from helpers import refusal

LOOP = Loop()
X, Y = LOOP.asked
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("unchecked")


def by_matrices() -> epk.Trajectory:
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=False)
    net = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Muon(net.parameters())
    return epk.train(net, vectors(11), torch.arange(11) % 3, optimizer=optimizer, steps=8, unexplained=0.5)


def asked(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: epk.datamodel(*args, **options)


RUN = LOOP.run
QUESTIONS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no y": (asked(RUN, X), ValueError, "y must have the class of each input"),
    "y out of range": (asked(RUN, X, Y + 1), ValueError, r"y must lie in 0\.\.2: got 1\.\.3"),
    "too few y": (asked(RUN, X, Y[:2]), ValueError, r"y must have one entry per point: got shape \(2,\) for 4"),
    "y of two dimensions": (asked(RUN, X, Y[:, None]), ValueError, "y must"),
    "y of floats": (asked(RUN, X, Y.double()), TypeError, "y must be class indices"),
    "y as a list": (asked(RUN, X, Y.tolist()), TypeError, "y must be a torch.Tensor"),
    "y and a function": (asked(RUN, X, Y, function=lambda z: z[:, 0]), ValueError, "must not be given together"),
    "head and a function": (
        asked(RUN, X, head="logits", function=lambda z: z[:, 0]), ValueError, "must not be given together",
    ),
    "another head": (asked(RUN, X, classes=Y, head="softmax"), ValueError, "head must be one of"),
    "a function of all rows": (
        asked(RUN, X, function=lambda z: z / z.sum()), ValueError, "function must map each row of outputs by itself",
    ),
    "a function of no kind": (asked(RUN, X, function="margin"), TypeError, "function must map"),
    "other inputs": (asked(RUN, X[:, :3], Y), ValueError, r"X must have shape \(n, 4\)"),
    "inputs with NaN": (asked(RUN, X.where(X < 1, NAN), Y), ValueError, "X must be finite"),
    "no inputs": (asked(RUN, X[:0], Y[:0]), ValueError, "X must hold at least one point"),
    "no run at all": (asked([], X, Y), (TypeError, ValueError), "run"),
    "an unknown head beside y": (asked(RUN, X, Y, head="softmax"), ValueError, "head|y"),
    "a head beside y": (asked(RUN, X, Y, head="logits"), ValueError, "head|y"),
    "classes beside y": (asked(RUN, X, Y, classes=Y.flip(0)), ValueError, "classes|y"),
    "no run": (asked(None, X, Y), TypeError, "trajectory must be an epk_gp.Trajectory: got NoneType"),
    "a network": (asked(mlp(), X, Y), TypeError, "trajectory must be an epk_gp.Trajectory"),
    "a run and none": (asked([RUN, None], X, Y), TypeError, "trajectory must be an epk_gp.Trajectory: got NoneType"),
    "a loss that is not stated": (
        asked(Loop(options={"loss": None}).run, X, Y), ValueError, "needs the loss as a function of the outputs",
    ),
    "five steps": (asked(Loop(steps=5).run, X, Y), ValueError, "6 steps at least.* got a run of 5"),
    "steps of matrices": (
        lambda: epk.datamodel(by_matrices(), X, Y),
        ValueError, "one number for each weight: those of Muon have matrices",
    ),
    "too small a budget": (asked(RUN, X, Y, memory_budget=1000), ValueError, "memory_budget must be at least 1 MiB"),
    "two pairs": (asked(RUN, X, Y, pairs=2), ValueError, "pairs must be at least 3: got 2"),
    "half a pair": (asked(RUN, X, Y, pairs=3.5), TypeError, "pairs must be a whole number"),
    "a seed of no kind": (asked(RUN, X, Y, seed="one"), TypeError, "seed must be a whole number"),
    "another option": (asked(RUN, X, Y, nodes=6), TypeError, "argument 'nodes'. It takes memory_budget, progress"),
    "derivatives of several runs": (
        asked([RUN, RUN], X, Y, derivative=True), ValueError, "derivative must be of one run",
    ),
    "a derivative of no kind": (
        asked(RUN, X, Y, derivative=torch.zeros(4, 11)), TypeError, "must be what epk_gp.influence returned, or True",
    ),
    "derivatives of all outputs": (
        lambda: epk.datamodel(RUN, X, Y, derivative=epk.influence(RUN, X)),
        ValueError, r"derivative must be of the same 4 numbers and 11 samples: got values \(4, 3, 11\)",
    ),
    "derivatives of another class": (
        lambda: epk.datamodel(RUN, X, classes=Y, derivative=epk.influence(RUN, X, classes=Y.flip(0))),
        ValueError, "derivative must be of the same 4 numbers",
    ),
    "derivatives of another run": (
        lambda: epk.datamodel(RUN, X, classes=Y, derivative=epk.influence(Loop(steps=60).run, X, classes=Y)),
        ValueError, "derivative must be of the same 4 numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "message"), QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_question_that_cannot_be_answered_is_refused(ask, error, message):
    assert refusal(error, message, ask) is None


ONE = torch.ones(11)
KEPT: dict[str, tuple[Any, type[Exception], str]] = {
    "too few": (ONE[:10], ValueError, r"kept must have one entry per sample, \(11,\) or \(s, 11\): got shape \(10,\)"),
    "three dimensions": (torch.ones(2, 3, 11), ValueError, r"kept must have one entry per sample.*\(2, 3, 11\)"),
    "complex": (torch.ones(11, dtype=torch.complex64), TypeError, "kept"),
    "a number": (torch.tensor(1.0), ValueError, "kept must have one entry per sample"),
    "below 0": (-ONE, ValueError, "kept must be booleans, or weights >= 0: got -1"),
    "NaN": (ONE * NAN, ValueError, "kept must be finite"),
    "a list": ([True] * 11, TypeError, "kept must be a torch.Tensor: got list"),
    "none": (None, TypeError, "kept must be a torch.Tensor"),
}


@pytest.mark.parametrize("method", ["predict", "verify"])
@pytest.mark.parametrize(("kept", "error", "message"), KEPT.values(), ids=KEPT.keys())
def test_what_is_no_subset_is_refused(method: str, kept: Any, error: type[Exception], message: str) -> None:
    assert refusal(error, message, getattr(LOOP.model, method), kept) is None


TOP: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no such question": ((4, 1), ValueError, "there must be such a question and so many samples: got 4 of 4, 1 of 11"),
    "too many samples": ((0, 12), ValueError, "so many samples: got 0 of 4, 12 of 11"),
    "a question from the end": ((-1, 1), ValueError, "question must be at least 0"),
    "no sample": ((0, 0), ValueError, "k must be at least 1"),
    "half a question": ((0.5, 1), TypeError, "question must be a whole number"),
}


@pytest.mark.parametrize(("args", "error", "message"), TOP.values(), ids=TOP.keys())
def test_top_samples_that_there_are_not_are_refused(args, error, message):
    assert refusal(error, message, LOOP.model.top, *args) is None

"""The adjoint recursion: of every update rule, what per-sample buffers run forward give."""

from functools import partial

import moving_loops
import pytest
import torch
from moving_loops import MOVES, mlp, sgd
from optimizer_cases import OF_TORCH, OPTIONS, batches, newton_schulz, optimizer_for, problem, recorded, zero_matrices
from path_shares import assert_are_shares, shares
from torch import Tensor

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine.adjoint import AdjointTerms, StepBack, decay_buffers, propagate
from epk_gp.kernel_machine.axes import by_sample, by_step
from epk_gp.optimizers.update_rules import (
    LinearStep,
    SecondBuffer,
    UpdateCoefficients,
    apply_matrices,
    predict_step,
    second_coefficients,
    stack_coefficients,
)
from loops import record

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
LARGEST = {"Adadelta": {"lr": 1.0}, "ASGD": {"lr": 0.1, "lambd": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}}


def random_steps(count: int, sizes: tuple[int, ...]) -> list[UpdateCoefficients]:
    """Coefficients of all kinds, with a matrix on either side, per weight and per parameter."""

    def linear(k: int) -> LinearStep:
        numbers = {name: torch.rand(sizes[k]).double() for name in ("lr", "beta", "one_minus_dampening")}
        left = torch.randn(2, 2).double() if k == 1 else None
        right = torch.randn(3, 3).double() if k < 2 else None
        inner = torch.randn(2, 2).double() if k == 1 else None
        second = SecondBuffer(*torch.rand(4), torch.rand(sizes[k])) if k > 0 else None
        matrices = {"left": left, "right": right, "inner_left": inner, "inner_right": right, "second": second}
        return LinearStep(momentum_lr=float(torch.rand(())), **matrices, **numbers)

    return [stack_coefficients([linear(k) for k in range(len(sizes))], sizes) for _ in range(count)]


def inner_products(updates: list[UpdateCoefficients], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """sum_s <Phi_s, step s> by the steps forward, and by the adjoints backward, for random Phi and gradients."""
    P, w = sum(sizes), torch.randn(sum(sizes)).double()
    Phi, g = torch.randn(len(updates), 1, 1, P).double(), torch.randn(len(updates), P).double()
    forward, backward, m, carried = torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros(P).double(), {}
    for s, u in enumerate(updates):
        d, m = predict_step(u, sizes, w, g[s], m)
        forward += Phi[s, 0, 0] @ d
    for s in reversed(range(len(updates))):
        carried = carried or {name: torch.zeros(1, P).double() for name in ("momentum", "second")}
        H, scale, N = propagate(updates[s], sizes, Phi[s, 0], carried)
        backward -= scale * (H[0] @ g[s])
        if N is not None:
            backward -= N[0] @ (second_coefficients(updates[s], sizes, w)[-1] * w)
        decay_buffers(updates[s], sizes, carried)
    return forward, backward


def test_the_recursion_is_the_transpose_of_the_steps(monkeypatch):
    sizes, module = (9, 6, 5), "epk_gp.kernel_machine.adjoint.apply_matrices"
    forward, backward = inner_products(random_steps(6, sizes), sizes)
    torch.testing.assert_close(forward, backward, rtol=1e-13, atol=1e-13)
    monkeypatch.setattr(module, lambda u, sizes, v, **_: apply_matrices(u, sizes, v))  # the control: not transposed
    forward, backward = inner_products(random_steps(6, sizes), sizes)
    assert abs(forward - backward) > 0.1 * abs(forward)


def points(name: str) -> Tensor:
    return torch.randint(0, 9, (2, 3)) if name == "SparseAdam" else torch.randn(2, 4).double()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name in OF_TORCH])
def test_contributions_are_those_of_per_sample_buffers_and_sum_to_the_network(name, monkeypatch):
    if name == "Muon":  # without the rounding of bfloat16, whose share is a term of its own
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    net, X, y = problem(name)
    decay = {} if name in ("SparseAdam", "Rprop") else {"weight_decay": 0.1}
    options = decay | LARGEST.get(name, {})
    unexplained = 0.5 if name == "Muon" else None
    run = record(net, optimizer_for(name, options, net), X, y, batches(2), unexplained=unexplained).trajectory
    assert_are_shares(run, points(name), shares(run))


def of_optimizer(name: str) -> epk.Trajectory:
    net, X, y = problem(name)
    return recorded(net, [optimizer_for(name, {}, net)], X, y, batches(3))[0]


def averaged() -> epk.Trajectory:
    run = of_optimizer("NAdam")
    return averaged_trajectory(run, averaging_coefficients(run.num_steps, decay=0.8))


TOGETHER = {
    **{name: partial(of_optimizer, name) for name in ("AdamW", "Adafactor", "Muon")},
    **{name: partial(lambda move: moving_loops.run(mlp, sgd, move)[0].trajectory, MOVES[name]) for name in MOVES},
    "averaged": averaged,
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")  # Muon rounds to bfloat16
def test_steps_of_a_chord_that_go_back_together_add_what_they_add_alone(name, monkeypatch):
    torch.manual_seed(0)
    run, sizes, found = TOGETHER[name](), [], []
    X, real = points(name), AdjointTerms._go_back
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: 1)  # else they go back together whatever has room
    monkeypatch.setattr(AdjointTerms, "_go_back", lambda *args: sizes.append(len(args[2])) or real(*args))
    for kept in (StepBack.nbytes, 1 << 40):  # the second leaves no room for a step beside another
        monkeypatch.setattr(StepBack, "nbytes", kept)
        found.append(epk.attribute(run, X, by=[by_sample(run), by_step(run)], path=epk.chords(4), head="logits"))
    assert max(sizes) > 1 == sizes[-1]
    for own in ("values", "decay", "unexplained", "statistics"):
        assert torch.equal(*(getattr(parts, own) for parts in found)), own


def test_left_out_matrices_are_seen():
    """The control: with the identity in the place of Muon's matrices nothing sums to the network."""
    net, X, y = problem("Muon")
    run, _ = recorded(net, [optimizer_for("Muon", {}, net)], X, y, batches(1))
    without = epk.Trajectory(**{**vars(run), "updates": tuple(map(zero_matrices, run.updates)), "unexplained": None})
    with pytest.warns(epk.CertificateWarning):
        assert epk.attribute(without, points("Muon"), head="logits").max_error > 1e-3

"""Contributions of loss terms: those of per-term gradients pushed through AdamW by hand; interrupted passes go on."""

import copy
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from path_runs import queries, recorded
from text_shapes import cut_outcome, draw_cut
from torch import nn
from torch.nn import functional as F
from weighted_loops import WeightedLoop

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine import adjoint
from epk_gp.kernel_machine.influence_pass import InfluenceWork
from epk_gp.kernel_machine.loss_products import LossProducts

WORDS, T, WIDTH, RULE = 7, 5, 8, epk.gauss_legendre(2)
LR, DECAY, EPS, BETAS = 0.02, 0.1, 1e-4, (0.9, 0.99)


class Small(nn.Module):
    """One block of causal attention over embedded words and places."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(T, WIDTH)
        self.mix, self.norm, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(rate)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = self.mix(self.norm(x)).split(WIDTH, dim=2)
        x = x + self.drop(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        return x @ self.words.weight.T


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def trained(rate=0.0, steps=4):
    """A recorded run, and of each step: weights before it, batch, and the gradients of all loss terms, (B, T, P)."""
    torch.manual_seed(0)
    net, tokens = Small(rate).double().train(), torch.randint(WORDS, (8, T + 1))
    X, Y = tokens[:, :-1], tokens[:, 1:].clone()
    Y[1, :2] = -100
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY, eps=EPS, betas=BETAS)
    recorder, made = epk.Recorder(net, optimizer, X, Y, loss=epk.CrossEntropy(), output=lambda z: z[:, -1]), []
    with recorder:
        for step in range(steps):
            batch = torch.tensor([[0, 1, 2], [3, 1, 1], [4, 0, 5], [6, 7, 1]][step % 4])
            before, numbers = copy.deepcopy(net), torch.random.get_rng_state()
            loss = F.cross_entropy(net(X[batch]).transpose(1, 2), Y[batch])
            optimizer.zero_grad()
            loss.backward()
            recorder.batch(batch)
            optimizer.step()
            after = torch.random.get_rng_state()
            torch.random.set_rng_state(numbers)
            terms = F.cross_entropy(before(X[batch]).transpose(1, 2), Y[batch], reduction="none")
            terms, leaves = terms / (Y[batch] != -100).sum(), list(before.parameters())
            rows = [flat(torch.autograd.grad(term, leaves, retain_graph=True)) for term in terms.flatten()]
            made.append((flat(leaves), batch, torch.stack(rows).view(3, T, -1)))
            torch.random.set_rng_state(after)
    return recorder.trajectory, net.eval(), made


def answered(net, w, X, answers):
    """Log-probabilities of answers, and their gradients."""
    net = copy.deepcopy(net)
    torch.nn.utils.vector_to_parameters(w, net.parameters())
    values = net(X)[:, -1].log_softmax(dim=1)[torch.arange(len(X)), answers]
    return [flat(torch.autograd.grad(value, list(net.parameters()), retain_graph=True)) for value in values]


def by_hand(net, made, X, answers):
    """The share of every loss term of every sequence in each answer: (n, M, T)."""
    states = [w for w, _, _ in made] + [flat(net.parameters())]
    result, P = torch.zeros(len(X), 8, T, dtype=torch.float64), len(states[0])
    m, v = torch.zeros(8, T, P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64)
    for s, (w, batch, gradients) in enumerate(made):
        own = torch.zeros_like(m).index_add_(0, batch, gradients)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * own, BETAS[1] * v + (1 - BETAS[1]) * own.sum(dim=(0, 1)).square()
        scale = LR / (1 - BETAS[0] ** (s + 1)) / ((v / (1 - BETAS[1] ** (s + 1))).sqrt() + EPS)
        for t, weight in RULE:
            for n, slope in enumerate(answered(net, w + t * (states[s + 1] - w), X, answers)):
                result[n] -= weight * m @ (scale * slope)
    return result


TEST, ANSWERS = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 0, 2]]), torch.tensor([3, 0])


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_terms_are_those_pushed_through_the_optimizer_by_hand(rate):
    run, net, made = trained(rate)
    expected = by_hand(net, made, TEST, ANSWERS)
    function = epk.RowFunction.log_probability(ANSWERS)
    asked = epk.attribute(run, TEST, function=function, rule=RULE)
    torch.testing.assert_close(asked.samples[:, 0], expected.sum(dim=2), rtol=1e-11, atol=1e-13)
    sequences = asked.top(3)
    found = epk.attribute_tokens(run, TEST, function=function, rule=RULE, sequences=sequences)
    assert found.certified == asked.certified
    assert found.tokens.shape == (2, 1, 3, T)
    chosen = expected.gather(1, sequences[:, 0, :, None].expand(-1, -1, T))
    torch.testing.assert_close(found.tokens[:, 0], chosen, rtol=1e-11, atol=1e-13)
    assert (found.tokens[:, 0] - chosen.roll(1, dims=2)).abs().max() > 0.1 * chosen.abs().max()  # the control
    assert found.tokens_error < 1e-13
    torch.testing.assert_close(found.samples, asked.samples, rtol=1e-12, atol=1e-14)
    shared = epk.attribute_tokens(run, TEST, function=function, rule=RULE, sequences=torch.tensor([1, 5]))
    torch.testing.assert_close(shared.tokens[:, 0], expected[:, [1, 5]], rtol=1e-11, atol=1e-13)
    assert shared.tokens[0, 0, 0, :2].eq(0).all()  # targets that are left out
    assert "largest tokens" in str(shared)


def test_outputs_apart_and_adjoints_in_a_file_give_the_same(monkeypatch):
    run, _, _ = trained()
    ask = {"rule": RULE, "sequences": torch.tensor([[0, 1], [2, 6]])}
    whole = epk.attribute_tokens(run, TEST, **ask)
    assert whole.tokens.shape == (2, WORDS, 2, T)
    monkeypatch.setattr("epk_gp.core.plans.MemoryPlan.adjoint_points", lambda *_: 0)
    mapped, made = adjoint.rows_of_weights, []
    monkeypatch.setattr(adjoint, "rows_of_weights", lambda *args: made.append(args[0] > args[3]) or mapped(*args))
    apart = epk.attribute_tokens(run, TEST, **ask)
    assert all(made)
    torch.testing.assert_close(apart.tokens, whole.tokens, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(apart.samples, whole.samples, rtol=1e-12, atol=1e-14)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))  # where writing would end the process
    with pytest.raises(OSError, match="set TMPDIR to a folder with more"):
        epk.attribute_tokens(run, TEST, **ask)


def test_terms_that_miss_their_sequence_are_a_finding(monkeypatch):
    run, _, _ = trained()
    real = LossProducts.of_targets
    monkeypatch.setattr(LossProducts, "of_targets", lambda *args: real(*args) * (1 + 1e-6))
    with pytest.warns(epk.CertificateWarning, match="the terms of a sequence miss its contribution"):
        found = epk.attribute_tokens(run, TEST, sequences=torch.tensor([0]))
    assert not found.certified


def test_what_has_no_known_terms_is_refused():
    run, net, _ = trained(steps=1)
    for wrong, error in (([0], TypeError), (torch.tensor([8]), ValueError), (torch.zeros(3, 1).long(), ValueError)):
        with pytest.raises(error, match="sequences must be"):
            epk.attribute_tokens(run, TEST, sequences=wrong)
    X, y = torch.randn(4, 3).double(), torch.arange(4) % 2
    net = nn.Linear(3, 2).double()
    other = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), steps=1)
    with pytest.raises(ValueError, match="a sum over the targets of a sequence"):
        epk.attribute_tokens(other, X, sequences=torch.tensor([0]))


@pytest.mark.parametrize("seed", [2, 11, *(pytest.param(k, marks=pytest.mark.slow) for k in range(12, 40, 2))])
@pytest.mark.filterwarnings("ignore:rows could not be matched with X")  # where the loop hides words of so few rows
def test_words_of_a_cut_batch_stand_where_its_inputs_are(seed):
    """Whatever the loop's targets are; refused where each text has other words than X, and no mask tells."""
    case = draw_cut(seed)
    found = cut_outcome(case)
    assert found == ("refused" if case.may_be_refused else "right"), case


LOOP = WeightedLoop(lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3))
ASKED = {"rule": RULE, "sequences": torch.tensor([0, 1]), "function": epk.RowFunction.log_probability(ANSWERS)}
STEP, BACK = (adjoint, "propagate_step"), (InfluenceWork, "_back")


def average():
    return averaged_trajectory(run := recorded("tanh_momentum"), averaging_coefficients(run.num_steps, decay=0.8))


# A call, what it does at each step of a block of points, and at which of these calls it is interrupted.
CHORDS = lambda **o: epk.attribute(recorded("tanh_momentum"), queries(), path=epk.chords(2), **o)  # noqa: E731
PASSES = {
    "momentum": (lambda **o: epk.attribute(recorded("tanh_momentum"), queries(), **o), STEP, 3),
    "within a chord": (CHORDS, STEP, 3),
    "both adjoints of an average": (lambda **o: epk.attribute(average(), queries(), **o), STEP, 3),
    "outputs apart, second block": (lambda **o: epk.attribute(recorded("tanh_momentum"), queries(2), **o), STEP, 7),
    "lines together": (CHORDS, STEP, 4),
    "terms of sequences": (lambda **o: epk.attribute_tokens(trained()[0], TEST, **ASKED, **o), STEP, 3),
    "influence": (lambda **o: epk.influence(LOOP.record(), LOOP.test_points, **o), BACK, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_an_interrupted_pass_goes_on_where_it_was(name, tmp_path, monkeypatch):
    call, (owner, function), last = PASSES[name]
    real, made, left = getattr(owner, function), [], [last]

    def counted(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        made.append(args)
        return real(*args)

    if "apart" in name:
        monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)
        monkeypatch.setattr("epk_gp.kernel_machine.attribute.MAPPED_ADJOINTS", 0)
    if "within" in name:
        monkeypatch.setattr(adjoint.StepBack, "nbytes", 1 << 40)  # no two steps go together
    num_lines = 2 if "lines" in name else 1
    monkeypatch.setattr(MemoryPlan, "lines_together", lambda *_: num_lines)
    monkeypatch.setattr("epk_gp.storage.files.SECONDS", 0)
    whole = call()
    monkeypatch.setattr(owner, function, counted)
    with pytest.raises(KeyboardInterrupt):
        call(checkpoint=tmp_path)
    resumed = call(checkpoint=tmp_path)
    together = len(made)
    made.clear()
    call()
    assert together - len(made) in range(2 * num_lines - 1)  # each step once, before and after, or those of some lines
    for field in fields(whole):
        a, b = getattr(whole, field.name), getattr(resumed, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else field.name == "axes" or a == b, field.name

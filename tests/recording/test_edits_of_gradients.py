"""What a loop does to its gradients is recorded as a factor and a decay of each parameter, exactly, or refused."""

from itertools import product
from types import SimpleNamespace

import library_cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import epk_gp as epk
import reference
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue
from loops import assert_exact as assert_terms_are_exact
from loops import record, sgd

POINTS, STEPS, SEED = 9, 6, torch.Generator().manual_seed(4)
X, TEST = (torch.randn(n, 4, generator=SEED, dtype=torch.float64) for n in (POINTS, 2))
Y = torch.arange(POINTS) % 3


def mlp(dtype=torch.float64, *, zero_bias=False):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    for bias in (net[0].bias, net[2].bias) if zero_bias else ():
        nn.init.zeros_(bias)
    return net


def normalised():
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.02),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1),
}


def squares(rate, part=lambda net: net.parameters()):
    return lambda net, step: rate * sum(p.square().sum() for p in part(net))


def weights(net):
    return [p for p in net.parameters() if p.ndim > 1]


# What the loop adds to its loss, and which multiple of a parameter's weights that is in the gradient.
PENALTIES = {
    "none": (lambda net, step: 0.0, lambda p: 0.0),
    "all": (squares(0.03), lambda p: 0.06),
    "half": (squares(5e-3 / 2), lambda p: 5e-3),
    "weights": (squares(0.02, weights), lambda p: 0.04 * (p.ndim > 1)),
    "two rates": (
        lambda net, step: squares(0.02)(net[0], 0) + squares(1e-4)(net[2], 0),
        lambda p: 0.04 if 5 in p.shape[:1] else 2e-4,
    ),
    "long rate": (squares(0.0123456), lambda p: 0.0246912),
}


def each(change):
    return lambda net: [change(p) for p in net.parameters()]


def decayed(net, rate=0.03):
    for p in weights(net):
        p.grad += rate * p.detach()


def masked(net):
    net[0].weight.grad[:2] = 0
    net[2].weight.grad *= torch.arange(5) % 2


def together(*edits):
    return lambda net: [edit(net) for edit in edits]


norm, entries = (
    (lambda *bounds: lambda net: clip_grad_norm_(net.parameters(), *bounds)),
    (lambda bound: lambda net: clip_grad_value_(net.parameters(), bound)),
)
EDITS = {
    "norm": norm(0.3),
    "norm of many digits": norm(0.1234567),
    "largest": norm(0.0654321, float("inf")),
    "entries": entries(0.1),
    "clamped": each(lambda p: p.grad.data.clamp_(-0.0212345, 0.0212345)),
    "a layer": lambda net: clip_grad_norm_(net[2].parameters(), 0.15),
    "entries of a layer": lambda net: clip_grad_value_(net[0].parameters(), 0.0123),
    "each layer": lambda net: [clip_grad_norm_(layer.parameters(), 0.05) for layer in (net[0], net[2])],
    "adaptive": each(lambda p: p.grad.mul_((0.05 * p.detach().norm() / p.grad.norm()).clamp(max=1))),
    "normed": each(lambda p: p.grad.div_(p.grad.norm())),
    "scaled": each(lambda p: p.grad.mul_(3.7)),
    "masked": masked,
    "masked and clipped": together(masked, norm(0.3)),
    "without one": lambda net: setattr(net[2].weight, "grad", None),
    "penalty by hand": decayed,
    "penalty by its own backward pass": lambda net: squares(0.015, weights)(net, 0).backward(),
    "penalty by hand, norm": together(decayed, norm(0.3)),
    "penalty by hand, entries": together(decayed, entries(0.18)),
}


class Shares:
    """Each row's own backward pass, and the decay's part, times what the loop did to each entry of their sum."""

    def __init__(self, rate):
        self.rate, self.buffers, self.steps = rate, {}, []

    def look(self, net, batch):
        parameters = [*net.parameters()]
        self.start = [p.detach().clone() for p in parameters]
        self.gradients = [torch.zeros(POINTS + 1, *p.shape, dtype=p.dtype) for p in parameters]
        for i in batch:
            row = torch.autograd.grad(F.cross_entropy(net(X[i][None]), Y[i][None]) / len(batch), parameters)
            for g, own in zip(self.gradients, row, strict=True):
                g[i] += own
        for g, w, p in zip(self.gradients, self.start, parameters, strict=True):
            g[-1] = self.rate(p) * w
            g *= torch.where(g.sum(dim=0) == 0, 0, (0 if p.grad is None else p.grad) / g.sum(dim=0))

    def follow(self, net, optimizer):
        group, shares = SimpleNamespace(**optimizer.param_groups[0]), []
        rule = library_cases.adam if hasattr(group, "betas") else library_cases.sgd
        for k, (p, g, w) in enumerate(zip(net.parameters(), self.gradients, self.start, strict=True)):
            state, buffer = SimpleNamespace(**optimizer.state[p]), self.buffers.setdefault(k, {})
            shares.append((0 * g if p.grad is None else rule(g, w, group, None, state, buffer)).flatten(1))
        self.steps.append(torch.cat(shares, dim=1))


def trained(
    penalty=PENALTIES["none"][0], optimizer="sgd", net=None, edit=None, *, steps=STEPS, shares=None, by=(), scale=None,
    **options,
):  # fmt: skip
    """Record a loop whose loss holds a penalty, and which changes its gradients after the backward passes."""
    net = mlp() if net is None else net
    optimizer, inputs = OPTIMIZERS[optimizer](net), X.to(next(net.parameters()).dtype)
    draw = torch.Generator().manual_seed(5)
    with epk.Recorder(net, optimizer, inputs, Y, **options) as recorder:
        for step in range(steps):
            batch, factor = torch.randperm(POINTS, generator=draw)[:5], 1.0 if scale is None else scale(step)
            optimizer.zero_grad()
            parts = batch.split(by or 5)
            for number, rows in enumerate(parts):
                loss = F.cross_entropy(net(inputs[rows]), Y[rows]) * len(rows) / 5
                (factor * (loss + (penalty(net, step) if number == 0 else 0))).backward()
                recorder.batch(rows, weight=len(rows) / 5)
            for p in net.parameters() if scale is not None else ():
                p.grad /= factor  # as a GradScaler does
            if edit is not None:
                edit(net)
            if shares is not None:
                shares.look(net, batch)
            optimizer.step()
            if shares is not None:
                shares.follow(net, optimizer)
    return recorder


def assert_exact(run, shares, tolerance=1e-10):
    """The terms sum to the network, and agree with the shares of the steps along the path of the weights."""
    parts, rule = assert_terms_are_exact(run, TEST, tolerance=tolerance), epk.gauss_legendre(8)
    expected = torch.zeros(len(TEST), 3, POINTS + 1, dtype=torch.float64)
    for s, share in enumerate(shares.steps):
        for n, x in enumerate(TEST):
            expected[n] += sum(v * reference.jacobian(run, s, t, x, "logits") for t, v in rule) @ share.T
    assert (parts.samples - expected[:, :, :-1]).abs().max() < 1e-8
    assert (parts.decay - expected[:, :, -1]).abs().max() < 1e-8
    assert parts.unexplained.abs().max() < tolerance


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "optimizer"), [*product(PENALTIES, ["sgd"]), ("two rates", "adam"), ("weights", "adam"), ("all", "adamw")],
)  # fmt: skip
def test_a_penalty_is_the_term_decay_and_all_terms_are_those_of_brute_force(name, optimizer):
    penalty, rate = PENALTIES[name]
    shares = Shares(rate)
    run = trained(penalty, optimizer, shares=shares).trajectory
    assert_exact(run, shares)
    stated = 0.01 if optimizer == "sgd" else 0.0
    expected = torch.tensor([stated + rate(p) for p in mlp().parameters()], dtype=torch.float64)
    assert torch.allclose(run.updates[STEPS - 1].weight_decay, expected, rtol=1e-12, atol=1e-15)


def outputs_of(change, *, penalty, edit, sample=2):
    """Of a loop in plain torch, where one sample has another weight."""
    weights = torch.ones(POINTS).double().index_fill(0, torch.tensor(sample), 1 + change)
    net, draw = mlp(), torch.Generator().manual_seed(5)
    optimizer = OPTIMIZERS["sgd"](net)
    for step in range(STEPS):
        batch = torch.randperm(POINTS, generator=draw)[:5]
        optimizer.zero_grad()
        losses = F.cross_entropy(net(X[batch]), Y[batch], reduction="none")
        (weights[batch] @ losses / len(batch) + penalty(net, step)).backward()
        edit(net)
        optimizer.step()
    return net(TEST).log_softmax(dim=1).detach()


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
@pytest.mark.parametrize(
    ("edit", "penalty"), [*product(EDITS, ["none"]), *product(("norm", "entries", "adaptive", "masked and clipped",
    "without one", "penalty by hand, norm"), ["weights"])],
)  # fmt: skip
def test_every_edit_is_exact_in_steps_that_are_not_checked_too_and_influence_is_right_or_not_certified(edit, penalty):
    by_hand, (added, rate) = (0.03 if "penalty" in edit else 0.0), PENALTIES[penalty]
    shares = Shares(lambda p: rate(p) + by_hand * (p.ndim > 1))
    recorder = trained(added, edit=EDITS[edit], shares=shares, check_every=1000)
    assert recorder.num_checked == 2
    assert_exact(recorder.trajectory, shares)
    found = epk.influence(recorder.trajectory, TEST)
    up, down = (outputs_of(change, penalty=added, edit=EDITS[edit]) for change in (1e-5, -1e-5))
    expected = (up - down) / 2e-5
    is_right = (found.values[..., 2] - expected).abs().max() < 1e-6 * expected.abs().max()
    assert is_right or not found.certified
    if penalty == "none" and edit in ("norm", "norm of many digits", "entries", "clamped", "masked and clipped"):
        assert found.certified  # bounds that several steps show
        assert epk.retrain(recorder.trajectory, torch.ones(POINTS)).certified


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("edit", "dtype", "scale"), [(None, torch.float64, 1000.0), ("penalty by hand", torch.float64, 1000.0),
    ("norm", torch.float32, 2.0**16), ("masked", torch.float32, 2.0**16)],
)  # fmt: skip
def test_the_factor_of_a_gradient_scaler_is_no_part_of_the_record(edit, dtype, scale):
    scaled, plain = (
        trained(PENALTIES["all"][0], net=mlp(dtype), edit=EDITS.get(edit), scale=own).trajectory
        for own in (lambda step: scale * (1 + (step > 2)), None)
    )
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for s in range(STEPS):
        for name in ("grad_scale", "weight_decay"):
            values = (getattr(run.updates[s], name).double() for run in (scaled, plain))
            assert torch.allclose(*values, rtol=rounding, atol=rounding)
    assert epk.attribute(scaled, TEST.to(dtype)).certified
    assert edit is not None or all(bool((scaled.updates[s].grad_scale == 1).all()) for s in range(STEPS))


MOVING = {
    "two rates": lambda net, step: squares(0.03 if step < 2 else 0.05)(net, step),
    "of norms": lambda net, step: 0.01 * sum(p.norm() for p in net.parameters()),
    "later": lambda net, step: squares(0.03)(net, step) * (step > 1),
}
LOOPS = {
    **{f"moving: {name}": {"penalty": own, "check_every": 1} for name, own in MOVING.items()},
    "batch norm and dropout": {"net": normalised},
    "loss not stated": {"loss": None},
    "accumulated": {"by": (2, 3), "edit": norm(0.3)},
    "few states": {"storage": epk.Storage(keep_every=3), "optimizer": "adam"},
    "resumed": {"resume": True, "check_every": 1000},
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_penalty_is_the_term_decay_in_every_loop(name, tmp_path):
    loop = {"penalty": PENALTIES["all"][0], **LOOPS[name]}
    loop |= {"net": loop["net"]()} if "net" in loop else {}
    loop |= {"folder": tmp_path / "run"} if "storage" in loop or "resume" in loop else {}
    if "resume" in loop:
        trained(**loop, steps=3)
    run = trained(**loop).trajectory
    assert assert_terms_are_exact(run, TEST).decay.abs().max() > 1e-3
    if "moving" in name:
        assert len({float(run.updates[s].weight_decay[0]) for s in range(STEPS)}) >= 2


def test_biases_that_begin_at_zero_get_their_rate_once_they_have_moved():
    for name in ("all", "weights"):
        penalty, rate = PENALTIES[name]
        shares = Shares(rate)
        recorder = trained(penalty, net=mlp(zero_bias=True), shares=shares, check_every=1000)
        assert recorder.num_checked == 3  # the first, the last, and the second
        assert_exact(recorder.trajectory, shares)


def test_a_rate_that_moves_between_two_checked_steps_is_not_certified_and_the_last_step_is_refused():
    with pytest.raises(epk.StepMismatchError, match="step 5: .*L2 penalty is not that of .* The step is kept, and"):
        trained(MOVING["two rates"], check_every=1000)
    run = trained(lambda net, step: squares(0.05 if step == 3 else 0.03)(net, step), check_every=1000).trajectory
    with pytest.warns(epk.CertificateWarning, match="step 3 differs"):
        assert not epk.attribute(run, TEST).certified


def test_a_factor_of_a_parameter_of_many_weights_is_found():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9000), nn.Tanh(), nn.Linear(9000, 3)).double()
    run = trained(net=net, edit=lambda net: clip_grad_norm_(net[0].parameters(), 1e-3), steps=2).trajectory
    factors = run.updates[0].grad_scale
    torch.testing.assert_close(factors[:2], factors[:1].expand(2), rtol=1e-14, atol=0.0)
    assert factors[0] < 1
    assert factors[2] == factors[3] == 1


def test_a_factor_of_the_loss_is_no_factor_of_a_scaler_in_steps_whose_gradient_nobody_changed():
    net, batches = mlp(), [torch.randperm(POINTS)[:5] for _ in range(STEPS)]
    tripled = lambda z, y: 3 * F.cross_entropy(z, y)  # noqa: E731
    clip = lambda step: clip_grad_norm_(net.parameters(), 1e9 if step else 0.2)  # noqa: E731
    options = {"value": tripled, "announced": clip, "check_every": 1000}
    recorder = record(net, OPTIMIZERS["sgd"](net), X, Y, batches, **options)
    assert recorder.num_checked < STEPS
    assert epk.attribute(recorder.trajectory, TEST).certified


def test_what_looks_like_a_penalty_on_whitened_rows_but_comes_through_the_outputs_is_another_loss():
    """Under one linear layer the gradient of |z|^2 is a multiple of the weights where X X^T is one of the identity."""
    net, rows = nn.Linear(4, 3, bias=False).double(), 2 * torch.eye(4, dtype=torch.float64)
    penalised = lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean()  # noqa: E731
    with pytest.warns(UserWarning, match="step 0: 4 of 4 rows do not follow the stated loss"):
        recorder = record(net, sgd(net), rows, Y[:4], [None], value=penalised)
    parts = epk.attribute(recorder.trajectory, rows)
    assert parts.certified
    assert not parts.decay.any()


def noisy(net):
    for p in net.parameters():
        p.grad += 0.01 * torch.randn_like(p)


UNEXPLAINED = {
    "noise": ({"edit": noisy}, "was changed after backward"),
    "a bias without an entry that is not clipped": ({"edit": together(decayed, entries(0.1))},
        "was changed after backward"),
    "one entry": ({"edit": lambda net: net[2].bias.grad[1:2].add_(0.1)}, r"in '2.bias', was changed after backward"),
    "elastic net": (
        {"penalty": lambda net, step: sum(1e-2 * (p.abs().sum() + p.square().sum()) for p in net.parameters())},
        "as of another penalty than L2"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "every"), list(zip(UNEXPLAINED, (1, 1000, 1000, 1), strict=True)))
def test_what_no_factor_and_no_decay_explains_is_refused_or_a_term_that_influence_never_certifies(name, every):
    loop, cause = UNEXPLAINED[name]
    with pytest.raises(epk.StepMismatchError, match=f"step 0: .*{cause}.* unexplained=SHARE records it"):
        trained(**loop, check_every=every)
    run = trained(**loop, check_every=every, unexplained=0.9).trajectory
    parts = epk.attribute(run, TEST, head="logits")
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert parts.unexplained.abs().max() > 1e-3
    with pytest.warns(epk.CertificateWarning, match="how that part would follow"):
        assert not epk.influence(run, TEST).certified


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("clip", "every"), [(ClipNorm(0.1), 1), (ClipNorm(0.3, 1.0), 1000), (ClipValue(0.02), 1), (ClipNorm(1e-3), 1000)]
)
def test_a_stated_clipping_must_be_the_loops(clip, every):
    """Each way of clipping under each other's statement, and without one."""
    for loop in (clip, ClipNorm(0.2), None):
        act = None if loop is None else loop.clip_gradients
        if loop is clip:
            run = trained(edit=act, clip=clip, check_every=every).trajectory
            assert epk.influence(run, TEST).certified
        else:
            with pytest.raises(epk.StepMismatchError, match="step 0: the gradient must be clipped as stated, Clip"):
                trained(edit=act, clip=clip, check_every=every)


def test_one_clipped_step_does_not_show_by_which_norm_a_run_is_clipped():
    count = iter(range(STEPS))
    run = trained(edit=lambda net: clip_grad_norm_(net.parameters(), 0.3) if next(count) == 2 else None).trajectory
    with pytest.warns(epk.CertificateWarning, match="step 2 alone was clipped.*state clip="):
        assert not epk.influence(run, TEST).certified


SGD = lambda p: torch.optim.SGD(p, lr=0.3)  # noqa: E731
LONG_LOOPS = {
    "momentum-mlp": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4), "mlp"),
    "adam-cnn": (lambda p: torch.optim.Adam(p, lr=0.02), "cnn"),
    "rmsprop-mlp": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), "mlp"),
}


def float32_problem(kind):
    torch.manual_seed(0)
    if kind == "cnn":
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), torch.randn(24, 1, 8, 8)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)), torch.randn(24, 6)


def float32_loop(optimizer, kind, steps, rate=0.0):
    """Record a loop whose loss has a penalty of a rate."""
    net, X = float32_problem(kind)
    batches = (torch.randperm(len(X))[:12] for _ in range(steps))
    penalty = lambda: rate / 2 * sum(p.square().sum() for p in net.parameters()) if rate else 0.0  # noqa: E731
    options = {"value": lambda z, y: F.cross_entropy(z, y) + penalty()}
    return record(net, optimizer(net.parameters()), X, torch.arange(len(X)) % 3, batches, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "kind"), LONG_LOOPS.values(), ids=LONG_LOOPS)
def test_a_long_run_that_learns_its_data_by_heart_is_no_false_alarm(optimizer, kind):
    """Where the loss is nearly 0, gradients are sums that cancel."""
    assert float32_loop(optimizer, kind, 110).num_steps == 110


@pytest.mark.parametrize(("rate", "kind"), [(2e-2, "mlp"), (1e-4, "cnn"), (2e-5, "mlp"), (2e-5, "cnn")])
def test_a_small_penalty_is_recorded_as_weight_decay(rate, kind):
    run = float32_loop(SGD, kind, 8, rate).trajectory
    assert epk.reconstruct(run, float32_problem(kind)[1][:3]).certified
    found = torch.stack([run.updates[s].weight_decay for s in range(8)])
    assert (found - rate).abs().max() < 1e-7

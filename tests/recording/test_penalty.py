"""An L2 penalty in the loop's loss is recorded as the weight decay that it is; other penalties are refused by name."""

from types import SimpleNamespace

import library_cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
import reference
from epk_gp.optimizers.update_rules import ClipNorm, ClipValue

POINTS, SEED = 9, torch.Generator().manual_seed(4)
X, TEST = (torch.randn(n, 4, generator=SEED, dtype=torch.float64) for n in (POINTS, 2))
Y = torch.arange(POINTS) % 3
STEPS = 6


def mlp(dtype=torch.float64, *, zero_bias=False):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    if zero_bias:
        nn.init.zeros_(net[0].bias)
        nn.init.zeros_(net[2].bias)
    return net


def squares(parameters, rate):
    return rate * sum(p.square().sum() for p in parameters)


def weights(net):
    return [p for p in net.parameters() if p.ndim > 1]


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8, weight_decay=0.01)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.02)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


# What the loop adds to its loss, and by which factor of each parameter's weights that is in the gradient.
PENALTIES = {
    "all": (lambda net: squares(net.parameters(), 0.03), lambda p: 0.06),
    "half": (lambda net: squares(net.parameters(), 5e-3 / 2), lambda p: 5e-3),
    "weights": (lambda net: squares(weights(net), 0.02), lambda p: 0.04 * (p.ndim > 1)),
    "two rates": (
        lambda net: squares(net[0].parameters(), 0.02) + squares(net[2].parameters(), 1e-4),
        lambda p: 0.04 if 5 in p.shape[:1] else 2e-4,
    ),
    "long rate": (lambda net: squares(net.parameters(), 0.0123456), lambda p: 0.0246912),
}


def trained(penalty, make_optimizer=sgd, net=None, clipping=None, steps=STEPS, watch=lambda *_: None, **options):
    """Record a loop whose loss holds a penalty; `penalty` gets the network, and the number of the step if it can."""
    net = mlp() if net is None else net
    optimizer, inputs = make_optimizer(net), X.to(next(net.parameters()).dtype)
    draw = torch.Generator().manual_seed(5)
    with epk.Recorder(net, optimizer, inputs, Y, **options) as recorder:
        for step in range(steps):
            batch = torch.randperm(POINTS, generator=draw)[:5]
            optimizer.zero_grad()
            value = penalty(net, step) if penalty.__code__.co_argcount == 2 else penalty(net)
            (F.cross_entropy(net(inputs[batch]), Y[batch]) + value).backward()
            if clipping is not None:
                clipping.clip_gradients(net)
            recorder.batch(batch)
            watch(net, optimizer, batch, False)
            optimizer.step()
            watch(net, optimizer, batch, True)
    return recorder


class Shares:
    """Each row's own backward pass, and the decay's part, through buffers beside the optimizer."""

    def __init__(self, rate, clip=None):
        self.rate, self.clip, self.buffers, self.steps = rate, clip, {}, []

    def __call__(self, net, optimizer, batch, has_stepped):
        if has_stepped:
            shares = [self.share(k, p, optimizer).flatten(1) for k, p in enumerate(net.parameters())]
            self.steps.append(torch.cat(shares, dim=1))
            return
        parameters = [*net.parameters()]
        self.start = [p.detach().clone() for p in parameters]
        self.gradients = [torch.zeros(POINTS + 1, *p.shape, dtype=p.dtype) for p in parameters]
        for i in batch:
            row = torch.autograd.grad(F.cross_entropy(net(X[i][None]), Y[i][None]) / len(batch), parameters)
            for g, own in zip(self.gradients, row, strict=True):
                g[i] += own
        for g, w, p in zip(self.gradients, self.start, parameters, strict=True):
            g[-1] = self.rate(p) * w
        if self.clip is not None:
            factor = self.clip.factor(torch.cat([g.sum(dim=0).flatten() for g in self.gradients]))
            factors = (
                torch.as_tensor(factor)
                .expand(sum(p.numel() for p in parameters))
                .split([p.numel() for p in parameters])
            )
            self.gradients = [g * f.view_as(p) for g, f, p in zip(self.gradients, factors, parameters, strict=True)]

    def share(self, k, p, optimizer):
        group, state = SimpleNamespace(**optimizer.param_groups[0]), SimpleNamespace(**optimizer.state[p])
        rule = library_cases.adam if hasattr(group, "betas") else library_cases.sgd
        return rule(self.gradients[k], self.start[k], group, None, state, self.buffers.setdefault(k, {}))


def assert_exact(run, shares):
    """The terms sum to the network, and agree with the shares of the steps along the path of the weights."""
    parts, rule = epk.attribute(run, TEST, head="logits"), epk.gauss_legendre(8)
    expected = torch.zeros(len(TEST), 3, POINTS + 1, dtype=torch.float64)
    for s, share in enumerate(shares.steps):
        for n, x in enumerate(TEST):
            expected[n] += sum(v * reference.jacobian(run, s, t, x, "logits") for t, v in rule) @ share.T
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert (parts.samples - expected[:, :, :-1]).abs().max() < 1e-8
    assert (parts.decay - expected[:, :, -1]).abs().max() < 1e-8
    assert parts.unexplained.abs().max() < 1e-10
    return parts


@pytest.mark.mostly_slow
@pytest.mark.parametrize("make_optimizer", [sgd, adam, adamw])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_the_term_decay_and_all_terms_are_those_of_brute_force(name, make_optimizer):
    penalty, rate = PENALTIES[name]
    shares = Shares(rate)
    run = trained(penalty, make_optimizer, watch=shares).trajectory
    parts = assert_exact(run, shares)
    without = epk.attribute(trained(lambda net: 0.0, make_optimizer).trajectory, TEST, head="logits")
    assert (parts.decay - without.decay).abs().max() > 1e-4 * parts.decay.abs().max()
    stated = 0.01 if make_optimizer is sgd else 0.0
    expected = torch.tensor([stated + rate(p) for p in mlp().parameters()], dtype=torch.float64)
    assert torch.allclose(run.updates[STEPS - 1].weight_decay, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("clip", [ClipNorm(0.3), ClipValue(0.1)], ids=["norm", "entries"])
def test_a_penalty_that_is_clipped_with_the_loss_is_exact_and_its_influence_is_not_certified(clip, stated):
    """The first step is clipped already."""
    penalty, rate = PENALTIES["all"]
    shares = Shares(rate, clip)
    run = trained(penalty, clipping=clip, watch=shares, **({"clip": clip} if stated else {})).trajectory
    assert float(run.updates[0].grad_scale.min()) < 0.9
    assert_exact(run, shares)
    for compute, argument in ((epk.influence, TEST), (epk.retrain, torch.ones(POINTS))):
        with pytest.warns(epk.CertificateWarning, match="clipping of gradients give"):
            assert not compute(run, argument).certified


def by_optimizer(steps=STEPS, left_out=None):
    """The weights of a loop in plain torch, in which the mean keeps its divisor where a row is left out."""
    net, draw = mlp(), torch.Generator().manual_seed(5)
    optimizer = sgd(net)
    for _ in range(steps):
        batch = torch.randperm(POINTS, generator=draw)[:5]
        kept = batch[batch != left_out] if left_out is not None else batch
        optimizer.zero_grad()
        value = F.cross_entropy(net(X[kept]), Y[kept], reduction="sum") / len(batch)
        (value + PENALTIES["all"][0](net)).backward()
        optimizer.step()
    return net


def test_retrain_and_influence_keep_the_penalty():
    run = trained(PENALTIES["all"][0]).trajectory
    weights = 1 - torch.eye(POINTS, dtype=torch.float64)[:2]
    runs = epk.retrain(run, weights)
    assert runs.certified
    for i in range(2):
        expected = by_optimizer(left_out=i)(TEST).detach()
        assert (runs.outputs(TEST, head="logits")[i] - expected).abs().max() < 1e-10
    found = epk.influence(run, TEST, head="logits")
    assert found.certified
    h = 1e-5
    moved = epk.retrain(run, 1 + h * torch.eye(POINTS, dtype=torch.float64)[:1] * torch.tensor([[1.0], [-1.0]]))
    up, down = moved.outputs(TEST, head="logits")
    assert (found.values[..., 0] - (up - down) / (2 * h)).abs().max() < 1e-7


def test_biases_that_begin_at_zero_get_their_rate_once_they_have_moved():
    for name in ("all", "weights"):
        penalty, rate = PENALTIES[name]
        net, shares = mlp(zero_bias=True), Shares(rate)
        recorder = trained(penalty, net=net, watch=shares, check_every=1000)
        assert recorder.num_checked == 3  # the first, the last, and the second
        assert_exact(recorder.trajectory, shares)


def changing(net, step):
    return squares(net.parameters(), 0.03 if step < 2 else 0.05)


def of_norms(net):
    return 0.01 * sum(p.norm() for p in net.parameters())


@pytest.mark.parametrize(
    "penalty", [changing, of_norms, lambda net, step: squares(net.parameters(), 0.03) * (step > 1)]
)
def test_a_rate_that_moves_is_recorded_as_it_is_where_steps_are_checked(penalty):
    run = trained(penalty, check_every=None if penalty is of_norms else 1).trajectory
    parts = epk.attribute(run, TEST, head="logits")
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert len({float(run.updates[s].weight_decay[0]) for s in range(STEPS)}) >= 2


def test_a_rate_that_moves_between_two_checked_steps_is_not_certified_and_the_last_step_is_refused():
    with pytest.raises(
        epk.StepMismatchError, match="step 5: .*factor of the loss's L2 penalty is not that of .* The step is kept, and"
    ):
        trained(changing, check_every=1000)
    run = trained(lambda net, step: squares(net.parameters(), 0.05 if step == 3 else 0.03), check_every=1000).trajectory
    with pytest.warns(epk.CertificateWarning, match="step 3 differs"):
        assert not epk.attribute(run, TEST).certified


def test_a_resumed_run_finds_its_penalty_again(tmp_path):
    def run(steps, folder):
        return trained(PENALTIES["all"][0], steps=steps, folder=folder, resume=True, check_every=1000).trajectory

    run(3, tmp_path / "run")
    resumed = run(3, tmp_path / "run")
    assert resumed.num_steps == 6
    assert epk.attribute(resumed, TEST).certified


@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_in_float32_the_stated_number_is_found(rate):
    run = trained(lambda net: squares(net.parameters(), rate), net=mlp(torch.float32), steps=20).trajectory
    assert epk.reconstruct(run, TEST.float()).certified
    assert {float(v) for s in range(20) for v in run.updates[s].weight_decay} == {0.01 + 2 * rate}


class Normalised(nn.Sequential):
    """Convolutions with BatchNorm and dropout, in training mode."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(8, 3),
        )  # fmt: skip


def test_a_penalty_is_found_beside_batch_norm_and_dropout():
    torch.manual_seed(0)
    run = trained(PENALTIES["all"][0], adam, net=Normalised().double()).trajectory
    parts = epk.attribute(run, TEST, head="logits")
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert torch.allclose(run.updates[5].weight_decay, torch.full((6,), 0.06, dtype=torch.float64), rtol=1e-9)


def test_a_penalty_is_found_beside_a_loss_that_is_not_stated():
    run = trained(PENALTIES["all"][0], loss=None).trajectory
    parts = epk.attribute(run, TEST, head="logits")
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert torch.allclose(run.updates[5].weight_decay, torch.full((4,), 0.07, dtype=torch.float64), rtol=1e-12)


def test_a_penalty_in_a_run_that_keeps_few_states(tmp_path):
    run = trained(PENALTIES["all"][0], adam, folder=tmp_path / "run", storage=epk.Storage(keep_every=3)).trajectory
    parts = epk.attribute(run, TEST, head="logits")
    assert parts.certified
    assert (parts.total - parts.network).abs().max() < 1e-10
    assert parts.decay.abs().max() > 1e-3


def test_what_looks_like_a_penalty_on_whitened_rows_but_comes_through_the_outputs_is_another_loss():
    """Under one linear layer the gradient of |z|^2 is a multiple of the weights where X X^T is one of the identity."""
    net, rows = nn.Linear(4, 3, bias=False).double(), 2 * torch.eye(4, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, rows, Y[:4]) as recorder:
        z = net(rows)
        (F.cross_entropy(z, Y[:4]) + 0.1 * z.square().mean()).backward()
        recorder.batch(None)
        with pytest.warns(UserWarning, match="4 of 4 rows do not follow"):
            optimizer.step()
    assert not recorder.trajectory.updates[0].weight_decay.any()

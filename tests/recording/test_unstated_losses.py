"""Losses that are not stated: contributions follow from what the loop's own backward pass sends into each row."""

import copy
import re
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import epk_gp as epk
from epk_gp.core.step import NOT_OF_DATA
from epk_gp.kernel_machine.axes import by_step
from helpers import refusal
from loops import Net, assert_exact, assert_has_no_influence, data, mlp, sgd

X, Y = data()
BATCHES = [torch.tensor(rows) for rows in ([0, 3, 5, 7], [1, 2, 9, 3], [8, 0, 4, 6])]
X_TEST = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def two_returned():
    """A network that returns features and what is computed from them: a gradient may come into both."""

    def forward(net, x):
        h = torch.tanh(net.body(x))
        return {"features": h, "outputs": net.head(h)}

    torch.manual_seed(3)
    return Net(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()


def outputs_of(returned):
    return returned["outputs"] if isinstance(returned, dict) else returned


def contrastive(net, rows, others):
    """A loss that couples all rows, of two passes, through features and outputs."""
    first, second = (net(x) for x in (X[rows], X[rows] + 0.1))
    z = F.normalize(torch.cat([outputs_of(first), outputs_of(second)]))
    likeness = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    n = len(rows)
    loss = F.cross_entropy(likeness, torch.cat([torch.arange(n) + n, torch.arange(n)]))
    return loss + (0.1 * (first["features"] - second["features"]).square().sum() if isinstance(first, dict) else 0.0)


def focal_of(z, y):
    values = F.cross_entropy(z, y, reduction="none")
    return (1 - (-values).exp()) ** 2 * values


def focal(net, rows, others):
    return focal_of(outputs_of(net(X[rows])), Y[rows]).mean()


def critic(net, rows, others):
    real, fake = outputs_of(net(X[rows])), outputs_of(net(others))
    return F.softplus(-real).mean() + F.softplus(fake).mean()


LOSSES = {contrastive: 2, focal: 1, critic: -1}  # passes on the batch's rows; -1: one, and one on rows of no data


def indices_of(loss, rows):
    return torch.cat([rows, torch.full_like(rows, -1)]) if LOSSES[loss] < 0 else rows.repeat(LOSSES[loss])


def train(net, optimizer, value, *, X=X, y=Y, batch=epk.Recorder.batch, batches=BATCHES, **options):
    """Record a loop with the loss value(net, rows)."""
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for rows in batches:
            optimizer.zero_grad()
            value(net, rows).backward()
            batch(recorder, rows)
            optimizer.step()
    return recorder


def record(net, loss, *, lr=0.1, **options):
    generator = torch.Generator().manual_seed(7)
    options = {"y": None, "loss": None, "output": outputs_of} | options
    return train(
        net, sgd(net, lr, momentum=0.9),
        lambda net, rows: loss(net, rows, torch.randn(4, 4, generator=generator, dtype=torch.float64)),
        batch=lambda recorder, rows: recorder.batch(indices_of(loss, rows)), **options,
    )  # fmt: skip


def shares_by_hand(net, loss, lr=0.1):
    """Each row's share of the change along straight steps, (n, C, M + 1), its gradient J^T delta by a pass of its own.

    The last column is that of rows which are no training points.
    """
    generator = torch.Generator().manual_seed(7)
    total, momentum = torch.zeros(3, 3, 11, dtype=torch.float64), dict[str, torch.Tensor]()
    for rows in BATCHES:
        others, seen = torch.randn(4, 4, generator=generator, dtype=torch.float64), []

        def watched(x, seen=seen):
            direct = tree_map(torch.clone, net(x))
            seen.append((x, tree_leaves(direct)))
            for value in tree_leaves(direct):
                value.retain_grad()
            return direct

        net.zero_grad()
        loss(watched, rows, others).backward()
        shares, weights = [], list(net.parameters())
        for x, direct in seen:
            for i in range(len(x)):
                pairs = zip(tree_leaves(net(x[i : i + 1])), direct, strict=True)
                value = sum((z.grad[i] * own[0]).sum() for own, z in pairs if z.grad is not None)
                shares.append(torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True))
        start, steps, samples = copy.deepcopy(net.state_dict()), {}, indices_of(loss, rows) % 11
        for (name, p), own in zip(net.named_parameters(), map(torch.stack, zip(*shares, strict=True)), strict=True):
            g = torch.zeros(11, *p.shape, dtype=torch.float64).index_add(0, samples, own)
            momentum[name] = g + 0.9 * momentum.get(name, torch.zeros(()))
            steps[name] = -lr * momentum[name]
        for node, weight in zip(*np.polynomial.legendre.leggauss(20), strict=True):
            leaves = {n: (start[n] + (1 + node) / 2 * steps[n].sum(dim=0)).requires_grad_() for n in start}
            f = outputs_of(torch.func.functional_call(net, leaves, (X_TEST,)))
            for n, c in product(range(3), range(3)):
                slopes = torch.autograd.grad(f[n, c], list(leaves.values()), retain_graph=True)
                for name, slope in zip(leaves, slopes, strict=True):
                    total[n, c] += weight / 2 * (steps[name] * slope).flatten(1).sum(dim=1)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p += steps[name].sum(dim=0)
    return total


@pytest.mark.parametrize("make", [mlp, two_returned], ids=["one_tensor", "two_tensors"])
@pytest.mark.parametrize("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])
def test_contributions_are_the_parts_of_the_gradient_that_came_through_each_row(loss, make):
    net = make()
    initial = copy.deepcopy(net)
    recorder = record(net, loss)
    parts = assert_exact(recorder.trajectory, X_TEST)
    expected = shares_by_hand(initial, loss)
    assert (parts.total - outputs_of(net(X_TEST))).abs().max() < 1e-10
    assert (parts.samples - expected[..., :10]).abs().max() < 1e-8
    assert parts.samples.abs().max() > 1e-3
    assert list(parts.sources) == ([NOT_OF_DATA] if LOSSES[loss] < 0 else [])
    for value in parts.sources.values():
        assert (value - expected[..., 10]).abs().max() < 1e-8
        assert value.abs().max() > 1e-3
    by = epk.attribute(recorder.trajectory, X_TEST, by=[by_step(recorder.trajectory)], head="logits")
    assert (by.total - parts.total).abs().max() < 1e-10
    assert torch.allclose(by.values.sum(dim=2), parts.samples.sum(dim=2), atol=1e-10)


def ppo(net, rows):
    """The loss of a policy and its values."""
    returned = net(X[rows])
    logits, values = returned["outputs"], returned["features"][:, 0]
    advantages = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    taken = -F.cross_entropy(logits, Y[rows], reduction="none")
    ratio = (taken - taken.detach()).exp()
    entropy = torch.special.entr(logits.softmax(dim=1)).sum(dim=1).mean()
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -clipped.mean() + 0.5 * (values - advantages).square().mean() - 0.01 * entropy


def changed_in_place(net, rows):
    z = net(X[rows])["outputs"]
    z.div_(2.0)
    return F.cross_entropy(z, Y[rows])


def triplet(net, rows):
    """It does not change when all outputs are shifted: the gradient of the last bias is nothing but rounding."""
    return F.triplet_margin_loss(*(net(X[(rows + k) % 10])["outputs"] for k in range(3)))


def two_backwards(net, rows):
    z = net(X[rows])["outputs"]
    F.cross_entropy(z[:2], Y[rows[:2]]).backward(retain_graph=True)
    return z.square().mean()


@pytest.mark.parametrize("loss", [ppo, changed_in_place, triplet, two_backwards])
def test_whatever_a_loop_does_to_outputs_is_in_the_gradient_that_comes_into_them(loss):
    def batch(recorder, rows):
        recorder.batch(torch.cat([(rows + k) % 10 for k in range(3)]) if loss is triplet else rows)

    net = two_returned()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    recorder = train(net, optimizer, loss, y=None, loss=None, output=outputs_of, batch=batch)
    parts = assert_exact(recorder.trajectory, X_TEST, tolerance=1e-8)
    assert (parts.total - outputs_of(net(X_TEST))).abs().max() < 1e-8
    assert parts.samples.abs().max() > 1e-3


def test_a_run_on_disk_is_the_run_in_memory_and_resumes(tmp_path):
    in_memory = record(two_returned(), critic).trajectory
    recorder = record(two_returned(), critic, folder=tmp_path / "run")
    opened = epk.load_trajectory(tmp_path / "run", two_returned(), output=outputs_of)
    assert opened.digest == in_memory.digest == recorder.trajectory.digest
    assert opened.targets.shape == (10, 0)
    one, other = (epk.attribute(run, X_TEST) for run in (in_memory, opened))
    assert torch.equal(one.samples, other.samples)
    assert torch.equal(one.sources[NOT_OF_DATA], other.sources[NOT_OF_DATA])
    again = record(two_returned(), focal, folder=tmp_path / "run", resume=True)
    assert again.num_steps == 6
    assert epk.attribute(again.trajectory, X_TEST).certified


def test_a_run_without_a_loss_reconstructs_its_network_and_has_a_kernel_but_no_influence():
    run = record(mlp(), contrastive).trajectory
    again = epk.reconstruct(run, X_TEST)
    assert again.certified
    assert (again.outputs - again.network).abs().max() < 1e-10
    points = epk.Points(X_TEST, is_train=False)
    assert epk.gram_block(run, points, points).isfinite().all()
    assert_has_no_influence(run, X_TEST, "needs the loss as a function of the outputs")


def test_wrong_uses_are_refused_at_the_door():
    net = mlp()
    optimizer = sgd(net)
    # of two tensors with rows, through which of them the loss goes is not seen
    with_mean = Net(lambda net, x: (z := net.inner(x), z.square().mean(), 2 * z), inner=mlp())

    def run(value, indices, net=net, **options):
        options = {"loss": None, "y": None, "batches": BATCHES[:1]} | options
        train(net, sgd(net), lambda net, rows: value(net, rows, None), batch=lambda r, _: r.batch(indices), **options)

    def without_backward(net, rows, others):
        net(X[rows])
        return sum(p.sum() for p in net.parameters())

    def with_its_loss(net, rows, others):
        return net(X[rows])[1]

    def with_targets(targets):
        with epk.Recorder(net, optimizer, X, Y) as recorder:
            recorder.batch(torch.arange(4), targets=targets)

    refusals = {
        "row 0 was X[0], the batch says X[1]": lambda: run(focal, [1, 3, 5, 7]),
        "of shape (4,)": lambda: with_targets(Y[:3]),
        "of shape (4, 3)": lambda: with_targets(X[:4, :2]),
        "targets must be a": lambda: with_targets([0, 1, 2, 0]),
        "y must be the targets that the stated loss takes": lambda: epk.Recorder(net, optimizer, X, None),
        "-1, for a row that is no training point, needs":
            lambda: run(focal, [-1, 0, 1, 2], y=Y, loss=epk.CrossEntropy()),
        "a gradient came into one of shape":
            lambda: run(with_its_loss, BATCHES[0], with_mean, output=lambda returned: returned[0]),
        "no gradient came into what the network returned": lambda: run(without_backward, BATCHES[0]),
        "must be seen: no call of the network on the batch's rows": lambda: run(focal, BATCHES[0][:2]),
        "indices must lie in 0..9: got -2": lambda: run(focal, [-2, 0, 1, 2]),
    }  # fmt: skip
    for message, call in refusals.items():
        assert refusal((TypeError, ValueError), re.escape(message), call) is None, message


def teacher(z, rows):
    q = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).softmax(dim=1)
    return 4 * F.kl_div((z / 2).log_softmax(dim=1), q[rows], reduction="batchmean")


def neighbours(z, rows):
    z = F.normalize(z)
    likeness = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(likeness, torch.arange(len(z)).roll(1))


def half(z, rows):
    first = F.cross_entropy(z[::2], Y[rows[::2]], reduction="sum")
    return (first + focal_of(z[1::2], Y[rows[1::2]]).sum()) / len(rows)


def one_hot(rows):
    return F.one_hot(Y[rows], 3).double()


# losses of the outputs z that are not the stated cross entropy, and how many of four rows follow that all the same
OTHERS = {
    "smoothing": (lambda z, rows: F.cross_entropy(z, Y[rows], label_smoothing=0.1), 0),
    "teacher": (teacher, 0),
    "neighbours": (neighbours, 0),
    "critic": (lambda z, rows: z[:2].mean() - z[2:].mean(), 0),
    "focal": (lambda z, rows: focal_of(z, Y[rows]).mean(), 0),
    "class_weights": (lambda z, rows: F.cross_entropy(z, Y[rows], weight=torch.tensor([1.0, 2, 3]).double()), 0),
    "sample_weights": (lambda z, rows: torch.tensor([1.0, 2, 1, 3]).double() @ F.cross_entropy(z, Y[rows],
        reduction="none") / 4, 2),
    "squares": (lambda z, rows: F.mse_loss(z, one_hot(rows)), 0),
    "binary": (lambda z, rows: F.binary_cross_entropy_with_logits(z, one_hot(rows)), 0),
    "entropy": (lambda z, rows: F.cross_entropy(z, Y[rows]) - 0.1 * torch.special.entr(z.softmax(1)).mean(), 0),
    "half": (half, 2),
}  # fmt: skip


def dropped():
    """Draws random numbers, and normalises by the batch."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def record_other(make, value, **options):
    net = make()
    torch.manual_seed(4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return train(net, optimizer, lambda net, rows: value(net(X[rows]), rows), output=outputs_of, **options).trajectory


def assert_as_unstated(make, value, tmp_path, follow, **options):
    """Contributions are those of the same loop without a stated loss, and what needs the loss refuses the run."""
    options = {"loss": epk.CrossEntropy(), "folder": tmp_path / "run"} | options
    with pytest.warns(UserWarning, match=f"step 0: {4 - follow} of 4 rows do not follow the stated loss") as said:
        run = record_other(make, value, **options)
    assert len(said) == 1
    unstated = record_other(make, value, loss=None)
    found, expected = (epk.attribute(each, X_TEST, head="logits") for each in (run, unstated))
    assert found.certified
    assert (found.samples - expected.samples).abs().max() < 1e-13
    assert found.samples.abs().max() > 1e-4
    assert epk.reconstruct(run, X_TEST).certified
    assert f"(not followed in steps 0 to 2: {4 - follow} of 4" in " ".join(str(run).split())
    assert_has_no_influence(run, X_TEST, f"does not follow: steps 0 to 2: {4 - follow} of 4 rows")
    return run


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "make"), [(name, dropped) for name in ("half", "neighbours", "critic", "sample_weights")] +
    [(name, mlp) for name in OTHERS],
)  # fmt: skip
def test_rows_that_do_not_follow_the_stated_loss_keep_their_gradient(name, make, tmp_path):
    value, follow = OTHERS[name]
    run = assert_as_unstated(make, value, tmp_path, follow)
    for step in run.steps:
        (seen,) = step.passes
        assert len(seen.cotangents.index) == 4 - follow
        assert seen.cotangents.values.shape == (4 - follow, 3)


HEADS = {
    "two_heads": lambda r, rows: F.cross_entropy(r["outputs"], Y[rows]) + r["features"][:, 0].square().mean(),
    "some_rows": lambda r, rows: F.cross_entropy(r["outputs"], Y[rows]) + 0.1 * r["features"][:1].square().sum(),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_comes_into_other_tensors_than_the_loss_takes_is_recorded_too(name, tmp_path):
    run = assert_as_unstated(two_returned, HEADS[name], tmp_path, 3 if name == "some_rows" else 0)
    assert run.steps[0].passes[0].cotangents.values.shape[1] == 8  # features and outputs
    plain = record_other(two_returned, lambda r, rows: F.cross_entropy(r["outputs"], Y[rows]), loss=epk.CrossEntropy())
    assert [step.passes for step in plain.steps] == [()] * 3


# factor of the loss, rows of a batch, what a GradScaler multiplies it with, and the stated weight: None reads it
FACTORS = [(0.37, 4, 1.0, 1.0), (0.37, 1, 1.0, 1.0), (1.0, 4, 1.0, 1.0), (0.37, 4, 1024.0, 0.37),
           (0.37, 1, 1024.0, 0.37), (1.0, 4, 1024.0, 1.0), (0.75, 4, 1.0, 0.75), (0.75, 4, 1.0, None)]  # fmt: skip


@pytest.mark.parametrize(("factor", "rows", "scale", "weight"), FACTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_factor_of_all_rows_is_a_weight_and_that_of_a_gradient_scaler_is_none(factor, rows, scale, weight, dtype):
    """Of one row a factor may be that of any loss: it follows only where the optimizer's gradient does not have it."""
    net, own_X, is_other = mlp(dtype), X.to(dtype), (rows, scale) == (1, 1.0)

    def announce(recorder, batch):
        recorder.batch(batch, weight=weight)
        for p in net.parameters():
            p.grad /= scale

    with pytest.warns(UserWarning, match="step 0: 1 of 1 rows do not follow") if is_other else nullcontext():
        run = train(
            net, sgd(net), lambda net, batch: scale * factor * F.cross_entropy(net(own_X[batch]), Y[batch]),
            X=own_X, batch=announce, batches=[each[:rows] for each in BATCHES],
        ).trajectory  # fmt: skip
    assert epk.attribute(run, X_TEST.to(dtype)).certified
    for step in run.steps:
        stored = [seen.cotangents for seen in step.passes]
        assert [len(seen.index) for seen in stored if seen is not None] == [1] * is_other
        if factor == 1.0:
            assert step.sample_weights is None
        elif not is_other:
            expected = torch.full((rows,), factor / rows).double()
            assert torch.allclose(step.sample_weights, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6)
    assert is_other or epk.influence(run, X_TEST.to(dtype)).certified


def test_rows_of_one_point_that_all_have_one_factor_are_none_of_the_stated_loss():
    """Of two outputs the gradients of all losses are multiples of each other."""
    net, rows = mlp(outputs=2), torch.tensor([0, 0, 0])
    with pytest.warns(UserWarning, match="3 of 3 rows do not follow"):
        train(net, sgd(net), lambda net, rows: focal_of(net(X[rows]), Y[rows] % 2).mean(), y=Y % 2, batches=[rows])


@pytest.mark.parametrize("kind", ["labels", "probabilities", "numbers"])
def test_targets_that_the_loop_states_stand_in_the_place_of_the_recorded_ones(kind):
    y = Y if kind != "numbers" else X[:, :3].sin()
    loss = nn.MSELoss() if kind == "numbers" else nn.CrossEntropyLoss()
    used = {"labels": (Y + 1) % 3, "probabilities": X[:, :3].softmax(dim=1), "numbers": X[:, 1:].cos()}[kind]
    nets, value = (mlp(), mlp()), lambda net, rows: loss(net(X[rows]), used[rows])
    with_targets = lambda recorder, rows: recorder.batch(rows, targets=used[rows])  # noqa: E731
    recorders = (
        train(nets[0], sgd(nets[0]), value, y=y, batch=with_targets, loss=loss),
        train(nets[1], sgd(nets[1]), value, y=used, loss=loss),
    )
    runs = [recorder.trajectory for recorder in recorders]
    found, expected = (assert_exact(run, X_TEST) for run in runs)
    assert (found.samples - expected.samples).abs().max() < 1e-14
    shown, known = (epk.influence(run, X_TEST, head="logits") for run in runs)
    assert shown.certified
    assert (shown.values - known.values).abs().max() < 1e-12


@pytest.mark.parametrize("follows", [True, False])
def test_a_factor_that_moves_is_no_weight_for_it_may_depend_on_the_outputs(follows):
    """As under the logarithm of the mean loss, whose rows all have one factor: the mean loss of before."""
    net = mlp()
    change = (lambda loss: 0.37 * loss) if follows else torch.log
    with nullcontext() if follows else pytest.warns(UserWarning, match="do not follow the stated loss"):
        recorder = train(
            net, sgd(net), lambda net, rows: change(F.cross_entropy(net(X), Y)),
            batch=lambda recorder, _: recorder.batch(None), batches=range(4),
        )  # fmt: skip
    trajectory = recorder.trajectory
    assert epk.attribute(trajectory, X[:2]).certified
    if follows:
        assert epk.influence(trajectory, X[:2]).certified
    else:
        with pytest.raises(ValueError, match="does not follow: steps 1 to 3: "):
            epk.influence(trajectory, X[:2])

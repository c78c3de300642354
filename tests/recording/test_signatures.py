"""Runs of networks with any signature are those of the same networks wrapped by hand to take one tensor."""

import pickle
from itertools import product

import pytest
import torch
from signatures import NUM_CLASSES, NUM_POINTS, Tagger, TwoInputs, Wrapped, mean_logits, record, tagger_inputs
from signatures import two_inputs as make_two_inputs
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
import reference
from epk_gp.core.gradients import batch_gradient
from epk_gp.core.trajectory import batch_of
from epk_gp.kernel_machine.reconstruct import single_machine
from helpers import assert_close
from loops import assert_exact, sgd
from loops import record as record_loop

RULE = epk.QuadratureRule.midpoint(1)
LABELS = torch.arange(NUM_POINTS) % NUM_CLASSES


def call_tagger(net, X):
    return mean_logits(net(X[:, :4].long(), X[:, 4:8].bool(), X[:, 8]))


def cut(X, count):
    """Return the first points of inputs of any structure."""
    return {k: v[:count] for k, v in X.items()} if isinstance(X, dict) else type(X)(v[:count] for v in X)


# the network, its inputs, those packed by hand, how the wrapper calls it, and output=
CASES = {
    "tuple": (TwoInputs, make_two_inputs, lambda X: torch.cat([X[0], X[1].flatten(1)], 1),
        lambda net, X: net(X[:, :3], X[:, 3:].reshape(-1, 1, 2)), None),
    "list": (TwoInputs, lambda: list(make_two_inputs()), lambda X: torch.cat([X[0], X[1][:, 0]], 1),
        lambda net, X: net(X[:, :3], X[:, 3:].reshape(-1, 1, 2)), None),
    "dict": (Tagger, tagger_inputs, lambda X: torch.cat([X["ids"], X["mask"], X["scale"][:, None]], 1), call_tagger,
        mean_logits),
}  # fmt: skip


class Pair:
    """The same run twice: of the network as it is, and wrapped by hand."""

    def __init__(self, name, folder):
        self.build, make_inputs, pack, call, self.output = CASES[name]
        torch.manual_seed(0)
        net, self.X, self.folder = self.build().double(), make_inputs(), folder
        wrapped = Wrapped(self.build().double(), call)
        wrapped.inner.load_state_dict(net.state_dict())
        self.rows = pack(self.X)
        self.run = record(net, self.X, LABELS, output=self.output, steps=2, folder=folder)
        self.by_hand = record(wrapped, self.rows, LABELS, steps=2)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("pair") / "run")


def test_weights_outputs_contributions_and_the_kernel_machine_are_the_same(pair):
    assert torch.equal(pair.run.states[2], pair.by_hand.states[2])
    assert pair.run.loss_takes_outputs
    assert torch.equal(epk.network_outputs(pair.run, pair.X), epk.network_outputs(pair.by_hand, pair.rows))
    result, expected = epk.reconstruct(pair.run, pair.X), epk.reconstruct(pair.by_hand, pair.rows)
    assert result.certified
    assert_close(result.outputs, expected.outputs, rounding=100)
    parts, expected = epk.attribute(pair.run, cut(pair.X, 3)), epk.attribute(pair.by_hand, pair.rows[:3])
    assert parts.certified
    assert_close(parts.samples, expected.samples, rounding=100)


@pytest.mark.mostly_slow
def test_kernels_and_processes_are_the_same_packed_or_not(pair):
    a, b = epk.Points(pair.X, is_train=True), epk.Points(cut(pair.X, 3), is_train=False)
    rows = epk.Points(pair.rows, is_train=True), epk.Points(pair.rows[:3], is_train=False)
    block, expected = epk.gram_block(pair.run, a, b, rule=RULE), epk.gram_block(pair.by_hand, *rows, rule=RULE)
    assert_close(block, expected, rounding=100)
    assert torch.equal(epk.gram_block(pair.run, *rows, rule=RULE), block)
    x, z = epk.train_copy(pair.X), epk.test_copy(cut(pair.X, 3))
    assert torch.equal(x, epk.train_copy(pair.rows))
    assert torch.equal(z[..., :-1], pair.rows[:3])
    values = epk.EPKKernel(pair.run, outputs=0, rule=RULE)(x, z).to_dense()
    assert_close(values, epk.EPKKernel(pair.by_hand, outputs=0, rule=RULE)(x, z).to_dense(), rounding=100)
    posterior = epk.LogitGP(pair.run, points=[0, 1], rule=RULE).logit_posterior(cut(pair.X, 2))
    expected = epk.LogitGP(pair.by_hand, points=[0, 1], rule=RULE).logit_posterior(pair.rows[:2])
    assert_close(posterior.mean, expected.mean)


def test_derivatives_in_the_inputs_are_the_same_and_zero_in_integers(pair):
    gradients = []
    for run in (pair.run, pair.by_hand):
        x = epk.test_copy(pair.rows[:2]).requires_grad_()
        values = epk.EPKKernel(run, outputs=0, rule=RULE)(x, epk.train_copy(pair.rows)).to_dense()
        gradients.append(torch.autograd.grad(values.square().sum(), x)[0])
    assert_close(*gradients, rounding=100)
    assert bool(gradients[0].any())
    if isinstance(pair.X, dict):
        assert not gradients[0][:, :8].any()


def test_a_query_in_another_precision_is_computed_in_it(pair):
    def single(part):
        return part.float() if part.is_floating_point() else part

    X = {k: single(v) for k, v in pair.X.items()} if isinstance(pair.X, dict) else [single(v) for v in pair.X]
    outputs = epk.network_outputs(pair.run, X)
    assert outputs.dtype == torch.float32
    assert_close(outputs.double(), epk.network_outputs(pair.run, pair.X), rounding=1e10)


def test_the_user_gets_the_structure_back_also_from_disk_and_pickles(pair):
    assert torch.equal(pair.run.inputs, pair.rows)
    assert torch.equal(pair.run.pack(pair.X), pair.run.inputs)
    again = pair.run.unpack(pair.run.inputs)
    assert isinstance(again, dict) == isinstance(pair.X, dict)
    assert torch.equal(pair.run.pack(again), pair.run.inputs)
    stored = epk.load_trajectory(pair.folder, pair.build().double(), output=pair.output)
    assert stored.digest == pair.run.digest
    for other in (stored, pickle.loads(pickle.dumps(stored))):
        assert torch.equal(epk.network_outputs(other, pair.X), epk.network_outputs(pair.run, pair.X))


def test_a_run_is_resumed_with_the_same_structure_only(tmp_path):
    X = tagger_inputs()

    def start(inputs, output, steps):
        torch.manual_seed(1)
        options = {"folder": tmp_path / "run", "resume": True, "steps": steps, "output": output}
        return record(Tagger().double(), inputs, LABELS, **options)

    start(X, mean_logits, 2)
    rows = epk.test_copy(X)[:, :-1]
    with pytest.raises(ValueError, match="must be the recorded one to resume"):
        record(OneTensorTagger().double(), rows, LABELS, folder=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="recorded with output=.*: pass it as output="):
        epk.load_trajectory(tmp_path / "run", Tagger().double())
    with pytest.raises(ValueError, match="its outputs at the initial state differ"):
        epk.load_trajectory(tmp_path / "run", Tagger().double(), output=lambda returned: returned.logits[:, 0])
    assert start(X, mean_logits, 4).num_steps == 4


class OneTensorTagger(Tagger):
    """The same weights by the same names, with one input."""

    def forward(self, X):
        return call_tagger(super().forward, X)


# losses of more than the outputs: of all tokens, of a function of the whole return value, and of a loop in plain torch
def next_tokens(returned, y):
    return F.cross_entropy(returned.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())


TOKENS = torch.randint(0, NUM_CLASSES, (NUM_POINTS, 4), generator=torch.Generator().manual_seed(0))
TOKENS[2:, 3] = -100
TOKENS[5:, 2] = -100
RETURNED_LOSSES = {
    "tokens": (epk.CrossEntropy(), lambda r, y: F.cross_entropy(r.logits.view(-1, NUM_CLASSES), y.view(-1))),
    "next_tokens": (epk.PerSampleLoss(next_tokens, counts=lambda y: (y[:, 1:] != -100).sum(1)), next_tokens),
    "two_terms": (
        epk.PerSampleLoss(lambda r, y: r.logits[:, 0].square().sum(1) + r.hidden.abs().mean((1, 2))),
        lambda r, y: r.logits[:, 0].square().sum(1).mean() + r.hidden.abs().mean(),
    ),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("loss", "in_torch"), RETURNED_LOSSES.values(), ids=RETURNED_LOSSES)
def test_losses_of_what_the_network_returns_are_recorded_and_attributed(loss, in_torch):
    net, X = Tagger().double(), tagger_inputs()
    optimizer, batches = sgd(net, 0.2, momentum=0.9), ([0, 5, 3], [1, 2, 7, 6], [4, 0])
    options = {"value": in_torch, "call": lambda net, x: net(**x), "loss": loss, "output": mean_logits}
    run = record_loop(net, optimizer, X, TOKENS, batches, **options).trajectory
    assert not run.loss_takes_outputs
    assert_exact(run, cut(X, 2), tolerance=2e-12)
    step, w = run.steps[0], run.states[0]
    rows, y, c = batch_of(run, step, w)
    alone = zip(rows.split(1), y.split(1), c.split(1), strict=True)
    gradients = [batch_gradient(run.model, w, x, target, run.loss, weight) for x, target, weight in alone]
    assert_close(sum(gradients), batch_gradient(run.model, w, rows, y, run.loss, c), rounding=100)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("shape", [(12,), (12, 1)], ids=["targets (n,)", "targets (n, 1)"])
@pytest.mark.parametrize("output", [lambda z: z, None, lambda z: z[:, None], lambda z: F.pad(z[:, None], (1, 0))])
def test_one_number_per_point_is_recorded_and_attributed_with_any_output(output, shape):
    torch.manual_seed(2)
    X, y = torch.randn(12, 3, dtype=torch.float64), torch.rand(shape, dtype=torch.float64).round()
    losses = nn.BCEWithLogitsLoss(), nn.HuberLoss(), epk.MeanSquaredError(), None
    for loss, is_flat in product(losses, (True, False) if output is None else (True,)):
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), *[nn.Flatten(0)] * is_flat).double()
        in_torch = loss if isinstance(loss, nn.Module) else nn.MSELoss()
        value = lambda z, t, in_torch=in_torch: in_torch(z.flatten(), t.flatten())  # noqa: E731
        options = {"loss": loss, "output": output, "value": value}
        recorder = record_loop(net, sgd(net, 0.2), X, y, torch.arange(12).split(4), **options)
        parts = assert_exact(recorder.trajectory, X[:2], tolerance=2e-12)
        expected = net(X[:2]).reshape(-1, 1).detach()
        assert_close(parts.network, expected if parts.network.shape[1] == 1 else F.pad(expected, (1, 0)))


def test_a_machine_of_loss_derivatives_in_the_outputs_refuses_a_loss_of_something_else():
    run = record(Tagger().double(), tagger_inputs(), TOKENS, loss=nn.CrossEntropyLoss(), output=mean_logits)
    with pytest.raises(ValueError, match=r"needs a loss of the outputs \(n, C\) alone: CrossEntropy"):
        single_machine(run, tagger_inputs(), head="logits")


# Targets as a loop saw them, of one value per row and of outputs derived from what the network returns

BATCHES = torch.arange(8).split(4)


def mixed(net, x):
    return net(0.7 * x + 0.3 * x.flip(0))


@pytest.mark.parametrize("squeeze", [True, False], ids=["n", "n_1"])
@pytest.mark.parametrize("column", [True, False], ids=["targets_n_1", "targets_n"])
def test_mixed_rows_of_a_regression_are_seen_whatever_its_shape(squeeze, column):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), *([nn.Flatten(0)] if squeeze else [])).double()
    X, y = torch.randn(8, 4).double(), torch.rand(8, *[1] * column).double()
    targets = [0.7 * y[rows] + 0.3 * y[rows].flip(0) for rows in BATCHES]

    def value(z, t):
        return F.mse_loss(z.flatten(), 0.7 * t.flatten() + 0.3 * t.flatten().flip(0))

    options = {"call": mixed, "value": value, "loss": nn.MSELoss(), "targets": targets}
    run = record_loop(net, sgd(net), X, y, BATCHES, **options).trajectory
    seen = run.steps[0].passes[0]
    assert seen.cotangents is None
    assert_close(seen.targets.values.flatten(), targets[0].flatten())
    assert_exact(run, run.inputs[:2], tolerance=2e-12)


class Scores(nn.Linear):
    """A network that returns its scores in a dictionary."""

    def forward(self, x):
        return {"logits": super().forward(x)}


def test_mixed_labels_are_read_where_the_loss_is_and_not_from_derived_outputs():
    net, X, y = Scores(4, 4).double(), torch.randn(8, 4).double(), torch.arange(8) % 4

    def value(returned, t):
        z = returned["logits"]
        return 0.7 * F.cross_entropy(z, t) + 0.3 * F.cross_entropy(z, t.flip(0))

    options = {"call": mixed, "value": value, "output": lambda returned: returned["logits"][:, :2]}
    run = record_loop(net, sgd(net), X, y, BATCHES, **options).trajectory
    assert [seen.cotangents for step in run.steps for seen in step.passes] == [None, None]
    assert_exact(run, run.inputs[:2], tolerance=2e-12)


def record_positions(loss, shape=(3, 5), smoothing=0.0):
    """A loop whose loss takes other positions of three in every step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 15), nn.Unflatten(1, shape)).double()
    X, y, steps = torch.randn(8, 4).double(), torch.randint(5, (8, 3)), iter(range(2))

    def value(z, labels):
        labels = labels.clone()
        labels[:, next(steps)], labels[1] = -100, -100
        return 0.5 * loss(z if shape == (5, 3) else z.transpose(1, 2), labels)

    options = {"loss": epk.CrossEntropy(label_smoothing=smoothing), "output": lambda returned: returned.flatten(1)}
    return record_loop(net, sgd(net), X, y, BATCHES, value=value, weight=0.5, **options).trajectory, y


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("shape", "smoothing"), [((5, 3), 0.0), ((3, 5), 0.1)], ids=["classes_second", "classes_last"])
def test_positions_that_the_loss_leaves_out_are_seen(shape, smoothing):
    run, y = record_positions(lambda z, t: F.cross_entropy(z, t, label_smoothing=smoothing), shape, smoothing)
    for step, (seen, batch) in enumerate((s.passes[0].targets, s.batch) for s in run.steps):
        assert seen.values.dtype == torch.int64
        assert seen.index.tolist() == [0, 1, 2, 3]
        assert (seen.values[:, step] == -100).all()
        assert (seen.values[1] == -100).all()
        is_kept = seen.values != -100
        assert torch.equal(seen.values[is_kept], y[batch][is_kept])
    parts = assert_exact(run, run.inputs[:2], tolerance=2e-12)
    assert (parts.samples[:, :, [1, 5]] == 0).all()  # of their positions none was left


def test_another_loss_of_positions_is_no_choice_of_positions():
    def focal(z, labels):
        losses = F.cross_entropy(z, labels, reduction="none")
        return ((1 - (-losses).exp()) * losses).sum() / (labels != -100).sum()

    def next_class(z, labels):
        return F.cross_entropy(z, (labels + 1).clamp(max=4).masked_fill(labels < 0, -100))

    for loss in (focal, next_class):
        with pytest.warns(UserWarning, match="step 0: [23] of 4 rows do not follow"):  # row 1 has no position
            run, _ = record_positions(loss)
        assert_exact(run, run.inputs[:2], tolerance=2e-12)


# Inputs of shape (M,): a number per point, as an embedding takes them

WORDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 1, 3])
WORD_LABELS = torch.arange(10) % 3
GAUSS = epk.gauss_legendre(3)


def make_net(dropout=0.0):
    torch.manual_seed(1)
    layers = (nn.Embedding(8, 4), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))
    return nn.Sequential(*layers).double()


def recorded(net, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return record_loop(net.train(), optimizer, WORDS, WORD_LABELS, torch.arange(10).split(4), **options).trajectory


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_contributions_sum_to_the_network(dropout, tmp_path):
    net = make_net(dropout)
    trajectory = recorded(net, folder=tmp_path / "run")
    asked = torch.tensor([7, 0, 0])
    parts = epk.attribute(trajectory, asked, head="logits")
    assert parts.certified
    assert_close(parts.total, net.eval()(asked).detach())
    loaded = epk.load_trajectory(tmp_path / "run", make_net(dropout))
    assert torch.equal(epk.attribute(loaded, asked, head="logits").samples, parts.samples)


def test_a_block_is_that_of_the_definitions_and_a_kernel_takes_columns():
    trajectory = recorded(make_net())
    a, b = epk.Points(torch.arange(3), is_train=False), epk.Points(torch.arange(2, 6), is_train=True)
    block = epk.gram_block(trajectory, a, b, head="logits", rule=GAUSS)
    assert_close(block, reference.gram_block(trajectory, a, b, "logits", GAUSS))
    copies = epk.train_copy(WORDS[:, None]), epk.test_copy(WORDS[:2, None])
    K = epk.EPKKernel(trajectory, rule=GAUSS)(*copies).to_dense()
    train, test = epk.Points(WORDS, is_train=True), epk.Points(WORDS[:2], is_train=False)
    assert_close(K, epk.gram_block(trajectory, train, test, rule=GAUSS).reshape(30, 6))


def test_rows_of_other_points_and_numbers_that_are_no_integers_are_refused():
    net = make_net()
    with pytest.raises(epk.StepMismatchError, match=r"row 0 was X\[0\], the batch says X\[4\]"):
        record_loop(net, sgd(net), WORDS, WORD_LABELS, [torch.arange(4, 8)], call=lambda net, x: net(WORDS[:4]))
    net = nn.Linear(1, 3).double()
    with pytest.raises(ValueError, match=r"\(M,\) is for integers alone, .*: got \(10,\). Points .* X\[:, None\]"):
        epk.Recorder(net, sgd(net), WORDS.double(), WORD_LABELS)

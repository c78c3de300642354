"""What a step is made of is seen: passes that only look are no part of it, and what replaces a part of it is named."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import epk_gp as epk
from epk_gp.core.model import functionalize
from helpers import assert_close
from loops import Attentive, Net, assert_exact, data, flat, mlp, record, sgd

POINTS, ROWS, STEPS = 24, 8, 3


NETWORKS = {
    "mlp": mlp,
    "dropout": lambda: nn.Sequential(*mlp(), nn.Dropout(0.2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "attention": lambda: Attentive(2),
}


def look_at_each_loss(loop):
    """As GradNorm weighs tasks."""
    for loss in (loop.loss, loop.z.square().mean()):
        torch.autograd.grad(loss, [*loop.net.parameters()][-1], retain_graph=True)


def look_at_every_row(loop):
    """As clipping by row."""
    for loss in F.cross_entropy(loop.z, loop.t, reduction="none"):
        torch.autograd.grad(loss, [*loop.net.parameters()], retain_graph=True)


def look_backwards(loop):
    """As ghost clipping: what the first backward pass left is thrown away."""
    if not loop.number:
        (2 * loop.loss).backward(retain_graph=True)
        loop.optimizer.zero_grad(set_to_none=loop.step % 2 == 0)


def look_at_inputs(loop):
    """As a saliency map of the batch itself, by a pass of its own."""
    x = loop.X[loop.rows].requires_grad_()
    torch.autograd.grad(F.cross_entropy(loop.net(x), loop.t), x)
    F.cross_entropy(loop.net(x), loop.t).backward(inputs=[x])


def look_at_outputs(loop):
    torch.autograd.grad(loop.loss, loop.z, retain_graph=True)


class Loop:
    """Accumulates batches whose rows are weighted, and looks at gradients before the backward pass and after it."""

    def __init__(self, name, adam, look, **options):
        torch.manual_seed(1)
        self.net, draw = NETWORKS[name]().double(), torch.Generator().manual_seed(2)
        self.X, y = data(POINTS)
        parameters = self.net.parameters()
        self.optimizer = torch.optim.Adam(parameters, 0.01) if adam else torch.optim.SGD(parameters, 0.1, momentum=0.5)
        with epk.Recorder(self.net, self.optimizer, self.X, y, check_every=1, **options) as recorder:
            for self.step in range(STEPS):
                self.optimizer.zero_grad()
                for self.number in range(2):
                    self.rows = torch.randperm(POINTS, generator=draw)[:ROWS]
                    self.t, c = y[self.rows], torch.rand(ROWS, generator=draw, dtype=torch.float64)
                    self.z = self.net(self.X[self.rows])
                    self.loss = c @ F.cross_entropy(self.z, self.t, reduction="none") / ROWS
                    look(self)
                    self.loss.backward(retain_graph=True)
                    look_at_each_loss(self)
                    recorder.batch(self.rows, weight=1.0 if "loss" in options else c)
                self.optimizer.step()
        self.trajectory = recorder.trajectory


LOOKS = [look_at_each_loss, look_at_every_row, look_backwards, look_at_inputs, look_at_outputs]


LOOKING = [
    *(("mlp", False, look, {}) for look in LOOKS), ("dropout", False, look_at_every_row, {}),
    ("attention", True, look_at_every_row, {"loss": None}), ("convolution", True, look_backwards, {}),
    ("attention", False, look_backwards, {"loss": None}), ("mlp", False, look_at_inputs, {"loss": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "adam", "look", "options"), LOOKING)
def test_backward_passes_that_only_look_are_no_part_of_a_step(name, adam, look, options):
    run, plain = Loop(name, adam, look, **options).trajectory, Loop(name, adam, id, **options).trajectory
    assert run.digest == plain.digest  # the weights, and what is recorded of each pass
    assert epk.attribute(run, run.inputs[:2]).certified


def record_by_hand(write, loss=None):
    """Record a loop that takes gradients by `torch.autograd.grad` and writes them itself."""
    net, (X, y) = mlp(), data()

    def backward(z, y):
        gradients = torch.autograd.grad(F.cross_entropy(z, y), [*net.parameters()])
        for p, g in zip(net.parameters(), gradients, strict=True):
            p.grad = write(g)
        return torch.zeros((), requires_grad=True)

    return record(net, sgd(net), X, y, (torch.arange(4), torch.arange(4, 9)), value=backward, loss=loss).trajectory


@pytest.mark.parametrize("loss", [None, epk.CrossEntropy()], ids=["unstated", "stated"])
def test_where_all_passes_of_a_step_look_the_loop_writes_its_gradients_itself(loss):
    for factor in (1, 3):
        trajectory = record_by_hand(lambda g, factor=factor: factor * g, loss)
        assert epk.attribute(trajectory, trajectory.inputs[:2]).certified
        assert {float(u.grad_scale[0]) for u in trajectory.updates} == {float(factor)}
    with pytest.raises(epk.StepMismatchError, match="does not come through the outputs"):
        record_by_hand(lambda g: g + 0.1, loss)


def train(net, change=id, at="before", X=None, losses=F.cross_entropy, optimizer=None, **options):
    """Train on all rows; the second step begins with a change, or has it after `batch()` or after the step."""
    act = {at: lambda step: change(net) if step == 1 else None}
    X, optimizer = data()[0] if X is None else X, sgd(net) if optimizer is None else optimizer
    return record(net, optimizer, X, data()[1], [None] * 3, value=losses, check_every=1, **act, **options)


def last(net):
    return [module for module in net.modules() if isinstance(module, nn.Linear)][-1]


KEEPING = {
    "prune": lambda net: prune.l1_unstructured(last(net), "weight", 0.3),
    "weight_norm": lambda net: nn.utils.weight_norm(last(net)),
    "spectral_norm": lambda net: nn.utils.spectral_norm(last(net)),
    "attribute": lambda net: net[0].register_forward_hook(lambda module, args, z: setattr(module, "kept", z)),
    "list": lambda net: setattr(net, "kept", []) or net[0].register_forward_hook(lambda m, args, z: net.kept.append(z)),
}


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_a_network_whose_modules_keep_results_is_recorded_after_calls_too(keep, dropout):
    X, _ = data()
    net = mlp() if not dropout else nn.Sequential(*mlp(), nn.Dropout(0.2))
    keep(net)
    net(X)
    assert_exact(train(net).trajectory, X[:3], net)


CHANGES = {
    "pruned": (lambda net: prune.l1_unstructured(last(net), "weight", 0.3), "'2.weight'"),
    "parametrised": (lambda net: parametrizations.weight_norm(last(net)), "'2.parametrizations'"),
    "without_bias": (lambda net: setattr(last(net), "bias", None), "'2.bias'"),
    "appended": (lambda net: net.append(nn.Identity()), "'3'"),
    "removed": (lambda net: net.__delitem__(1), "'1'"),
    "replaced": (lambda net: net.__setitem__(2, nn.Linear(6, 3).double()), "'2'"),
}


@pytest.mark.parametrize(
    ("name", "at"), [*product(CHANGES, ["before"]), ("appended", "announced"), ("pruned", "after")]
)
def test_modules_and_parameters_that_a_loop_changes_are_named(name, at):
    change, name = CHANGES[name]
    message = f"step {1 + (at == 'after')}: the network must keep its modules and parameters: {name} was added, removed"
    with pytest.raises(epk.StepMismatchError, match=message):
        train(mlp(), change, at)


def test_a_module_that_is_back_before_the_next_batch_is_no_change():
    def features(net):
        layer, net[2] = net[2], nn.Identity()
        net(data()[0])
        net[2] = layer

    assert train(mlp(), features).num_steps == 3


def spectrum(before, modes):
    """Complex weights as pairs of numbers, after an odd number of others."""

    def forward(net, x):
        h = torch.fft.rfft(torch.cat([x, net.scale.sum() * x[:, :1]], dim=1))
        kept = h[:, :modes] * torch.view_as_complex(net.pairs)
        return net.out(torch.tanh(torch.fft.irfft(torch.cat([kept, h[:, modes:]], dim=1), n=5)))

    scale, pairs = nn.Parameter(torch.ones(before)), nn.Parameter(torch.randn(modes, 2))
    return Net(forward, scale=scale, pairs=pairs, out=nn.Linear(5, 3)).double()


@pytest.mark.parametrize(("before", "modes"), [(1, 2), (2, 3), (3, 1)])
def test_complex_weights_may_begin_anywhere_among_the_weights_and_are_read_under_vmap(before, modes):
    X = data()[0]
    for make in (sgd, lambda net: torch.optim.Adam(net.parameters(), 0.01)):
        net = spectrum(before, modes)
        trajectory = train(net, optimizer=make(net)).trajectory
        assert_exact(trajectory, X[:3], net)
        assert make is not sgd or epk.reconstruct(trajectory, X[:3], head="logits").certified
    model = functionalize(net, tuple(name for name, _ in net.named_parameters()))
    W = torch.stack([flat(net), 1.5 * flat(net)])
    together = torch.func.vmap(lambda w: model.evaluate(model.unflatten(w), X))(W)
    assert_close(together, torch.stack([model(model.unflatten(w), X) for w in W]))


def words(*, by_torch, kind=nn.Embedding):
    """An embedding whose rows have a largest norm, by torch, which writes them, or by a factor."""

    def forward(net, ids):
        w = net.embed.weight
        if not by_torch:
            w = w * (0.7 / w.norm(dim=1, keepdim=True)).clamp(max=1)
        h = net.embed(ids) if by_torch else F.embedding(ids, w)
        return net.out(torch.tanh(h).reshape(len(ids), -1, 4).mean(dim=1))

    return Net(forward, embed=kind(9, 4, max_norm=0.7 if by_torch else None), out=nn.Linear(4, 3)).double()


def test_a_forward_pass_that_writes_to_weights_is_refused_and_its_cure_is_exact():
    ids = torch.randint(0, 9, (10, 5))
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match=r"in place \('embed.weight'\).* for Embedding\(max_norm=...\) a product"):
            train(words(by_torch=True, kind=kind), X=ids)
    net = words(by_torch=False)
    assert epk.attribute(train(net, X=ids).trajectory, ids[:2], head="logits").certified


def counting(dtype, size, *, always):
    """Counts its passes in training, and scales by that: always, or in training alone."""

    def forward(net, x):
        if net.training:
            net.count += 1
        return net.inner(x) * (1 + 0.1 * net.count.sum() if always or net.training else 1)

    return Net(forward, inner=mlp(), count=torch.zeros(() if size is None else size, dtype=dtype))


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("always", [True, False])
def test_integer_buffers_that_training_moves_are_told_to_be_floating_point(size, always):
    message = r"'count' changed\..* floating-point one \(torch.int64" if always else r"has count=.* floating-point buf"
    with pytest.raises(epk.StepMismatchError, match=message):
        train(counting(torch.int64, size, always=always))
    trajectory = train(counting(torch.float64, size, always=always)).trajectory
    assert epk.attribute(trajectory, trajectory.inputs[:2], head="logits").certified


def temperature(*, in_forward):
    """CLIP's scale: a parameter that the loss uses, or forward()."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    forward = lambda net, x: net.inner(x) * net.scale.exp() if in_forward else net.inner(x)  # noqa: E731
    return Net(forward, inner=mlp(), scale=scale)


@pytest.mark.parametrize("late", [False, True], ids=["before_the_pass", "after_it"])
def test_a_parameter_that_only_the_loss_uses_is_named_and_both_cures_are_exact(late):
    def losses(z, y):
        return F.cross_entropy(z * net.scale.exp() if late else scale() * z, y)

    def scale():
        return net.scale.exp()

    net = temperature(in_forward=False)
    with pytest.raises(epk.StepMismatchError, match="no gradient comes to 'scale' through the network's outputs"):
        train(net, losses=losses, loss=None)
    X = data()[0]
    assert epk.attribute(train(temperature(in_forward=True)).trajectory, X[:2], head="logits").certified
    net = temperature(in_forward=False)
    own, inner = torch.optim.SGD([net.scale], lr=0.1), sgd(net.inner)
    hook = inner.register_step_post_hook(lambda *args: own.step())
    trajectory = train(net, losses=losses, loss=None, optimizer=inner).trajectory
    hook.remove()
    assert epk.attribute(trajectory, X[:2], head="logits").certified


@pytest.mark.parametrize(("zero", "batch_norm"), [({0}, True), ({1}, False), ({0, 1}, True)])
def test_a_batch_whose_loss_is_0_has_no_weight(zero, batch_norm):
    (X, y), factors = data(), [float(number not in zero) for number in range(2)]
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double() if batch_norm else mlp()
    optimizer, batches = sgd(net, momentum=0.5), (torch.arange(5), torch.arange(5, 10))
    with epk.Recorder(net, optimizer, X, y, check_every=1) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            for rows, factor in zip(batches, factors, strict=True):
                ((factor if step == 1 else 1.0) * F.cross_entropy(net(X[rows]), y[rows])).backward()
                recorder.batch(rows)
            optimizer.step()
    weights = torch.tensor([factor / 5 for factor in factors for _ in range(5)], dtype=torch.float64)
    assert torch.equal(recorder.steps[1].sample_weights, weights)
    assert epk.attribute(recorder.trajectory, X[:2], head="logits").certified


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_that_no_backward_pass_went_through_are_named_on_a_cpu_too(dtype):
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    with epk.Recorder(net, optimizer := sgd(net), X, y) as recorder:
        for rows in (torch.arange(4), torch.arange(4, 8)):
            loss = F.cross_entropy(net(X[rows]), y[rows])
            if not rows[0]:
                loss.backward()
            recorder.batch(rows)
        with pytest.raises(epk.StepMismatchError, match=r"announced rows that no backward\(\) went through"):
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "steps"), [(lambda net: sgd(net, 0.05), 4), (lambda net: torch.optim.Adam(net.parameters()), 2)]
)
def test_an_optimizer_that_is_made_in_the_loop_is_named(make, steps):
    (X, y), net = data(), mlp()
    own, message = sgd(net), f"Another {type(make(net)).__name__} stepped: pass the recorder both"
    says, recorder = pytest.raises(epk.StepMismatchError, match=message), epk.Recorder(net, own, X, y)
    with says, recorder:
        for step in range(steps):
            own = make(net) if step == 1 else own
            own.zero_grad()
            F.cross_entropy(net(X), y).backward()
            recorder.batch()
            own.step()


def test_optimizers_around_the_recorder_s_or_of_other_networks_are_no_others():
    (X, y), net, teacher = data(), mlp(), mlp()
    inner, other = sgd(net), sgd(teacher)

    class Wrapper(torch.optim.Optimizer):
        def step(self, closure=None):
            inner.step()

    def train_teacher(_):
        F.cross_entropy(teacher(X), y).backward()
        other.step()

    around = Wrapper(inner.param_groups, {})
    assert record(net, inner, X, y, [None] * 3, before=train_teacher, stepped=around).num_steps == 3


def record_some_empty(net, optimizer, X, y, batches, *, calls=False, **options):
    """Record a loop whose sampler draws batches without rows too, as a Poisson sampler does."""
    before, reduction = [], "sum" if "loss" in options else "mean"
    with epk.Recorder(net, optimizer, X, y, check_every=1, **options) as recorder:
        for rows in batches:
            before.append(flat(net))
            optimizer.zero_grad(set_to_none=False)
            if len(rows) or calls:
                F.cross_entropy(net(X[rows]), y[rows], reduction=reduction).backward()
            recorder.batch(rows)
            optimizer.step()
    assert not torch.equal(before[1], flat(net))  # momentum and decay move the weights all the same
    assert_exact(recorder.trajectory, X[:3])
    assert not recorder.steps[1].sample_weights.any()


@pytest.mark.parametrize("calls", [True, False], ids=["called", "not_called"])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_a_batch_without_rows_is_a_step_without_contributions(adam, calls):
    net, batches = mlp(), (torch.arange(5), [], torch.arange(1), torch.tensor([], dtype=torch.int64))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01) if adam else sgd(net, momentum=0.9, weight_decay=0.01)
    record_some_empty(net, optimizer, *data(), batches, calls=calls, loss=epk.CrossEntropy("sum"))


def test_a_batch_without_rows_needs_no_sample_that_counts_but_a_stated_loss():
    (X, y), net = data(), mlp()
    y[0] = -100  # no sample stands for rows that are not there
    record_some_empty(net, sgd(net, momentum=0.9), X, y, (torch.arange(5), []))
    with pytest.raises(ValueError, match="With loss=None, leave out"):
        record(net, sgd(net), X, y, [[]], value=lambda z, y: z.sum(), loss=None)


def test_a_step_in_which_no_weight_has_a_gradient_is_none():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net, momentum=0.9)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for step in range(3):
            optimizer.zero_grad()
            if step != 1:
                F.cross_entropy(net(X), y).backward()
                recorder.batch()
            optimizer.step()
    assert recorder.num_steps == 2

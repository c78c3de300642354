"""`UncertainClassifier.of`: a network that was not recorded, with the kernel of its last weights."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weighted_loops import Apply

import epk_gp as epk
from epk_gp.adapters.scores import EPKInfluence
from epk_gp.analysis.score_check import leave_one_out
from epk_gp.gram import sketch
from epk_gp.gram.path_features import path_features

NAMES = ["ant", "bee", "cat", "dog", "eel"]


def trained_net(seed: int = 0, *, frozen: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    X = torch.randn(50, 1, 5, 5, dtype=torch.float64)
    y = (2 * (X[:, 0, 0, 0] > 0) + (X[:, 0, 2, 2] > 0.3) + (X[:, 0, 4, 4] > 1)).long()
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(27, 5)
    net = nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimizer.step()
    net[0].requires_grad_(not frozen)
    return net, X, y


def held_out(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    X = torch.randn(count, 1, 5, 5, dtype=torch.float64, generator=generator)
    return X, torch.randint(0, 5, (count,), generator=generator)


@pytest.fixture(scope="module")
def judged():
    return epk.UncertainClassifier.of(*trained_net()).fit(*held_out())


def gradients_of(net: nn.Module, X: torch.Tensor) -> torch.Tensor:
    """Return J (n, C, P) in evaluation mode, one backward pass a row and output."""
    net.eval()
    weights = [p for p in net.parameters() if p.requires_grad]
    rows = [
        [torch.cat([g.flatten() for g in torch.autograd.grad(net(x[None])[0, c], weights)]) for c in range(5)]
        for x in X
    ]
    return torch.stack([torch.stack(row) for row in rows])


def kernel_of(J: torch.Tensor, K: torch.Tensor, X: torch.Tensor, Y: torch.Tensor, length: float) -> torch.Tensor:
    products = torch.einsum("ncp,mcp->nm", J, K)
    cosine = products / J.square().sum((1, 2)).sqrt()[:, None] / K.square().sum((1, 2)).sqrt()
    return (cosine * torch.exp(-torch.cdist(X.flatten(1), Y.flatten(1)).square() / (2 * length**2))) ** 2


@pytest.mark.parametrize("frozen", [False, True])
def test_process_is_that_of_the_tangent_kernel_written_by_hand(frozen):
    net, X, y = trained_net(frozen=frozen)
    V, labels = held_out()
    net.train()
    judged = epk.UncertainClassifier.of(net, X, y).fit(V, labels)
    assert net.training  # the network is as it was
    process, J, G = judged.process_, gradients_of(net, X), gradients_of(net, V)
    length = process.kernel.lengthscale
    gram, cross = kernel_of(J, J, X, X, length), kernel_of(G, J, V, X, length)
    torch.testing.assert_close(process.kernel.block(V, X), cross, rtol=1e-10, atol=1e-12)
    targets = nn.functional.one_hot(y, 5).double() - 1 / 5
    inverse = torch.linalg.inv(gram + process.noise * torch.eye(50, dtype=torch.float64))
    mean, variance = process.predict(V)
    torch.testing.assert_close(mean, cross @ inverse @ targets, rtol=0, atol=1e-8)
    torch.testing.assert_close(variance, 1 - (cross @ inverse * cross).sum(1), rtol=0, atol=1e-8)
    score = judged.uncertainty(V).out_of_distribution
    torch.testing.assert_close(score, variance, rtol=0, atol=0)
    with torch.no_grad():  # the network's own part of the probabilities
        raw = judged.stacking_.logits(net(V), mean)
    torch.testing.assert_close(judged.logit_posterior(V).mean, judged.stacking_.without_certainty(raw, variance))


def test_one_state_is_kept_and_each_output_is_differentiated_once(judged, monkeypatch):
    nodes = judged.process_.kernel.nodes
    assert nodes.num_steps == 5
    assert all(state is nodes.states[0] for state in nodes.states)
    passes = []
    original = sketch.layer_jacobians
    monkeypatch.setattr(sketch, "layer_jacobians", lambda *a: passes.append(len(a[2])) or original(*a))
    judged.process_.kernel.gram(trained_net()[1][:7])
    # the second-to-last call measures one point for the plan of the tile; the last has all points and all outputs
    assert passes == [1, 7]


def test_outputs_that_share_a_pass_give_what_separate_passes_give(monkeypatch):
    net, X, y = trained_net()
    found = []
    for numbers in (1 << 20, 1):
        monkeypatch.setattr(sketch, "_SHARED_NUMBERS", numbers)
        judged = epk.UncertainClassifier.of(net, X, y)
        nodes = sketch.nodes_trajectory(judged.trajectory, 5)
        features = path_features(nodes, X, 96, nodes=None, head="logits", num_probe=0)
        coefficients = sketch.trace_coefficients(nodes, 0)
        exact = sketch.PathSketch(nodes, None, "logits", coefficients, 1, 0, epk.straight(), nodes)
        points = epk.Points(X, is_train=False)
        found.append((torch.as_tensor(features), *exact.products(points, points)))
    for shared, separate in zip(*found, strict=True):
        torch.testing.assert_close(shared, separate, rtol=1e-11, atol=1e-12)


def test_features_of_one_state_are_unbiased():
    net, X, y = trained_net()
    run = sketch.nodes_trajectory(epk.UncertainClassifier.of(net, X, y).trajectory, 5)
    J = gradients_of(net, X[:6])
    exact = torch.einsum("ncp,mcp->nm", J, J) / 5
    drawn = [path_features(run, X[:6], 64, nodes=None, head="logits", seed=seed, num_probe=0) for seed in range(64)]
    products = torch.stack([torch.as_tensor(z @ z.T) for z in drawn])
    mean, deviation = products.mean(0), products.std(0) / 64**0.5
    assert ((mean - exact).abs() / deviation).max() < 4.5
    assert (mean * 1.2 - exact).abs().max() > 10 * deviation.min()  # the control


def test_one_node_takes_one_combination_of_the_outputs():
    net, X, y = trained_net()
    judged = epk.UncertainClassifier.of(net, X, y, nodes=1, inputs_kernel=None, power=1).fit(*held_out())
    v = judged.process_.kernel.combined.coefficients[0] * 5**0.5
    assert v.abs().tolist() == pytest.approx([1.0] * 5)
    J = torch.einsum("c,ncp->np", v, gradients_of(net, X))
    cosine = nn.functional.normalize(J) @ nn.functional.normalize(J).T
    torch.testing.assert_close(judged.process_.kernel.gram(X), cosine, rtol=1e-10, atol=1e-12)


def small_problem(outputs: int) -> tuple[nn.Module, *tuple[torch.Tensor, ...]]:
    """Return a network, its data and held-out points, with labels of three classes, or of two for one logit."""
    torch.manual_seed(1)
    X, V = torch.randn(60, 4, dtype=torch.float64), torch.randn(40, 4, dtype=torch.float64)
    y, labels = ((part[:, 0] > 0).long() + (part[:, 1] > 0).long() * (outputs > 1) for part in (X, V))
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double(), X, y, V, labels


def test_data_of_every_kind_give_the_same_classifier():
    pandas = pytest.importorskip("pandas")
    net, X, y, V, labels = small_problem(3)
    expected = epk.UncertainClassifier.of(net, X, y).fit(V, labels).predict_proba(V)
    data, validation = TensorDataset(X, y), TensorDataset(V, labels)
    of_data = epk.UncertainClassifier.of(net, data).fit(validation)
    of_loader = epk.UncertainClassifier.of(net, DataLoader(data, batch_size=7)).fit(DataLoader(validation, 9))
    for judged in (of_data, of_loader):
        torch.testing.assert_close(judged.predict_proba(V), expected, rtol=0, atol=1e-12)
    columns = list("abcd")
    frame, other = pandas.DataFrame(X.numpy(), columns=columns), pandas.DataFrame(V.numpy(), columns=columns)
    words = [pandas.Series([NAMES[k] for k in own]) for own in (y, labels)]
    named = epk.UncertainClassifier.of(net, frame, words[0], classes=NAMES[:3]).fit(other, words[1])
    np.testing.assert_allclose(named.predict_proba(other), expected.numpy(), rtol=0, atol=1e-12)
    assert set(named.predict(other)) <= set(NAMES[:3])
    single = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    single.load_state_dict(net.state_dict())
    rows = epk.UncertainClassifier.of(single, X.numpy(), y.tolist()).fit(V.numpy(), labels.numpy())
    assert rows.trajectory.inputs.dtype == torch.float32
    np.testing.assert_allclose(rows.predict_proba(V.numpy()), expected.numpy(), atol=1e-3)
    returned = nn.Sequential(net, Apply(lambda z: {"logits": z}))
    taken = epk.UncertainClassifier.of(returned, X, y, output=lambda found: found["logits"]).fit(V, labels)
    torch.testing.assert_close(taken.predict_proba(V), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("names", [[2, 0, 1], NAMES[:3]])
def test_targets_of_data_sets_are_numbers_of_outputs_whatever_the_names(names):
    net, X, y, V, labels = small_problem(3)
    expected = epk.UncertainClassifier.of(net, X, y).fit(V, labels)
    data, validation = (DataLoader(TensorDataset(*part), 8) for part in ((X, y), (V, labels)))
    named = np.asarray(names)
    for judged in (
        epk.UncertainClassifier.of(net, data, classes=names).fit(validation),
        epk.UncertainClassifier.of(net, X, named[y], classes=names).fit(validation),
        epk.UncertainClassifier.of(net, data, classes=names).fit(V, named[labels]),
    ):
        torch.testing.assert_close(judged.predict_proba(V), expected.predict_proba(V), rtol=0, atol=1e-12)
        assert judged.stacking_ == expected.stacking_
        assert (judged.predict(V) == named[expected.predict(V)]).all()
    wrong = DataLoader(TensorDataset(V, labels - 1), 8)  # -1 is no class, though NumPy takes it as the last
    with pytest.raises(ValueError, match=r"y must lie in 0\.\.2: got -1\.\.1"):
        epk.UncertainClassifier.of(net, data, classes=names).fit(wrong)


def pair(z: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(z.reshape(-1, 1), (1, 0))


ONE_LOGIT = {  # what the network makes of its logit, and the output that takes [0, z] from it
    "(n, 1)": (lambda z: z, pair),
    "(n,)": (lambda z: z[:, 0], pair),
    "(n,), stacked": (lambda z: z[:, 0], lambda z: torch.stack([0 * z, z], 1)),
    "(n, 1), joined": (lambda z: z, lambda z: torch.cat([torch.zeros_like(z), z], 1)),
    "a dictionary": (lambda z: {"logits": z}, lambda found: pair(found["logits"])),
    "a probability": (lambda z: z.sigmoid(), lambda p: pair(p.logit())),
    "two logits": (lambda z: torch.cat([0 * z, z], 1), None),
    "two log-probabilities": (lambda z: pair(z).log_softmax(1), lambda p: p - p[:, :1]),
    "two probabilities": (lambda z: pair(z).softmax(1), lambda p: p.log() - p[:, :1].log()),
}


@pytest.fixture(scope="module")
def one_logit():
    """A network of one logit, its data, the classifier of [0, z], and its order of suspicious labels."""
    net, X, y, V, labels = small_problem(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(net(X)[:, 0], y.double()).backward()
        optimizer.step()
    expected = epk.UncertainClassifier.of(nn.Sequential(net, Apply(pair)), X, y).fit(V, labels)
    return net, X, y, V, labels, expected, epk.label_errors(expected.trajectory).indices.tolist()


@pytest.mark.parametrize("name", ONE_LOGIT)
def test_output_is_judged_by_the_logits_that_it_takes(one_logit, tmp_path, name):
    """Whatever the network itself returns: the classifier is that of a network that returns the logits."""
    (net, X, y, V, labels, expected, order), (change, output) = one_logit, ONE_LOGIT[name]
    changed = nn.Sequential(net, Apply(change))
    data = (DataLoader(TensorDataset(X, y), batch_size=16),) if name.startswith("(n, 1)") else (X, y)
    judged = epk.UncertainClassifier.of(changed, *data, output=output).fit(V, labels)
    torch.testing.assert_close(judged.predict_proba(V), expected.predict_proba(V), rtol=0, atol=1e-9)
    torch.testing.assert_close(judged.uncertainty(V).error, expected.uncertainty(V).error, rtol=0, atol=1e-9)
    assert epk.label_errors(judged.trajectory).indices.tolist() == order
    judged.save(tmp_path / "saved")
    again = epk.UncertainClassifier.load(tmp_path / "saved", changed, output=output)
    torch.testing.assert_close(again.predict_proba(V), judged.predict_proba(V), rtol=0, atol=1e-9)


NO_LOGITS = {
    "one number per point": (lambda z: z[:, :1], lambda z: z[:, 0], lambda z: z[:, :1].sigmoid()),
    "probabilities": (
        lambda z: z.softmax(1), lambda z: z.float().softmax(1).double(), lambda z: (100 * z).softmax(1),
        lambda z: torch.stack([1 - z[:, 0].sigmoid(), z[:, 0].sigmoid()], 1), lambda z: z.softmax(1).clamp(1e-6, 1),
    ),
}  # fmt: skip
LOGITS = [lambda z: z.log_softmax(1), lambda z: z - z.mean(1, keepdim=True) + 1 / 3, torch.exp, torch.sigmoid]


@pytest.mark.parametrize("by_output", [False, True])
def test_probabilities_are_named_and_not_taken_for_logits(by_output):
    torch.manual_seed(1)
    X, y = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 2
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def of(change):
        returned = (net, change) if by_output else (nn.Sequential(net, Apply(change)), None)
        return epk.UncertainClassifier.of(returned[0], X, y, output=returned[1])

    for change, got in ((change, got) for got, changes in NO_LOGITS.items() for change in changes):
        with pytest.raises(ValueError, match=f"must be.*got {got}.* [Pp]ass output=lambda"):
            of(change)
    for change in (*LOGITS, lambda z: 1e-6 * z):
        assert of(change).trajectory.num_outputs == 3
    with pytest.raises(ValueError, match=r"the run's labels must lie in 0\.\.2: got 0\.\.3"):
        epk.UncertainClassifier.of(net, X, torch.arange(30) % 4)


def test_loaders_are_predicted_as_their_points(judged):
    V, labels = held_out()
    for data in (DataLoader(TensorDataset(V, labels), 7), TensorDataset(V)):
        assert torch.equal(judged.predict(data), judged.predict(V))
        assert torch.equal(judged.predict_proba(data), judged.predict_proba(V))
        assert torch.equal(judged.uncertainty(data).error, judged.uncertainty(V).error)


@pytest.mark.parametrize("settings", [{}, {"nodes": 1}, {"nodes": 3, "features": 32}])
def test_files_pickles_and_clones_hold_one_state(tmp_path, settings):
    net, X, y = trained_net()
    V, labels = held_out()
    judged = epk.UncertainClassifier.of(net, X, y, **settings).fit(V, labels)
    expected = judged.predict_proba(V)
    judged.save(tmp_path / "saved")
    size = (tmp_path / "saved" / "classifier.safetensors").stat().st_size
    assert judged.get_params()["nodes"] == settings.get("nodes")
    again = [
        epk.UncertainClassifier.load(tmp_path / "saved", trained_net(seed=5)[0]),
        pickle.loads(pickle.dumps(judged)),
        clone(judged).fit(V, labels),
    ]
    for own in again:
        torch.testing.assert_close(own.predict_proba(V), expected, rtol=0, atol=1e-10)
        assert len({id(state) for state in own.process_.kernel.nodes.states}) == 1
    again[0].save(tmp_path / "twice")
    assert (tmp_path / "twice" / "classifier.safetensors").stat().st_size == size
    with pytest.raises(ValueError, match="holds no training data"):
        again[0].fit(V, labels)


def test_scores_of_labels_come_from_the_process_alone(judged):
    net, X, y = trained_net()
    errors = epk.label_errors(judged.trajectory)
    order = errors.log_probability.argsort(stable=True)
    assert errors.indices.tolist() == order.tolist()
    with torch.no_grad():
        z = net.eval()(X)
    own = z.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(errors.aum, own - z.scatter(1, y[:, None], -torch.inf).amax(1))
    assert len(epk.next_to_label(judged, held_out()[0], 3)) == 3


def test_what_only_a_recorded_run_has_is_refused():
    net, X, y = trained_net()
    run = epk.UncertainClassifier.of(net, X, y).trajectory
    for ask in (
        lambda: epk.attribute(run, X[:2]),
        lambda: epk.attribute_tokens(run, X[:2], sequences=torch.arange(50)),
        lambda: epk.reconstruct(run, X[:2]),
        lambda: epk.influence(run, X[:2]),
        lambda: epk.influence(run, own=True),
        lambda: epk.retrain(run, torch.ones(50, dtype=torch.float64)),
        lambda: leave_one_out(run, X[:2]),
        lambda: EPKInfluence(run).influence((X[:2], y[:2])),
    ):
        with pytest.raises(ValueError, match="needs the recorded steps of a training: this run has the states"):
            ask()


def test_bad_arguments_have_one_clear_line():
    net, X, y = trained_net()
    V, labels = held_out()
    of = epk.UncertainClassifier.of
    for ask, kind, message in (
        (lambda: of("net", X, y), TypeError, r"the network must be a torch.nn.Module: got str"),
        (lambda: of(net, X, NAMES * 10), TypeError, r"y must be whole numbers, the classes of the network: got list"),
        (lambda: of(net, X, NAMES * 10, classes=NAMES[:2]), ValueError, r"y must hold classes .*: got 'cat'"),
        (lambda: of(net, X), TypeError, r"y must be whole numbers, .* got NoneType"),
        (lambda: of(net, X.numpy()), TypeError, r"y must be whole numbers, .* got NoneType"),
        (lambda: of(net, X, classes=NAMES), ValueError, r"y must hold classes .*: got None"),
        (lambda: of(net, X, y.double()), TypeError, r"y must be class indices: got torch.float64"),
        (lambda: of(net, X, y, classes=NAMES[:2]), ValueError, r"y must hold classes of the network"),
        (lambda: of(net, X, y, power=0).fit(V, labels), ValueError, r"power must be"),
        (lambda: of(net, X, y).fit(V), TypeError, r"y must be whole numbers, .* got NoneType"),
        (lambda: of(net, [["a"]], y), TypeError, r"X must be an array of numbers: got list"),
        (lambda: of(net, X, y, colour=1), TypeError, r"colour"),
    ):
        with pytest.raises(kind, match=message):
            ask()

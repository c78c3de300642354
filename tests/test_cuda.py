"""The same numbers on a GPU. Skipped, visibly, where there is none."""

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import epk_gp as epk
from epk_gp.quadrature.rules import Rule, WeightPath
from helpers import assert_close, make_case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:Synchronization debug mode is a prototype"),
]
NAMES = ["relu", "wide", "cnn", "wide_conv", "twice", "attention", "transformer"]


def data(points: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(points, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X.to(device), (torch.arange(points) % 3).to(device)


def mlp(*between: nn.Module, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), *between, nn.ReLU(), nn.Linear(width, 3)).double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", [epk.gauss_legendre(3), epk.adaptive(1e-10)], ids=["fixed", "adaptive"])
def test_blocks_on_a_gpu_equal_those_on_the_cpu(name: str, rule: Rule) -> None:
    case = make_case(name)
    X, is_train = torch.cat([case.trajectory.inputs, case.test]), torch.arange(12) < 7
    for head in case.heads:
        expected = epk.gram_block(case.trajectory, *[epk.Points(X, is_train)] * 2, head=head, rule=rule)
        points = epk.Points(X.cuda(), is_train.cuda())
        actual = epk.gram_block(case.trajectory, points, points, head=head, rule=rule)
        assert actual.is_cuda
        assert_close(actual.cpu(), expected, rounding=1e6)


@pytest.mark.parametrize("name", [*NAMES, "norms"])
@pytest.mark.parametrize("path", [epk.straight(), epk.layerwise()], ids=["straight", "layerwise"])
def test_machines_on_a_gpu_equal_those_on_the_cpu(name: str, path: WeightPath) -> None:
    case = make_case(name)
    on_cpu, on_gpu = (epk.attribute(case.trajectory, X, path=path) for X in (case.test, case.test.cuda()))
    assert on_gpu.samples.is_cuda
    assert on_gpu.certified
    assert_close(on_gpu.samples.cpu(), on_cpu.samples, rounding=1e6)
    assert epk.reconstruct(case.trajectory, case.test.cuda()).max_error <= 1e-11


def test_a_run_recorded_on_a_gpu_is_exact() -> None:
    (X, y), net = data(20, "cuda"), mlp().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=10, batch_size=7)
    assert epk.attribute(trajectory, X[:4]).max_error <= 1e-12


def test_states_on_disk_are_streamed_to_the_stream_that_computes(tmp_path: Path) -> None:
    (X, y), net = data(20), mlp(width=300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    epk.train(net, X, y, optimizer=optimizer, steps=40, folder=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", net)
    expected = epk.gram_block(run, epk.Points(X, False), epk.Points(X, True))
    with torch.cuda.stream(torch.cuda.Stream()):
        actual = epk.gram_block(run, epk.Points(X.cuda(), False), epk.Points(X.cuda(), True)).cpu()
    assert_close(actual, expected, rounding=1e6)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait_inside_the_loop_over_steps(name: str) -> None:
    """As in tests/gram/test_no_synchronisation.py, but CUDA itself warns at every synchronisation."""
    counts = []
    for steps in (2, 6):
        case = make_case(name, steps=steps)
        a, b = epk.Points(case.test.cuda(), False), epk.Points(case.trajectory.inputs.cuda(), True)
        epk.gram_block(case.trajectory, a, b, head=case.heads[0])
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                epk.gram_block(case.trajectory, a, b, head=case.heads[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("features", ["exact", 512])
def test_judgements_on_a_gpu_equal_those_on_the_cpu(features: int | str) -> None:
    (X, y), net = data(54), mlp()
    run = epk.train(net, X[:30], y[:30], optimizer=torch.optim.SGD(net.parameters(), lr=0.2), steps=10)
    model = epk.UncertainClassifier(run, nodes=4, features=features)
    expected = model.fit(X[30:50], y[:20]).uncertainty(X[50:])
    actual = model.fit(X[30:50].cuda(), y[:20].cuda()).uncertainty(X[50:].cuda())
    assert actual.error.is_cuda
    for name in ("error", "out_of_distribution"):
        torch.testing.assert_close(getattr(actual, name).cpu(), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_sketched_features_on_a_gpu_equal_those_on_the_cpu() -> None:
    case = make_case("relu")
    found = [epk.path_features(case.trajectory, X, 256, nodes=4, num_probe=0) for X in (case.test.cuda(), case.test)]
    assert found[0].is_cuda
    torch.testing.assert_close(found[0].cpu() + 0, found[1] + 0, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_influence_and_retraining_on_a_gpu_equal_those_on_the_cpu(clip: float | None) -> None:
    found = []
    for device in ("cpu", "cuda"):
        (X, y), net = data(20, device), mlp(nn.BatchNorm1d(8)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
        with epk.Recorder(net, optimizer, X, y) as recorder:
            for step in range(6):
                batch = (torch.arange(8) + 3 * step) % 20
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(X[batch.to(device)]), y[batch.to(device)]).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                recorder.batch(batch)
                optimizer.step()
        run, weights = recorder.trajectory, torch.linspace(0, 2, 40, dtype=torch.float64).reshape(2, 20)
        found.append((epk.influence(run, X[:3]).values.cpu(), epk.retrain(run, weights).outputs(X[:3]).cpu()))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert_close(on_gpu, on_cpu, rounding=1e8)


def _recorded(
    net: nn.Module, optimizer: torch.optim.Optimizer, X: torch.Tensor, y: torch.Tensor, **options: Any
) -> epk.Trajectory:
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for batch in torch.arange(20).split(7):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[batch].cuda()), y[batch].cuda()).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def test_data_on_the_cpu_are_moved_to_the_network() -> None:
    (X, y), net = data(20), mlp().cuda()
    run = _recorded(net, torch.optim.Adam(net.parameters()), X, y)
    assert run.inputs.is_cuda
    assert epk.attribute(run, X[:2].cuda()).certified


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [None, False])
def test_steps_that_torch_counts_on_the_gpu_are_read_as_it_computes_them(optimizer: Any, foreach: bool | None) -> None:
    (X, y), net = data(20), mlp().cuda()
    run = _recorded(net, optimizer(net.parameters(), lr=0.01, capturable=True, foreach=foreach), X, y)
    assert epk.attribute(run, X[:2].cuda()).max_error <= 1e-12


def test_rates_in_float32_are_a_named_cause() -> None:
    (X, y), net = data(20), mlp().cuda()
    optimizer = torch.optim.Adamax(net.parameters(), lr=0.01, capturable=True)
    with pytest.raises(epk.StepMismatchError, match="torch computes its rates in float32"):
        _recorded(net, optimizer, X, y)
    assert epk.attribute(_recorded(net, optimizer, X, y, unexplained=1e-3), X[:2].cuda()).certified


@pytest.mark.parametrize("name", ["Adan", "AdEMAMix"])
def test_a_second_buffer_is_read_on_the_gpu(name: str) -> None:
    library = pytest.importorskip("pytorch_optimizer")
    (X, y), net = data(20), mlp().cuda()
    run = _recorded(net, getattr(library, name)(net.parameters(), lr=0.01), X, y)
    assert epk.attribute(run, X[:2].cuda()).max_error <= 1e-12


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(1, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.layer(self.embed(x[:, :, None])).mean(dim=1))
        return out


def convolutions() -> nn.Module:
    layers = [nn.Linear(5, 3 * 32 * 32), nn.Unflatten(1, (3, 32, 32)), nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("make", "cause", "context"),
    [
        (Encoder, "fused attention draws its dropout", lambda: sdpa_kernel(SDPBackend.MATH)),
        (convolutions, "in less than its dtype", lambda: torch.backends.cudnn.flags(enabled=True, allow_tf32=False)),
    ],
)
def test_what_the_kernels_of_a_loop_do_otherwise_is_named(make: Any, cause: str, context: Any) -> None:
    X, y = data(20)
    for chosen in (nullcontext, context):
        torch.manual_seed(0)
        net = make().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        expected = pytest.raises(epk.StepMismatchError, match=cause) if chosen is nullcontext else nullcontext()
        with chosen(), expected:
            assert epk.attribute(_recorded(net, optimizer, X.float(), y), X[:2].float().cuda()).certified
    if make is convolutions:  # the loop stays as it is
        run = _recorded(net, optimizer, X.float(), y, unexplained=0.05)
        assert 0 < epk.attribute(run, X[:2].float().cuda()).unexplained.abs().max() < 1e-2


def trained(device: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """A network that was trained without a recorder, and its checkpoints."""
    (X, y), net = data(54, device), mlp(nn.BatchNorm1d(8)).to(device)
    optimizer, states = torch.optim.Adam(net.parameters(), lr=0.02, eps=1e-3), [copy.deepcopy(net.state_dict())]
    for _ in range(3):
        for batch in torch.arange(30).split(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
            optimizer.step()
        states.append(copy.deepcopy(net.state_dict()))
    return net, states, X, y


def test_splits_between_checkpoints_on_a_gpu_equal_those_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        net, states, X, y = trained(device)
        split = epk.between(net, states, X[30:], data=(X[:30], y[:30]), lr=0.02, head="logits")
        assert split.max_error <= 1e-12
        assert split.pieces.device.type == device
        found.append([split.pieces.cpu(), split.network.cpu()])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert_close(on_gpu, on_cpu, rounding=1e8)
    net, states, X, _ = trained("cpu")  # checkpoints and rows on the CPU, as files have them
    assert_close(epk.between(net.cuda(), states, X[30:]).pieces.cpu(), found[0][0], rounding=1e8)


@pytest.mark.parametrize("make", [mlp, convolutions, Encoder])
def test_tangent_kernels_on_a_gpu_equal_those_on_the_cpu(make: Any) -> None:
    (X, _), found = data(12), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net, rows = make().double().to(device).eval(), X.to(device)
        kernel = epk.NTKKernel(net, rows[:8], outputs="trace")
        found.append([epk.ntk(net, rows[:8], rows[8:]).cpu(), kernel(rows[8:]).to_dense().detach().cpu()])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert_close(on_gpu, on_cpu, rounding=1e6)


def test_a_classifier_of_a_trained_network_on_a_gpu_equals_that_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        net, _, X, y = trained(device)
        model = epk.UncertainClassifier.of(net, X[:30], y[:30]).fit(X[30:50], y[30:50])
        found.append(model.uncertainty(X[50:]))
    assert found[1].error.is_cuda
    for name in ("error", "out_of_distribution"):
        torch.testing.assert_close(
            getattr(found[1], name).cpu(), getattr(found[0], name), rtol=1e-4, atol=1e-5, check_dtype=False
        )


def test_scores_are_judged_on_a_gpu_as_on_the_cpu() -> None:
    (X, y), scores = data(54), torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    found = []
    for device in ("cpu", "cuda"):
        net = mlp().to(device)
        run = epk.train(
            net, *(t[:30].to(device) for t in (X, y)), optimizer=torch.optim.Adam(net.parameters()), steps=9
        )
        asked, classes = X[30:34].to(device), y[30:34].to(device)
        exact = epk.influence(run, asked, classes=classes).values[:, 0]
        found.append(
            epk.check_scores(run, {"exact": exact, "random": scores}, asked, classes=classes, retrainings=8, left_out=4)
        )
    for name in ("exact", "random"):
        on_cpu, on_gpu = (check.systems[name] for check in found)
        assert on_cpu.findings == on_gpu.findings
        torch.testing.assert_close(on_gpu.miss.cpu(), on_cpu.miss, rtol=1e-6, atol=1e-8)


def test_terms_of_sequences_on_a_gpu_equal_those_on_the_cpu() -> None:
    texts, found = torch.randint(7, (8, 6), generator=torch.Generator().manual_seed(0)), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 7)).double().to(device)
        X, targets = texts[:, :-1].to(device), texts[:, 1:].to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-3)
        with epk.Recorder(net, optimizer, X, targets, loss=epk.CrossEntropy(), output=lambda z: z[:, -1]) as recorder:
            for batch in torch.arange(8).repeat(3).split(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(X[batch]).transpose(1, 2), targets[batch]).backward()
                recorder.batch(batch)
                optimizer.step()
        function = epk.RowFunction.log_probability(targets[:2, -1])
        asked = {"function": function, "sequences": torch.tensor([1, 5])}
        tokens = epk.attribute_tokens(recorder.trajectory, X[:2], **asked)
        assert tokens.certified
        found.append(tokens.tokens.cpu())
    assert_close(found[1], found[0], rounding=1e8)


@pytest.mark.parametrize("is_regression", [False, True], ids=["margins", "outputs"])
def test_datamodels_on_a_gpu_equal_those_on_the_cpu(is_regression: bool) -> None:
    (X, y), net = data(20), mlp()
    targets, loss = (X[:, :3].sin(), epk.MeanSquaredError()) if is_regression else (y, epk.CrossEntropy())
    run = epk.train(net, X, targets, optimizer=torch.optim.Adam(net.parameters(), lr=0.02), steps=30, loss=loss)
    kept = torch.arange(20) % 3 > 0
    on_cpu, on_gpu = (
        epk.datamodel(run, X[:4].to(device), None if is_regression else y[:4].to(device)) for device in ("cpu", "cuda")
    )
    assert on_gpu.scores.is_cuda
    assert_close(on_gpu.scores.cpu(), on_cpu.scores, rounding=1e6)
    assert_close(on_gpu.predict(kept.cuda()).cpu(), on_cpu.predict(kept), rounding=1e6)

"""The same numbers on a GPU. Skipped, visibly, where there is none."""

import warnings
from pathlib import Path

import pytest
import torch

import epk_gp as epk
from epk_gp.quadrature.rules import Rule
from helpers import assert_close, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAMES = ["relu", "wide", "cnn", "wide_conv", "twice", "attention", "transformer"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", [epk.gauss_legendre(3), epk.adaptive(1e-10)], ids=["fixed", "adaptive"])
def test_blocks_on_a_gpu_equal_those_on_the_cpu(name: str, rule: Rule) -> None:
    case = make_case(name)
    X = torch.cat([case.trajectory.inputs, case.test])
    is_train = torch.arange(12) < 7
    for head in case.heads:
        expected = epk.gram_block(case.trajectory, *[epk.Points(X, is_train)] * 2, head=head, rule=rule)
        points = epk.Points(X.cuda(), is_train.cuda())
        actual = epk.gram_block(case.trajectory, points, points, head=head, rule=rule)
        assert actual.is_cuda
        assert_close(actual.cpu(), expected, rounding=1e6)


@pytest.mark.parametrize("name", NAMES)
def test_machines_on_a_gpu_equal_those_on_the_cpu(name: str) -> None:
    case = make_case(name)
    on_cpu, on_gpu = (epk.attribute(case.trajectory, X) for X in (case.test, case.test.cuda()))
    assert on_gpu.samples.is_cuda
    assert_close(on_gpu.samples.cpu(), on_cpu.samples, rounding=1e6)
    assert epk.reconstruct(case.trajectory, case.test.cuda()).max_error <= 1e-11


@pytest.mark.parametrize("name", ["relu", "cnn", "norms", "attention", "transformer"])
def test_layerwise_averages_on_a_gpu_equal_those_on_the_cpu(name: str) -> None:
    case = make_case(name)
    path = epk.layerwise()
    on_cpu, on_gpu = (epk.attribute(case.trajectory, X, path=path) for X in (case.test, case.test.cuda()))
    assert_close(on_gpu.samples.cpu(), on_cpu.samples, rounding=1e6)
    assert on_gpu.certified


def test_a_run_recorded_on_a_gpu_is_exact() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(20, 5, dtype=torch.float64, device="cuda"), (torch.arange(20) % 3).cuda()
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=10, batch_size=7)
    assert epk.attribute(trajectory, X[:4]).max_error <= 1e-12


def test_states_on_disk_are_streamed_to_the_stream_that_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    X, y = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 3
    net = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3)).double()
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
    torch.manual_seed(0)
    X, y = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 3
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.2), steps=10)
    held_out, asked = torch.randn(20, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    model = epk.UncertainClassifier(run, nodes=4, features=features)
    expected = model.fit(held_out, y[:20]).uncertainty(asked)
    actual = model.fit(held_out.cuda(), y[:20].cuda()).uncertainty(asked.cuda())
    assert actual.error.is_cuda
    torch.testing.assert_close(actual.error.cpu(), expected.error, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.out_of_distribution.cpu(), expected.out_of_distribution, rtol=1e-4, atol=1e-5)


def test_sketched_features_on_a_gpu_equal_those_on_the_cpu() -> None:
    case = make_case("relu")
    expected = epk.path_features(case.trajectory, case.test, 256, nodes=4, num_probe=0)
    actual = epk.path_features(case.trajectory, case.test.cuda(), 256, nodes=4, num_probe=0)
    assert actual.is_cuda
    torch.testing.assert_close(actual.cpu() + 0, expected + 0, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_influence_and_retraining_on_a_gpu_equal_those_on_the_cpu(clip: float | None) -> None:
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(20, 5, generator=generator, dtype=torch.float64).to(device)
        y = (torch.arange(20) % 3).to(device)
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
        net = net.double().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
        with epk.Recorder(net, optimizer, X, y) as recorder:
            for step in range(6):
                batch = (torch.arange(8) + 3 * step) % 20
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(X[batch.to(device)]), y[batch.to(device)]).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                recorder.batch(batch)
                optimizer.step()
        run = recorder.trajectory
        weights = torch.linspace(0, 2, 40, dtype=torch.float64).reshape(2, 20)
        found.append((epk.influence(run, X[:3]).values.cpu(), epk.retrain(run, weights).outputs(X[:3]).cpu()))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert_close(on_gpu, on_cpu, rounding=1e8)

"""Peak memory stays near the budget: measured in a process for each test."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)

SETUP = """
    import json, pathlib, torch
    import epk_gp as epk
    from epk_gp.analysis.maps import uncertainty_on_plane
    from epk_gp.analysis.planes import principal_plane

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def resident(which):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split(which + ":")[1].split()[0]) * 1024

    points = torch.randn({points}, {dim}, dtype=torch.float64)  # asked about
    X, y = points[:{train}].clone(), torch.arange({train}) % 3
    net = torch.nn.Sequential(torch.nn.Linear({dim}, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=2)
    small, ones = X[:3], torch.ones(2, len(X), dtype=torch.float64)
    epk.reconstruct(trajectory, small), epk.attribute(trajectory, small)  # what torch loads once
    epk.influence(trajectory, small), epk.retrain(trajectory, ones)
    increases = []
"""
BEFORE = """
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
"""
AFTER = """
    increases.append(resident("VmHWM") - before)
"""


def increases(*works: str, **sizes: int) -> list[int]:
    """Bytes by which the peak of a new process grows during each work: the negative control comes last."""
    measured = [textwrap.dedent(part) for work in works for part in (BEFORE, work, AFTER)]
    code = "".join([textwrap.dedent(SETUP).format(**sizes), *measured, "\nprint(json.dumps(increases))"])
    fixed = {
        "MALLOC_MMAP_THRESHOLD_": "131072"
    }  # else glibc keeps freed buffers or not, by luck: 44 to 67 MiB were seen
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg", **fixed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return [int(value) for value in json.loads(done.stdout.splitlines()[-1])]


MANY_OUTPUTS = """
    hidden = [torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
    net, inputs = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 300)).double(), X
"""
MIB = 1 << 20
# Buffers of matrix products and pages of code read for the first time: 0 to 8 MiB, and more on other processors.
OVERHEAD = 16 * MIB


@pytest.mark.slow
def test_reconstruct_keeps_to_its_budget() -> None:
    """6000 points of 400 numbers: 20 MB, times the nodes of the adaptive rule."""
    sizes = {"points": 6000, "train": 60, "dim": 400}
    # one panel of points, as a run of many steps has: panels alone would bound the memory of a few steps
    work = "from epk_gp.kernel_machine import reconstruction_pass as made\nmade.panel_points = lambda count, _: count\n"
    work += "epk.reconstruct(trajectory, points, rule=epk.adaptive(1e-9), memory_budget={budget})"
    bounded, loose = increases(work.format(budget=64 * MIB), work.format(budget=4096 * MIB), **sizes)
    assert bounded < 64 * MIB + OVERHEAD
    assert loose > bounded + 64 * MIB  # the negative control: without it the work takes more


@pytest.mark.slow
def test_a_tile_of_images_keeps_to_its_budget_because_passes_are_bounded() -> None:
    """400 images in one tile, of which no more go through a pass than it may hold."""
    sizes = {"points": 400, "train": 40, "dim": 784}
    work = """
    images = points.view(-1, 1, 28, 28)
    layers = [torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(1568, 3)).double()
    run = epk.train(net, images[:40], y, optimizer=torch.optim.SGD(net.parameters(), lr=0.05), steps=1)
    sides = (epk.Points(images, is_train=True), epk.Points(images.clone(), is_train=True))
    epk.gram_block(run, *sides, head="logits", rule=epk.left_endpoint(), memory_budget=96 * (1 << 20))
    """
    result = (3 * 400) ** 2 * 8
    unbounded = "\n    from epk_gp.autodiff import jacobians\n    jacobians.rows_per_pass = lambda *_: 1 << 20"
    bounded, loose = increases(work, unbounded + work, **sizes)
    assert bounded < 96 * MIB + result + OVERHEAD
    assert loose > bounded + 16 * MIB  # the negative control


@pytest.mark.slow
def test_a_million_weights_and_a_thousand_outputs_keep_to_a_budget() -> None:
    """What a network can do is verified before anything else, and that is what takes most."""
    work = """
    layers = [torch.nn.Linear(500, 660), torch.nn.ReLU(), torch.nn.Linear(660, 1000)]
    net, inputs = torch.nn.Sequential(*layers), torch.randn(12, 500)
    run = epk.train(net, inputs, torch.arange(12), optimizer=torch.optim.SGD(net.parameters(), lr=0.05), steps=1)
    epk.reconstruct(run, inputs, memory_budget=256 * (1 << 20))
    """
    block = """
    sides = (epk.Points(inputs[:3], is_train=False), epk.Points(inputs[:2], is_train=True))
    epk.gram_block(run, *sides, head="logits", memory_budget=256 * (1 << 20))
    """
    sizes = {"points": 40, "train": 20, "dim": 10}
    unbounded = "\n    from epk_gp.autodiff import verification\n    verification._TRUTH_BYTES = 1 << 30"
    bounded, loose = increases(work + block, unbounded + work, **sizes)
    assert bounded < 256 * MIB + 6 * 1000**2 * 4 + OVERHEAD
    assert loose > bounded + 64 * MIB  # the negative control


@pytest.mark.slow
def test_attribute_keeps_to_its_budget() -> None:
    sizes = {"points": 1500, "train": 1500, "dim": 100}
    work = "parts = epk.attribute(trajectory, X[:300], memory_budget={budget})"
    result = 3 * 300 * 1500 * 8  # samples, (n, C, M)
    bounded, loose = increases(work.format(budget=32 * MIB), work.format(budget=1024 * MIB), **sizes)
    assert bounded < 32 * MIB + result + OVERHEAD
    assert loose > bounded + 16 * MIB  # the negative control


@pytest.mark.slow
def test_output_gradients_at_many_nodes_keep_to_a_budget() -> None:
    """Two layers of ReLU cut a step at dozens of kinks; the gradients of 300 outputs take 1 MB at each node."""
    work = (
        MANY_OUTPUTS
        + """
    run = epk.train(net, inputs, torch.arange(20), optimizer=torch.optim.SGD(net.parameters(), lr=5.0), steps=1)
    epk.attribute(run, inputs[:1], memory_budget=32 * (1 << 20))
    """
    )
    sizes = {"points": 40, "train": 20, "dim": 10}
    result = 300 * 20 * 8
    held = "\n    from epk_gp.core.plans import MemoryPlan\n    MemoryPlan.node_bytes = 1 << 40"
    bounded, loose = increases(work, held + work, **sizes)
    assert bounded < 32 * MIB + result + OVERHEAD
    assert loose > bounded + 16 * MIB  # the negative control


@pytest.mark.slow
def test_adjoints_of_many_outputs_keep_to_a_budget() -> None:
    """Those of all 300 outputs of a point take 400 MB and more: outputs are computed apart."""
    work = (
        MANY_OUTPUTS
        + """
    run = epk.train(net, inputs, torch.arange(20), optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3), steps=1)
    """
    )
    calls = [f"epk.{call}(run, inputs[:1], memory_budget=32 * (1 << 20))\n" for call in ("attribute", "influence")]
    sizes = {"points": 40, "train": 20, "dim": 10}
    whole = "from epk_gp.core.plans import MemoryPlan\n"
    whole += "MemoryPlan.adjoint_points = MemoryPlan.influence_points = lambda *args: 1\n"
    _, *bounded, attributed, influence = increases(work, *calls, whole + calls[0], calls[1], **sizes)
    assert max(bounded) < 32 * MIB + OVERHEAD
    assert min(attributed, influence) > max(bounded) + 64 * MIB  # the negative controls


@pytest.mark.slow
def test_influence_keeps_to_its_budget() -> None:
    """60 points of 3 outputs: 77 MB of adjoints and what joins them, as they are counted."""
    sizes = {"points": 500, "train": 500, "dim": 100}
    work = "from epk_gp.kernel_machine.axes import by_label\n"
    work += "epk.influence(trajectory, X[:60], by=[by_label(trajectory)], memory_budget={budget})"
    bounded, loose = increases(work.format(budget=16 * MIB), work.format(budget=1024 * MIB), **sizes)
    assert bounded < 16 * MIB + OVERHEAD
    assert loose > bounded + 16 * MIB  # the negative control


@pytest.mark.slow
def test_retraining_keeps_to_its_budget() -> None:
    sizes = {"points": 500, "train": 500, "dim": 100}
    work = "epk.retrain(trajectory, torch.rand(300, len(X), dtype=torch.float64), memory_budget={budget})"
    result = 300 * (100 * 32 + 32 + 32 * 3 + 3) * 8
    bounded, loose = increases(work.format(budget=16 * MIB), work.format(budget=1024 * MIB), **sizes)
    assert bounded < 16 * MIB + result + OVERHEAD
    assert loose > bounded + 16 * MIB  # the negative control


@pytest.mark.slow
def test_an_uncertainty_map_keeps_to_its_budget() -> None:
    """The demo's map in small: the Gram matrix and its factorisation stand beside the budget."""
    sizes = {"points": 180, "train": 180, "dim": 100}
    work = """
    gp = epk.LogitGP(trajectory, rule=epk.gauss_legendre(2), memory_budget=32 * (1 << 20))
    gp.fit(3)
    generator = torch.Generator().manual_seed(0)
    uncertainty_on_plane(gp, principal_plane(X), size=40, num_samples=64, generator=generator)
    """
    gram = (3 * 180) ** 2 * 8
    (found,) = increases(work, **sizes)
    assert found < 32 * MIB + 6 * gram  # 57 MiB with a budget of 4096

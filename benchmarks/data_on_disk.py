"""Memory that a run over many rows on disk takes: creating, recording, loading, attributing.

    python benchmarks/data_on_disk.py --rows 1000000 --width 100

The rows are numbers in float32, a NumPy memory map. What counts is anonymous memory (`RssAnon` of
/proc/self/status): pages of a mapped file are dropped where memory is short. A thread reads it every 5 ms; each phase's
line says by how much its peak lies above the memory before it.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

import epk_gp as epk

CLASSES, STEPS, BATCH = 3, 50, 256
MIB = 1 << 20


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Peaks(dict[str, float]):
    """Growth of the anonymous memory by phase, at its peak, in MiB."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Watch a phase."""
        start, peak, ended = anonymous(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.005):
                peak[0] = max(peak[0], anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        began = time.perf_counter()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self[name] = (max(peak[0], anonymous()) - start) / MIB
            print(f"{name:<10} {self[name]:8.1f} MiB {time.perf_counter() - began:8.2f} s", flush=True)


def network(width: int) -> nn.Module:
    """Return the network that is trained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def write_rows(folder: Path, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Write inputs and labels, block by block, and return them mapped."""
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, width))
    generator = np.random.default_rng(0)
    for part in np.array_split(X, 100):
        part[...] = generator.standard_normal(part.shape, np.float32)
    np.save(folder / "y.npy", np.arange(rows) % CLASSES)
    del X
    return np.load(folder / "X.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r")


def measure(rows: int, folder: Path, width: int = 100) -> Peaks:
    """Record a run over so many rows in `folder`, load it and split predictions; return what each phase took."""
    X, y = write_rows(folder, rows, width)
    warm_up = torch.randn(50, width)
    net = network(width)
    run = epk.train(net, warm_up, torch.arange(50) % 3, optimizer=torch.optim.Adam(net.parameters()), steps=2)
    epk.attribute(run, warm_up[:1])  # loads what the phases load
    peaks, net = Peaks(), network(width)
    optimizer, loss = torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss()
    with peaks.of("creating"):
        recorder = epk.Recorder(net, optimizer, X, y, folder=folder / "run", unexplained=1e-3)
    with peaks.of("recording"), recorder:
        for step in range(STEPS):
            batch = torch.randint(rows, (BATCH,))
            inputs = torch.from_numpy(X[batch.numpy()])
            if step % 2:
                inputs = inputs + 0.01 * torch.randn_like(inputs)  # rows are looked for in X
            optimizer.zero_grad()
            loss(net(inputs), torch.from_numpy(y[batch.numpy()])).backward()
            recorder.batch(batch)
            optimizer.step()
    del recorder
    with peaks.of("loading"):
        trajectory = epk.load_trajectory(folder / "run", network(width))
    with peaks.of("attribute"):
        parts = epk.attribute(trajectory, torch.from_numpy(X[:2].copy()), path=epk.layerwise())
    print(f"the result: {parts.samples.nbytes / MIB:.1f} MiB; the rows: {X.nbytes / MIB:.1f} MiB")
    if not parts.certified:
        raise SystemExit("the contributions are not certified")
    return peaks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=100)
    with tempfile.TemporaryDirectory() as name:
        measure(parser.parse_args().rows, Path(name), parser.parse_args().width)

"""Recording processes that are killed: run as `python crashes.py MODE FOLDER SEED [KEEP_EVERY]`, prints JSON.

torch is imported once; each recording is a fork of this process. Modes: "random" reads while it records and kills at
random moments, "operations" kills after each single file operation of a recording, and in the middle of each write.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import epk_gp as epk
from epk_gp.storage.run import check_run
from epk_gp.storage.schema import read_journal

STEPS, POINTS = 6, 12
Report = Callable[[epk.Recorder], object]


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def record(path: Path, report: Report, keep_every: int) -> str:
    """Adam with a schedule, batches of 12 points, a commit after every second step, at kept states and between them."""
    net = make_net()
    generator = torch.Generator().manual_seed(2)
    X, y = torch.randn(POINTS, 3, generator=generator).double(), torch.arange(POINTS) % 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stateful, storage = {"schedule": scheduler, "batches": generator}, epk.Storage(steps=2, keep_every=keep_every)
    torch.manual_seed(3)
    with epk.Recorder(net, optimizer, X, y, folder=path, resume=True, stateful=stateful, storage=storage) as recorder:
        for _ in recorder.until(STEPS):
            report(recorder)
            batch = torch.randperm(POINTS, generator=generator)[: 3 + int(torch.randint(3, ()))]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
            scheduler.step()
    report(recorder)
    return recorder.trajectory.digest


def fork(work: Callable[[Report], object]) -> tuple[int, int]:
    """Call a function in a process of its own, with what reports the committed steps into a pipe."""
    end, start = os.pipe()
    pid = os.fork()
    if pid:
        os.close(start)
        return pid, end
    status = 1
    try:
        work(lambda recorder: os.write(start, bytes([recorder.num_committed])))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def bytes_of(folder: Path) -> bytes:
    """Return a digest of the names and contents of a folder's files."""
    files = sorted(folder.iterdir()) if folder.exists() else []
    return hashlib.sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).digest()


def last_report(pipe: int) -> int:
    reports = os.read(pipe, 1 << 16)
    os.close(pipe)
    return reports[-1] if reports else 0


class Crashes:
    """Recordings in a folder, which are compared with one that is left alone."""

    def __init__(self, folder: Path, keep_every: int) -> None:
        self.folder, self.keep_every, self.problems = folder, keep_every, list[str]()
        began, (pid, _) = time.monotonic(), self.start(folder / "reference")
        _, status = os.waitpid(pid, 0)
        self.seconds = time.monotonic() - began
        assert status == 0, "the uninterrupted recording failed"
        self.digests = {chunk.last: chunk.digest for chunk in check_run(folder / "reference").chunks}

    def start(self, path: Path) -> tuple[int, int]:
        return fork(lambda report: record(path, report, self.keep_every))

    def check(self, path: Path, reported: int = 0) -> int:
        """Open what is left: every reported step is there, every digest is that of the uninterrupted run."""
        if not (path / "run.json").exists():
            if reported:
                self.problems.append(f"{reported} steps were reported, and there is no run")
            return 0
        try:
            loaded = epk.load_trajectory(path, make_net())
            summary = check_run(path)
        except (OSError, ValueError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return 0
        if loaded.num_steps < reported or summary.num_steps < loaded.num_steps:
            self.problems.append(f"{reported} steps were reported, {loaded.num_steps} or {summary.num_steps} are there")
        if loaded.digest != self.digests[loaded.num_steps]:
            self.problems.append(f"another digest after {loaded.num_steps} steps")
        return loaded.num_steps

    def finish(self, path: Path) -> None:
        """Resume a run to its end without being killed, and remove it."""
        pid, pipe = self.start(path)
        _, status = os.waitpid(pid, 0)
        if status or self.check(path, last_report(pipe)) != STEPS or not read_journal(path).finished:
            self.problems.append(f"a resumed run did not come to its end (status {status})")
        left = [file.name for file in path.iterdir() if file.name.endswith(".part") or file.name.startswith("resume-")]
        if len(left) != 1:
            self.problems.append(f"files were left behind: {left}")
        shutil.rmtree(path)

    def at_random(self, seed: int, kills: int) -> dict[str, object]:
        """Read recordings while they are written, kill them at random moments, and resume them."""
        draw, done, runs, reads, at = random.Random(seed), 0, 0, 0, []
        while done < kills:
            path = self.folder / str(runs)
            pid, pipe = self.start(path)
            end, before = time.monotonic() + draw.uniform(0.05, 1) * self.seconds, 0
            while time.monotonic() < end:  # a reader beside the writer
                seen = self.check(path)
                if seen < before:
                    self.problems.append(f"{before} steps were there, then {seen}")
                reads, before = reads + 1, seen
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            done += status == signal.SIGKILL
            at.append(self.check(path, last_report(pipe)))
            self.seconds *= 0.8 if at[-1] == STEPS else 1.1 if at[-1] == at[-2:][0] else 1  # as fast as now
            if at[-1] == STEPS or draw.random() < 0.05:
                self.finish(path)
                runs += 1
        return {"kills": done, "reads": reads, "left_at": sorted(set(at)), "problems": self.problems}

    def after_operations(self) -> dict[str, object]:
        """Kill a recording after each file operation, or every third of them; resume each state of the folder once."""
        path, kills, resumed = self.folder / "run", 0, set[bytes]()
        for half in (False, True):
            for count in range(0, 10_000, 3 * self.keep_every if half else self.keep_every):
                pid, pipe = fork(lambda _, n=count, half=half: self.die(n, half, path))
                _, status = os.waitpid(pid, 0)
                os.close(pipe)
                if status != signal.SIGKILL:
                    break
                kills += 1
                self.check(path)
                if (state := bytes_of(path)) not in resumed:  # a resumed run follows from the bytes that are there
                    self.finish(path)
                resumed.add(state)
                shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
        return {"kills": kills, "resumed": len(resumed), "problems": self.problems}

    def die(self, count: int, half: bool, path: Path) -> None:
        """Record, and kill this process at its file operation number `count`; of a write, half is done before."""
        left, os_write = [count], os.write

        def guarded(function: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*arguments: object, **options: object) -> object:
                if left[0] == 0:
                    if half and function is os_write:
                        os_write(arguments[0], bytes(arguments[1])[: len(bytes(arguments[1])) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return function(*arguments, **options)

            return wrapper

        for owner, names in ((os, "fsync write ftruncate mkdir"), (Path, "replace unlink open mkdir")):
            for name in names.split():
                setattr(owner, name, guarded(getattr(owner, name)))
        record(path, lambda recorder: None, self.keep_every)


def main(mode: str, folder: str, seed: str, keep_every: str = "1", kills: str = "200") -> None:
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()  # torch imports modules with the first step: not in each fork
    crashes = Crashes(Path(folder), int(keep_every))
    result = crashes.at_random(int(seed), int(kills)) if mode == "random" else crashes.after_operations()
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

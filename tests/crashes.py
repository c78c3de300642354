"""Recording processes that are killed: run as `python crashes.py MODE FOLDER SEED [KEEP_EVERY]`, prints JSON.

torch is imported once; each recording is a fork of this process. Modes: "random" kills at random moments, "operations"
after each single file operation of a recording (and in the middle of each write), "readers" reads while others write.
"""

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
from epk_gp.storage.verify import check_run

STEPS, POINTS = 8, 12
KEEP_EVERY = 1  # which states are kept; a commit follows every second step, at kept states and between them


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def record(path: Path, report: Callable[[epk.Recorder], None]) -> str:
    """Adam with a schedule, batches of 5 of 12 points, a commit after every second step."""
    net = make_net()
    generator = torch.Generator().manual_seed(2)
    X, y = torch.randn(POINTS, 3, generator=generator).double(), torch.arange(POINTS) % 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stateful, storage = {"schedule": scheduler, "batches": generator}, epk.Storage(steps=2, keep_every=KEEP_EVERY)
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


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Call a function in a process of its own, with the end of a pipe to write to."""
    end, start = os.pipe()
    pid = os.fork()
    if pid:
        os.close(start)
        return pid, end
    status = 1
    try:
        work(start)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def reporter(pipe: int) -> Callable[[epk.Recorder], None]:
    return lambda recorder: os.write(pipe, bytes([recorder.num_committed])) and None


def last_report(pipe: int) -> int:
    reports = os.read(pipe, 1 << 16)
    os.close(pipe)
    return reports[-1] if reports else 0


def reference(folder: Path) -> dict[int, str]:
    """Digest after every even number of steps of an uninterrupted recording, by committed state."""
    pid, pipe = fork(lambda pipe: os.write(pipe, record(folder / "reference", lambda recorder: None).encode()) and None)
    _, status = os.waitpid(pid, 0)
    digest = os.read(pipe, 100).decode()
    os.close(pipe)
    chunks = check_run(folder / "reference").chunks
    assert status == 0, "the uninterrupted recording failed"
    assert chunks[-1].digest == digest
    return {chunk.last: chunk.digest for chunk in chunks}


def check(path: Path, reported: int, digests: dict[int, str], problems: list[str]) -> int:
    """Open what is left: every reported step is there, every digest is that of the uninterrupted run."""
    if not (path / "run.json").exists():
        if reported:
            problems.append(f"{reported} steps were reported, and there is no run")
        return 0
    try:
        loaded = epk.load_trajectory(path, make_net())
        summary = check_run(path)
    except (OSError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {error}")
        return 0
    if loaded.num_steps < reported or summary.num_steps < loaded.num_steps:
        problems.append(f"{reported} steps were reported, {loaded.num_steps} are there, or {summary.num_steps}")
    if loaded.digest != digests[loaded.num_steps]:
        problems.append(f"another digest after {loaded.num_steps} steps")
    return loaded.num_steps


def finish(path: Path, digests: dict[int, str], problems: list[str]) -> None:
    """Resume a run to its end without being killed."""
    pid, pipe = fork(lambda pipe: record(path, reporter(pipe)) and None)
    _, status = os.waitpid(pid, 0)
    if status or check(path, last_report(pipe), digests, problems) != STEPS or not check_run(path).finished:
        problems.append(f"a resumed run did not come to its end (status {status})")
    left = [file.name for file in path.iterdir() if file.name.endswith(".part") or file.name.startswith("resume-")]
    if len(left) != 1:
        problems.append(f"files were left behind: {left}")


def kill_at_random(folder: Path, seed: int, kills: int) -> dict[str, object]:
    draw, digests, problems = random.Random(seed), reference(folder), []
    done, runs, at, before, path = 0, 0, [], 0, folder / "0"
    scale = 0.1  # seconds until half of a run: longer where a kill came too soon, shorter where it came too late
    while done < kills:
        pid, pipe = fork(lambda pipe, path=path: record(path, reporter(pipe)) and None)
        time.sleep(draw.uniform(0.05, 1) * scale)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        done += status == signal.SIGKILL
        at.append(check(path, last_report(pipe), digests, problems))
        scale *= 0.8 if at[-1] == STEPS else 1.1 if at[-1] == before else 1.0
        before = at[-1]
        if at[-1] == STEPS or draw.random() < 0.05:
            finish(path, digests, problems)
            shutil.rmtree(path)
            runs += 1
            before, path = 0, folder / str(runs)
    return {"kills": done, "runs": runs, "left_at": sorted(set(at)), "problems": problems}


def dying_after(count: int, half: bool) -> None:
    """Make this process kill itself at its file operation number `count`; of a write, half is done before."""
    left = [count]

    def guarded(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            if left[0] == 0:
                if half and function is os_write:
                    os_write(arguments[0], bytes(arguments[1])[: len(bytes(arguments[1])) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*arguments, **options)

        return wrapper

    os_write = os.write
    of_system, of_path = ("fsync", "write", "ftruncate", "mkdir"), ("replace", "unlink", "open", "mkdir")
    for owner, names in ((os, of_system), (Path, of_path)):
        for name in names:
            setattr(owner, name, guarded(getattr(owner, name)))


def kill_after_operations(folder: Path, every: int) -> dict[str, object]:
    """Kill a recording after each file operation, or every second or third of them."""
    digests, problems = reference(folder), []
    path, kills = folder / "run", 0
    for half in (False, True):
        count = 0
        while True:

            def work(pipe: int, count: int = count, half: bool = half) -> None:
                dying_after(count, half)
                record(path, lambda recorder: None)

            pid, pipe = fork(work)
            _, status = os.waitpid(pid, 0)
            os.close(pipe)
            if status != signal.SIGKILL:
                break
            kills += 1
            check(path, 0, digests, problems)
            finish(path, digests, problems)
            shutil.rmtree(path)
            count += every if not half else 3 * every
        shutil.rmtree(path, ignore_errors=True)
    return {"kills": kills, "problems": problems}


def read_while_others_write(folder: Path, rounds: int) -> dict[str, object]:
    digests, problems, seen = reference(folder), [], []
    for number in range(rounds):
        path = folder / str(number)
        pid, pipe = fork(lambda pipe, path=path: record(path, reporter(pipe)) and None)
        before = 0
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
            now = check(path, 0, digests, problems)
            if now < before:
                problems.append(f"{before} steps were there, then {now}")
            before = now
            seen.append(now)
        if check(path, last_report(pipe), digests, problems) != STEPS:
            problems.append("the run that was read did not come to its end")
        shutil.rmtree(path)
    return {"reads": len(seen), "seen": sorted(set(seen)), "problems": problems}


def warm_up() -> None:
    """Import what torch imports with the first step of an optimizer, so that the forks do not."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


def main(mode: str, folder: str, seed: str, keep_every: str = "1", kills: str = "200") -> None:
    global KEEP_EVERY
    KEEP_EVERY = int(keep_every)
    torch.set_num_threads(1)
    warm_up()
    path = Path(folder)
    result = {
        "random": lambda: kill_at_random(path, int(seed), int(kills)),
        "operations": lambda: kill_after_operations(path, every=KEEP_EVERY),
        "readers": lambda: read_while_others_write(path, 15),
    }[mode]()
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

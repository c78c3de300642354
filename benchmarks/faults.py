"""Plant faults of every kind, count what becomes of them, and write the table of docs/reliability.md.

    python benchmarks/faults.py [--thread-rounds 1] [--kinds WORDS] [--out benchmarks]

Some 25 minutes. Exit status 1 if anything was silently wrong.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
NAMES = 20_000  # folders of checkpoints
ODD = 400  # programs in each of the rows of `odd_themes`
STRETCHES = 1000  # small networks
TABLES = 2040  # 60 of each change of `odd_frames`
WORKERS = 2  # processes that share them
SOUND_ROW = "nothing odd"
LIMIT = "a limit: may not be seen"
SHAPES = 240  # questions about texts, and a quarter as many cut batches
FLIPS = 400  # on each of three runs

Outcomes = tuple[Counter[str], list[str]]  # how many cases ended how, and which were wrong


@dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
        kind: What was tried.
        tried: How often.
        found: How many ended in an error of the package's own, or in a result that says it is not certified.
        harmless: How many left a result that is right.
        silent: How many were wrong without a word.
        seconds: How long it took.
    """

    kind: str
    tried: int
    found: int
    harmless: int
    silent: int
    seconds: float


def main() -> int:
    """Count all kinds of faults and write faults.json and faults.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thread-rounds", type=int, default=1, help="Rounds of all calls on all networks.")
    parser.add_argument("--kinds", default="", help="Count kinds with these words again; of others keep saved rows.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="Folder of the results.")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    sys.path.insert(0, str(TESTS))
    kinds: dict[str, Callable[[], tuple[int, int, int, int]]] = {
        **{f"odd programs: {row}": partial(odd_programs, row) for row in odd_rows() if row != SOUND_ROW},
        f"odd programs: {SOUND_ROW} (the control: nothing may be found)": partial(odd_programs, SOUND_ROW),
        "small networks, answered with 1, 2, 7 and all states of a run evaluated together": lambda: in_processes(
            _tests_module("odd_stretches").count_outcomes, STRETCHES
        ),
        "loops that change rows: wrong indices by 19 patterns, in a quarter right ones": partial(
            drawn, "wrong_indices", ODD
        ),
        f"the same, wrong in a quarter of the rows or within classes, under any change ({LIMIT})": partial(
            drawn, "wrong_indices", ODD // 2, right=False, subtle=True
        ),
        "texts and answers: lengths that coincide, prefixes, pixels, batches cut to their longest text": partial(
            drawn, "text_shapes", SHAPES
        ),
        "folders of checkpoints under random names, read in the order in which they were saved": names,
        "public calls in 8 threads at once on one run": lambda: thread_faults(arguments.thread_rounds),
        "kills (SIGKILL) of a recording, at random and after each file operation": kills,
        "flipped bits and cut files of stored runs": flips,
        "hostile files: false sizes and names, links, pipes, other content": lambda: cases("storage/test_damage.py"),
        "bad arguments of the library": lambda: cases("bad_input"),
        "wrong uses of the command line": lambda: cases("cli/test_wrong_uses.py"),
        "data frames of other columns, types, names and labels": partial(drawn, "odd_frames", TABLES),
        "folders and disks that fail while a run is recorded": lambda: cases("storage/test_writing.py"),
    }
    file = arguments.out / "faults.json"
    saved = {row["kind"]: Row(**row) for row in json.loads(file.read_text())} if arguments.kinds else {}
    for kind, count in kinds.items():
        if arguments.kinds not in kind:
            continue
        start = time.monotonic()
        row = saved[kind] = Row(kind, *count(), seconds=round(time.monotonic() - start, 1))
        print(f"{row.tried:>6} tried, {row.found:>6} found, {row.harmless:>6} harmless, {row.silent} silent: {kind}")
        rows = [saved[kind] for kind in kinds if kind in saved]
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (arguments.out / "faults.md").write_text(table(rows))
    rows = list(saved.values())
    return int(any(row.silent * (LIMIT not in row.kind) or ("control" in row.kind and row.found) for row in rows))


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| tried | how many | found | without effect | silently wrong |", "|---|---|---|---|---|"]
    lines += [f"| {row.kind} | {row.tried} | {row.found} | {row.harmless} | {row.silent} |" for row in rows]
    return "\n".join(lines) + "\n"


def odd_rows() -> dict[str, tuple[str, ...]]:
    """Return the themes of odd programs by their row of the table."""
    rows: dict[str, tuple[str, ...]] = _tests_module("odd_themes").ROWS
    return rows


def odd_programs(row: str) -> tuple[int, int, int, int]:
    """Compare the answers about odd training loops with brute force."""
    odd = _tests_module("odd_themes")
    return in_processes(partial(odd.count_outcomes, odd.ROWS[row]), ODD)


def in_processes(count_outcomes: Callable[[int, int], Outcomes], count: int) -> tuple[int, int, int, int]:
    """Compare drawn cases in several processes; a number of cases and the first seed are asked of each."""
    share = count // WORKERS
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        return _summed(list(pool.map(partial(count_outcomes, share), range(0, count, share))))


def drawn(module: str, count: int, **options: bool) -> tuple[int, int, int, int]:
    """Compare drawn cases of a module of the tests with its own oracle."""
    return _summed([_tests_module(module).count_outcomes(count, **options)])


def _summed(outcomes: list[Outcomes]) -> tuple[int, int, int, int]:
    """Print the wrong cases, and count all."""
    for case in (case for _, wrong in outcomes for case in wrong):
        print(f"       {case}")
    counts = sum((found for found, _ in outcomes), Counter[str]())
    tried, found = counts.total(), counts["refused"] + counts["uncertified"]
    return tried, found, counts["right"], tried - found - counts["right"]


def names() -> tuple[int, int, int, int]:
    """Compare the order in which folders of checkpoints are read with that of saving."""
    with _folder_in_memory() as folder:
        counts, wrong = _tests_module("checkpoint_names").count_orders(folder, range(NAMES))
    for files in wrong:
        print(f"       {files}")
    return NAMES, counts["refused"], counts["right"], counts["wrong"]


def thread_faults(rounds: int) -> tuple[int, int, int, int]:
    """Count calls whose bytes differ from those of one thread."""
    warnings.simplefilter("ignore")  # of coarse rules
    counted = _tests_module("thread_faults").count_thread_faults(rounds)
    for fault in counted.faults:
        print(f"       {fault}")
    return counted.calls, 0, counted.calls - len(counted.faults), len(counted.faults)


def kills() -> tuple[int, int, int, int]:
    """Kill recordings; a kill is without effect if what was committed is there and the run can be resumed."""
    tried, problems = 0, 0
    for mode in ("random", "operations"):
        with _folder_in_memory() as folder:
            command = [sys.executable, str(TESTS / "crashes.py"), mode, str(folder), "7"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout)
        tried, problems = tried + result["kills"], problems + len(result["problems"])
    return tried, 0, tried - problems, problems


def flips() -> tuple[int, int, int, int]:
    """Damage files of stored runs; each must be found by name."""
    damage = _tests_module("storage.test_damage")
    missed = 0
    for finish in (True, False):
        with _folder_in_memory() as folder:
            run, draw = folder / "run", random.Random(17)
            damage.record(run, finish=finish)
            copy = shutil.copytree(run, folder / "copy")
            files = sorted(file.name for file in copy.iterdir() if file.name != "writer.lock")
            for number in range(FLIPS):
                file = copy / files[number % len(files)]
                damage.flip_or_cut(file, draw)
                missed += not damage.names(damage.digest_or_error(copy), file)
                shutil.copy(run / file.name, file)
    return 2 * FLIPS, 2 * FLIPS - missed, 0, missed


def cases(*files: str) -> tuple[int, int, int, int]:
    """Count the cases of test files, which demand one clear error or are controls; one that fails counts as silent."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        done = subprocess.run(
            [*command, *(str(TESTS / file) for file in files)], capture_output=True, text=True, cwd=ROOT, check=False
        )
        if not report.exists():
            raise RuntimeError(f"pytest must run the cases: it ended without a report.\n{done.stdout}{done.stderr}")
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    tried = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
    return tried, tried - failed, 0, failed


def _tests_module(name: str) -> ModuleType:
    """Import a module of the tests, which need not be a package."""
    file = TESTS.joinpath(*name.split(".")).with_suffix(".py")
    specification = importlib.util.spec_from_file_location(file.stem, file)
    if specification is None or specification.loader is None:
        raise ImportError(f"{file} must be a module.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[file.stem] = module
    specification.loader.exec_module(module)
    return module


@contextmanager
def _folder_in_memory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())

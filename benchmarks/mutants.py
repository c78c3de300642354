"""Change one token at a time, and count how many of these faults the tests find.

    python benchmarks/mutants.py contexts lines.coverage               # once: which test executes which line
    python benchmarks/mutants.py run lines.coverage --seed 1 --jobs 2  # plant 150 faults, one after the other

The tests of `contexts` are the quick ones that pass. `run` needs the same sources: after a change of the package, take
the contexts again. Both work in temporary copies of the tree. Of a fault that runs into the limit, nobody knows.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "core optimizers training recording storage autodiff quadrature gram kernel_machine work"
LIMIT = 90.0  # seconds of one place
BUDGET = 30.0  # recorded seconds of the tests that are chosen for a place: with checks of types they take longer
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
SWAPPED = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "/",
    "**": "*",
    "@": "*",
    "%": "//",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "/=": "*=",
}
OPERATOR = re.compile(rb"([\s)]*)(" + "|".join(re.escape(word) for word in SWAPPED).encode() + rb")[\s(]*")
OUTCOMES = ("found", "survived", "not executed", "out of time")
LEFT_OUT = ("annotation", "returns", "decorator_list")
Change = tuple[str, int, int, int, str]  # kind, line, first and last byte in it, and what is put there


@dataclass(frozen=True)
class Place:
    file: str
    kind: str
    line: int
    start: int
    end: int
    new: str
    statement: range | None  # its lines; None outside of functions

    def planted(self, source: bytes) -> bytes:
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: self.start] + self.new.encode() + text[self.end :]
        return b"".join(lines)


def changes_of(node: ast.AST, lines: list[bytes]) -> Iterator[Change]:
    """Say what can be changed at a node itself, where it stands on one line."""

    def whole(kind: str, node: ast.expr | ast.stmt, new: str) -> Iterator[Change]:
        if node.lineno == node.end_lineno:
            yield kind, node.lineno, node.col_offset, node.end_col_offset or 0, new

    def operator(kind: str, left: ast.expr, right: ast.expr) -> Iterator[Change]:
        between = lines[right.lineno - 1][: right.col_offset]
        found = OPERATOR.fullmatch(between, left.end_col_offset or 0) if left.end_lineno == right.lineno else None
        if found:
            yield kind, right.lineno, found.start(2), found.end(2), SWAPPED[found[2].decode()]

    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.Raise | ast.AugAssign | ast.Continue | ast.Break):
        yield from whole("line deleted", node, "pass")
    match node:
        case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
            yield from operator("sign", left, right)
        case ast.BoolOp(values=[left, right, *_]):
            yield from operator("condition", left, right)
        case ast.Compare(left=left, comparators=[right, *_]):
            yield from operator("comparison", left, right)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=part) if part.lineno == part.end_lineno:
            yield from whole("sign", node, lines[part.lineno - 1][part.col_offset : part.end_col_offset].decode())
        case ast.Subscript(slice=ast.Constant(value=int(index)) as part):
            yield from whole("index", part, str(index + 1))
        case ast.Constant(value=bool(value)):
            yield from whole("constant", node, str(not value))
        case ast.Constant(value=int(value) | float(value)):
            yield from whole("constant", node, repr(value + 1 if isinstance(value, int) else 2 * value + 1))


def places_in(file: str, source: bytes) -> Iterator[Place]:
    """Find all places of a file; annotations, messages of errors and text in braces are left out."""
    lines = source.splitlines()

    def walk(node: ast.AST, statement: range | None, in_function: bool) -> Iterator[Place]:
        if isinstance(node, ast.JoinedStr | ast.ImportFrom | ast.Import):
            return
        if isinstance(node, ast.stmt) and in_function:
            body = getattr(node, "body", None)
            statement = range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1)
        for kind, *where, new in changes_of(node, lines):
            yield Place(file, kind, *where, new, statement)
        for name, value in ast.iter_fields(node):
            is_index = name == "slice" and isinstance(value, ast.Constant)
            if name not in LEFT_OUT and not is_index and not isinstance(node, ast.Raise):
                inside = in_function or (name == "body" and isinstance(node, ast.FunctionDef))
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        yield from walk(part, statement, inside)

    yield from walk(ast.parse(source), None, False)


def copy_of_tree(root: Path, folder: str) -> Path:
    """Copy what git tracks, and new files that it does not ignore; of a folder without git everything."""
    asked = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, capture_output=True, text=True).stdout.split("\0")
    for file in [root / name for name in names if name] or root.rglob("*"):
        if file.is_file():
            target = Path(folder) / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    return Path(folder)


def call(copy: Path, *arguments: str, seconds: float | None = None) -> tuple[int, str]:
    """Run Python in a copy; return its exit status, -9 if its time is over, and what it said."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | threads | {"MPLBACKEND": "Agg", "PYTHONPATH": str(copy)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # files that were not changed are compiled once
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    asked = [sys.executable, *arguments]
    process = subprocess.Popen(asked, cwd=copy, env=environment, start_new_session=True, **streams)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -9, ""
    return process.returncode, said


class Contexts:
    """A plugin of pytest: remembers which test executes which line, and how long each test takes."""

    def __init__(self, file: Path, folders: list[str]) -> None:
        self.coverage = coverage.Coverage(data_file=str(file), source=folders, config_file=False)
        self.coverage.set_option("run:relative_files", True)
        self.seconds, self.failed, self.tests = Counter[str](), set[str](), str(Path("tests").resolve())
        self.coverage.erase()
        self.coverage.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Name the test that begins; what tests cache for each other, each computes itself, so that it counts."""
        for module in list(sys.modules.values()):
            if (getattr(module, "__file__", None) or "").startswith(self.tests):
                for cached in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                    cached.cache_clear()
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def sources_of(root: Path, folders: list[str]) -> dict[str, str]:
    """Return the checksum of each file of some folders."""
    files = [file.relative_to(root) for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    return {str(file): hashlib.sha256((root / file).read_bytes()).hexdigest() for file in files}


def places_of(root: Path, folders: list[str], count: int, seed: int) -> list[Place]:
    """Draw places: first the kind of change, then a place of this kind."""
    kinds, draw = defaultdict[str, list[Place]](list), random.Random(seed)
    for file in sources_of(root, folders):
        for place in places_in(file, (root / file).read_bytes()):
            kinds[place.kind].append(place)
    drawn = list[Place]()
    while len(drawn) < count and any(kinds.values()):
        among = kinds[draw.choice(sorted(kind for kind, places in kinds.items() if places))]
        drawn.append(among.pop(draw.randrange(len(among))))
    return drawn


def tests_of(place: Place, data: coverage.CoverageData, seconds: dict[str, float]) -> list[str]:
    """Return the tests that execute a line, or else its statement, the shortest first, as far as the time allows.

    A line of a module or a class runs at the import: then those that execute anything in the file.
    """
    lines = data.contexts_by_lineno(place.file)
    for asked in ([place.line], place.statement) if place.statement else (lines,):
        tests = {test for line in asked for test in lines.get(line, ())} & seconds.keys()
        if tests:
            break
    ordered = sorted(tests, key=lambda test: (seconds[test], test))
    totals = accumulate(seconds[test] for test in ordered)
    return [test for test, total in zip(ordered, totals, strict=True) if total <= BUDGET] or ordered[:1]


def outcome(place: Place, tests: list[str], copy: Path, number: int) -> str:
    """Plant a fault in a copy, run the tests, and take it out again."""
    if not tests:
        return "not executed"
    file = copy / place.file
    source = file.read_bytes()
    time = 2_000_000_000 + 2 * number  # compiled files know a source by its size and its time, in whole seconds
    try:
        file.write_bytes(place.planted(source))
        os.utime(file, (time, time))
        status, said = call(copy, "-m", "pytest", "-x", *PYTEST, *tests, seconds=LIMIT)
    finally:
        file.write_bytes(source)
        os.utime(file, (time + 1, time + 1))
    if status in (0, -9):
        return f"survived {len(tests)} tests" if status == 0 else "out of time"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    return f"found by {found[1] if found else 'the import'}"


def watch(root: Path, file: Path, folders: list[str], tests: list[str]) -> None:
    """Run the quick tests in a copy of the tree, and write the contexts."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(copy_of_tree(root, folder))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # tests until then are kept, as after Ctrl-C
        contexts = Contexts(file, folders)
        options = "-m", "not slow", "-o", "addopts=--import-mode=importlib"  # without checks of types, for speed
        pytest.main([*options, *PYTEST, *tests], plugins=[contexts])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        contexts.coverage.stop()
        contexts.coverage.save()
        sources = sources_of(Path(folder), folders)
    seconds = {test: round(time, 3) for test, time in contexts.seconds.items() if test not in contexts.failed}
    Path(f"{file}.json").write_text(json.dumps({"seconds": seconds, "sources": sources}))


def plant(root: Path, file: Path, folders: list[str], seed: int, count: int, jobs: int) -> None:
    """Plant faults, and print what becomes of each."""
    known = json.loads(Path(f"{file}.json").read_text())
    if known["sources"] != sources_of(root, folders):
        sys.exit(f"the sources are not those of {file}: take the contexts again")
    (data := coverage.CoverageData(str(file))).read()
    places, results = places_of(root, folders, count, seed), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as executor:
        copies = [copy_of_tree(root, f"{folder}/{job}") for job in range(jobs)]
        collected = call(copies[0], "-m", "pytest", "--collect-only", *PYTEST)[1].splitlines()
        seconds = {test: known["seconds"][test] for test in collected if test in known["seconds"]}

        chosen = [tests_of(place, data, seconds) for place in places]

        def in_one_copy(job: int) -> None:
            for number in range(job, len(places), jobs):
                place, result = places[number], outcome(places[number], chosen[number], copies[job], number)
                results[number] = result
                old = (root / place.file).read_bytes().splitlines()[place.line - 1][place.start : place.end].decode()
                print(f"{place.file}:{place.line}: {place.kind}: {old} -> {place.new}: {result}", flush=True)

        list(executor.map(in_one_copy, range(jobs)))
        found_by = {result.removeprefix("found by ") for result in results.values()} & seconds.keys()
        control = call(copies[0], "-m", "pytest", *PYTEST, *sorted(found_by))[1] if found_by else ""
    counts = {kind: sum(result.startswith(kind) for result in results.values()) for kind in OUTCOMES}
    executed = len(places) - counts["not executed"]
    for line in re.findall("^(?:FAILED|ERROR) .*", control, re.MULTILINE):
        print(f"without a fault too: {line}")
    print(f"seed {seed}: {counts['found'] / max(executed, 1):.0%} of {executed} places that a test executes are found")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("contexts", "run"))
    parser.add_argument("file", type=Path, help="contexts; the times of the tests are in FILE.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the package and its tests")
    parser.add_argument("--folders", nargs="+", help="of the sources; by default those of the engine")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders and files of the tests that are watched")
    options = parser.parse_args(argv)
    file, root = options.file.resolve(), options.root.resolve()
    folders = options.folders or [f"epk_gp/{name}" for name in FOLDERS.split() if (root / "epk_gp" / name).is_dir()]
    if options.what == "contexts":
        watch(root, file, folders, options.tests)
    else:
        plant(root, file, folders, options.seed, options.places, options.jobs)


if __name__ == "__main__":
    main()

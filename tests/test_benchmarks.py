"""The benchmarks can be imported, and those that are cheap run in their smallest form: a rename must not break them.

Those of attribution are judges of others: their truth is that of the recorded run, and a score that is right has a one.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import page_code
from harness import words_in

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    yield from page_code.imported(monkeypatch, FOLDER)


def test_every_benchmark_can_be_imported(load):
    assert all(load(file.stem) for file in FOLDER.glob("*.py"))


def test_the_committed_tables_are_those_of_the_committed_numbers(load):
    numbers = json.loads((FOLDER / "results.json").read_text())
    assert load("table").markdown(numbers) == (FOLDER / "results.md").read_text()
    rows = json.loads((FOLDER / "recording_overhead.json").read_text())
    assert load("recording_overhead").table(rows) == (FOLDER / "recording_overhead.md").read_text()
    parts = json.loads((FOLDER / "small_networks.json").read_text())
    assert load("small_networks").markdown(parts) == (FOLDER / "small_networks.md").read_text()
    judged = json.loads((FOLDER / "tables.json").read_text())
    assert load("tables").markdown(judged) == (FOLDER / "tables.md").read_text()


@pytest.mark.slow
def test_the_committed_chart_is_that_of_the_committed_numbers():
    """`docs/pictures/benchmarks.py` draws it; the ratios are among its words."""
    chart = page_code.load(FOLDER.parent / "docs" / "pictures" / "benchmarks.py")
    numbers = json.loads((FOLDER / "results.json").read_text())
    shown = words_in(FOLDER.parent / "docs" / "pictures" / "benchmarks.svg")
    assert shown == chart.words_of(chart.draw(numbers))
    row = next(row for row in numbers["ntk"] if row["contender"] == "neural-tangents 3")
    row["median"] *= 2  # the negative control
    assert shown != chart.words_of(chart.draw(numbers))


def test_interpreters_and_environments_are_used_where_there_are_any(load, tmp_path):
    processes = load("processes")
    assert processes.interpreter((3, 11)) == Path(sys.executable)
    with pytest.raises(RuntimeError, match=r"no Python 9\.0 or later on this machine"):
        processes.interpreter((9, 0))
    (tmp_path / "done").touch()  # an environment that is ready is not made again
    assert processes.environment(tmp_path, ["no-such-package"]) == tmp_path / "bin" / "python"
    benchmark, row = load("run"), {"contender": "explaind"}  # a peer that cannot run has its reason in the table
    benchmark._start(row, {}, {}, {"explaind": "no Python 3.12 or later on this machine"}, Path())
    assert row["failure"] == "no Python 3.12 or later on this machine"


@pytest.mark.slow
def test_contenders_of_tangent_kernels_compute_the_same_blocks(monkeypatch):
    """Those in torch: of attention, moving statistics, and a layer that is used several times."""
    for load in page_code.imported(monkeypatch, FOLDER / "contenders"):
        of_torch, ours, architectures = load("torch_func"), load("tangent_epk_gp"), load("architectures")
        for name in list(architectures.ARCHITECTURES)[2:]:
            (X, Y), net = architectures.make_points(name), architectures.make_network(name)
            tensors = {**net.state_dict(), "X": X[:3], "Y": Y[:2]}
            arrays = {key: value.numpy() for key, value in tensors.items()}
            for of in ("full", "trace"):
                problem = {"kind": name, "of": of}
                expected = of_torch.make(problem, arrays)()
                for variant in ("epk.ntk", "epk.NTKKernel"):
                    block = ours.make({**problem, "variant": variant}, arrays)()
                    assert (block - expected).abs().max() < 1e-12 * expected.abs().max()


def on_a_pool(b):
    with b.pool(1) as executor:
        b.compare(executor, 1, rounds=1, steps=1, budget=1 << 28)


def one_influence(b):
    b.CASES = b.CASES[:1]
    b.main(rounds=1, num_train=12, num_test=2, steps=2)


def fewer_states(b):
    with tempfile.TemporaryDirectory() as folder:
        for part in ("record", "attribute"):
            options = {"steps": 3, "keep_every": 2, "base": 2, "side": 4, "batch_size": 4, "nodes": 2, "threads": 1}
            b.main(**options, part=part, folder=Path(folder) / "run")


def some_paths(b):
    b.sums(only="ReLU MLP", steps=4, num_train=8, num_test=1, lengths="1,2")
    b.layerwise(only="ReLU MLP", steps=4, num_train=8, num_test=1, lengths="2")
    b.uncertainty_map(size=3, num_train=6, steps=4, width=4, asked="1:1,2:1", threads=1)


def small_networks(b):
    with tempfile.TemporaryDirectory() as folder:
        b.questions(rounds=1, only="gram_block", steps=3, out=Path(folder) / "table")
        b.together(rounds=1, only="MLP", steps=3, out=Path(folder) / "table")
        b.typer.echo((Path(folder) / "table.md").read_text())


def attribution(b):
    """It goes on where it was stopped."""
    with tempfile.TemporaryDirectory() as name:
        b.TINY, folder = b.TINY[:1], Path(name)
        options = {"rows": folder / "rows", "out": folder / "out", "environments": folder, "peers": False}
        for only in ("truth|random|neighbours", "Shapley|seconds"):
            b.main(seeds=1, subsets=6, tiny=True, only=only, **options)
        b.typer.echo((folder / "out.md").read_text())


def judged_or_datamodels(b, **options):
    with tempfile.TemporaryDirectory() as folder:
        b.main(rows=Path(folder), out=Path(folder) / "out", peers=False, tiny=True, **options)
        b.typer.echo((Path(folder) / "out.md").read_text())


def beside_laplace(b):
    with tempfile.TemporaryDirectory() as name:
        b.main(Path(name) / "rows.json", Path(name), 1.0, Path(name), quick=True)
        b.typer.echo((Path(name) / "rows.json").read_text())


def open_set(b):
    with tempfile.TemporaryDirectory() as name:
        b.main(out=Path(name) / "rows.json", epochs=1, splits=1, library=False, small=True)
        b.typer.echo((Path(name) / "rows.json").read_text())


SMALL = {  # benchmarks in their smallest form, and what they say
    "uncertainty_grid": (
        lambda b: b.main(grid=3, num_train=6, steps=1, outputs="independent", nodes=1, as_json=False),
        "9 grid points x 6 training points x 1 steps",
    ),
    "pools": (on_a_pool, "problem a, 1 steps, 256 MiB: one process"),
    "map_by_workers": (
        lambda b: b.grid(points=60, num_train=10, steps=3, workers=1, memory=0.25),
        "60 grid points x 10 training points x 3 steps",
    ),
    "many_outputs": (
        lambda b: b.table(budget=64, only="reconstruct", width=6, outputs=20, steps=1, dtypes="float64"),
        "| `reconstruct`, 30 points | ",
    ),
    "influence": (one_influence, "| MLP 64-32-10, tanh, SGD, full batch | "),
    "logit_posterior": (
        lambda b: b.main(points=4, num_train=6, outputs="full", budget=512, fit_steps=1),
        "4 test points x 6 training points x 3 outputs, full: linear algebra",
    ),
    "beyond_one_machine": (
        lambda b: b.simulate(points=300, steps=20, workers="1,4", only="map", samples=1, memory=1, disk=1, door=0.002),
        "\n| 4 | ",
    ),
    "fewer_states": (fewer_states, '"residual": '),
    "small_networks": (small_networks, "\n| MLP | attribute of 3 | "),
    "paths": (some_paths, "\n| 2 | 1 | "),
    "attribution/run": (attribution, "| random "),
    "attribution/judged": (
        lambda b: judged_or_datamodels(b, retrainings=4),
        "Not computed: TracInCP (captum), TracIn (dattri), influence",
    ),
    "attribution/datamodels": (
        lambda b: judged_or_datamodels(b, subsets=8, only="digits.*seed 0: (truth, half|path ridge|ridge)"),
        "| digits, 0 | path ridge | ",
    ),
    "outside/openset": (open_set, '"epk_gp, out of distribution"'),
    "outside/laplace": (beside_laplace, '"epk_gp, recorded path"'),
}


@pytest.mark.mostly_slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_in_its_smallest_form(name, capsys, monkeypatch):
    (run, said), (folder, _, file) = SMALL[name], name.rpartition("/")
    for load in page_code.imported(monkeypatch, *dict.fromkeys((FOLDER, FOLDER / folder))):
        benchmark = load(file)
        for owner in (benchmark.PathKernel, benchmark.models) if name == "logit_posterior" else ():
            for wrapped, value in vars(owner).copy().items():  # it wraps some of their functions: they come back
                if callable(value) and not wrapped.startswith("__"):
                    monkeypatch.setattr(owner, wrapped, value)
        if file == "datamodels":
            monkeypatch.setattr(load("datamodel_systems"), "NETWORKS", 40)
        run(benchmark)
    assert said in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny MLP", "tiny transformer"])
def test_the_truth_of_attribution_is_the_recorded_run_trained_again(monkeypatch, name):
    for load in page_code.imported(monkeypatch, FOLDER, FOLDER / "attribution"):
        retraining, settings = load("retraining"), load("settings")
        problem = settings.Problem(next(setting for setting in settings.TINY if setting.name == name), seed=0)
        run, again = retraining.record(problem), retraining.retrained(problem, torch.ones(2, problem.setting.num_train))
        # AdamW divides gradients that are rounding by their own size, so single weights may move by a step of size lr
        atol = 2 * problem.setting.lr * run.num_steps * (1e-2 if problem.setting.optimizer == "adamw" else 1e-5)
        for key, value in retraining.weights_at(run, run.num_steps).items():
            torch.testing.assert_close(again[key], value.expand_as(again[key]), rtol=0, atol=atol)


def test_scores_that_add_up_to_the_outcomes_have_a_datamodeling_score_of_one(monkeypatch):
    for load in page_code.imported(monkeypatch, FOLDER, FOLDER / "attribution"):
        agreement, generator = load("agreement"), torch.Generator().manual_seed(0)
        scores = torch.randn(4, 10, generator=generator)
        subsets = (torch.rand(30, 10, generator=generator) < 0.5).float()
        outcomes, score = subsets @ scores.T, agreement.linear_datamodeling_score
        assert score(scores, subsets, outcomes.exp()) == pytest.approx(1.0)
        assert score(-scores, subsets, outcomes) == pytest.approx(-1.0)
        assert score(torch.zeros(4, 10), subsets, outcomes) == 0.0
        true = torch.randn(50, 80, generator=generator)
        predicted = true + torch.randn(50, 80, generator=generator)
        low, high = agreement.bootstrap_interval(predicted, true)
        assert low < agreement.mean_rank_correlation(predicted, true) < high < low + 0.1


def test_a_result_of_other_bytes_is_told(load, monkeypatch, tmp_path, capsys):
    tool, file = load("result_bytes"), str(tmp_path / "before.safetensors")
    ones = torch.ones(3, dtype=torch.float64)
    before = {"same": lambda: "text", "numbers": lambda: [ones, 2], "old": lambda: ones}
    now = {"same": lambda: "text", "numbers": lambda: [ones + ones.new_tensor([0, 2**-52, 0]), 2], "new": lambda: ones}
    told = [
        "new: only now",
        "numbers | 0: differs by at most 2.22e-16; the largest value is 1.00e+00",
        "old: only before",
    ]
    monkeypatch.setattr(tool, "RESULTS", before)
    tool.run(["save", file])
    for results, status, lines in ((before, 0, []), (now, 1, told)):
        monkeypatch.setattr(tool, "RESULTS", results)
        with pytest.raises(SystemExit, match=str(bool(status))):
            tool.run(["compare", file])
        assert capsys.readouterr().out.splitlines() == [*lines, f"4 tensors, {len(lines)} differences"]


def test_a_result_of_the_package_has_the_same_bytes_twice(load):
    tool = load("result_bytes")
    before = tool.compute("block, logits")
    tool.recorded.cache_clear()
    assert list(tool.differences(before, tool.compute("block, logits"))) == []


@pytest.mark.slow
def test_a_planted_fault_is_found_where_a_test_sees_it(load, tmp_path, capsys):
    tool, root = load("mutants"), tmp_path / "tree"
    files = {
        "package/__init__.py": "def seen(x):\n    return x + 3\n\n\ndef unseen(x):\n    return x * 3\n",
        "tests/test_it.py": "import package\n\n\ndef test_seen():\n    assert package.seen(1) == 4\n\n\n"
        "def test_nothing():\n    package.unseen(0)\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    asked = [str(tmp_path / "lines"), "--root", str(root), "--folders", "package"]
    subprocess.run([sys.executable, tool.__file__, "contexts", *asked], check=True, capture_output=True)
    tool.main(["run", *asked, "--jobs", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert "package/__init__.py:2: sign: + -> -: found by tests/test_it.py::test_seen" in lines
    assert "package/__init__.py:6: sign: * -> /: survived 1 tests" in lines
    assert lines[-2:] == [
        "seed 0: 50% of 4 places that a test executes are found",
        "2 found, 2 survived, 0 not executed, 0 out of time",
    ]
    assert (root / "package" / "__init__.py").read_text() == files["package/__init__.py"]

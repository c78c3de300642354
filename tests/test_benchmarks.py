"""The benchmarks can be imported, and those that are cheap run in their smallest form: a rename must not break them."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark as if it were run as a script, and forget it and its neighbours afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    for file in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)

    def load(name):
        specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, name, module)
        specification.loader.exec_module(module)
        return module

    yield load
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_every_benchmark_can_be_imported(load, name):
    assert load(name)


@pytest.mark.slow
def test_a_posterior_is_timed_beside_its_kernel(load, monkeypatch, capsys):
    benchmark = load("logit_posterior")
    for owner in (benchmark.PathKernel, benchmark.posterior):  # it wraps some of their functions: they come back
        for name, value in vars(owner).copy().items():
            if callable(value) and not name.startswith("__"):
                monkeypatch.setattr(owner, name, value)
    benchmark.main(points=4, num_train=6, outputs="full", budget=512, fit_steps=1)
    assert "4 test points x 6 training points x 3 outputs, full: linear algebra" in capsys.readouterr().out


def test_an_uncertainty_map_is_timed(load, capsys):
    load("uncertainty_grid").main(grid=3, num_train=6, steps=1, outputs="independent", nodes=1, as_json=False)
    assert "9 grid points x 6 training points x 1 steps" in capsys.readouterr().out

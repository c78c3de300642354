"""Every experiment runs in a tiny size, and draws its saved result again."""

import importlib
import json
from pathlib import Path

import pytest

from harness import main

FOLDER = Path(__file__).parents[1] / "experiments"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("harness", "problems"))
GALLERY = FOLDER.parent / "docs" / "gallery"


def test_there_is_an_experiment_for_every_figure():
    numbered = [name[:5] for name in NAMES if name.startswith("fig")]
    assert numbered == [f"fig{n:02d}" for n in range(2, 9)]
    assert {"notebook_path_kernel", "ood_mnist"} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning:laplace")  # the optional peer's
@pytest.mark.parametrize("name", NAMES)
def test_the_experiment_runs_and_redraws(name, tmp_path):
    experiment = importlib.import_module(name).EXPERIMENT
    assert experiment.name == name
    main(experiment, ["--smoke", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved.keys() == {"experiment", "config", "results", "versions", "machine", "seconds"}
    picture = tmp_path / f"{name}.png"
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    picture.unlink()
    main(experiment, ["--redraw", "--out", str(tmp_path)])
    assert picture.read_bytes() == before


@pytest.mark.parametrize("name", NAMES)
def test_redrawing_needs_a_saved_result(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved result|there is no"):
        main(importlib.import_module(name).EXPERIMENT, ["--redraw", "--out", str(tmp_path)])


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_holds_the_full_run_and_it_is_small(name):
    """The negative control of the sizes: a smoke run is not what is shown."""
    experiment = importlib.import_module(name).EXPERIMENT
    saved = json.loads((GALLERY / f"{name}.json").read_text())
    assert saved["config"] != json.loads(json.dumps(experiment.smoke, default=vars))
    assert saved["config"] == json.loads(json.dumps(experiment.config, default=vars))
    for suffix in (".json", ".png"):
        assert (GALLERY / f"{name}{suffix}").stat().st_size <= 200 * 1024

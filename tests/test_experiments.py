"""Every experiment runs in a tiny size, its saved result is the live one, and draws the same picture again."""

import importlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from harness import floats_as_text, floats_from_text, main, words_in, words_of

FOLDER = Path(__file__).parents[1] / "experiments"
SHARED = {  # what experiments have in common
    "drawings", "harness", "judging", "label_suspicion", "peers", "problems", "rbf_process", "saved_rows", "strips",
    "uncertainty_problems",
}  # fmt: skip
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in SHARED)
GALLERY = FOLDER.parent / "docs" / "gallery"


def test_there_is_an_experiment_for_every_figure():
    numbered = [name[:5] for name in NAMES if name.startswith("fig")]
    assert numbered == [f"fig{n:02d}" for n in range(2, 9)]
    assert {"notebook_path_kernel", "judged_networks"} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning:laplace")  # the optional peer's
@pytest.mark.parametrize("name", NAMES)
def test_the_experiment_runs_and_redraws(name, tmp_path):
    """A tiny run, and what is drawn of its saved result: the same result and the same picture."""
    experiment, results, pictures = importlib.import_module(name).EXPERIMENT, [], []
    picture = tmp_path / f"{name}{experiment.suffix}"

    def draw(result: object) -> Figure:
        figure = experiment.draw(result)
        results.append((result, words_of(figure)))
        return figure

    assert experiment.name == name
    for option in ("--smoke", "--redraw"):
        main(replace(experiment, draw=draw), [option, "--out", str(tmp_path)])
        pictures.append(picture.read_bytes())
        assert words_in(picture) == results[-1][1]
        picture.unlink()
    assert asdict(results[0][0]) == asdict(results[1][0])
    assert not [reason for reason in getattr(results[0][0], "left_out", []) if "not installed" not in reason]
    assert pictures[0].startswith(b"\x89PNG" if experiment.suffix == ".png" else b"<?xml")
    assert pictures[0] == pictures[1]
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved.keys() == {"experiment", "config", "results", "versions", "machine", "seconds"}


def test_large_arrays_are_written_as_text_in_every_digit():
    values = torch.tensor([[1 / 3, -0.0, 5e-324], [1e300, math.pi, 1e-17]], dtype=torch.float64)
    text = json.loads(json.dumps(floats_as_text(values)))
    assert text["shape"] == [2, 3]
    assert torch.from_numpy(floats_from_text(text).copy()).equal(values)
    assert np.signbit(floats_from_text(text)[0, 1])
    assert len(floats_as_text(torch.rand(999).double())["float64"]) == 999 * 8 * 4 // 3


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_holds_the_full_run_and_it_is_small(name, tmp_path):
    """The negative control of the sizes: a smoke run is not what is shown. Redrawing needs a saved result."""
    experiment = importlib.import_module(name).EXPERIMENT
    with pytest.raises(FileNotFoundError, match="no saved result|there is no"):
        main(experiment, ["--redraw", "--out", str(tmp_path)])
    saved = json.loads((GALLERY / f"{name}.json").read_text())
    assert saved["config"] != json.loads(json.dumps(experiment.smoke, default=vars))
    assert saved["config"] == json.loads(json.dumps(experiment.config, default=vars))
    for suffix, kilobytes in {".json": 200, ".png": 200, ".svg": 150}.items():
        file = GALLERY / f"{name}{suffix}"
        assert file.exists() == (suffix in (".json", experiment.suffix))
        assert not file.exists() or file.stat().st_size <= kilobytes * 1024

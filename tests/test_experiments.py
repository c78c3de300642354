"""Every experiment runs in a tiny size, its saved result is the live one, and draws the same picture again."""

import importlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness import Experiment, floats_as_text, floats_from_text, main, words_in, words_of

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


def drawn_numbers(figure: Figure) -> list[np.ndarray]:
    """The data of every line, scatter, bar, filled area and image."""
    values = []
    for artist in figure.findobj():
        if isinstance(artist, Line2D):
            values += [artist.get_xydata()]
        elif isinstance(artist, Patch):
            values += [artist.get_patch_transform().transform_path(artist.get_path()).vertices]
        elif isinstance(artist, Collection):
            values += [artist.get_offsets(), artist.get_array(), *(path.vertices for path in artist.get_paths())]
        elif isinstance(artist, AxesImage):
            values += [artist.get_array()]
    return [np.ma.getdata(value) for value in values if value is not None]


def run_and_redraw(experiment: Experiment, folder: Path) -> tuple[list, list[Figure], list[bytes]]:
    """Run in a tiny size, then draw the saved result: both results, both figures and both pictures."""
    results, figures, pictures = [], [], []

    def draw(result: object) -> Figure:
        results.append(result)
        figures.append(experiment.draw(result))
        return figures[-1]

    for option in ("--smoke", "--redraw"):
        main(replace(experiment, draw=draw), [option, "--out", str(folder)])
        picture = folder / f"{experiment.name}{experiment.suffix}"
        pictures.append(picture.read_bytes())
        assert words_in(picture) == words_of(figures[-1])
        picture.unlink()
    return results, figures, pictures


def assert_drawn_alike(live: Figure, again: Figure) -> None:
    assert words_of(live) == words_of(again)
    for a, b in zip(drawn_numbers(live), drawn_numbers(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning:laplace")  # the optional peer's
@pytest.mark.parametrize("name", NAMES)
def test_the_experiment_runs_and_redraws(name, tmp_path):
    experiment = importlib.import_module(name).EXPERIMENT
    assert experiment.name == name
    (live, again), figures, pictures = run_and_redraw(experiment, tmp_path)
    assert asdict(live) == asdict(again)
    assert not [reason for reason in getattr(live, "left_out", []) if "not installed" not in reason]
    assert_drawn_alike(*figures)
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

"""One-off pages: experiments, the gallery and tutorials. They run, and pages show what was saved."""

import importlib
import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from harness import floats_as_text, floats_from_text, main, read_result, texts_of, words_in, words_of
from page_code import sections

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SHARED = {  # what experiments have in common
    "drawings", "harness", "judging", "label_suspicion", "peers", "problems", "rbf_process", "saved_rows", "strips",
    "uncertainty_problems",
}  # fmt: skip
NAMES = sorted(file.stem for file in (ROOT / "experiments").glob("*.py") if file.stem not in SHARED)


def test_every_experiment_has_a_section_a_result_and_a_picture():
    shown = {file.stem for file in GALLERY.glob("*.[ps][nv]g")}
    assert sections().keys() == set(NAMES) == shown == {file.stem for file in GALLERY.glob("*.json")}


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
    assert pictures[0] == pictures[1]
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    assert saved.keys() == {"experiment", "config", "results", "versions", "machine", "seconds"}


def test_large_arrays_are_written_as_text_in_every_digit():
    values = torch.tensor([[1 / 3, -0.0, 5e-324], [1e300, 3.14159, 1e-17]], dtype=torch.float64)
    text = json.loads(json.dumps(floats_as_text(values)))
    assert torch.from_numpy(floats_from_text(text).copy()).equal(values)
    assert np.signbit(floats_from_text(text)[0, 1])


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_holds_the_full_run_and_it_is_small(name, tmp_path):
    """The negative control of the sizes: a smoke run is not what is shown. Redrawing needs a saved result."""
    experiment = importlib.import_module(name).EXPERIMENT
    with pytest.raises(FileNotFoundError, match="no saved result|there is no"):
        main(experiment, ["--redraw", "--out", str(tmp_path)])
    saved = json.loads((GALLERY / f"{name}.json").read_text())["config"]
    smoke, full = (json.loads(json.dumps(own, default=vars)) for own in (experiment.smoke, experiment.config))
    assert smoke != saved == full
    for suffix, kilobytes in {".json": 200, ".png": 200, ".svg": 150}.items():
        file = GALLERY / f"{name}{suffix}"
        assert file.exists() == (suffix in (".json", experiment.suffix))
        assert not file.exists() or file.stat().st_size <= kilobytes * 1024


LEGIBLE = 8  # points: 11 pixels


def illegible(figure: Figure) -> list[str]:
    """Words outside of the figure or under others, and those too small where the site's column of 7.6 inches has it."""
    texts, f = texts_of(figure), figure.bbox
    boxes, scale = {text: text.get_window_extent() for text in texts}, min(1.0, 7.6 / figure.get_figwidth())
    inside = {t for t, b in boxes.items() if b.x0 >= f.x0 and b.y0 >= f.y0 and b.x1 <= f.x1 and b.y1 <= f.y1}
    pairs = itertools.combinations(boxes.items(), 2)
    wrong = [text.get_text() for text in boxes if text not in inside or scale * text.get_fontsize() < LEGIBLE]
    return wrong + [f"{a.get_text()} / {b.get_text()}" for (a, box), (b, other) in pairs if box.overlaps(other)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", NAMES)
def test_the_picture_says_what_its_saved_result_draws_and_all_of_it_can_be_read(name):
    """A picture drawn by older code, or from another result, has other words; the numbers in titles are words."""
    experiment = importlib.import_module(name).EXPERIMENT
    figure = experiment.draw(read_result(experiment, GALLERY / f"{name}.json"))
    assert words_in(GALLERY / f"{name}{experiment.suffix}") == words_of(figure)
    ticks = [label for ax in figure.axes for label in (*ax.get_xticklabels(), *ax.get_yticklabels())]
    assert min(label.get_fontsize() for label in ticks) >= LEGIBLE
    assert illegible(figure) == []


def test_a_word_that_cannot_be_read_is_found():
    """The negative control."""
    figure = Figure(figsize=(12, 4))
    for x, word, size in ((0.5, "seen", 13), (0.51, "under", 13), (-0.01, "cut", 13), (0.1, "small", 10)):
        figure.text(x, 0.5, word, fontsize=size)
    assert illegible(figure) == ["cut", "small", "seen / under"]


TUTORIALS = {  # what their text says of the numbers that come out
    "regression": [
        "all(function['RBF'][k] < function['path kernel'][k] < function['network'][k] for k in (0, 1))",
        "abs(function['path kernel'][2] - 0.9) < 0.03",
        "prediction.std[2, 0] > 2 * prediction.std[0, 0]",
    ],
    "removing_points": [
        "found >= 12",
        "abs(predicted - validated[0]) < 0.25 * (float(effect.outputs) - validated[0])",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "docs" / "tutorials").glob("*.md")))
def test_the_code_of_a_tutorial_runs_and_its_text_says_what_comes_out(name):
    text, names = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(), {"__name__": name}
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{name}.md", "exec"), names)
    assert [claim for claim in TUTORIALS[name] if not eval(claim, names)] == []

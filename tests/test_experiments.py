"""One-off pages: experiments, the gallery and tutorials. They run, and pages show and state what was saved.

A saved result, and the numbers that its section states in words, were compared once; `READ` holds both. Who computes a
result again, or states another number, reads the section beside the result and writes the line anew.
"""

import importlib
import itertools
import json
import re
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from harness import floats_as_text, floats_from_text, main, read_result, texts_of, words_in, words_of
from page_code import pages_tool

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SHARED = {  # what experiments have in common
    "drawings", "harness", "judging", "label_suspicion", "peers", "problems", "rbf_process", "saved_rows", "strips",
    "uncertainty_problems",
}  # fmt: skip
NAMES = sorted(file.stem for file in (ROOT / "experiments").glob("*.py") if file.stem not in SHARED)
SECTIONS = {
    re.search(r"python experiments/(\w+)\.py", section)[1]: section
    for page in ("figures.md", "experiments.md")
    for section in pages_tool().written((ROOT / "docs" / page).read_text()).split("\n## ")[1:]
}
# Digest of each saved result, and the numbers of its section.
READ = {
    "active_learning": "8636b34d 20 2000 40 60",
    "asymmetry": "70f622f3 0.40 0.52 0.71 0.89 0.90 0.91 1.00 3.2",
    "counterfactual": "6a7d911f 0.003 0.11 0.22 0.95 0.98 100 2e-13 30",
    "fig02_alignment": "0839bcc5 0.013 0.14 0.85 300 5.3 99",
    "fig03_retrained": "53ad711d 0.223 0.923 0.927 0.957 0.960 0.983 0.988 0.995 0.997 1.000 10 3000",
    "fig04_machine": "73fbbb94 1.4e-3 100 3.3 3.7 4.0e-13 8.0e-14",
    "fig05_uncertainty": "21084cae 0.28 0.62 100 79 81% 85 86 89% 93% −0.21 −0.37",
    "fig06_kernel_values": "524ebbd7 0.25 0.28 1.9 4.6 −0.38 −0.51",
    "fig07_quadrature": "4b7b37ff 0.049 18.4 2.5e-4 200 4e11 6.7e-16 600 9%",
    "fig08_path_geometry": "5f743435 0.19 0.23 0.90 130 20 202% 30% 31 32% 37 57 68",
    "finetuned_minilm": "d72ee0e2 1.4e-06 10 104 2.4 20 200 40% 5% 54% 60% 75,653 89.5%",
    "grokking": "c4d51a5d 0.6 0.7 1.1 100 1000 113 115 1200 1400 1600 200 4,000 5.2 5.7 6,441 7% 875 89,024 99%",
    "judged_networks": "5029a724 10,000 1000 2000 512 59,000 64",
    "label_noise": "d2b44e85 10 20% 4000",
    "notebook_path_kernel": "fd0689fb 0.11 0.84 0.97 10 100 1000 128 31.7% 7.2e-15 784",
    "other_paths": "dfa61102 0.051 0.23% 0.73 0.96 0.997 0.9995 0.9999 100 16 2.4 20 3.6 6.1 7e-15",
    "planted_sentence": "3f749b3e 0.00068 0.47 0.60 0.65 0.81 1.0e-5 2.51 250 274 3.75 3.9e-6 4.00 8.9e-11 95,664",
    "resnet_contributions": "09aef5a9 1.1e-16 10,000 100 123% 148 15 163 19,890 300 352 439 459 5.7e-12 52.1 79.4%",
    "shifted_networks": "719c4886 0.06 0.1",
    "signal_dimension": "8a87570a 100 107 13 205 3.6 300 4.6 784 94 95%",
    "without_the_worst":
        "559b1c04 1.59 1.60 1.64 15% 3.1 3.31 3.83 400 47 51% 84% 87.9% 88.7% 90.9% 92% 92.3% 93.6% 997",
}  # fmt: skip


def stated(section: str) -> list[str]:
    """The numbers and percentages of a section's prose, but for single digits, code, links and formulas."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$|\*\*", "", section).replace(" %", "%")
    found = re.findall(r"(?<![\w.])−?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?", prose)
    return sorted({number.rstrip(",") for number in found if len(number.rstrip(",")) > 1})


def digest(results: object) -> str:
    return blake2b(json.dumps(results, sort_keys=True).encode(), digest_size=4).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_a_section_states_numbers_that_were_read_beside_the_saved_result(name):
    result, numbers = READ[name].partition(" ")[::2]
    assert digest(json.loads((GALLERY / f"{name}.json").read_text())["results"]) == result
    assert set(stated(SECTIONS[name])) <= set(numbers.split())


def test_every_experiment_has_a_section_a_result_and_a_picture():
    shown = {file.stem for file in GALLERY.glob("*.[ps][nv]g")}
    assert SECTIONS.keys() == READ.keys() == set(NAMES) == shown == {file.stem for file in GALLERY.glob("*.json")}


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


def test_another_number_and_a_word_that_cannot_be_read_are_found():
    """The negative controls."""
    changed = SECTIONS["fig04_machine"].replace("8.0e-14", "8.1e-14")
    assert set(stated(changed)) - set(READ["fig04_machine"].split()) == {"8.1e-14"}
    assert digest({"error": 1.0}) != digest({"error": 1.1})
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

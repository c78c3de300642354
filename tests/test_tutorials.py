"""Every tutorial's code runs as it stands, and its text states the numbers that come out."""

import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def run(name):
    text = (TUTORIALS / f"{name}.md").read_text()
    names = {"__name__": name}
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, f"{name}.md", "exec"), names)
    return names


def test_every_tutorial_is_tested():
    names = {file.stem for file in TUTORIALS.glob("*.md")}
    assert all(f'run("{name}")' in Path(__file__).read_text() for name in names)


@pytest.mark.slow
def test_regression():
    names = run("regression")
    function = names["function"]
    assert function["RBF"][0] < function["path kernel"][0] < function["network"][0]
    assert function["RBF"][1] < function["path kernel"][1] < function["network"][1]
    assert abs(function["path kernel"][2] - 0.9) < 0.03
    middle, _, far = names["prediction"].std[:, 0].tolist()
    assert far > 2 * middle


@pytest.mark.slow
def test_removing_points():
    names = run("removing_points")
    assert names["found"] >= 12
    assert abs(names["predicted"] - names["validated"][0]) < 0.25 * (
        float(names["effect"].outputs) - names["validated"][0]
    )

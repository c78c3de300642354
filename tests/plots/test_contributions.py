import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from epk_gp.plots import PALETTE, attribution_bars, training_image
from epk_gp.plots.style import LOWERED, RAISED, REST


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def words(ax):
    return [text.get_text() for text in ax.texts]


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def ticks(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_bars_sum_to_the_total(ax):
    values = torch.linspace(-1, 1.01, 100, dtype=torch.float64)
    attribution_bars(ax, values, torch.zeros(100, dtype=torch.int64), top=3)
    assert sum(widths(ax)) == pytest.approx(float(values.sum()), rel=1e-12)
    assert len(widths(ax)) == 7
    assert ticks(ax)[3] == "94 others"


def test_bars_are_the_most_helpful_and_the_most_harmful_points(ax):
    values = np.array([0.1, -0.5, 0.4, -0.2, 0.3, -0.1])
    attribution_bars(ax, values, np.array([0, 1, 2, 0, 1, 2]), names=["cat", "dog", "bird"], top=2)
    assert ticks(ax) == ["#2, bird", "#4, dog", "2 others", "#3, cat", "#1, dog"]
    assert np.allclose(widths(ax), [0.4, 0.3, 0.0, -0.2, -0.5])
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches[:2]] == [PALETTE[2], PALETTE[1]]
    assert words(ax) == ["+0.4", "+0.3", "+0", "−0.2", "−0.5"]
    assert legend(ax) == ["cat", "dog", "bird"]


def test_a_long_rest_is_cut_and_says_so(ax):
    values = np.full(1000, 0.01)
    attribution_bars(ax, values, np.zeros(1000, dtype=int), top=2)
    assert "+9.98 (bar cut)" in words(ax)
    assert max(widths(ax)) == pytest.approx(0.025)
    assert "all bars together: +10" in ax.get_xlabel()


def test_without_others_there_is_no_bar_for_them(ax):
    attribution_bars(ax, np.array([1.0, -1.0]), np.array([0, 1]))
    assert ticks(ax) == ["#0, class 0", "#1, class 1"]


def test_contributions_of_zero_are_others(ax):
    attribution_bars(ax, np.zeros(4), np.zeros(4, dtype=int))
    assert ticks(ax) == ["4 others"]
    assert words(ax) == ["+0"]


def test_the_sign_of_a_bar_is_its_side_and_its_marks_say_so(ax):
    attribution_bars(ax, np.array([2.0, -1.0, 0.5]), None, top=1, output="logit of class 2")
    assert [np.sign(width) for width in widths(ax)] == [1, 1, -1]
    assert ticks(ax) == ["#0", "1 other", "#1"]
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [RAISED, REST, LOWERED]
    assert ax.get_xlabel().startswith("▼ lowered     contribution to the logit of class 2     ▲ raised")
    assert ax.get_legend() is None


@pytest.mark.parametrize(("contribution", "style"), [(2.0, "-"), (-2.0, (0, (2.2, 1.2))), (0.0, "-")])
def test_the_frame_of_an_image_tells_the_sign_without_colours(ax, contribution, style):
    training_image(ax, np.eye(4), "caption", contribution)
    (drawn,) = {spine.get_linestyle() for spine in ax.spines.values()}
    assert drawn == style
    (width,) = {spine.get_linewidth() for spine in ax.spines.values()}
    assert (width > 1) == (contribution != 0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": np.zeros(2, dtype=int)}, r"labels must have shape \(3,\): got \(2,\)"),
        ({"top": 0}, "top must be at least 1: got 0"),
        ({"names": ["cat"]}, "names must name each class: got 1 names for classes up to 1"),
        ({"contributions": np.zeros(0), "labels": np.zeros(0, dtype=int)}, "at least one entry"),
        ({"contributions": np.array([0, np.inf, 0])}, "contributions must be finite"),
    ],
)
def test_bars_refuse_what_does_not_fit(ax, options, message):
    with pytest.raises(ValueError, match=message):
        attribution_bars(ax, **({"contributions": np.ones(3), "labels": np.array([0, 1, 0])} | options))

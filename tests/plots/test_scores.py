"""Drawings of scores."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from epk_gp.plots import risk_coverage, score_histogram, suspicion_bars
from epk_gp.plots.scores import ScoredPoints, scores_figure
from epk_gp.plots.style import IN_DISTRIBUTION, WRONG


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_curves_run_from_a_few_points_to_all_of_them(ax):
    risk = torch.linspace(0, 0.2, 200, dtype=torch.float64)
    assert risk_coverage(ax, {"a": risk, "b": risk / 2}) is ax
    assert legend(ax) == ["a", "b"]
    x, y = ax.lines[0].get_data()
    assert (x[0], x[-1]) == (2, 100)
    np.testing.assert_allclose(y, 100 * risk[3:])


def test_histograms_of_different_sizes_have_one_area(ax):
    score_histogram(ax, {"few": np.full(3, 0.5), "many": np.linspace(0, 1.01, 1000)}, label="score")
    for patch in ax.patches:
        corners = patch.get_xy()
        tops = corners[1:-1:2] if len(corners) < 90 else corners[1:80:2]
        assert tops[:, 1].sum() == pytest.approx(1)  # also what rounding has put above 1
    assert [patch.get_fill() for patch in ax.patches] == [True, False]  # told apart without colours
    assert ax.get_xlabel() == "score"


def test_labels_that_another_class_is_expected_for_stand_out(ax):
    suspicion_bars(ax, torch.tensor([-0.5, 0.1]), ["#3", "#4"])
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([-0.5, 0.1])
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == [WRONG, IN_DISTRIBUTION]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["#3", "#4"]
    low, high = ax.get_ylim()
    assert low > high  # the worst stands on top


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_drawn_is_refused(ax):
    with pytest.raises(ValueError, match="at least one curve: got none"):
        risk_coverage(ax, {})
    with pytest.raises(ValueError, match="a must have a risk for each number of points"):
        risk_coverage(ax, {"a": torch.zeros(0)})
    with pytest.raises(ValueError, match="a must be finite: got 1 entries"):
        score_histogram(ax, {"a": np.array([np.nan])}, label="score")
    with pytest.raises(ValueError, match="names must name each label: got 1 names for 2 margins"):
        suspicion_bars(ax, torch.zeros(2), ["#1"])


@pytest.mark.parametrize("known", [True, False])
def test_images_are_drawn_from_the_surest_to_the_strangest(known):
    n = 12
    error = torch.linspace(0, 1, n, dtype=torch.float64)
    scored = ScoredPoints(
        X=torch.rand(n, 1, 4, 4, dtype=torch.float64),
        rows=torch.arange(n) + 100,
        error=error,
        out_of_distribution=(error - 0.5).abs(),
        predicted=torch.zeros(n, dtype=torch.int64),
        right=error < 0.5 if known else None,
        risks={"error score": error} if known else {},
    )
    figure = scores_figure(scored, torch.rand(20, dtype=torch.float64))
    axes = [ax for ax in figure.get_axes() if ax.images]
    rows = [int(ax.get_xlabel().split("\n")[0].removeprefix("#")) for ax in axes]
    assert rows[:10] == list(range(100, 110))
    assert rows[10:20] == list(range(111, 101, -1))
    assert set(rows[20:22]) == {100, 111}
    marks = [ax.get_title().partition(" ")[2] for ax in axes[10:20]]
    assert marks == (["✗"] * 6 + ["✓"] * 4 if known else [""] * 10)

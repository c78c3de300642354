"""The drawings that experiments share: what is drawn is what was passed in."""

import numpy as np
import pytest
import torch

from drawings import error_against_evaluations, reconstruction_scatter, term_bars
from epk_gp.plots import PALETTE


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def ticks(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def words(ax):
    return [text.get_text() for text in ax.texts]


def test_the_scatter_names_its_largest_error(ax):
    network = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    machine = network + torch.tensor([[0.0, -0.25], [0.125, 0.0]])
    assert reconstruction_scatter(ax, network, machine, label="midpoint") is ax
    assert legend(ax) == ["midpoint: largest |error| 0.25"]
    assert np.array_equal(ax.collections[0].get_offsets(), [[0, 0], [1, 0.75], [2, 2.125], [3, 3]])
    assert ax.get_aspect() == 1


def test_two_rules_share_one_identity_line(ax):
    x = torch.arange(3.0)
    reconstruction_scatter(ax, x, x + 1, label="a")
    reconstruction_scatter(ax, x, x, label="b")
    assert len(ax.lines) == 1
    assert len(legend(ax)) == 2
    assert not np.array_equal(ax.collections[0].get_facecolor(), ax.collections[1].get_facecolor())


def test_outputs_with_gradients_are_drawn(ax):
    x = torch.arange(3.0, requires_grad=True)
    reconstruction_scatter(ax, x, 2 * x)
    assert legend(ax) == ["kernel machine: largest |error| 2"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("network", "machine", "message"),
    [
        ([0.0, 1.0], [0.0], r"one shape: got \(2,\) and \(1,\)"),
        ([], [], "at least one output"),
        ([0.0], [np.nan], "machine must be finite: got 1 entries"),
    ],
)
def test_the_scatter_refuses_what_it_cannot_compare(ax, network, machine, message):
    with pytest.raises(ValueError, match=message):
        reconstruction_scatter(ax, np.array(network), np.array(machine))


def test_terms_start_where_the_one_above_ends(ax):
    assert term_bars(ax, ["initial", "samples", "decay"], np.array([-0.5, 4.0, -1.5]), output="logit") is ax
    starts = [bar.get_x() for bar in ax.patches]
    assert np.allclose(starts, [0, -0.5, 3.5, 0])
    assert np.allclose(widths(ax), [-0.5, 4, -1.5, 2])
    assert ticks(ax) == ["initial", "samples", "decay", "logit"]
    assert words(ax) == ["▼ −0.5", "▲ +4", "▼ −1.5", "2"]


@pytest.mark.usefixtures("unchecked")
def test_every_term_needs_a_value(ax):
    with pytest.raises(ValueError, match=r"values must have shape \(2,\): got \(1,\)"):
        term_bars(ax, ["a", "b"], np.array([1.0]))


def test_each_rule_stands_at_its_cost_and_error(ax):
    error_against_evaluations(ax, ["left", "adaptive"], [1, 11.3], [1e-1, 1e-14])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1, 1e-1), (11.3, 1e-14)]
    assert words(ax) == ["left", "adaptive"]


def test_rules_of_a_family_share_colour_mark_and_line(ax):
    rules = ["left Riemann 100", "left Riemann 1", "adaptive Gauss-Legendre 4, tol 1e-06", "midpoint"]
    error_against_evaluations(ax, rules, [100, 1, 8, 2], [1e-4, 1e-1, 1e-7, 1e-2])
    assert legend(ax) == ["left Riemann, n nodes"]
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1, 1e-1], [100, 1e-4]], [[8, 1e-7]], [[2, 1e-2]]]
    assert len({line.get_color() for line in ax.lines}) == len({line.get_marker() for line in ax.lines}) == 3
    assert words(ax) == ["100", "1", "adaptive Gauss-Legendre 4, tol 1e−6", "midpoint"]


def test_many_rules_of_one_family_repeat_no_colour_for_another(ax):
    rules = [f"Gauss-Legendre {n}" for n in range(1, 12)] + ["left Riemann 1"]
    error_against_evaluations(ax, rules, list(range(1, 13)), [10.0**-n for n in range(12)])
    assert [line.get_color() for line in ax.lines] == list(PALETTE[:2])


def test_names_keep_clear_of_each_other(ax):
    error_against_evaluations(ax, ["first rule", "second rule", "third rule"], [100, 100, 101], [1e-3, 1e-3, 1.1e-3])
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_an_error_of_zero_is_drawn_and_named(ax):
    error_against_evaluations(ax, ["a", "b"], torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    assert words(ax) == ["a", "b (error 0)"]
    assert [line.get_ydata()[0] for line in ax.lines] == [0.5, 0.25, 0.25]
    assert (ax.lines[2].get_marker(), ax.lines[2].get_markerfacecolor()) == ("v", "white")


@pytest.mark.parametrize(
    ("evaluations", "errors", "message"),
    [([1], [1, 1], "evaluations must have shape"), ([0, 1], [1, 1], "positive"), ([1, 1], [1, -1], "absolute errors")],
)
def test_rules_refuse_what_no_logarithm_shows(ax, evaluations, errors, message):
    with pytest.raises(ValueError, match=message):
        error_against_evaluations(ax, ["a", "b"], evaluations, errors)


def test_no_rules_are_refused(ax):
    with pytest.raises(ValueError, match="at least one name"):
        error_against_evaluations(ax, [], [], [])

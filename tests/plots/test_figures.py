"""The figures that commands write."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from torch import nn

import epk_gp as epk
from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges
from epk_gp.analysis.maps import UncertaintyMap, column_plane, coordinate_plane, project
from epk_gp.cli.uncertainty import describe_plane
from epk_gp.core.show import shortened
from epk_gp.datamodels.model import Verification
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots import shades_of, style
from epk_gp.plots.contributions import attribution_figure
from epk_gp.plots.maps import held_columns, map_figure
from epk_gp.plots.scores import check_figure, scores_figure, verification_figure


@pytest.fixture(scope="module")
def images():
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(40, 1, 4, 4, generator=g, dtype=torch.float64), torch.arange(40) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.BatchNorm1d(2)).double()
    trajectory = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    axes = [[by_sample(trajectory)], [step_ranges(trajectory)]]
    parts = epk.attribute(trajectory, X[:1], by=axes, rule=epk.gauss_legendre(8))
    return trajectory, X[:1], prediction_breakdown(*parts, parts[0].network.argmax(1))


def test_the_curve_of_an_output_ends_at_the_network_where_statistics_move(images):
    breakdown = images[2]
    assert (breakdown.initial + breakdown.steps.sum(1) - breakdown.network).abs().max() < 1e-12
    assert breakdown.statistics.abs().max() > 1e-3


def test_as_many_training_images_are_drawn_as_are_asked_for(images):
    trajectory, X, breakdown, top = *images, 8
    assert min((breakdown.samples[0] > 0).sum(), (breakdown.samples[0] < 0).sum()) >= top
    figure = attribution_figure(breakdown, trajectory, X, [0], top)
    axes = [ax for ax in figure.get_axes() if ax.images]
    assert axes[0].get_title() == "explained"
    order = breakdown.samples[0].argsort(descending=True).tolist()
    expected = [*order[:top], *order[::-1][:top]]
    assert [ax.get_xlabel() for ax in axes[1:]] == [f"#{i}\nlabel {int(trajectory.targets[i])}" for i in expected]
    signs = [ax.get_title()[0] for ax in axes[1:]]
    assert signs == ["+"] * top + ["−"] * top


def words_of(figure):
    return " / ".join(text.get_text() for text in figure.findobj(Text) if text.get_text())


def test_an_attribution_says_head_class_and_true_label(images):
    trajectory, X, breakdown = images
    labels, c = torch.tensor([1]), int(breakdown.output[0])
    words = words_of(attribution_figure(breakdown, trajectory, X, [0], 1, head="logits", labels=labels))
    assert f"point 0: predicted class {c}, true label 1" in words
    assert f"▲ raised the logit of class {c} most" in words
    assert "▼ lowered it most" in words
    assert f"logit of class {c} so far" in words
    named = words_of(attribution_figure(breakdown, trajectory, X, [0], 1, head="log_softmax", names=["cat", "dog"]))
    assert f"log probability of class {'cat' if c == 0 else 'dog'} so far" in named
    assert "true label" not in named


def test_points_that_are_no_images_are_drawn_as_bars(images):
    trajectory, X, breakdown = images
    flat = replace(trajectory, inputs=trajectory.inputs.flatten(1))
    figure = attribution_figure(breakdown, flat, X.flatten(1), [0, 0], 2, head="logits")
    assert not any(ax.images for ax in figure.get_axes())
    bars = [ax for ax in figure.get_axes() if ax.get_ylabel() == "training point"]
    ticks = [[label.get_text() for label in ax.get_yticklabels()] for ax in bars]
    assert [rows[2] for rows in ticks] == ["36 others"] * 2
    assert all(re.fullmatch(r"#\d+, class [01]", word) for word in ticks[0][:2])


def test_the_plane_of_a_map_is_said_and_one_legend_serves_all_maps():
    g, x = torch.Generator().manual_seed(0), torch.linspace(0, 1, 6, dtype=torch.float64)
    values = torch.rand(6, 6, generator=g, dtype=torch.float64)
    classes = (x > 0.5).long().expand(6, 6).contiguous()
    shown = dict.fromkeys(("kernel", "probability", "std", "entropy", "mutual_information"), values)
    m = UncertaintyMap(
        x=x, y=x, training=values[:2].reshape(6, 2), network_class=classes, plane=coordinate_plane(values),
        boundary_classes=classes.repeat_interleave(5, 0).repeat_interleave(5, 1), standard_error=0.1,
        distance_correlation=None, points=torch.arange(6), labels=torch.arange(6) % 2, **shown,
    )  # fmt: skip
    figure = map_figure(m, plane=describe_plane(784))
    assert "principal directions of the training inputs (784 coordinates)" in words_of(figure)
    assert len(figure.legends) == 1
    assert not any(ax.get_legend() for ax in figure.get_axes())
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["class 0", "class 1", "decision boundary of the network"]
    maps = [ax for ax in figure.get_axes() if ax.get_title(loc="left")]
    assert [shades_of(ax).levels[0] for ax in maps] == [0, 0, 0, 0]  # white is 0


def score_map(num_kinds, axes=(0, 1)):
    """A map of made-up scores over ages and kinds of training points in three classes, and validation points."""
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(20, 70, 40), np.arange(40) % num_kinds * 2, rng.normal(size=40)]
    names = {float(2 * k): f"the kind number ${k} of all" for k in range(num_kinds)}
    plane = column_plane(X, *axes, names=["age", "kind", "c"], categories={"kind": names})
    x, y = (torch.tensor([*names]) if k == 1 else torch.linspace(10, 80, 6).double() for k in axes)
    error = torch.arange(len(x) * len(y)).double().reshape(len(y), len(x)) / (len(x) * len(y))
    classes = (error * 3).long()
    boundary = classes.repeat_interleave(1 if axes[0] == 1 else 5, 1).repeat_interleave(1 if axes[1] == 1 else 5, 0)
    m = UncertaintyMap(
        x=x, y=y, training=project(plane, torch.tensor(X)), points=torch.arange(30), network_class=classes, plane=plane,
        boundary_classes=boundary, probability=1 - error, std=error, entropy=error, mutual_information=error,
        out_of_distribution=error.flip(0), standard_error=0.0, distance_correlation=None, labels=torch.arange(40) % 3,
        class_names=["ant", "bee", "$cat$"],
    )  # fmt: skip
    return m, X[30:]


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_categories_are_cells_that_nothing_is_interpolated_across_and_hold_their_points(axes):
    m, _ = score_map(4, axes)
    figure = map_figure(m)
    error, far = (ax for ax in figure.axes if ax.get_title(loc="left"))
    assert (error.get_title(loc="left"), far.get_title(loc="left")) == ("error score", "out-of-distribution score")
    assert (error.get_xlabel(), error.get_ylabel()) == m.plane.names
    of_kinds, along = (error.yaxis, 0) if axes[1] == 1 else (error.xaxis, 1)
    assert [text.get_text() for text in of_kinds.get_ticklabels()] == [
        style.plain(shortened(name, 20)) for name in m.plane.categories[1 - along].values()
    ]
    shades = shades_of(far)
    for kind in range(4):
        values = m.out_of_distribution.select(along, kind)
        for place in (-0.49, 0.0, 0.49):
            at = np.array([float((m.x, m.y)[along][3]), kind + place])[:: 1 if along == 0 else -1]
            found = [k for k, path in enumerate(shades.get_paths()) if path.contains_point(at)]
            assert any(shades.levels[k] <= values[3] <= shades.levels[k + 1] for k in found)
    points = error.collections[-1].get_offsets()
    assert len(points) == 30
    assert np.array_equal(points[:, 1 - along].round(), np.arange(30) % 4)
    assert np.ptp(points[:, 1 - along] - np.arange(30) % 4) > 0.5  # spread, so that they can be seen


@pytest.mark.parametrize("length", [1, 10, 40])
def test_the_line_of_other_columns_stays_in_the_figure(length):
    X = np.random.default_rng(0).normal(size=(5, 30))
    plane = column_plane(X, 0, 1, names=[f"{k}".rjust(length, "n") for k in range(30)])
    said, (m, _) = held_columns(plane), score_map(3)
    figure = map_figure(m, plane=said)
    box = figure._suptitle.get_window_extent()
    assert box.x1 <= figure.bbox.x1
    shown = said.count(", ")
    assert f", and {30 - 2 - shown} more columns." in said
    assert f" {np.median(X[:, 2]):.5g}, " in said


@pytest.mark.parametrize(("num_classes", "length"), [(3, 16), (3, 28), (6, 20), (10, 12), (40, 20)])
def test_long_names_of_classes_and_columns_stay_in_the_figure(num_classes, length):
    m, validation = score_map(3)
    names = [f"{c}".rjust(length, "m") for c in range(num_classes)]
    m = replace(m, labels=torch.arange(40) % num_classes, class_names=names)
    m = replace(m, plane=replace(m.plane, columns=("a" * 70, "b" * 70, "c")))
    figure = map_figure(m, validation=validation)
    figure.canvas.draw()
    boxes = [figure.legends[0], *(axis.label for ax in figure.axes[:2] for axis in (ax.xaxis, ax.yaxis))]
    for box in (artist.get_window_extent() for artist in boxes):
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0
        assert box.y1 <= figure.bbox.y1
    panels = [ax.get_window_extent() for ax in figure.axes[:2]]
    assert all(panel.height > 150 and panel.y0 > figure.legends[0].get_window_extent().y1 for panel in panels)
    left, right = (ax.xaxis.label.get_window_extent() for ax in figure.axes[:2])
    assert left.x1 < right.x0


def test_validation_points_of_other_columns_or_categories_are_refused():
    m, validation = score_map(3)
    frame = pd.DataFrame(validation, columns=["age", "kind", "c"])
    map_figure(m, validation=frame)
    with pytest.raises(ValueError, match="validation must have the columns of the plane"):
        map_figure(m, validation=frame[["kind", "age", "c"]])
    with pytest.raises(ValueError, match="points must have values of 'kind' that have a name"):
        map_figure(m, validation=validation + 1)
    with pytest.raises(ValueError, match="points must have the 3 entries of an input: got 2"):
        map_figure(m, validation=validation[:, :2])


@pytest.mark.parametrize(("num_kinds", "axes"), [(3, (1, 0)), (20, (0, 1)), (40, (1, 0))])
def test_names_of_categories_do_not_overlap_and_stay_in_the_figure(num_kinds, axes):
    m, validation = score_map(num_kinds, axes)
    figure = map_figure(m, validation=validation)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["ant", "bee", r"\$cat\$", "validation points", "decision boundary of the network"]
    crosses = [c for ax in figure.axes for c in ax.collections if len(c.get_offsets()) == len(validation)]
    assert len(crosses) == 2
    assert "Other columns: c " in words_of(figure)
    for ax in figure.axes[:2]:
        for axis in (ax.xaxis, ax.yaxis):
            boxes = [
                text.get_window_extent() for text in axis.get_ticklabels() if text.get_visible() and text.get_text()
            ]
            for a, b in itertools.pairwise(boxes):
                assert a.x1 <= b.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
            assert all(figure.bbox.contains(*corner) for box in boxes for corner in box.corners())


@pytest.mark.mostly_slow
@pytest.mark.parametrize("known", [True, False])
def test_images_are_drawn_from_the_surest_to_the_strangest(known):
    n = 12
    error = torch.linspace(0, 1, n, dtype=torch.float64)
    right, risks = (error < 0.5, {"error score": error}) if known else (None, {})
    figure = scores_figure(
        torch.rand(n, 1, 4, 4, dtype=torch.float64), rows=torch.arange(n) + 100, error=error, far=(error - 0.5).abs(),
        ordinary=torch.rand(20, dtype=torch.float64), predicted=torch.zeros(n, dtype=torch.int64), right=right,
        risks=risks,
    )  # fmt: skip
    axes = [ax for ax in figure.get_axes() if ax.images]
    rows = [int(ax.get_xlabel().split("\n")[0].removeprefix("#")) for ax in axes]
    assert rows[:10] == list(range(100, 110))
    assert rows[10:20] == list(range(111, 101, -1))
    assert set(rows[20:22]) == {100, 111}
    marks = [ax.get_title().partition(" ")[2] for ax in axes[10:20]]
    assert marks == (["✗"] * 6 + ["✓"] * 4 if known else [""] * 10)


def test_agreements_of_scores_stand_where_their_numbers_are_with_their_intervals():
    X, y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(16) % 2
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=4)
    scores = {"$exact$": epk.influence(run, X[:3]).values, "random": torch.randn(3, 2, 16)}
    check = epk.check_scores(run, scores, X[:3], contributions=False, retrainings=6, left_out=6, removals=0)
    figure = check_figure(check)
    (ax,) = figure.axes
    cosines, derivatives, lds, left_out = ax.containers
    systems = list((check.systems | check.references).values())
    expected = [float(a.likeness["derivatives"]["cosine"].mean()) for a in systems]
    assert derivatives.lines[0].get_xdata() == pytest.approx(expected)
    assert all(x != x for x in cosines.lines[0].get_xdata())  # contributions were not asked for
    for drawn, name in ((lds, "lds"), (left_out, "left_out")):
        assert drawn.lines[0].get_xdata() == pytest.approx([getattr(a, name).mean for a in systems])
        ends = [segment[:, 0].tolist() for segment in drawn.lines[2][0].get_segments()]
        assert ends == [pytest.approx(list(getattr(a, f"{name}_interval"))) for a in systems]
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"\$exact\$", "random", "exact derivatives"]
    words = words_of(figure)
    assert all(label in words for label in ("cosine, derivatives", "LDS, 95 %", "left out, 95 %"))


@pytest.mark.parametrize(("Q", "groups"), [(3, 3), (12, 1)])
def test_a_verification_is_a_dot_for_each_network_and_question_beside_diagonal_and_slope(Q, groups):
    outputs = torch.arange(Q, dtype=torch.float64)
    change = torch.randn(5, Q, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    figure = verification_figure(Verification(outputs + change, outputs + 0.5 * change, outputs))
    (ax,) = figure.axes
    dots = torch.cat([torch.as_tensor(group.get_offsets().data) for group in ax.collections])
    assert len(ax.collections) == groups
    expected = torch.stack([change.T.flatten(), 0.5 * change.T.flatten()], dim=1)
    assert torch.allclose(dots[dots[:, 0].argsort()], expected[expected[:, 0].argsort()])
    diagonal, line = (torch.as_tensor(drawn.get_xydata()) for drawn in ax.lines)
    assert torch.equal(diagonal[:, 0], diagonal[:, 1])
    assert torch.allclose(line[:, 1], 0.5 * line[:, 0])
    words = words_of(figure)
    assert f"5 networks, {Q} questions: correlation 1.00" in words
    assert "slope 0.50" in words
    assert ("question 2" in words) == (Q == 3)

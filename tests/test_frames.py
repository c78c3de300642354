"""`to_frame()`: results as tables with named rows and columns."""

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from odd_frames import CHANGES, draw_case, models, outcome

import epk_gp as epk
from epk_gp.kernel_machine.axes import by_label, by_layer, by_sample, by_step
from gp_cases import gaussian_run, gaussians

ODD_SEEDS = 3  # of each change; `make faults` draws others
POINTS, OUTPUTS = ["first", "second"], ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def run():
    return gaussian_run(*gaussians(5, 0), steps=4)


@pytest.fixture(scope="module")
def X():
    return gaussians(1, 1)[0][:2]


def test_columns_of_an_attribution_sum_to_the_network_s_outputs(run, X):
    parts = epk.attribute(run, X)
    samples = [f"row {i}" for i in range(run.num_points)]
    frame = parts.to_frame(point=POINTS, output=OUTPUTS, sample=samples)
    assert frame.index.names == ["point", "output"]
    assert frame.columns.names == ["term", "sample"]
    np.testing.assert_allclose(frame.sum(axis=1), parts.network.flatten(), rtol=1e-12)
    assert frame["samples"].loc[("second", "bee"), "row 7"] == float(parts.samples[1, 1, 7])
    assert frame["initial"].loc[("first", "cat")] == float(parts.initial[0, 2])
    numbered = parts.to_frame()
    assert numbered["samples"].loc[(1, 1), 7] == float(parts.samples[1, 1, 7])
    assert list(numbered.index) == [(n, c) for n in range(2) for c in range(3)]


def test_labels_may_repeat_and_each_point_may_have_an_output_of_its_own(run, X):
    parts = epk.attribute(run, X, classes=torch.tensor([2, 0]))
    frame = parts.to_frame(point=["same", "same"], chosen=["cat", "ant"], sample=["a"] * run.num_points)
    assert list(frame.index) == [("same", "cat"), ("same", "ant")]
    np.testing.assert_array_equal(frame["samples"].to_numpy(), parts.samples[:, 0])
    with pytest.raises(ValueError, match="labels must be those of point, output, sample: got chosen"):
        epk.attribute(run, X).to_frame(chosen=["cat", "ant"])
    assert parts.to_frame(output=["only"]).index.get_level_values("output").tolist() == ["only", "only"]


def test_names_of_all_outputs_are_no_names_of_the_points_outputs(run):
    """Also where there are as many points as outputs, so that lengths do not tell."""
    X, classes = gaussians(1, 1)[0][:3], torch.tensor([2, 0, 0])
    for parts in (epk.attribute(run, X, classes=classes), epk.influence(run, X, classes=classes)):
        with pytest.raises(ValueError, match="output must have 1 label, one for each place along the axis: got 3"):
            parts.to_frame(output=OUTPUTS)
        with pytest.raises(ValueError, match="chosen must have 3 labels"):
            parts.to_frame(chosen=OUTPUTS[:2])
        frame = parts.labelled(output=OUTPUTS).to_frame(chosen=[OUTPUTS[c] for c in classes])
        assert list(frame.index) == [(0, "cat"), (1, "ant"), (2, "ant")]
        assert frame.index.names == ["point", "output"]


def test_an_attribution_along_axes_has_a_level_for_each(run, X):
    axes = [by_step(run, [1]), by_layer(run), by_label(run)]
    parts = epk.attribute(run, X, by=axes)
    frame = parts.to_frame(output=OUTPUTS)
    assert frame.columns.names == ["term", "step", "parameter", "sample"]
    np.testing.assert_allclose(frame.sum(axis=1), parts.network.flatten(), rtol=1e-12)
    layer = axes[1].names[1]
    assert frame[("values", "1..3", layer, 2)].loc[(1, "bee")] == float(parts.values[1, 1, 1, 1, 2])
    assert frame[("decay", "0..0", layer, "")].loc[(0, "ant")] == float(parts.decay[0, 0, 0, 1, 0])
    assert epk.attribute(run, X, by=[]).to_frame().columns.tolist()[:2] == ["initial", "values"]


def test_numbers_that_a_function_gave_are_no_outputs(run, X):
    bound = epk.attribute(run, X, function=lambda z: z[:, 0] - z[:, 1]).labelled(output=OUTPUTS, point=POINTS)
    assert bound.to_frame().index.names == ["point", "number"]
    assert list(bound.to_frame().index) == [("first", 0), ("second", 0)]


def test_influence_has_the_numbers_and_their_derivatives(run, X):
    effect = epk.influence(run, X, by=[by_step(run), by_sample(run)])
    frame = effect.to_frame(sample=range(100, 100 + run.num_points))
    np.testing.assert_array_equal(frame["outputs"].to_numpy().ravel(), effect.outputs.flatten())
    assert frame[("values", 3, 107)].loc[(1, 2)] == float(effect.values[1, 2, 3, 7])


def test_suspicious_labels_come_worst_first_under_the_names_of_their_rows(run):
    points = [4, 9, 2, 11, 0]
    errors = epk.label_errors(run, nodes=3, points=points)
    names = np.array([f"row {i}" for i in range(run.num_points)])
    frame = errors.labelled(sample=names, output=OUTPUTS).to_frame()
    assert list(frame.index) == [f"row {i}" for i in errors.indices]
    assert set(frame.index) == set(names[points])
    assert frame["scores"].is_monotonic_decreasing
    for place, point in enumerate(points):
        row = frame.loc[names[point]]
        assert (row["margin"], row["predicted"]) == (errors.margin[place], OUTPUTS[errors.predicted[place]])
    pd.testing.assert_frame_equal(errors.to_frame(sample=names, output=OUTPUTS), frame)
    with pytest.raises(ValueError, match="output must have at least . labels?, .*: got 0"):
        errors.to_frame(output=[])
    with pytest.raises(ValueError, match="labels must be those of sample, output: got point"):
        errors.to_frame(point=names)
    assert errors.to_frame()["predicted"].tolist() == [OUTPUTS.index(name) for name in frame["predicted"]]


def test_scores_of_points_are_columns(run):
    X, y = gaussians(20, 2)
    model = epk.UncertainClassifier(run, nodes=3).fit(X, y)
    for inputs in (X[:4], X[:4].numpy()):
        scores = model.uncertainty(inputs)
        frame = scores.to_frame(point=list("wxyz"))
        assert frame.loc["y", "error"] == float(scores.error[2])
        assert list(frame) == ["error", "out_of_distribution", "entropy", "mutual_information", "std"]
    chosen = epk.next_to_label(model, X[:10], 3)
    frame = chosen.to_frame(point=list("abcdefghij"))
    assert list(frame.index) == ["abcdefghij"[i] for i in chosen.indices]
    assert frame["scores"].tolist() == chosen.scores.tolist()


def test_labels_that_do_not_fit_are_refused(run, X, unchecked):
    parts = epk.attribute(run, X)
    for labels, message in (
        ({"point": ["one"]}, "point must have 2 labels, one for each place along the axis: got 1"),
        ({"point": ["one", "two", "three"]}, "point must have 2 labels"),
        ({"output": OUTPUTS[:2]}, "output must have 3 labels"),
        ({"sample": ["a"]}, f"sample must have {run.num_points} labels"),
        ({"row": POINTS}, "labels must be those of point, output, sample: got row"),
    ):
        with pytest.raises(ValueError, match=message):
            parts.to_frame(**labels)
    with pytest.raises(ValueError, match="sample must have at least 15 labels"):
        epk.label_errors(run, nodes=3).to_frame(sample=range(14))


def test_without_pandas_it_says_what_to_install(run, X, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package pandas: it is not installed.*epk-gp\[tables\]"):
        epk.attribute(run, X).to_frame()


def test_dates_and_several_levels_name_rows(run, X):
    dates = pd.date_range("2026-01-01", periods=2)
    frame = epk.attribute(run, X).to_frame(point=dates)
    assert frame.loc[dates[1]].shape[0] == 3
    pairs = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["letter", "number"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = epk.attribute(run, X).to_frame(
            point=pairs, sample=pd.MultiIndex.from_product([range(3), list("vwxyz")])
        )
    assert frame.index.names == ["point", "output"]
    assert frame["samples"].columns[1] == (0, "w")
    assert frame.columns[0] == ("initial", "")


@pytest.fixture(scope="module")
def odd():
    return models()


@pytest.mark.usefixtures("odd", "unchecked")
@pytest.mark.parametrize("change", CHANGES)
def test_an_odd_table_is_answered_about_as_its_values_or_refused_in_one_line(change):
    """And none that scikit-learn takes is refused."""
    for seed in range(90_000, 90_000 + ODD_SEEDS):
        case = draw_case(seed, change)
        assert outcome(case) in ("right", "refused"), str(case)


@pytest.mark.usefixtures("odd")
def test_a_table_that_reaches_the_wrong_columns_would_be_found():
    """The negative control."""
    cases = [draw_case(seed, "columns in another order") for seed in range(90_000, 90_012)]
    found = []
    for case in cases:
        case.X = case.X.to_numpy()  # which has no names to compare
        found.append(outcome(case))
    assert found.count("wrong") >= 4  # a fit is right in any order

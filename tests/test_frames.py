"""`to_frame()`: results as tables with named rows and columns."""

import importlib
import inspect
import sys
import typing
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from odd_frames import CHANGES, KINDS, draw_case, models, outcome, table, values_of

import epk_gp as epk
from epk_gp.analysis.maps import uncertainty_on_plane
from epk_gp.analysis.score_check import rank_agreement
from epk_gp.core.show import Tabular
from epk_gp.estimator import line
from epk_gp.gp import regression
from epk_gp.kernel_machine.axes import by_label, by_layer, by_step
from epk_gp.kernel_machine.reconstruct import single_machine
from gp_cases import gaussian_net, gaussian_run, gaussians
from page_code import pages_tool

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


def test_points_to_label_have_the_names_of_the_pool(run):
    X, _ = gaussians(20, 2)
    chosen = epk.next_to_label(judged(run), X[:10], 3)
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


def process(run):
    return epk.LogitGP(run, targets="labels", points=[9, 2, 4], nodes=2)


def judged(run):
    return epk.UncertainClassifier(run, nodes=2).fit(*gaussians(20, 2))


def split(run, X):
    return epk.between(gaussian_net(), [run.weights(k) for k in (0, 2, -1)], X, data=(run.inputs, run.targets), lr=0.1)


# How each public result that is a table is made, of a run and two points.
def regressor(run):
    rows = run.inputs.numpy()
    return epk.EPKRegressor(line, steps=10, lr=0.05, random_state=0).fit(rows, rows[:, 0])


RESULTS = {
    "Agreement": lambda run, X: rank_agreement(torch.rand(4, 6), torch.rand(4, 6)),
    "Attribution": epk.attribute,
    "CheckpointSplit": split,
    "ClassUncertainty": lambda run, X: judged(run).uncertainty(X, 4),
    "Datamodel": lambda run, X: epk.datamodel(run, X, torch.tensor([0, 1])),
    "GroupedAttribution": lambda run, X: epk.attribute(run, X, by=[by_step(run)]),
    "Influence": epk.influence,
    "LabelErrors": lambda run, X: epk.label_errors(run, nodes=2),
    "LeaveOneOut": lambda run, X: regression.leave_one_out(process(run)),
    "LogitPosterior": lambda run, X: process(run).logit_posterior(X),
    "NextToLabel": lambda run, X: epk.next_to_label(judged(run), X, 2),
    "Reconstruction": epk.reconstruct,
    "ScoreCheck": lambda run, X: epk.check_scores(
        run, {"a": torch.rand(2, 3, 15), "b": torch.rand(2, 3, 15)}, X, retrainings=3, left_out=3, removals=0
    ),
    "Shares": lambda run, X: split(run, X).by("stretch", "parameter"),
    "SingleMachine": single_machine,
    "SoftmaxUncertainty": lambda run, X: process(run).logit_posterior(X).softmax_uncertainty(4, quantiles=[0.1]),
    "TargetPrediction": lambda run, X: regression.predict_targets(process(run), X),
    "TargetUncertainty": lambda run, X: regressor(run).uncertainty(X.numpy()),
    "UncertaintyMap": lambda run, X: uncertainty_on_plane(judged(run), (0, 1), size=3, num_samples=4),
    "Verification": lambda run, X: epk.datamodel(run, X, torch.tensor([0, 1])).verify(torch.ones(2, 15).bool()),
}
# Public classes that functions return and that are no table.
NO_TABLES = {
    "what is asked, or how": "AdaptiveRule Axis ChordPath LayerwisePath Plane Plan QuadratureRule RowFunction",
    "models, runs, and what they are made of":
        "Dataset EPKClassifier EPKRegressor FunctionalModel Graph PlannedKernel Ragged Trajectory UncertainClassifier",
    "what a result says of itself, in words": "Certificate Entry",
    "trained networks, whose outputs at points are a tensor": "Retraining",
    "two or three numbers": "GramSpectrum OODMetrics",
    "two columns of a Datamodel's table": "Top",
    "captum's form": "MostInfluential",
}  # fmt: skip


def returned(function):
    waiting, found = [typing.get_type_hints(function).get("return")], set()
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        found |= {hint} if inspect.isclass(hint) and hint.__module__.startswith("epk_gp") else set()
    return found


def own_functions(value):
    """A function; or a class's public methods that this package defines."""
    members = inspect.getmembers(value, inspect.isroutine) if inspect.isclass(value) else [("", value)]
    for name, member in members:
        function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else None
        is_own = inspect.isfunction(function) and function.__module__.startswith("epk_gp")
        if is_own and not name.startswith("_"):
            yield function


def public_results():
    """The classes in what public functions and methods return, and the methods of such results."""
    named = [getattr(importlib.import_module(where), name) for name, where in pages_tool().public_names().items()]
    waiting, found = [*named, regression.leave_one_out], set()
    while waiting:
        for function in own_functions(waiting.pop()):
            new = returned(function) - found
            found |= new
            waiting += [result for result in new if issubclass(result, Tabular)]
    return found


def test_every_public_result_is_a_table_or_is_listed_with_the_reason():
    found = {result.__name__: issubclass(result, Tabular) for result in public_results()}
    assert {name for name, is_table in found.items() if is_table} - {"TokenAttribution"} == RESULTS.keys()
    assert {name for name, is_table in found.items() if not is_table} == {*" ".join(NO_TABLES.values()).split()}


@pytest.fixture(scope="module")
def longer():
    return gaussian_run(*gaussians(5, 0), steps=7)


@pytest.mark.parametrize("name", RESULTS)
def test_the_table_of_a_result_holds_its_numbers_and_the_result_is_shown(longer, X, name):
    with warnings.catch_warnings(action="ignore"):
        result = RESULTS[name](longer, X)
    assert type(result).__name__ == name
    assert "cannot be shown" not in str(result)
    frame = result.to_frame()
    assert len(frame)
    terms = frame.columns.get_level_values(0).unique()
    held = [term for term in terms if isinstance(getattr(result, term, None), torch.Tensor | np.ndarray)]
    assert held
    for term in held:
        np.testing.assert_array_equal(np.unique(frame[term]), np.unique(np.asarray(getattr(result, term))))


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


def test_doors_that_take_a_frame_label_the_rows_of_their_tables(odd):
    model, X = odd.judged["its own"], table(values_of(5, 4)[0])
    posterior = model.logit_posterior(X)
    for result in (posterior, posterior.softmax_uncertainty(4), model.uncertainty(X, 4)):
        assert list(result.to_frame().index.get_level_values("point").unique()) == list(X.index)
    assert list(posterior.to_frame().index.get_level_values("output").unique()) == KINDS.tolist()
    assert list(posterior.softmax_uncertainty(4).to_frame()["mean"]) == KINDS.tolist()
    of_tensor = model.logit_posterior(torch.tensor(X.to_numpy()))
    np.testing.assert_array_equal(of_tensor.to_frame(), posterior.to_frame())


def test_tables_of_a_process_have_the_numbers_of_training_points(run):
    for result in (regression.leave_one_out(process(run)), regression.leave_one_out_targets(process(run))):
        assert list(result.to_frame().index.get_level_values("point").unique()) == [9, 2, 4]


def test_a_split_s_pieces_sum_to_the_change_and_a_check_has_a_row_for_each_system_and_query(run, X):
    parts = split(run, X)
    frame = parts.to_frame()
    np.testing.assert_allclose(frame[["initial", "pieces"]].sum(axis=1), parts.network.flatten(), rtol=1e-10)
    assert frame.columns.names == ["term", "step", "parameter", "sample"]
    check = RESULTS["ScoreCheck"](run, X)
    frame = check.to_frame()
    assert frame.index.names == ["system", "query"]
    assert frame.loc[("b", 4), "contributions cosine"] == float(
        check.systems["b"].likeness["contributions"]["cosine"][4]
    )
    assert frame.loc[("exact derivatives", 0), "miss"] == float(check.references["exact derivatives"].miss[0])
    with pytest.raises(ValueError, match="system must have 4 labels"):
        check.to_frame(system=["a"])
    assert check.to_frame(system=list("abcd")).index[-1][0] == "d"

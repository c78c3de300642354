"""Maps over a plane: an extent for each axis, and other columns at their mean, their median or where they are put."""

import numpy as np
import pandas as pd
import pytest
import torch

import epk_gp as epk
from epk_gp.analysis.maps import (
    column_plane,
    coordinate_plane,
    grid_over,
    lift,
    principal_plane,
    project,
    uncertainty_on_plane,
)
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.plots.maps import map_figure


@pytest.fixture(scope="module")
def people():
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(20, 70, 30), rng.lognormal(10.8, 0.5, 30), rng.integers(1, 4, 30)]
    model = epk.EPKClassifier(steps=20, random_state=0).fit(X, X[:, 1] > 1000 * X[:, 0])
    return model.trajectory_


@pytest.fixture(scope="module")
def process(people):
    return epk.LogitGP(people, points=range(0, 30, 3), nodes=2)


def test_each_axis_of_a_map_has_the_extent_of_its_column(people, process):
    X, plane = people.inputs, coordinate_plane(people.inputs)
    m = uncertainty_on_plane(process, plane, size=5, margin=0.1, num_samples=16)
    for axis, column in ((m.x, X[:, 0]), (m.y, X[:, 1])):
        border = 0.1 * (column.max() - column.min())
        torch.testing.assert_close(axis[[0, -1]], torch.stack([column.min() - border, column.max() + border]))
    ages, incomes, children = lift(m.plane, torch.tensor([[30.0, 4e4]]).double())[0].tolist()
    assert (ages, incomes, children) == pytest.approx((30, 4e4, float(X[:, 2].mean())))
    torch.testing.assert_close(project(plane, X), X[:, :2])
    square = uncertainty_on_plane(process, plane, size=5, margin=0.1, num_samples=16, square=True)  # the control
    assert float(square.x[0]) < -1e4


def test_the_distance_to_the_data_counts_both_columns_of_a_map(people, process):
    def correlation(scale):
        m = uncertainty_on_plane(
            process, coordinate_plane(people.inputs), size=5, num_samples=16, generator=torch.Generator().manual_seed(0)
        )
        unit = torch.tensor([m.x[-1] - m.x[0], m.y[-1] - m.y[0]]) ** scale
        nodes = torch.cartesian_prod(m.y, m.x).flip(1) / unit
        distance = torch.cdist(nodes, m.training / unit).amin(1)
        ranks = torch.stack([values.argsort().argsort().double() for values in (m.std.flatten(), distance)])
        return float(torch.corrcoef(ranks)[0, 1]), m.distance_correlation

    expected, found = correlation(1)
    assert found == pytest.approx(expected, abs=1e-6)
    assert correlation(0)[0] != pytest.approx(found, abs=1e-3)  # of incomes alone


@pytest.mark.parametrize("outputs", ["full", "independent", "trace"])
def test_a_map_has_the_kernels_own_diagonal_and_computes_it_once(people, outputs, monkeypatch):
    gp = epk.LogitGP(people, outputs, points=range(0, 30, 3), nodes=2)
    gp.fit(3)
    calls, diagonal_blocks = [], PathKernel.diagonal_blocks
    monkeypatch.setattr(
        PathKernel, "diagonal_blocks", lambda *args: calls.append(len(args[1])) or diagonal_blocks(*args)
    )
    m = uncertainty_on_plane(gp, coordinate_plane(people.inputs), size=5, num_samples=16)
    assert calls == [25]
    nodes = lift(m.plane, torch.cartesian_prod(m.y, m.x).flip(1))
    with torch.no_grad():
        k = gp.kernel(epk.test_copy(nodes), diag=True)
    expected = k.reshape(25, 2).mean(1) if outputs == "full" else k.reshape(-1, 25).mean(0)
    torch.testing.assert_close(m.kernel.flatten(), expected, rtol=1e-12, atol=0)


def test_a_grid_of_points_without_extent_along_an_axis_is_refused_and_a_square_one_is_not():
    line = torch.linspace(0, 1, 9).double()[:, None] * torch.tensor([[3.0, 1.0, 2.0]]).double() + 1e3
    same = torch.tensor([[1.0, 2.0], [1.0, 5.0]])
    for plane, X in ((principal_plane(line), line), (coordinate_plane(same), same)):
        with pytest.raises(ValueError, match="different places along both axes: .* pass square=True"):
            grid_over(project(plane, X), 3, 0.1)
        x, y = grid_over(project(plane, X), 3, 0.1, square=True)
        assert x[-1] - x[0] == pytest.approx(float(y[-1] - y[0]))
    with pytest.raises(ValueError, match="different places"):
        grid_over(torch.ones(3, 2), 3, 0.1, square=True)


def test_a_map_of_two_units_fills_its_axes_and_one_of_one_unit_keeps_their_ratio(people, process):
    plane = coordinate_plane(people.inputs)
    for square, aspect in ((False, "auto"), (True, 1.0)):
        m = uncertainty_on_plane(process, plane, size=5, num_samples=16, square=square)
        ax = map_figure(m).axes[0]
        assert ax.get_aspect() == aspect
        assert ax.get_xlim() == tuple(m.x[[0, -1]].tolist())


KINDS = {"sex": {0: "female", 1: "male"}, "region": {4: "north", 1: "south", 2: "west"}}
COLUMNS = ["age", "income", "sex", "region", "children"]


def table(n, seed):
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(
        {
            "age": rng.uniform(20, 70, n), "income": rng.lognormal(10.8, 0.5, n), "sex": rng.random(n) < 0.4,
            "region": pd.Categorical(rng.choice([1, 2, 4], n, p=[0.2, 0.3, 0.5]), [1, 2, 4]),
            "children": rng.integers(0, 5, n),
        },
        index=[f"person {i}" for i in range(n)],
    )  # fmt: skip
    return X, np.where(X["age"] + 8 * X["sex"] + X["income"] / 4000 > 60, "yes", "no")


@pytest.fixture(scope="module")
def judged():
    (X, y), (held_out, labels) = table(60, 0), table(30, 1)
    model = epk.EPKClassifier(steps=15, random_state=0).fit(X, y)
    return model.uncertain_classifier(held_out, labels, nodes=2), X, held_out


def by_hand(model, X, m, others):
    """The scores at the nodes of a map, from rows that are put together without it."""
    frame = m.to_frame().reset_index()
    rows = pd.DataFrame({name: np.full(len(frame), others.get(name, np.nan)) for name in X.columns})
    for name in m.plane.names:
        codes = {word: value for value, word in KINDS.get(name, {}).items()}
        rows[name] = frame[name].map(codes) if name in KINDS else frame[name]
    return frame, model.uncertainty(rows.astype(float), 16)


@pytest.mark.parametrize("axes", [("age", "income"), ("income", "region"), ("sex", "age"), ("region", "sex"), (0, 4)])
def test_a_map_over_two_columns_has_the_scores_of_rows_with_the_others_at_their_median(judged, axes):
    model, X, _ = judged
    usual = {name: X[name].astype(float).mode()[0] if name in KINDS else X[name].median() for name in X.columns}
    for source, options in ((model, {}), (X, {}), (X.astype(float).to_numpy(), {"names": COLUMNS})):
        plane = column_plane(source, *axes, categories=KINDS, **options)
        m = uncertainty_on_plane(model, plane, size=4, margin=0.2, num_samples=16)
        frame, u = by_hand(model, X, m, usual)
        for name in ("error", "out_of_distribution", "entropy", "std"):
            np.testing.assert_allclose(frame[name], getattr(u, name), rtol=1e-9, atol=1e-12)
        x, y = (name if isinstance(name, str) else COLUMNS[name] for name in axes)
        assert list(m.to_frame().index.names) == [y, x]
        for name, nodes in ((x, m.x), (y, m.y)):
            border = 0.2 * np.ptp(X[name].astype(float))
            ends = [X[name].astype(float).min() - border, X[name].astype(float).max() + border]
            assert nodes[[0, -1]].tolist() == pytest.approx(
                [min(KINDS[name]), max(KINDS[name])] if name in KINDS else ends
            )
        np.testing.assert_allclose(m.training, X[[x, y]].astype(float))


def test_axes_and_other_columns_are_where_they_are_put(judged):
    model, X, _ = judged
    person = X.iloc[7].drop(["age", "income"])
    plane = column_plane(X, "age", "income", others=person, extent={"age": (0, 100), 1: (-1.0, 2.5e5)})
    m = uncertainty_on_plane(model, plane, size=3, margin=9.0, num_samples=16)
    assert (m.x.tolist(), m.y.tolist()) == ([0, 50, 100], [-1, 124999.5, 2.5e5])
    assert plane.others == person.astype(float).to_dict()
    frame, u = by_hand(model, X, m, person.astype(float).to_dict())
    np.testing.assert_allclose(frame["error"], u.error, rtol=1e-9, atol=1e-12)


def test_categories_are_said_or_of_a_dtype_and_never_a_number_of_values(judged):
    model, X, _ = judged
    assert X["children"].nunique() == 5
    of_frame, of_numbers = column_plane(X, "region", "children"), column_plane(X.astype(float), "region", "children")
    assert of_frame.categories == ({1.0: "1", 2.0: "2", 4.0: "4"}, None)
    assert of_numbers.categories == (None, None)
    assert of_frame.others["sex"] == 0  # the most frequent value
    half = X.iloc[[0, 1]].assign(sex=[0, 1])
    assert column_plane(half, "age", "income").others["sex"] == 0.5  # numbers, which nobody called categories
    m = uncertainty_on_plane(model, ("age", "children"), size=3, num_samples=16)
    assert (m.y[-1] - m.y[0]).item() == pytest.approx(4 * 1.8)


def test_columns_in_another_order_or_of_other_names_are_refused_and_arrays_are_not(judged):
    model, X, _ = judged
    for other in (X[COLUMNS[::-1]], X.rename(columns={"age": "height"})):
        with pytest.raises(ValueError, match="the classifier must have the columns of the plane"):
            uncertainty_on_plane(model, column_plane(other, 0, 1), size=2, num_samples=2)
    with pytest.raises(ValueError, match="plane must be one of inputs"):
        uncertainty_on_plane(model, column_plane(X[["age", "income"]], 0, 1), size=2, num_samples=2)
    assert uncertainty_on_plane(model, column_plane(X.astype(float).to_numpy(), 0, 1), size=2, num_samples=2)
    numbered = X.astype(float).set_axis([1, 0, 2, 3, 4], axis=1)
    with pytest.raises(ValueError, match="0 must be .* of one column: got column 0, 1 and column 1, 0"):
        column_plane(numbered, 0, 2)


def test_rows_that_the_process_leaves_out_are_neither_drawn_nor_counted(judged):
    _, X, held_out = judged
    y = table(60, 0)[1]
    weights = np.ones(60)
    weights[X["age"] > 40] = 0
    model = epk.EPKClassifier(steps=20, random_state=0).fit(X, y, sample_weight=weights)
    m = uncertainty_on_plane(
        model.uncertain_classifier(held_out, table(30, 1)[1], nodes=2), ("income", "sex"), size=2, num_samples=2
    )
    kept = X[weights > 0]
    assert m.points.tolist() == np.flatnonzero(weights).tolist()
    assert m.plane.others["age"] == kept["age"].median() < 40
    assert float(m.x[-1] - m.x[0]) == pytest.approx(1.8 * np.ptp(kept["income"]))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_map_has_inputs_of_the_run_s_dtype(dtype):
    g = torch.Generator().manual_seed(0)
    X = torch.randint(0, 4, (80, 3), generator=g)
    y = (X.sum(1) > 4).long()
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    if dtype == "int64":
        net = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    X = X.to(getattr(torch, dtype))
    run = epk.train(net, X[:40], y[:40], optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=4)
    with pytest.warns(UserWarning, match="19 of 40 validation points are equal to training points"):
        model = epk.UncertainClassifier(run, nodes=2).fit(X[40:], y[40:])
    kinds = {k: dict(enumerate("abcd")) for k in range(3)}
    m = uncertainty_on_plane(model, column_plane(model, 0, 2, categories=kinds), num_samples=4)
    rows = torch.tensor([[u, m.plane.others["column 1"], v] for v in range(4) for u in range(4)]).to(X.dtype)
    torch.testing.assert_close(m.error.flatten(), model.uncertainty(rows, 4).error)
    assert m.boundary_classes.shape == (4, 4)
    assert torch.equal(m.boundary_classes, m.network_class)


def test_a_map_of_a_process_over_columns_is_that_of_the_same_plane(people, process):
    plane = coordinate_plane(people.inputs)
    columns = column_plane(people.inputs, 0, 1, others={2: float(plane.origin[2])})
    maps = [
        uncertainty_on_plane(process, own, size=4, num_samples=16, generator=torch.Generator().manual_seed(0))
        for own in (plane, columns)
    ]
    assert torch.equal(maps[0].std, maps[1].std)
    assert maps[0].distance_correlation == maps[1].distance_correlation is not None
    assert maps[1].out_of_distribution is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "height"}, "'height' must be the name or the number of one column: got none of"),
        ({"x": 5}, "5 must be the name or the number of one column"),
        ({"x": "income"}, "axes must be two columns"),
        ({"others": {"age": 1.0}}, "others= must be of columns beside the axes: leave 'age' out"),
        ({"others": {"children": np.inf}}, "others= must be finite"),
        ({"others": {"sex": 2.0}}, "categories of 'sex' must name each of its values: 2.0 has no name"),
        (
            {"categories": {"children": {0: "none"}}},
            "'children' must name each of its values: 1.0 has no name",
        ),
        ({"extent": {"sex": (0, 1)}}, "extent= must be of axes without categories: leave 'sex' out"),
        ({"extent": {"age": (30, 20)}}, "extent= two ends that ascend"),
        ({"extent": {"age": (30,)}}, "extent= two ends that ascend"),
        ({"others": {"children": "two"}}, "values of 'children' must be numbers: got 'two'"),
        ({"extent": {"age": ("a", 1)}}, "values of 'age' must be numbers: got 'a'"),
        ({"categories": {"sex": {"m": "male"}}}, "values of 'sex' must be numbers: got 'm'"),
        ({"names": ["a", "b"]}, "a name for each of 2 columns or more"),
    ],
)
def test_a_plane_that_would_not_be_as_asked_is_refused(judged, options, message):
    with pytest.raises(ValueError, match=message):
        column_plane(judged[1], **({"x": "age", "y": "income"} | options))


@pytest.mark.usefixtures("unchecked")
def test_options_that_would_not_be_used_are_refused(judged, process):
    model, X, _ = judged
    plane = column_plane(X, "age", "sex")
    for options in ({"generator": torch.Generator()}, {"progress": True}, {"square": True}):
        with pytest.raises(ValueError, match="leave"):
            uncertainty_on_plane(model, plane, size=2, num_samples=2, **options)
    for wrong in (("age", "income", "sex"), "age"):
        with pytest.raises(TypeError, match="plane must be a Plane"):
            uncertainty_on_plane(model, wrong)
    with pytest.raises(TypeError, match="model must be an UncertainClassifier or a LogitGP: got Trajectory"):
        uncertainty_on_plane(model.trajectory, plane)
    for wrong in (["children"], {"children": [0, 1]}):
        with pytest.raises(TypeError, match="must be by column, and categories by value"):
            column_plane(X, "age", "income", categories=wrong)

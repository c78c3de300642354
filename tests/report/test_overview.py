"""The run as a whole in a report: each number is that of the library's own function."""

import re

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.analysis.maps import (
    column_plane,
    coordinate_plane,
    grid_coordinates,
    lift,
    principal_plane,
    uncertainty_on_plane,
)
from epk_gp.analysis.measures import calibration, gram_spectrum, ood_metrics
from epk_gp.datasets import three_gaussians
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.report.overview import REPORT_INK
from report_cases import embedded, report_case, written


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """A run of three Gaussians with everything that a report can hold, and the report."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    data, held = (three_gaussians(n, dim=3, generator=g, dtype=torch.float64) for n in (12, 16))
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    trajectory = epk.train(net, data.inputs, data.labels, optimizer=torch.optim.SGD(net.parameters(), lr=0.3), steps=25)
    model = epk.UncertainClassifier(trajectory, nodes=4).fit(held.inputs[:24], held.labels[:24])
    gp = epk.LogitGP(trajectory, points=[0, 13, 30], rule=epk.gauss_legendre(1))
    m = uncertainty_on_plane(gp, coordinate_plane(trajectory.inputs), size=13, square=True, num_samples=32, generator=g)
    found = {"trajectory": trajectory, "X": held.inputs[24:], "y": held.labels[24:], "model": model, "map": m}
    found["outside"] = 4 * torch.randn(15, 3, generator=g, dtype=torch.float64)
    found["suspects"] = epk.label_errors(trajectory, nodes=4)
    file = epk.write_report(
        tmp_path_factory.mktemp("overview") / "report.html", trajectory, found["X"], found["y"], explained=2, outputs=1,
        posterior=model, outside=found["outside"], suspects=found["suspects"], uncertainty_map=m, kernel_points=9,
        rule=epk.adaptive(1e-8),
    )  # fmt: skip
    return found | {"content": embedded(file)}


def path_cosines(trajectory, X):
    points = epk.Points(X, is_train=False)
    K = epk.PathKernel(nodes_trajectory(trajectory, 20), None, epk.QuadratureRule.left_endpoint()).trace_block(
        points, points
    )
    d = K.diagonal().sqrt()
    return K, K / (d[:, None] * d)


@pytest.fixture
def overview(problem):
    return problem["content"]["overview"]


@pytest.fixture
def figures(overview):
    return {figure["id"]: figure for figure in overview["figures"]}


pytestmark = pytest.mark.slow  # the problem takes some seconds


def test_figures_are_svg_in_the_reports_ink_with_a_table_behind_each(overview, figures):
    assert list(figures) == ["reliability", "outside", "roc", "kernel", "spectrum"]
    for svg in (*(figure["svg"] for figure in figures.values()), overview["map"]["svg"]):
        assert svg.startswith("<svg ")
        assert svg.endswith("</svg>")
        assert [word in svg for word in (REPORT_INK, "<text", "#222222", "<metadata>")] == [True, True, False, False]
        assert len(svg) < 150_000
    for figure in figures.values():
        head, rows = figure["table"]["head"], figure["table"]["rows"]
        assert rows
        assert all(len(row) == len(head) for row in rows)


def test_probabilities_and_scores_are_those_of_the_process(problem):
    content, model, X = problem["content"], problem["model"], problem["X"]
    p, u = model.predict_proba(X), model.uncertainty(X)
    posterior = model.logit_posterior(X[:2])
    assert content["outputs"]["probabilities_of"] == "network and process"
    for n, point in enumerate(content["points"]):
        assert point["probabilities"] == pytest.approx(p[n].tolist(), rel=1e-4)
        assert torch.allclose(posterior.mean[n].softmax(dim=0), p[n])
        for c, (low, high) in enumerate(point["band"]):
            assert 0 <= low <= high <= 1
            centre = posterior.softmax_uncertainty(1024, torch.Generator().manual_seed(0)).mean[n, c]
            assert low - 1e-3 <= float(centre) <= high + 1e-3 or low <= point["probabilities"][c] <= high
        scores = {name: value for name, value, _ in point["scores"]}
        assert scores["error score"] == pytest.approx(float(u.error[n]), rel=1e-3)
        assert scores["out-of-distribution score"] == pytest.approx(float(u.out_of_distribution[n]), rel=1e-3)


def test_reliability_is_that_of_the_points(problem, figures):
    p = problem["model"].predict_proba(problem["X"])
    found = calibration(p, problem["y"], bins=10)
    assert f"{found.ece:.3f} (expected calibration error" in figures["reliability"]["sentence"]
    rows = figures["reliability"]["table"]["rows"]
    assert sum(row[1] for row in rows) == len(problem["y"])
    gaps = sum(row[1] * abs(row[2] - row[3]) for row in rows) / len(problem["y"])
    assert gaps == pytest.approx(found.ece, abs=2e-3)


def test_detection_of_other_inputs_is_that_of_the_scores(problem, figures):
    scores = [problem["model"].uncertainty(X).out_of_distribution for X in (problem["X"], problem["outside"])]
    found = ood_metrics(*scores)
    assert f"with probability {found.auroc:.3f}" in figures["outside"]["sentence"]
    assert f"misses {100 * found.fpr95:.1f} %" in figures["roc"]["sentence"]
    rows = figures["outside"]["table"]["rows"]
    assert [sum(row[k] for row in rows) for k in (1, 2)] == [len(problem["X"]), len(problem["outside"])]


def test_the_kernel_matrix_is_the_path_kernel_of_samples_of_every_class(problem, figures):
    trajectory = problem["trajectory"]
    chosen = torch.cat([(trajectory.targets == c).nonzero()[:3, 0] for c in range(3)])
    K, cosines = path_cosines(trajectory, trajectory.inputs[chosen])
    found = gram_spectrum(K)
    assert f"is {found.effective_rank:.1f}." in figures["spectrum"]["sentence"]
    values = [row[1] for row in figures["spectrum"]["table"]["rows"]]
    assert values == pytest.approx(found.values.tolist(), rel=1e-3)
    between = cosines.reshape(3, 3, 3, 3).mean(dim=(1, 3))
    for a, row in enumerate(figures["kernel"]["table"]["rows"]):
        assert all(row[1 + b] == pytest.approx(float(between[a, b]), rel=1e-2) for b in range(3) if a != b)


def test_suspects_are_the_first_of_the_ranking_and_are_marked_where_they_contribute(problem, overview):
    """Those that are listed and of which another class is expected, with this class; no others."""
    trajectory, suspects, rows = problem["trajectory"], problem["suspects"], overview["suspects"]["rows"]
    shown = problem["content"]["samples"]["shown"]
    assert [row[0] for row in rows] == suspects.indices[:30].tolist()
    for row in rows:
        assert len(row) == 1 + len(overview["suspects"]["head"])
        assert row[1] == f"class {int(trajectory.targets[row[0]])}"
        assert str(row[0]) in shown
    k = int((suspects.points == rows[0][0]).nonzero())
    assert rows[0][3] == pytest.approx(float(suspects.scores[k]), rel=1e-3)
    expected = dict(zip(suspects.points.tolist(), suspects.predicted.tolist(), strict=True))
    listed = [row[0] for row in rows]
    for index, sample in shown.items():
        other = expected[int(index)] if int(index) in listed else int(trajectory.targets[int(index)])
        assert sample["suspected"] == (None if other == int(trajectory.targets[int(index)]) else other)
    assert 0 < sum(sample["suspected"] is not None for sample in shown.values()) < len(shown)


@pytest.mark.parametrize("pairs", [0, 3])
def test_a_datamodel_names_the_largest_scores_of_each_explained_point_and_the_forecast(problem, tmp_path, pairs):
    trajectory, X, y = (problem[name] for name in ("trajectory", "X", "y"))
    model = epk.datamodel(trajectory, X[[1, 4]], y[[1, 4]], pairs=pairs)
    content = written(tmp_path, trajectory, X, y, explained=[1, 4], outputs=1, rule=epk.adaptive(1e-8), datamodel=model)
    found = content["overview"]["datamodel"]
    for question, n in enumerate((1, 4)):
        order = model.scores[question].abs().argsort(descending=True)[:3].tolist()
        for row, index in zip(found["rows"][3 * question : 3 * question + 3], order, strict=True):
            assert row[:3] == [index, f"point {n}", f"log-odds of class {int(y[n])}"]
            expected = [float(value) for value in (model.outputs[question], model.scores[question, index])]
            assert row[3:] == pytest.approx(expected, rel=1e-3)
            assert str(index) in content["samples"]["shown"]
    said = f"the linear datamodeling score {model.forecast.lds:.2f}" if pairs else "No forecast was asked for"
    assert said in found["sentence"]


def test_a_datamodel_of_a_regression_or_a_function_names_its_numbers(tmp_path):
    trajectory, X, _ = report_case("regression")
    rule = {"rule": epk.adaptive(1e-8), "explained": 2}
    for asked in ({}, {"function": torch.sin}):
        model = epk.datamodel(trajectory, X[:2], **asked)
        content = written(tmp_path, trajectory, X, datamodel=model, **rule)
        kind = "number" if asked else "output"
        names = [(row[1], row[2]) for row in content["overview"]["datamodel"]["rows"][::3]]
        assert names == [(f"point {n}", f"{kind} {k}") for n in range(2) for k in range(2)]


def test_the_map_has_the_values_of_the_map_and_the_samples_of_the_kernel(problem, overview):
    m, found, trajectory = problem["map"], overview["map"], problem["trajectory"]
    assert found["shape"] == [13, 13]
    assert found["extent"] == [float(v) for v in (m.x[0], m.x[-1], m.y[0], m.y[-1])]
    assert found["predicted"] == m.network_class.flatten().tolist()
    assert found["wrong"] == pytest.approx((1 - m.probability).flatten().tolist(), abs=1e-2)
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', found["svg"]).groups())
    frame = r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"/>'
    x, y, w, h = map(float, re.search(frame, found["svg"]).groups())
    assert found["area"] == pytest.approx([x / width, y / height, (x + w) / width, (y + h) / height], abs=1e-4)
    assert w == pytest.approx(h, rel=1e-3)  # the plane is not stretched
    ny, nx = found["coarse"]
    x, y = (a[0] + (torch.arange(n).double() + 0.5) / n * (a[-1] - a[0]) for a, n in ((m.x, nx), (m.y, ny)))
    cells = lift(m.plane, grid_coordinates(x, y))
    cosines = path_cosines(trajectory, torch.cat([cells, trajectory.inputs]))[1][: len(cells), len(cells) :]
    assert found["behind"] == cosines.topk(3, dim=1).indices.tolist()
    assert {str(i) for cell in found["behind"] for i in cell} <= problem["content"]["samples"]["shown"].keys()


@pytest.mark.parametrize("axes", [(2, 0), (0, 2), (0, 1)])
def test_a_map_over_columns_has_both_scores_and_the_names_of_categories(problem, tmp_path, axes):
    trajectory, model = problem["trajectory"], problem["model"]
    kinds = {2: {float(value): f"kind {k}" for k, value in enumerate(trajectory.inputs[:, 2].sort().values)}}
    plane = column_plane(
        model, *axes, names=["age", "income", "kind"], categories=kinds, extent={axes[-1] % 2: (-1, 3)}
    )
    m = uncertainty_on_plane(model, plane, size=5, num_samples=4)
    content = written(
        tmp_path, trajectory, problem["X"], explained=1, outputs=1, rule=epk.adaptive(1e-8), posterior=model,
        uncertainty_map=m,
    )  # fmt: skip
    found, names = content["overview"]["map"], list(kinds[2].values())
    assert found["categories"] == [names if axis == 2 else None for axis in axes]
    assert found["axes"] == [["age", "income", "kind"][axis] for axis in axes]
    for axis, ends in zip(axes, (found["extent"][:2], found["extent"][2:]), strict=True):
        assert axis != 2 or ends == [-0.5, 35.5]
    assert found["shape"] == [len(m.y), len(m.x)]
    assert found["coarse"] == [len(m.y), len(m.x)]
    X = lift(plane, grid_coordinates(m.x, m.y))
    u = model.uncertainty(X, 4)
    assert found["wrong"] == pytest.approx(u.error.tolist(), rel=1e-2)
    assert found["far"] == pytest.approx(u.out_of_distribution.tolist(), rel=1e-2)
    middles = [
        nodes if axis == 2 else torch.linspace(nodes[0], nodes[-1], 11, dtype=nodes.dtype)[1::2]
        for axis, nodes in zip(axes, (m.x, m.y), strict=True)
    ]
    X = lift(plane, grid_coordinates(*middles))
    cosines = path_cosines(trajectory, torch.cat([X, trajectory.inputs]))[1][: len(X), len(X) :]
    assert found["behind"] == cosines.topk(3, dim=1).indices.tolist()
    assert found["has_positions"] is False
    assert [figure["id"] for figure in content["overview"]["figures"]] == ["far"]


def test_positions_are_marked_on_a_map_whose_axes_are_the_inputs_alone(tmp_path):
    data = three_gaussians(5, dim=2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(2, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    trajectory = epk.train(net, data.inputs, data.labels, optimizer=optimizer, steps=5)
    X, y = data.inputs + 0.1, data.labels
    gp = epk.LogitGP(trajectory, points=[0, 1, 5], nodes=2)
    for plane, expected in (
        (coordinate_plane(trajectory.inputs), True),
        (column_plane(trajectory.inputs, 1, 0), False),
        (principal_plane(trajectory.inputs), False),
    ):
        m = uncertainty_on_plane(gp, plane, size=3, num_samples=4)
        found = written(tmp_path, trajectory, X, y, explained=1, outputs=1, rule=epk.adaptive(1e-8), uncertainty_map=m)
        assert found["overview"]["map"]["has_positions"] is expected


def test_a_posterior_of_the_points_gives_probabilities_too(problem, tmp_path):
    X = problem["X"]
    gp = epk.LogitGP(problem["trajectory"], points=[0, 13, 30], rule=epk.gauss_legendre(1))
    posterior = gp.logit_posterior(X)
    u = posterior.softmax_uncertainty(1024, torch.Generator().manual_seed(0))
    for given in (gp, posterior):
        options = {"explained": [3], "outputs": 1, "posterior": given, "rule": epk.adaptive(1e-8)}
        (point,) = written(tmp_path, problem["trajectory"], X, **options)["points"]
        assert point["probabilities"] == pytest.approx(u.mean[3].tolist(), rel=1e-4)
        assert all(low < p < high for p, (low, high) in zip(point["probabilities"], point["band"], strict=True))
        assert [name for name, _, _ in point["scores"]] == [
            "entropy", "mutual information", "standard deviation", "network's own probability",
        ]  # fmt: skip

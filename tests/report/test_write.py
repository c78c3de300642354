"""The report as a file: what it says of the run, what fits into it, and what is refused before anything is computed."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.report.explanations import MAX_LAYERS, divide
from epk_gp.report.points import certainty
from epk_gp.report.request import parse_request, validate_results
from epk_gp.report.write import document, lessen, page, require_room
from report_cases import embedded, report_case, terms_of, written


@pytest.fixture(scope="module")
def run():
    return report_case("gradient_descent")


@pytest.fixture(scope="module")
def content(run, tmp_path_factory):
    trajectory, X, y = run
    return written(tmp_path_factory.mktemp("written"), trajectory, X, y, explained=2, outputs=1, top=3)


def facts(content, title):
    return dict(next(section["rows"] for section in content["card"] if section["title"] == title))


def test_the_card_says_what_the_run_is(run, content):
    trajectory, X, _ = run
    own, training, identity = (facts(content, title) for title in ("Run", "Training", "Identity"))
    assert (own["loss"], own["digest"]) == (str(trajectory.loss), trajectory.digest)
    assert own["steps"].startswith("9 (batches of 12, learning rate 0.3")
    assert "states" not in own  # which may name a folder of this machine
    assert facts(content, "Network")["0.weight"] == "6 × 5, 30 weights"
    assert training["classes"] == "3, with 4 to 4 samples each"
    assert training["optimizer"].startswith("SGD: lr=0.3, momentum=0")
    assert (identity["epk_gp"], identity["digest of the data"]) == (epk.__version__, trajectory.data_digest)
    assert facts(content, "This report")["explained"] == f"2 of {len(X)} points, 2 outputs"


def test_the_certificate_is_that_of_the_attribution_and_a_report_that_has_none_says_so(run, content, tmp_path):
    trajectory, X, y = run
    expected, found = epk.attribute(trajectory, X[:2]), content["certificate"]
    assert found["certified"] is expected.certified is True
    assert "NOT CERTIFIED" not in " ".join(found["sentences"])
    assert f"{expected.max_step_mismatch:.1e}" in found["sentences"][1]
    with pytest.warns(epk.CertificateWarning, match="the report is not certified: the quadrature of a step"):
        content = written(tmp_path, trajectory, X, y, explained=1, outputs=1, rule=epk.QuadratureRule.left_riemann(1))
    assert content["certificate"]["certified"] is False
    sentences = content["certificate"]["sentences"]
    assert sentences[0].startswith("NOT CERTIFIED.")
    assert any("the quadrature of a step leaves" in sentence.lower() for sentence in sentences)
    (explanation,) = content["points"][0]["explanations"].values()
    assert abs(explanation["views"]["*|*"]["rounding"]) * content["quantum"] > 1e-6  # what the sum misses is shown
    assert all(terms_of(view) == view["total"] for view in explanation["views"].values())
    wrong = replace(trajectory, loss=epk.CrossEntropy(label_smoothing=0.2))  # other gradients, whatever the quadrature
    with pytest.warns(epk.CertificateWarning, match="the report is not certified: step"):
        assert not written(tmp_path, wrong, X, y, explained=1, outputs=1)["certificate"]["certified"]


def test_points_and_every_sample_that_is_named_are_shown_with_labels_and_probabilities(run, content):
    trajectory, X, y = run
    explanations = [explanation for point in content["points"] for explanation in point["explanations"].values()]
    views = [view for explanation in explanations for view in explanation["views"].values()]
    named = {entry[0] for view in views for side in ("raised", "lowered") for entry in view[side]}
    shown = content["samples"]["shown"]
    assert {int(index) for index in shown} == named
    assert all(sample["label"] == int(index) % 3 for index, sample in shown.items())
    p = epk.network_outputs(trajectory, X).softmax(dim=1)
    assert content["overview"]["accuracy"] == float((p.argmax(dim=1) == y).double().mean())
    for n, point in enumerate(content["points"]):
        assert (point["predicted"], point["label"], point["band"]) == (int(p[n].argmax()), int(y[n]), None)
        assert point["probabilities"] == pytest.approx(p[n].tolist(), rel=1e-4)
        assert point["input"]["values"][0] == ["x1", pytest.approx(float(X[n, 0]), rel=1e-3)]
    assert content["outputs"]["probabilities_of"] == "network"


def test_a_regression_has_no_classes(tmp_path):
    trajectory, X, y = report_case("regression")
    content = written(tmp_path, trajectory, X, y, explained=1)
    (point,) = content["points"]
    assert content["outputs"]["classes"] == ["output 0", "output 1"]
    assert sorted(point["explanations"]) == ["0", "1"]
    assert point["label"] is point["probabilities"] is content["overview"]["accuracy"] is None
    f, target = epk.network_outputs(trajectory, X)[0], y.reshape(len(X), -1)[0]
    for values, expected in zip(point["values"], zip(f, target, f - target, strict=True), strict=True):
        assert values == pytest.approx([float(value) for value in expected], rel=1e-4)
    for index, sample in content["samples"]["shown"].items():
        assert sample["target"] == pytest.approx(trajectory.targets[int(index)].tolist(), rel=1e-3)
    assert point["explanations"]["0"]["views"]["*|*"]["labels"] is None
    (figure,) = content["overview"]["figures"]
    rmse = (epk.network_outputs(trajectory, X) - y).square().mean(dim=0).sqrt()
    assert [row[3] for row in figure["table"]["rows"]] == pytest.approx(rmse.tolist(), rel=1e-3)


PATHS = {
    "straight steps": epk.straight(),
    "straight lines, each over 4 steps": epk.chords(4),
    "derivatives averaged operation by operation, each over 1 step": epk.layerwise(),
}


@pytest.mark.parametrize("said", PATHS)
def test_contributions_are_those_of_the_path_that_is_asked_for(said, tmp_path):
    (trajectory, X, y), path = report_case("momentum"), PATHS[said]
    content = written(tmp_path, trajectory, X, y, explained=1, outputs=1, path=path, top=12)
    assert facts(content, "This report")["path of integration"] == said
    assert content["certificate"]["certified"]
    (explanation,) = content["points"][0]["explanations"].values()
    view, scale = explanation["views"]["*|*"], content["quantum"]
    expected, other = (
        epk.attribute(trajectory, X[:1], path=p, classes=epk.network_outputs(trajectory, X[:1]).argmax(1))
        for p in (path, epk.chords(2))
    )
    for index, value, _ in view["raised"] + view["lowered"]:
        assert value * scale == pytest.approx(float(expected.samples[0, 0, index]), abs=1e-9)
    assert explanation["amplification"] == pytest.approx(float(expected.amplification), rel=5e-3)
    assert float((expected.samples - other.samples).abs().max()) > 1e-4  # the negative control


def test_names_may_hold_anything(run, tmp_path):
    """Formulas and characters that UTF-8 does not have, in the page and in its pictures."""
    trajectory, X, y = run
    names = ["$x_{$", "a_b^c\\d", "\udcff</script>"]
    content = written(tmp_path, trajectory, X, y, explained=1, outputs=1, class_names=names, kernel_points=6)
    assert content["outputs"]["classes"] == [*names[:2], "?</script>"]
    matrix = next(figure["svg"] for figure in content["overview"]["figures"] if figure["id"] == "kernel")
    assert "$x_{$" in matrix
    assert "a_b^c\\d" in matrix


def test_less_detail_is_said_and_still_adds_up(run, tmp_path):
    everything = written(tmp_path, *run, explained=2, outputs=1, top=6)
    contents = {0: everything} | {top: lessen(everything, top, 6) for top in (6, 3, 1)}
    sizes = [len(json.dumps(content)) for content in contents.values()]
    assert sizes == sorted(sizes, reverse=True)
    for top, content in contents.items():
        said = facts(content, "This report").get("left out to keep the file small", "")
        assert ("the views of one layer and one range of steps are left out" in said) == (top > 0)
        assert (f"name {top} samples" in said) == (0 < top < 6)
        for views in (e["views"] for point in content["points"] for e in point["explanations"].values()):
            assert ("0|0" in views) == (top == 0)
            assert {"*|*", "0|*", "*|0"} <= views.keys()
            assert len(views["*|0"]["raised"]) <= (top or 6)
            assert all(terms_of(view) == view["total"] for view in views.values())
    whole = len(document(everything, 6, 10**9))
    for most in (whole - 1, whole - 3000):
        text = document(everything, 6, most)
        assert len(text.encode()) <= most
        assert '"0|0":' not in text
    with pytest.raises(ValueError, match=r"must have at most 0\.01 MB: got .* Explain fewer points or outputs"):
        document(everything, 6, 10_000)


def test_many_layers_are_joined_by_their_names_or_as_neighbours():
    X, y = torch.randn(4, 2, dtype=torch.float64), torch.arange(4) % 2
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)) for _ in range(7)))
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    for net, first, count in ((blocks, "0 (Sequential)", 7), (many, "0 to 2", MAX_LAYERS)):
        optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1)
        _, layers, ranges = divide(epk.train(net, X, y, optimizer=optimizer, steps=2))
        assert (layers.names[0], len(layers.names)) == (first, count)
        group = layers.group.tolist()
        assert group == sorted(group)
        assert set(group) == set(range(count))
        assert ranges.group.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"outputs": "most"}, ValueError, "'all' or a number of the 3 classes of a classifier: got 'most'"),
        ({"outputs": 4}, ValueError, "a number of the 3 classes of a classifier: got 4"),
        ({"explained": 0}, ValueError, "explained must be at least 1: got 0"),
        ({"explained": [0, 9]}, ValueError, r"explained must lie in 0\.\.7: got 0\.\.9"),
        ({"explained": [0.5]}, TypeError, "explained must be indices: got"),
        ({"top": 0}, ValueError, "top must be at least 1: got 0"),
        ({"path": "layerwise"}, TypeError, r"path must be a path such as epk_gp.straight\(\).*got 'layerwise'"),
        ({"head": "softmax"}, ValueError, "head must be one of"),
        ({"class_names": ["a", "b"]}, ValueError, "class_names must name each of the 3 outputs"),
        ({"names": ["a", "b"]}, ValueError, "names must name each of the 5 features: got 2 names"),
        ({"decode": "utf-8"}, TypeError, "decode must be a function that makes a text of one input"),
        ({"kernel_points": -1}, ValueError, "kernel_points must be at least 0: got -1"),
        ({"posterior": 3}, TypeError, "posterior must be an UncertainClassifier, a LogitGP or a LogitPosterior of X"),
        ({"influence": 3}, TypeError, "influence must be a result of epk_gp.influence: got int"),
        ({"datamodel": 3}, TypeError, "datamodel must be a result of epk_gp.datamodel: got int"),
        ({"outside": torch.zeros(2, 5)}, ValueError, "outside needs scores of such inputs"),
        ({"accumulate": torch.float64}, TypeError, r"write_report\(\) got an unexpected keyword argument 'accumulate'"),
        ({"y": [0] * 8}, TypeError, "y must be a torch.Tensor: got list"),
        ({"X": torch.zeros(3, 4, dtype=torch.float64)}, ValueError, r"X must have shape \(n, 5\)"),
        ({"trajectory": 3}, TypeError, "trajectory must be an epk_gp.Trajectory: got int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_reported_is_refused_before_anything_is_computed(
    run, tmp_path, unchecked, monkeypatch, change, kind, message
):
    trajectory, X, y = run
    monkeypatch.setattr("epk_gp.report.explanations.attribute", lambda *args, **options: pytest.fail("computed"))
    given = {"trajectory": trajectory, "X": X, "y": y} | change
    with pytest.raises(kind, match=message):
        epk.write_report(tmp_path / "report.html", **given)
    assert not list(tmp_path.iterdir())


def test_results_of_other_points_or_runs_and_places_that_are_no_file_are_refused(run, tmp_path):
    trajectory, X, y = run
    gp, other = (epk.LogitGP(report_case(name)[0], nodes=2) for name in ("gradient_descent", "momentum"))
    file = tmp_path / "report.html"
    for place, given, kind, message in (
        (file, {"influence": epk.influence(trajectory, X[4:6])}, ValueError, "influence must be that of training samp"),
        (file, {"datamodel": epk.datamodel(trajectory, X[4:6], y[4:6])}, ValueError, "datamodel must be of this run"),
        (file, {"posterior": gp.logit_posterior(X[:3])}, ValueError, r"must be that of X, \(8, 3\): got \(3, 3\)"),
        (file, {"posterior": other}, ValueError, "posterior must be of the run"),
        (file, {"posterior": epk.UncertainClassifier(trajectory)}, ValueError, r"fitted: call fit\(X, y\)"),
        (tmp_path, {}, IsADirectoryError, r"file must be the name of a file, as in report\.html"),
        (tmp_path / "none" / "report.html", {}, FileNotFoundError, "file must lie in a folder that exists"),
    ):
        with pytest.raises(kind, match=message):
            epk.write_report(place, trajectory, X, y, explained=2, **given)
    own = replace(parse_request(trajectory, X, y, head=None), posterior=gp)
    validate_results(own)
    assert certainty(own).source == "process"


def test_more_than_fits_is_refused_before_anything_is_computed(run, tmp_path):
    """The bound is below what is written, so that nothing that fits is refused."""
    trajectory, X, y = run
    request = parse_request(trajectory, X, y, head=None, outputs="all", explained=2)
    content = written(tmp_path, trajectory, X, y, outputs="all", explained=2)
    with pytest.raises(ValueError, match=r"must have at most 0\.001 MB: 6 explained outputs take at least 0\.0.* MB"):
        require_room(request, divide(trajectory), 1000)
    require_room(request, divide(trajectory), len(page(lessen(content, 1, 10)).encode()))


def test_a_report_is_written_with_a_checkpoint_and_the_same_bytes(run, tmp_path):
    arguments = {"explained": 2, "outputs": 1, "kernel_points": 6}
    first = epk.write_report(tmp_path / "a.html", *run, **arguments)
    second = epk.write_report(tmp_path / "b.html", *run, checkpoint=tmp_path / "partial", **arguments)
    assert first.read_bytes() == second.read_bytes()
    assert list((tmp_path / "partial").iterdir())
    assert embedded(first)["title"] == f"Report of run {run[0].digest[:12]}"


def test_the_kernel_of_a_float32_run_is_semi_definite_to_its_own_rounding(tmp_path):
    torch.manual_seed(0)
    X = torch.randn(60, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))  # 67 weights: most eigenvalues are 0
    run = epk.train(net, X, (X[:, 0] > 0).long(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3)
    epk.write_report(tmp_path / "report.html", run, torch.randn(5, 4), explained=1, outputs=1)

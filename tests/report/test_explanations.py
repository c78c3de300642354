"""The explained outputs of a report: their sums, exact in whole numbers, and their values, those of `attribute`."""

from dataclasses import replace

import pytest
import torch

import epk_gp as epk
from epk_gp.kernel_machine.attribute import attribute_by
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.report.explanations import LARGEST, choose_quantum, significant, to_units
from report_cases import CASES, report_case, terms_of, written

WHOLE = ("decay", "statistics", "unexplained", "rounding", "total")


@pytest.fixture(scope="module", params=[CASES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CASES[1:])])
def reported(request, tmp_path_factory):
    trajectory, X, y = report_case(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, trajectory, X, written(folder, trajectory, X, y, explained=2, outputs="all", top=3)


def explanations(content):
    return [(n, int(c), e) for n, p in enumerate(content["points"]) for c, e in p["explanations"].items()]


def rounding_of(trajectory, content):
    """A quantum for each contribution that was rounded."""
    return trajectory.num_points * len(content["layers"]) * len(content["ranges"]) * content["quantum"]


def test_every_view_adds_up_exactly(reported):
    _, _, _, content = reported
    for _, _, explanation in explanations(content):
        for view in explanation["views"].values():
            assert all(isinstance(view[name], int) for name in WHOLE)
            assert terms_of(view) == view["total"]


def test_the_terms_lead_from_the_first_output_to_the_last(reported):
    _, _, _, content = reported
    for _, _, explanation in explanations(content):
        running = explanation["running"]
        assert len(running) == len(content["ranges"]) + 1
        assert (running[0], running[-1]) == (explanation["initial"], explanation["network"])
        assert explanation["views"]["*|*"]["total"] == explanation["network"] - explanation["initial"]
        for r in range(len(content["ranges"])):
            assert explanation["views"][f"*|{r}"]["total"] == running[r + 1] - running[r]


def test_views_of_parts_sum_to_the_view_of_the_whole(reported):
    """Exactly: of samples, by layer, range and label, and of every other term."""
    _, _, _, content = reported
    L, R = len(content["layers"]), len(content["ranges"])
    for _, _, explanation in explanations(content):
        views = explanation["views"]
        samples = {k: terms_of(v) - sum(v[name] for name in WHOLE[:4]) for k, v in views.items()}
        whole = views["*|*"]
        assert sum(whole["layers"]) == sum(whole["ranges"]) == samples["*|*"]
        assert whole["layers"] == [samples[f"{layer}|*"] for layer in range(L)]
        assert whole["ranges"] == [samples[f"*|{r}"] for r in range(R)]
        for view in views.values():
            assert view["labels"] is None or sum(view["labels"]) == terms_of(view) - sum(view[n] for n in WHOLE[:4])
        for layer in range(L):
            assert views[f"{layer}|*"]["ranges"] == [samples[f"{layer}|{r}"] for r in range(R)]
            assert views[f"{layer}|*"]["statistics"] == 0
            assert views[f"{layer}|*"]["layers"] is None
        for name in ("decay", "unexplained"):
            assert whole[name] == sum(views[f"{layer}|{r}"][name] for layer in range(L) for r in range(R))


def test_the_terms_are_those_of_the_attribution(reported):
    name, trajectory, X, content = reported
    expected = epk.attribute(trajectory, X[:2])
    limit = rounding_of(trajectory, content) + (1e-5 if name == "float32" else 1e-12)
    for n, c, explanation in explanations(content):
        view, quantum = explanation["views"]["*|*"], content["quantum"]
        for index, value, _ in view["raised"] + view["lowered"]:
            assert abs(value * quantum - float(expected.samples[n, c, index])) < limit
        for term in ("decay", "statistics", "unexplained"):
            assert abs(view[term] * quantum - float(getattr(expected, term)[n, c])) < limit
        assert (view["statistics"] != 0) == (name == "batch_norm")
        assert abs(explanation["initial"] * quantum - float(expected.initial[n, c])) <= quantum
        assert abs(explanation["network"] * quantum - float(expected.network[n, c])) <= quantum
        assert abs(view["rounding"] * quantum) < limit


def test_the_named_samples_are_the_largest_and_the_rest_is_counted(reported):
    _, trajectory, X, content = reported
    expected = epk.attribute(trajectory, X[:2]).samples
    for n, c, explanation in explanations(content):
        view, values = explanation["views"]["*|*"], expected[n, c]
        for side, signed in (("raised", values), ("lowered", -values)):
            ordered = signed.sort(descending=True)
            found = [entry[0] for entry in view[side]]
            assert found == ordered.indices[: len(found)].tolist()
            assert len(found) + view[f"rest_{side}"][0] == int((signed > content["quantum"]).sum())


def test_a_view_of_a_layer_and_a_range_is_that_part_of_the_attribution(reported):
    name, trajectory, X, content = reported
    edges = [first for first, _ in content["ranges"]][1:]
    axes = [by_sample(trajectory), by_layer(trajectory), by_step(trajectory, edges)]
    expected = attribute_by(trajectory, X[:2], axes)
    limit = rounding_of(trajectory, content) + (1e-5 if name == "float32" else 1e-12)
    L, R = len(content["layers"]), len(content["ranges"])
    for n, c, explanation in explanations(content):
        view = explanation["views"][f"{L - 1}|{R - 1}"]
        for index, value, _ in view["raised"] + view["lowered"]:
            assert abs(value * content["quantum"] - float(expected.values[n, c, index, L - 1, R - 1])) < limit


def test_a_change_of_one_term_is_seen_by_the_sums(tmp_path):
    """The negative control: by one quantum in one view."""
    trajectory, X, y = report_case("momentum")
    (point,) = written(tmp_path, trajectory, X, y, explained=1, outputs=1)["points"]
    (explanation,) = point["explanations"].values()
    for view in explanation["views"].values():
        for change in ("decay", "rounding"):
            assert terms_of(view | {change: view[change] + 1}) != view["total"]
        assert terms_of(view | {"rest_raised": [0, view["rest_raised"][1] + 1]}) != view["total"]


@pytest.mark.slow
def test_points_are_explained_alike_together_and_alone(tmp_path):
    """In one pass over the run, or in one for each."""
    trajectory, X, y = report_case("momentum")
    together = written(tmp_path, trajectory, X, y, explained=4)
    alone = [written(tmp_path, trajectory, X, y, explained=[n])["points"][0] for n in range(4)]
    for n, point in enumerate(alone):
        assert point["name"] == together["points"][n]["name"] == f"point {n}"
        for c, explanation in point["explanations"].items():
            other = together["points"][n]["explanations"][c]
            assert abs(explanation["network"] - other["network"]) <= 1
            assert [e[0] for e in explanation["views"]["*|*"]["raised"]] == [
                e[0] for e in other["views"]["*|*"]["raised"]
            ]


@pytest.mark.slow
def test_influence_stands_beside_contributions_of_the_whole(tmp_path):
    trajectory, X, y = report_case("gradient_descent")
    f = epk.network_outputs(trajectory, X[[1, 3]])
    of_all = epk.influence(trajectory, X[[1, 3]])
    for influence in (of_all, epk.influence(trajectory, X[[1, 3]], classes=f.argmax(dim=1))):
        content = written(tmp_path, trajectory, X, y, explained=[1, 3], influence=influence, outputs=1)
        assert "The influence beside the contributions is certified." in content["certificate"]["sentences"]
        for n, c, explanation in explanations(content):
            for key, view in explanation["views"].items():
                for index, _, effect in view["raised"] + view["lowered"]:
                    expected = pytest.approx(float(of_all.values[n, c, index]), rel=1e-4) if key == "*|*" else None
                    assert effect == expected


@pytest.mark.slow
def test_an_influence_that_is_not_certified_is_said_to_be_none(tmp_path):
    trajectory, X, y = report_case("gradient_descent")
    influence = replace(epk.influence(trajectory, X[:1]), findings=("how a scale would change is not known",))
    content = written(tmp_path, trajectory, X, y, explained=1, influence=influence, outputs=1)
    (words,) = (text for text in content["certificate"]["sentences"] if "influence" in text)
    assert "is NOT CERTIFIED: how a scale would change" in words
    assert content["certificate"]["certified"] is True  # of the contributions


@pytest.mark.slow
def test_the_outputs_that_are_asked_for_are_explained(tmp_path):
    trajectory, X, y = report_case("momentum")
    f = epk.network_outputs(trajectory, X)
    for outputs, expected in (
        ("predicted", [{int(f[n].argmax()), int(y[n])} for n in range(4)]),
        ("all", [{0, 1, 2}] * 4),
        (2, [set(f[n].topk(2).indices.tolist()) for n in range(4)]),
    ):
        points = written(tmp_path, trajectory, X, y, explained=4, outputs=outputs)["points"]
        assert [{int(c) for c in point["explanations"]} for point in points] == expected
    points = written(tmp_path, trajectory, X, explained=4)["points"]
    assert [{int(c) for c in point["explanations"]} for point in points] == [{int(f[n].argmax())} for n in range(4)]


@pytest.mark.parametrize("name", ["gradient_descent", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_without_layers_the_terms_are_those_of_all_layers(tmp_path, name):
    trajectory, X, y = report_case(name)
    split, whole = (written(tmp_path, trajectory, X, y, explained=1, outputs=1, by_layers=by) for by in (True, False))
    assert whole["layers"] == ["the network"]
    (a,), (b,) = (content["points"][0]["explanations"].values() for content in (split, whole))
    limit = rounding_of(trajectory, split) / split["quantum"]
    assert split["quantum"] == whole["quantum"]
    for key, view in b["views"].items():
        assert terms_of(view) == view["total"]
        other = a["views"][key.replace("0|", "*|", 1) if key[0] == "0" else key]
        assert [e[0] for e in view["raised"]] == [e[0] for e in other["raised"]]
        for (_, value, _), (_, expected, _) in zip(view["raised"], other["raised"], strict=True):
            assert abs(value - expected) <= limit
    assert b["views"]["*|*"]["statistics"] == pytest.approx(a["views"]["*|*"]["statistics"], abs=limit)


@pytest.mark.parametrize("size", [1e-9, 0.3, 1.0, 77.0, 1e4, 8e9])
def test_the_quantum_is_the_finest_in_which_sums_are_exact(size):
    quantum = choose_quantum(size)
    assert 1000 * size / quantum <= LARGEST
    assert quantum == 1e-15 or 1000 * size / (quantum / 10) > LARGEST


@pytest.mark.parametrize("size", [1e13, float("inf"), float("nan")])
def test_sizes_without_a_quantum_are_refused(size):
    with pytest.raises(ValueError, match="must sum to at most 9e\\+12 to be shown: got"):
        choose_quantum(size)


def test_units_are_the_nearest_whole_multiples(generator):
    values = torch.randn(1000, generator=generator, dtype=torch.float64)
    units = to_units(values, 1e-6)
    assert units.dtype == torch.int64
    assert float((units.double() * 1e-6 - values).abs().max()) <= 0.5001e-6
    assert int(units.sum()) == sum(units.tolist())


def test_terms_beyond_exact_sums_are_refused():
    values = torch.full((10,), 1e15, dtype=torch.float64)
    with pytest.raises(ValueError, match="sum to less than 9e\\+15.* sum to 1e\\+16. Explain this point by"):
        to_units(values, 1.0)


def test_other_numbers_are_short():
    assert significant(0.123456789) == 0.12346
    assert significant(-1234567.0, 2) == -1.2e6

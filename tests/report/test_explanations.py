"""The explained outputs of a report: their sums, exact in whole numbers, and their values, those of `attribute`."""

from dataclasses import replace

import pytest
import torch

import epk_gp as epk
from epk_gp.kernel_machine.axes import by_layer, by_sample, by_step
from epk_gp.report.explanations import LARGEST, choose_quantum, significant, to_units
from report_cases import report_case, terms_of, written

OTHERS = ("regression", "images", "float32", "batch_norm", "words", "one_step")
WHOLE = ("decay", "statistics", "unexplained", "rounding", "total")


def explanations(content):
    return [(n, int(c), e) for n, p in enumerate(content["points"]) for c, e in p["explanations"].items()]


def named(view):
    return view["raised"] + view["lowered"]


@pytest.fixture(scope="module", params=["momentum", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def reported(request, tmp_path_factory):
    trajectory, X, y = report_case(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, trajectory, X, written(folder, trajectory, X, y, explained=2, outputs="all", top=3)


def test_every_view_adds_up_exactly_and_its_terms_lead_from_the_first_output_to_the_last(reported):
    content = reported[3]
    for _, _, explanation in explanations(content):
        views, running = explanation["views"], explanation["running"]
        for view in views.values():
            assert all(isinstance(view[name], int) for name in WHOLE)
            assert terms_of(view) == view["total"]
            for change in ("decay", "rounding"):  # the negative control: by one quantum in one view
                assert terms_of(view | {change: view[change] + 1}) != view["total"]
        assert len(running) == len(content["ranges"]) + 1
        assert (running[0], running[-1]) == (explanation["initial"], explanation["network"])
        assert views["*|*"]["total"] == explanation["network"] - explanation["initial"]
        for r in range(len(content["ranges"])):
            assert views[f"*|{r}"]["total"] == running[r + 1] - running[r]


def test_views_of_parts_sum_to_the_view_of_the_whole(reported):
    """Exactly: of samples, by layer, range and label, and of every other term."""
    content = reported[3]
    L, R = len(content["layers"]), len(content["ranges"])
    for _, _, explanation in explanations(content):
        views = explanation["views"]
        samples = {k: terms_of(v) - sum(v[name] for name in WHOLE[:4]) for k, v in views.items()}
        whole = views["*|*"]
        assert sum(whole["layers"]) == sum(whole["ranges"]) == samples["*|*"]
        assert whole["layers"] == [samples[f"{layer}|*"] for layer in range(L)]
        assert whole["ranges"] == [samples[f"*|{r}"] for r in range(R)]
        for key, view in views.items():
            assert view["labels"] is None or sum(view["labels"]) == samples[key]
        for layer in range(L):
            assert views[f"{layer}|*"]["ranges"] == [samples[f"{layer}|{r}"] for r in range(R)]
            assert (views[f"{layer}|*"]["statistics"], views[f"{layer}|*"]["layers"]) == (0, None)
        for name in ("decay", "unexplained"):
            assert whole[name] == sum(views[f"{layer}|{r}"][name] for layer in range(L) for r in range(R))


def test_the_terms_are_those_of_the_attribution(reported):
    """The named samples are the largest, the rest is counted, and a view has its layer and its range."""
    name, trajectory, X, content = reported
    edges = [first for first, _ in content["ranges"]][1:]
    axes = [by_sample(trajectory), by_layer(trajectory), by_step(trajectory, edges)]
    expected, by_parts = epk.attribute(trajectory, X[:2]), epk.attribute(trajectory, X[:2], by=axes).values
    L, R, quantum = len(content["layers"]), len(content["ranges"]), content["quantum"]
    limit = trajectory.num_points * L * R * quantum + (1e-5 if name == "float32" else 1e-12)  # each is rounded
    for n, c, explanation in explanations(content):
        view, values = explanation["views"]["*|*"], expected.samples[n, c]
        for index, value, _ in named(view):
            assert abs(value * quantum - float(values[index])) < limit
        for index, value, _ in named(explanation["views"][f"{L - 1}|{R - 1}"]):
            assert abs(value * quantum - float(by_parts[n, c, index, L - 1, R - 1])) < limit
        for term in ("decay", "statistics", "unexplained"):
            assert abs(view[term] * quantum - float(getattr(expected, term)[n, c])) < limit
        assert (view["statistics"] != 0) == (name == "batch_norm")
        for end in ("initial", "network"):
            assert abs(explanation[end] * quantum - float(getattr(expected, end)[n, c])) <= quantum
        assert abs(view["rounding"] * quantum) < limit
        for side, signed in (("raised", values), ("lowered", -values)):
            found = [entry[0] for entry in view[side]]
            assert found == signed.sort(descending=True).indices[: len(found)].tolist()
            assert len(found) + view[f"rest_{side}"][0] == int((signed > quantum).sum())


@pytest.mark.slow
def test_points_are_explained_alike_together_and_alone(tmp_path, monkeypatch):
    """In one pass over the run, or in one for each output where no two fit into the memory budget."""
    together = written(tmp_path, *report_case("momentum"), explained=4)
    monkeypatch.setattr("epk_gp.report.explanations._BYTES", 1 << 40)
    alone = written(tmp_path, *report_case("momentum"), explained=4)
    for (n, c, one), (m, d, other) in zip(explanations(together), explanations(alone), strict=True):
        assert (n, c) == (m, d)
        assert one["running"] == pytest.approx(other["running"], abs=1)
        raised = [e["views"]["*|*"]["raised"] for e in (one, other)]
        assert [entry[0] for entry in raised[0]] == [entry[0] for entry in raised[1]]


@pytest.mark.slow
def test_influence_stands_beside_contributions_of_the_whole_and_says_whether_it_is_certified(tmp_path):
    trajectory, X, y = report_case("gradient_descent")
    f = epk.network_outputs(trajectory, X[[1, 3]])
    of_all, of_largest = (epk.influence(trajectory, X[[1, 3]], classes=c) for c in (None, f.argmax(dim=1)))
    uncertified = replace(of_all, findings=("its scale is not known",))
    said = ("certified.", "certified.", "NOT CERTIFIED: its scale is not known.")
    for influence, words in zip((of_all, of_largest, uncertified), said, strict=True):
        content = written(tmp_path, trajectory, X, y, explained=[1, 3], influence=influence, outputs=1)
        assert f"The influence beside the contributions is {words}" in content["certificate"]["sentences"]
        assert content["certificate"]["certified"] is True  # of the contributions
        for n, c, explanation in explanations(content):
            for key, view in explanation["views"].items():
                for index, _, effect in named(view):
                    expected = pytest.approx(float(of_all.values[n, c, index]), rel=1e-4) if key == "*|*" else None
                    assert effect == expected


@pytest.mark.slow
def test_the_outputs_that_are_asked_for_are_explained(tmp_path):
    trajectory, X, y = report_case("momentum")
    f = epk.network_outputs(trajectory, X)
    for known, outputs, expected in (
        (y, "predicted", [{int(f[n].argmax()), int(y[n])} for n in range(4)]),
        (None, "predicted", [{int(f[n].argmax())} for n in range(4)]),
        (y, "all", [{0, 1, 2}] * 4),
        (y, 2, [set(f[n].topk(2).indices.tolist()) for n in range(4)]),
    ):
        points = written(tmp_path, trajectory, X, known, explained=4, outputs=outputs)["points"]
        assert [{int(c) for c in point["explanations"]} for point in points] == expected


@pytest.mark.parametrize("size", [1e-9, 0.3, 1.0, 77.0, 1e4, 8e9])
def test_the_quantum_is_the_finest_in_which_sums_are_exact(size):
    quantum = choose_quantum(size)
    assert 1000 * size / quantum <= LARGEST
    assert quantum == 1e-15 or 1000 * size / (quantum / 10) > LARGEST


def test_sums_that_would_not_be_exact_are_refused():
    for size in (1e13, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must sum to at most 9e\\+12 to be shown: got"):
            choose_quantum(size)
    with pytest.raises(ValueError, match="sum to less than 9e\\+15.* sum to 1e\\+16. Explain this point by"):
        to_units(torch.full((10,), 1e15, dtype=torch.float64), 1.0)


def test_units_are_the_nearest_whole_multiples_and_other_numbers_are_short(generator):
    values = torch.randn(1000, generator=generator, dtype=torch.float64)
    units = to_units(values, 1e-6)
    assert units.dtype == torch.int64
    assert float((units.double() * 1e-6 - values).abs().max()) <= 0.5001e-6
    assert (significant(0.123456789), significant(-1234567.0, 2)) == (0.12346, -1.2e6)

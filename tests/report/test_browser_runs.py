"""Reports of recorded runs in a browser: what the library wrote is what the page shows."""

import copy

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from safetensors.torch import save_file

import epk_gp as epk
from commands import run
from report_cases import embedded, report_case
from shown_numbers import check_numbers, fragment_of, go, shown_sum, view_sum

pytestmark = pytest.mark.slow


def check(page, content):
    """Compare sums and numbers of all explained outputs, and of every fourth other view of the last one."""
    outputs = [(n, target) for n, point in enumerate(content["points"]) for target in point["explanations"]]
    number, target = outputs[-1]
    others = list(content["points"][number]["explanations"][target]["views"])[1::4]
    for state in [(*output, "*", "*") for output in outputs] + [(number, target, *key.split("|")) for key in others]:
        go(page, fragment_of(state))
        assert shown_sum(page)[0] == view_sum(content, state)
        assert not page.get_by_role("alert").count()
        check_numbers(page, content, state)
    go(page, "#view=run")
    assert page.locator("#all-sums").inner_text().startswith("✓ All")
    assert page.locator("#certificate h3").inner_text() == "✓ Certified"
    go(page, "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])


@pytest.mark.parametrize("name", ["momentum", "regression", "images", "batch_norm", "words"])
def test_the_report_of_a_run_shows_its_content(open_file, tmp_path, name):
    trajectory, X, y = report_case(name)
    file = epk.write_report(tmp_path / "report.html", trajectory, X, y, explained=2, top=3)
    page = open_file(file)
    check(page, embedded(file))
    if name != "regression":
        return
    f = epk.network_outputs(trajectory, X)
    go(page, "#point=0")

    def numbers(place):
        return [float(value) for value in page.locator(place).evaluate_all("all => all.map((e) => e.value)")]

    for output in (0, 1):  # predictions and all targets
        page.select_option("#class", str(output))
        assert numbers(".headline .number") == pytest.approx([float(f[0, output]), float(y[0, output])], rel=1e-4)
        samples = [int(number) for number in numbers(".samples .sample-number .number")]
        assert numbers(".samples .label .number") == pytest.approx(trajectory.targets[samples, output].tolist(), 1e-3)


def test_it_says_whose_class_and_probabilities_are_shown_and_what_to_ask_where_contributions_cancel(
    open_report, content
):
    content = {**content, "points": copy.deepcopy(content["points"][:2])}
    for point in content["points"]:
        point["predicted"] = max(range(14), key=lambda c: point["probabilities"][c])
    content["points"][0]["predicted"] = (content["points"][0]["predicted"] + 1) % 14
    for point, amplification in zip(content["points"], (36.2, 3.0), strict=True):
        for explanation in point["explanations"].values():
            explanation["amplification"] = amplification
    page = open_report(content)
    card = page.locator(".card", has=page.locator(".probabilities"))
    for number, is_first in ((0, True), (1, False)):
        page.click(f"#points [data-point='{number}']")
        assert page.locator(".headline").inner_text().split("\n")[-1].startswith("the network predicts class ")
        assert card.locator("h4").inner_text() == "Class probabilities of the network and process"
        assert ("is the most probable class" in card.inner_text()) == is_first
        words = "difference between two classes’ contributions, or ask for an influence"
        assert (words in page.inner_text("#shown")) == ("Amplification 36: " in page.inner_text("#shown")) == is_first


def test_a_report_of_everything_shows_its_content_fits_a_narrow_screen_and_passes_axe(open_file, tmp_path):
    record = ("--num-train", 24, "--num-test", 60, "--width", 5, "--steps", 4, "--weight-decay", 0.01, "--quiet")
    assert run("record", "--out", tmp_path / "run", *record) == 0
    save_file({"inputs": 9 * torch.randn(5, 100, dtype=torch.float64)}, tmp_path / "far.safetensors")
    asked = ("--influence", "--label-errors", "--map", "--validation", "held-out", "--num-points", 3, "--outputs", 2)
    options = ("--outside", tmp_path / "far.safetensors", "--rule", "adaptive:1e-8", "--quiet")
    assert run("report", tmp_path / "run", "--out", tmp_path / "report.html", *asked, *options) == 0
    content = embedded(tmp_path / "report.html")
    page = open_file(tmp_path / "report.html", color_scheme="dark", viewport={"width": 360, "height": 700})
    check(page, content)
    assert page.locator(".suspects tbody tr").count() == len(content["overview"]["suspects"]["rows"])
    page.focus("#map")
    page.keyboard.press("ArrowLeft")
    ny, nx = content["overview"]["map"]["shape"]
    wrong = content["overview"]["map"]["wrong"][(ny // 2) * nx + nx // 2 - 1]
    assert float(page.locator(".map-panel .number").first.get_attribute("value")) == wrong
    for view in ("#point=0", "#view=overview", "#view=run"):
        go(page, view)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        assert [(one["id"], one["nodes"][0]["html"]) for one in Axe().run(page).response["violations"]] == []

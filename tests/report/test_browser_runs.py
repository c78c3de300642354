"""Reports of recorded runs in a browser: what the library wrote is what the page shows."""

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from safetensors.torch import save_file

import epk_gp as epk
from commands import run
from report_cases import embedded, report_case
from shown_numbers import check_numbers, fragment_of, shown_sum, view_sum
from synthetic_content import Sizes, made_content

pytestmark = pytest.mark.slow


def states(content):
    """Return all layers and steps of each explained output, and every fourth other view of the last one."""
    found = [
        (number, target, "*", "*") for number, point in enumerate(content["points"]) for target in point["explanations"]
    ]
    number, target, _, _ = found[-1]
    views = content["points"][number]["explanations"][target]["views"]
    return found + [(number, target, *key.split("|")) for key in list(views)[1::4]]


def check(page, content):
    """Compare sums and numbers of the views with the content."""
    for state in states(content):
        page.goto(page.url.split("#")[0] + fragment_of(state))
        assert shown_sum(page)[0] == view_sum(content, state)
        assert not page.get_by_role("alert").count()
        check_numbers(page, content, state)


@pytest.mark.parametrize("name", ["momentum", "regression", "images", "batch_norm", "words"])
def test_the_report_of_a_run_shows_its_content(open_file, tmp_path, name):
    trajectory, X, y = report_case(name)
    file = epk.write_report(tmp_path / "report.html", trajectory, X, y, explained=2, top=3)
    content = embedded(file)
    page = open_file(file)
    check(page, content)
    page.goto(page.url.split("#")[0] + "#view=run")
    assert page.locator("#all-sums").inner_text().startswith("✓ All")
    assert page.locator("#certificate h3").inner_text() == "✓ Certified"
    page.goto(page.url.split("#")[0] + "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])


def test_a_regression_shows_its_predictions_and_all_targets(open_file, tmp_path):
    trajectory, X, y = report_case("regression")
    f = epk.network_outputs(trajectory, X)
    page = open_file(epk.write_report(tmp_path / "report.html", trajectory, X, y, explained=2, kernel_points=0))

    def numbers(place):
        return [float(value) for value in page.locator(place).evaluate_all("all => all.map((e) => e.value)")]

    for output in (0, 1):
        page.select_option("#class", str(output))
        assert numbers(".headline .number") == pytest.approx([float(f[0, output]), float(y[0, output])], rel=1e-4)
        samples = [int(number) for number in numbers(".samples .sample-number .number")]
        targets = trajectory.targets[samples, output].tolist()
        assert numbers(".samples .label .number") == pytest.approx(targets, rel=1e-3)


def test_the_network_s_class_and_the_process_s_probabilities_are_told_apart(open_report):
    """Whose each is stands beside it, and where they differ a sentence says so."""
    content = made_content(Sizes(points=2))
    content["outputs"]["probabilities_of"] = "network and process"
    first, second = content["points"]
    first["predicted"] = (first["predicted"] + 1) % 4
    page = open_report(content)
    card = page.locator(".card", has=page.locator(".probabilities"))
    for number, differs in ((0, True), (1, False)):
        page.click(f"#points [data-point='{number}']")
        assert page.locator(".headline").inner_text().split("\n")[-1].startswith("the network predicts class ")
        assert card.locator("h4").inner_text() == "Class probabilities of the network and process"
        assert ("is the most probable class" in card.inner_text()) == differs
    assert second["predicted"] == max(range(4), key=second["probabilities"].__getitem__)


def test_contributions_that_cancel_say_what_to_ask_instead(open_report):
    content = made_content(Sizes(points=2, explained=1))
    for point, amplification in zip(content["points"], (36.2, 3.0), strict=True):
        for explanation in point["explanations"].values():
            explanation["amplification"] = amplification
    page = open_report(content)
    assert "Amplification 36: " in page.locator("#shown").inner_text()
    assert "difference between two classes’ contributions, or ask for an influence" in page.inner_text("#shown")
    page.keyboard.press("ArrowRight")
    assert "mplification" not in page.inner_text("#shown")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report with everything that the command can show."""
    folder = tmp_path_factory.mktemp("whole")
    record = ("--num-train", 24, "--num-test", 60, "--width", 5, "--steps", 4, "--weight-decay", 0.01, "--quiet")
    assert run("record", "--out", folder / "run", *record) == 0
    save_file({"inputs": 9 * torch.randn(5, 100, dtype=torch.float64)}, folder / "far.safetensors")
    shown = (
        "--influence",
        "--label-errors",
        "--map",
        "--validation",
        "held-out",
        "--outside",
        folder / "far.safetensors",
    )
    asked = ("--num-points", 3, "--outputs", 2, "--rule", "adaptive:1e-8", "--quiet")
    assert run("report", folder / "run", "--out", folder / "report.html", *shown, *asked) == 0
    return folder / "report.html"


def test_a_report_of_everything_shows_its_content(open_file, whole):
    content = embedded(whole)
    page = open_file(whole)
    check(page, content)
    page.goto(page.url.split("#")[0] + "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])
    assert page.locator(".suspects tbody tr").count() == len(content["overview"]["suspects"]["rows"])
    assert not page.locator("#overview .suspected").count()
    page.focus("#map")
    page.keyboard.press("ArrowLeft")
    ny, nx = content["overview"]["map"]["shape"]
    wrong = content["overview"]["map"]["wrong"][(ny // 2) * nx + nx // 2 - 1]
    assert float(page.locator(".map-panel .number").first.get_attribute("value")) == wrong


def test_a_report_of_everything_has_nothing_that_axe_finds_and_fits_a_narrow_screen(open_file, whole):
    page = open_file(whole, color_scheme="dark", viewport={"width": 360, "height": 700})
    for view in ("#point=0", "#view=overview", "#view=run"):
        page.goto(page.url.split("#")[0] + view)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        assert [(one["id"], one["nodes"][0]["html"]) for one in Axe().run(page).response["violations"]] == []

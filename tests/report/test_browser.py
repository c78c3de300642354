"""Reports in a browser: what they show is what their content says, and every view has a link."""

import copy

import pytest

from shown_numbers import at, check_numbers, exact_text, fragment_of, shown_sum, view_of, view_sum
from synthetic_content import Sizes, made_content

pytestmark = pytest.mark.slow

KINDS = ("image", "text", "values", "position")


@pytest.fixture(scope="module")
def content():
    return made_content(Sizes(kind="position", points=5, classes=14, layers=3, samples=120))


def states(content):
    """Return a state of each kind: another point, class, layer, range of steps, and a layer with a range."""
    points = content["points"]
    first, last = (sorted(point["explanations"], key=int) for point in (points[0], points[3]))
    return [(0, first[0], "*", "*"), (3, last[-1], "*", "*"), (3, last[-1], "1", "*"), (0, first[0], "*", "2"),
            (3, last[0], "2", "0")]  # fmt: skip


def choose(page, state):
    """Choose a state by the controls."""
    point, target, layer, steps = state
    page.locator(f"#points [data-point='{point}']").click()
    page.select_option("#class", target)
    page.select_option("#steps", "*")
    page.select_option("#layer", layer)
    page.select_option("#steps", steps)


def without_classes(content):
    """Return the content of a regression: no labels, no probabilities and nothing of the whole."""
    content = copy.deepcopy(content)
    for point in content["points"]:
        point.update(label=None, probabilities=None, band=None, scores=[])
        for explanation in point["explanations"].values():
            for view in explanation["views"].values():
                view["labels"] = None
                view["raised"] = [[sample, value, None] for sample, value, _ in view["raised"]]
                view["lowered"] = [[sample, value, None] for sample, value, _ in view["lowered"]]
    content["overview"].update(accuracy=None, figures=[], suspects=None, map=None)
    content["outputs"].update(head="logits", name="output")
    return content


def test_the_sums_shown_are_those_of_the_content(open_report, content):
    """Also after choosing another point, class, layer and range of steps."""
    page = open_report(content)
    seen = set()
    for state in states(content):
        choose(page, state)
        expected_sum = view_sum(content, state)
        assert shown_sum(page) == (expected_sum, exact_text(expected_sum))
        assert page.locator("#sum").get_attribute("data-agrees") == "true"
        assert not page.locator(".disagrees").count()
        seen.add(expected_sum)
    assert len(seen) == len(states(content))


def test_a_sum_that_is_wrong_by_one_unit_is_an_error(open_report, content):
    """The negative control."""
    target = min(content["points"][0]["explanations"], key=int)
    for place in ("views.*|*.raised.0.1", "views.*|*.rest_lowered.1", "views.*|*.decay", "views.*|*.total",
                  "views.*|*.labels.2", "initial", "network"):  # fmt: skip
        changed = copy.deepcopy(content)
        owner, _, name = f"points.0.explanations.{target}.{place}".rpartition(".")
        owner = at(changed, owner)
        owner[int(name) if isinstance(owner, list) else name] += 1
        page = open_report(changed, f"#point=0&class={target}")
        error = " ".join(page.get_by_role("alert").all_inner_texts())
        assert "are not shares of one sum" in error or ("do not add up" in error and exact_text(1) in error), place
        page.goto(page.url.split("#")[0] + "#view=run")
        assert page.locator("#all-sums").inner_text().startswith("✗")
        page.goto(page.url.split("#")[0] + "#point=1")
        assert not page.get_by_role("alert").count()


def test_all_sums_are_checked(open_report, content):
    page = open_report(content, "#view=run")
    explanations = [e for point in content["points"] for e in point["explanations"].values()]
    number = sum(1 + len(explanation["views"]) for explanation in explanations)
    assert page.locator("#all-sums").inner_text().startswith(f"✓ All {number} sums")


@pytest.mark.parametrize("digits", ["short", "all"])
def test_every_number_shown_is_one_of_the_content(open_report, content, digits):
    """Each has its exact value and its source, no digit stands elsewhere, and none that must be there is missing."""
    page = open_report(content)
    if digits == "all":
        page.click("#digits")
    for state in states(content):
        page.goto(page.url.split("#")[0] + fragment_of(state))
        page.locator("summary", has_text="Table of the running sum").click()
        sources = check_numbers(page, content, state)
        assert required(content, state) <= sources
        if digits == "all":
            assert exact_text(view_sum(content, state)) in page.locator("#shown").inner_text()


def required(content, state):
    """Return the sources of what a view must show."""
    point, target, layer, steps = state
    explanation, view = view_of(content, state)
    of_output = f"points.{point}.explanations.{target}"
    of_view = f"{of_output}.views.{layer}|{steps}"
    sources = {f"{of_view}.{name}" for name in ("decay", "statistics", "unexplained", "rounding")}
    for side in ("raised", "lowered"):
        shown = [(row, k) for row, entry in enumerate(view[side]) for k in range(3) if entry[k] is not None]
        sources |= {f"{of_view}.{side}.{row}.{column}" for row, column in shown}
        sources |= {f"{of_view}.rest_{side}.0", f"{of_view}.rest_{side}.1"}
    sources |= {f"{of_output}.running.{number}" for number in range(len(explanation["running"]))}
    for part in ("layers", "ranges"):
        sources |= {f"{of_view}.{part}.{number}" for number in range(len(view[part] or []))}
    if (layer, steps) == ("*", "*"):
        sources |= {f"{of_output}.initial", f"{of_output}.network"}
    chosen = content["points"][point]
    sources |= {f"points.{point}.scores.{number}.1" for number in range(len(chosen["scores"]))}
    best = sorted(range(len(chosen["probabilities"])), key=lambda c: -chosen["probabilities"][c])[:12]
    sources |= {f"points.{point}.probabilities.{number}" for number in best}
    return sources | {f"points.{point}.band.{number}.{end}" for number in best for end in (0, 1)}


def test_bars_have_the_side_and_length_of_their_numbers(open_report, content):
    state = states(content)[1]
    page = open_report(content, fragment_of(state), reduced_motion="reduce")
    rows = page.evaluate(
        """() => [...document.querySelectorAll('.bars tbody tr')].map((row) => {
          const [track, fill] = ['.track', '.fill'].map((name) => row.querySelector(name).getBoundingClientRect());
          const chart = row.closest('table').caption.textContent;
          return { chart, value: Number(row.querySelector('td .number').value),
            middle: track.left + track.width / 2, half: track.width / 2, left: fill.left, right: fill.right };
        })"""
    )
    charts = {row["chart"] for row in rows}
    assert len(charts) == 4
    for chart in charts:
        bars = [row for row in rows if row["chart"] == chart]
        largest = max(abs(row["value"]) for row in bars)
        for row in bars:
            length = row["half"] * abs(row["value"]) / largest
            end, other = (row["left"], row["right"]) if row["value"] < 0 else (row["right"], row["left"])
            assert other == pytest.approx(row["middle"], abs=0.5)
            assert abs(end - row["middle"]) == pytest.approx(max(length, 1), abs=0.6)


def test_the_curve_over_the_steps_is_the_running_sum(open_report, content):
    state = states(content)[0]
    page = open_report(content, fragment_of(state))
    dots = page.evaluate(
        """() => [...document.querySelectorAll('.chart .dot')].map((dot) =>
          [Number(dot.getAttribute('cx')), Number(dot.getAttribute('cy')), dot.querySelector('title').textContent])"""
    )
    running, ends = view_of(content, state)[0]["running"], [0] + [last for _, last in content["ranges"]]
    assert [text for _, _, text in dots] == [
        f"after {end} steps: {exact_text(value)}" for end, value in zip(ends, running, strict=True)
    ]
    for column, numbers in ((0, ends), (1, running)):
        positions = [dot[column] for dot in dots]
        scale = (positions[-1] - positions[0]) / (numbers[-1] - numbers[0])
        assert scale * (1 - 2 * column) > 0
        for position, number in zip(positions, numbers, strict=True):
            assert position == pytest.approx(positions[0] + scale * (number - numbers[0]), abs=1e-6)


def test_the_overview_shows_its_content(open_report, content):
    page = open_report(content, "#view=overview")
    overview = content["overview"]
    accuracy = page.locator("[data-source='overview.accuracy']")
    assert float(accuracy.get_attribute("value")) == overview["accuracy"]
    assert accuracy.inner_text() == f"{100 * overview['accuracy']:.1f}\u202f%"
    assert page.locator("[data-source='overview.count']").inner_text() == str(overview["count"])
    rows = page.locator(".suspects tbody tr")
    for row, cells in zip(rows.all(), overview["suspects"]["rows"], strict=True):
        assert row.locator("th [data-source]").first.get_attribute("value") is not None
        assert row.locator("td").all_inner_texts() == cells[1:]
    figures = page.locator(".figure svg")
    assert figures.count() == len(overview["figures"])
    assert "out of distribution" in figures.first.text_content()
    page.locator("summary", has_text="Table of these numbers").click()
    table = overview["figures"][0]["table"]
    assert page.locator("details table tbody tr").first.inner_text().split() == table["rows"][0]


def test_names_inside_figures_are_their_own(open_report, content):
    """Two figures that use the same names would take each other's clipping."""
    page = open_report(content, "#view=overview")
    names = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(names) == len(set(names))
    clips = page.evaluate("[...document.querySelectorAll('[clip-path]')].map((e) => e.getAttribute('clip-path'))")
    assert clips
    assert {clip.split("#")[1].rstrip(")") for clip in clips} <= set(names)


def test_certificate_and_card_are_shown(open_report, content):
    page = open_report(content, "#view=run")
    assert page.locator("#badge").inner_text() == "✓ Certified"
    text = page.locator("#run").inner_text()
    for rows in [content["certificate"]["rows"], *(card["rows"] for card in content["card"])]:
        assert all(cell in text for row in rows for cell in row)
    assert all(sentence in text for sentence in content["certificate"]["sentences"])


def test_what_is_not_certified_is_marked_in_every_view(open_report, content):
    content = {**content, "certificate": {**content["certificate"], "certified": False}}
    page = open_report(content)
    assert page.locator("#badge").inner_text() == "✗ Not certified"
    assert "not certified" in page.locator("#notices").inner_text()
    page.get_by_role("link", name="What that means").click()
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator("#certificate h3").inner_text() == "✗ Not certified"


@pytest.mark.parametrize("kind", [*KINDS, "no classes"])
def test_every_kind_of_input_is_shown(open_report, kind):
    sizes = Sizes(kind="values" if kind == "no classes" else kind, points=2, samples=60)
    content = made_content(sizes)
    if kind == "no classes":
        content = without_classes(content)
    page = open_report(content, "#point=1")
    card = page.locator(".input-card")
    given = content["points"][1]["input"]
    if kind == "image":
        assert card.locator("img").get_attribute("src") == given["image"]
        assert page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
    elif kind == "text":
        assert card.locator("blockquote").inner_text() == given["text"]
    elif kind == "position":
        assert card.locator("path.cross").count() == 1
        view = view_of(content, (1, page.input_value("#class"), "*", "*"))[1]
        for side, mark in (("raised", "raises"), ("lowered", "lowers")):
            assert card.locator(f"path.{mark}").count() == len(view[side])
    else:
        assert card.locator("tbody tr").count() == len(given["values"])
    assert ("wrong" in page.locator("#prediction").inner_text().lower()) == (kind != "no classes")
    page.goto(page.url.split("#")[0] + "#view=overview")
    assert page.locator("#overview").is_visible()


@pytest.mark.parametrize("policy", ["as_written", "none"])
def test_a_report_that_asks_for_something_is_noticed(open_report, content, policy):
    """The negative control: the policy blocks it, and without a policy it is a request."""

    def change(document):
        if policy == "none":
            document = document.replace("Content-Security-Policy", "No-Policy")
        return document.replace("<noscript>", '<img src="http://127.0.0.1:9/a.png" alt=""><noscript>', 1)

    open_report(content, change=change).wait_for_load_state()
    expected_fault = "Content Security Policy" if policy == "as_written" else "request of http://127.0.0.1:9/a.png"
    assert any(expected_fault in fault for fault in open_report.faults)
    open_report.faults.clear()


def test_hostile_texts_are_shown_as_texts(open_report, content):
    """A figure's own event handler is blocked by the policy, which is all that the browser complains of."""
    hostile = "</script><img src=x onerror=alert(1)><b>name</b>"
    content = copy.deepcopy(content)
    content["title"] = content["points"][0]["name"] = content["layers"][0] = hostile
    content["outputs"]["classes"] = [f"{number}{hostile}" for number in range(14)]
    figure = content["overview"]["figures"][0]
    figure["svg"] = figure["svg"].replace(
        "</svg>",
        '<script>alert(2)</script><image href="https://example.org/x.png" onload="alert(3)"/>'
        '<a href="javascript:alert(4)"><text>away</text></a></svg>',
    )
    page = open_report(content)
    assert page.locator("h1").inner_text() == hostile
    assert page.locator("#point-title").inner_text() == hostile
    page.goto(page.url.split("#")[0] + "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])
    assert not page.locator(".figure :is(script, a, [href^=http], [onload])").count()
    assert all("inline event handler violates the following Content Security" in fault for fault in open_report.faults)
    open_report.faults.clear()

"""Reports in a browser: they show their content, exactly, by links, keyboard and search, on screens and on paper."""

import copy
import re

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe

import epk_gp as epk
from epk_gp.analysis.maps import column_plane, uncertainty_on_plane
from epk_gp.report.write import lessen
from report_cases import embedded, report_case, written
from shown_numbers import at, check_numbers, exact_text, fragment_of, go, read, shown_sum, view_of, view_sum

pytestmark = pytest.mark.slow

VIEWS = ("#point=1", "#view=overview", "#view=run")
ACTIVE = "document.activeElement"
FOCUS = f"{ACTIVE}.id"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Few points of which no view has one layer and one range; not certified."""
    folder, case = tmp_path_factory.mktemp("pictures"), report_case("images")
    with pytest.warns(epk.CertificateWarning):
        made = written(folder, *case, explained=3, rule=epk.QuadratureRule.left_riemann(1), kernel_points=6)
    return lessen(made, 10, 10)


def fragment(page):
    return page.evaluate("location.hash")


def text(page, place):
    return page.locator(place).inner_text()


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def states(content):
    """Return a state of each kind: another point, class, layer, range of steps, and a layer with a range."""
    first, last = (sorted(content["points"][k]["explanations"], key=int) for k in (0, 3))
    return [(0, first[0], "*", "*"), (3, last[-1], "*", "*"), (3, last[-1], "1", "*"), (0, first[0], "*", "2"),
            (3, last[0], "2", "0")]  # fmt: skip


def test_the_sums_shown_are_those_of_the_content(open_report, content):
    """Also after choosing another point, class, layer and range of steps by the controls."""
    page, sums = open_report(content), [view_sum(content, state) for state in states(content)]
    assert len(set(sums)) == len(sums)
    for (point, target, layer, steps), expected in zip(states(content), sums, strict=True):
        page.locator(f"#points [data-point='{point}']").click()
        for control, value in (("class", target), ("steps", "*"), ("layer", layer), ("steps", steps)):
            page.select_option(f"#{control}", value)
        assert shown_sum(page) == (expected, exact_text(content, expected))
        assert page.locator("#sum").get_attribute("data-agrees") == "true"
        assert not page.locator(".disagrees").count()
    go(page, "#view=run")
    explanations = [e for point in content["points"] for e in point["explanations"].values()]
    number = sum(1 + len(explanation["views"]) for explanation in explanations)
    assert text(page, "#all-sums").replace("\u202f", "").startswith(f"✓ All {number} sums")


def test_a_sum_that_is_wrong_by_one_unit_is_an_error(open_report, content):
    """The negative control."""
    target = min(content["points"][0]["explanations"], key=int)
    whole = ("raised.0.1", "rest_lowered.1", "decay", "total", "labels.2")
    for place in (*(f"views.*|*.{name}" for name in whole), "initial", "network"):
        changed = {**content, "points": copy.deepcopy(content["points"][:2])}
        owner, _, name = f"points.0.explanations.{target}.{place}".rpartition(".")
        owner = at(changed, owner)
        owner[int(name) if isinstance(owner, list) else name] += 1
        page = open_report(changed, f"#point=0&class={target}")
        error = " ".join(page.get_by_role("alert").all_inner_texts())
        assert "are not shares of one sum" in error or ("do not add up" in error and exact_text(content, 1) in error), (
            place
        )
        go(page, "#view=run")
        assert text(page, "#all-sums").startswith("✗")
        go(page, "#point=1")
        assert not page.get_by_role("alert").count()


@pytest.mark.parametrize("digits", ["short", "all"])
def test_every_number_shown_is_one_of_the_content(open_report, content, digits):
    """Each has its exact value and its source, no digit stands elsewhere, and none that must be there is missing."""
    page = open_report(content)
    if digits == "all":
        page.click("#digits")
    for state in states(content):
        go(page, fragment_of(state))
        page.locator("summary", has_text="Table of the running sum").click()
        assert required(content, state) <= check_numbers(page, content, state)
        if digits == "all":
            assert exact_text(content, view_sum(content, state)) in text(page, "#shown")


def required(content, state):
    """Return the sources of what a view must show."""
    number, target, layer, steps = state
    (explanation, view), point = view_of(content, state), content["points"][number]
    output, of_view = f"explanations.{target}", f"explanations.{target}.views.{layer}|{steps}"
    sources = {f"{of_view}.{name}" for name in ("decay", "statistics", "unexplained", "rounding")}
    for side in ("raised", "lowered"):
        shown = [(row, k) for row, entry in enumerate(view[side]) for k in range(3) if entry[k] is not None]
        sources |= {f"{of_view}.{side}.{row}.{column}" for row, column in shown}
        sources |= {f"{of_view}.rest_{side}.{k}" for k in (0, 1)}
    sources |= {f"{output}.running.{k}" for k in range(len(explanation["running"]))}
    sources |= {f"{of_view}.{part}.{k}" for part in ("layers", "ranges") for k in range(len(view[part] or []))}
    sources |= {f"{output}.{name}" for name in ("initial", "network") if (layer, steps) == ("*", "*")}
    sources |= {f"scores.{k}.1" for k in range(len(point["scores"]))}
    for c in sorted(range(14), key=lambda c: -point["probabilities"][c])[:12]:
        sources |= {f"probabilities.{c}", f"band.{c}.0", f"band.{c}.1"}
    return {f"points.{number}.{source}" for source in sources}


def test_bars_and_the_curve_have_the_side_and_length_of_their_numbers(open_report, content):
    state = states(content)[1]
    page = open_report(content, fragment_of(state), reduced_motion="reduce")
    rows = page.locator(".bars tbody tr").evaluate_all(
        """all => all.map((row) => {
          const [track, fill] = ['.track', '.fill'].map((name) => row.querySelector(name).getBoundingClientRect());
          return [row.closest('table').caption.textContent, Number(row.querySelector('td .number').value),
            track.left + track.width / 2, track.width / 2, fill.left, fill.right];
        })"""
    )
    largest = {chart: max(abs(row[1]) for row in rows if row[0] == chart) for chart in {row[0] for row in rows}}
    assert len(largest) == 4
    for chart, value, middle, half, left, right in rows:
        end, other = (left, right) if value < 0 else (right, left)
        assert other == pytest.approx(middle, abs=0.5)
        assert abs(end - middle) == pytest.approx(max(half * abs(value) / largest[chart], 1), abs=0.6)
    dots = page.locator(".chart .dot").evaluate_all(
        "all => all.map((dot) => [+dot.getAttribute('cx'), +dot.getAttribute('cy'), dot.textContent])"
    )
    running, ends = view_of(content, state)[0]["running"], [0] + [last for _, last in content["ranges"]]
    titles = [f"after {end} steps: {exact_text(content, value)}" for end, value in zip(ends, running, strict=True)]
    assert [dot[2] for dot in dots] == titles
    for column, numbers in ((0, ends), (1, running)):
        places = [dot[column] for dot in dots]
        scale = (places[-1] - places[0]) / (numbers[-1] - numbers[0])
        assert scale * (1 - 2 * column) > 0
        assert places == pytest.approx([places[0] + scale * (n - numbers[0]) for n in numbers], abs=1e-6)


def check_cells(shown, cells):
    for text, cell in zip(shown, cells, strict=True):
        value, half = (text, 0) if isinstance(cell, str) else read(text)
        assert value == (cell if isinstance(cell, str) else pytest.approx(cell, abs=half))


def test_the_overview_shows_its_content(open_report, content):
    """Two figures that used the same names would take each other's clipping."""
    page, overview = open_report(content, "#view=overview"), content["overview"]
    assert text(page, "[data-source='overview.accuracy']") == f"{100 * overview['accuracy']:.1f}\u202f%"
    assert text(page, "[data-source='overview.count']") == str(overview["count"])
    for part in ("suspects", "datamodel"):
        for row, cells in zip(page.locator(f".{part} tbody tr").all(), overview[part]["rows"], strict=True):
            check_cells(row.locator("td").all_inner_texts(), cells[1:])
    assert page.locator(".figure svg").count() == len(overview["figures"])
    page.locator("summary", has_text="Table of these numbers").first.click()
    row = page.locator("details table tbody tr >> nth=0")
    row.wait_for()
    check_cells(row.locator("th, td").all_inner_texts(), overview["figures"][0]["table"]["rows"][0])
    names = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(names) == len(set(names))
    clips = page.evaluate("[...document.querySelectorAll('[clip-path]')].map((e) => e.getAttribute('clip-path'))")
    assert {clip.split("#")[1].rstrip(")") for clip in clips} <= set(names)
    assert clips


def test_certificate_and_card_are_shown_and_what_is_not_certified_is_marked_in_every_view(
    open_report, content, pictures
):
    page = open_report(content, "#view=run")
    assert text(page, "#badge") == "✓ Certified"
    shown = text(page, "#run")
    for rows in [content["certificate"]["rows"], *(card["rows"] for card in content["card"])]:
        assert all(cell in shown for row in rows for cell in row)
    assert all(sentence in shown for sentence in content["certificate"]["sentences"])
    page = open_report(pictures)
    assert text(page, "#badge") == "✗ Not certified"
    assert "not certified" in text(page, "#notices")
    page.get_by_role("link", name="What that means").click()
    assert page.evaluate(FOCUS) == "main"
    assert text(page, "#certificate h3") == "✗ Not certified"


def test_a_point_of_the_plane_stands_among_the_samples_that_moved_it(open_report, content):
    page = open_report(content, "#point=1")
    view = view_of(content, (1, page.input_value("#class"), "*", "*"))[1]
    counts = [page.locator(f".input-card path.{mark}").count() for mark in ("cross", "raises", "lowers")]
    assert counts == [1, len(view["raised"]), len(view["lowered"])]


def test_a_report_that_knows_nothing_of_the_whole_says_so(open_report, tmp_path):
    trajectory, X, _ = report_case("regression")
    page = open_report(written(tmp_path, trajectory, X, explained=1), "#view=overview")
    assert "This report has no numbers of the whole." in text(page, "#overview")


@pytest.mark.parametrize("policy", ["Content-Security-Policy", "No-Policy"])
def test_a_report_that_asks_for_something_is_noticed(open_report, pictures, policy):
    """The negative control: the policy blocks it, and without a policy it is a request."""
    image = '<img src="http://127.0.0.1:9/a.png" alt=""><noscript>'

    def change(document):
        return document.replace("Content-Security-Policy", policy).replace("<noscript>", image, 1)

    open_report(pictures, change=change).wait_for_load_state()
    fault = "request of http://127.0.0.1:9/a.png" if policy == "No-Policy" else "Content Security Policy"
    assert any(fault in found for found in open_report.faults)
    open_report.faults.clear()


def test_hostile_texts_are_shown_as_texts(open_report, pictures):
    """A figure's own event handler is blocked by the policy, which is all that the browser complains of."""
    hostile, content = "</script><img src=x onerror=alert(1)><b>name</b>", copy.deepcopy(pictures)
    content["title"] = content["points"][0]["name"] = content["layers"][0] = hostile
    content["outputs"]["classes"] = [f"{number}{hostile}" for number in range(3)]
    figure = content["overview"]["figures"][0]
    figure["svg"] = figure["svg"].replace(
        "</svg>",
        '<script>alert(2)</script><image href="https://example.org/x.png" onload="alert(3)"/>'
        '<a href="javascript:alert(4)"><text>away</text></a></svg>',
    )
    page = open_report(content)
    assert text(page, "h1") == text(page, "#point-title") == hostile
    go(page, "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])
    assert not page.locator(".figure :is(script, a, [href^=http], [onload])").count()
    assert all("inline event handler violates the following Content Security" in fault for fault in open_report.faults)
    open_report.faults.clear()


def test_every_view_has_a_link(open_report, content):
    page = open_report(content)
    target = sorted(content["points"][3]["explanations"], key=int)[-1]
    page.locator("#points [data-point='3']").click()
    page.select_option("#class", target)
    page.select_option("#layer", "2")
    assert fragment(page) == f"#point=3&class={target}&layer=2"
    page.select_option("#layer", "*")
    page.select_option("#steps", "1")
    link, shown = f"#point=3&class={target}&steps=1", text(page, "#shown")
    page.reload()
    assert (fragment(page), text(page, "#shown"), page.input_value("#steps")) == (link, shown, "1")
    page.go_back()
    page.go_back()
    assert (fragment(page), page.input_value("#layer")) == (f"#point=3&class={target}&layer=2", "2")
    page.go_forward()
    page.go_forward()
    assert text(page, "#shown") == shown
    page.click("nav a[data-view='overview']")
    assert fragment(page).startswith("#view=overview&point=3")
    page.reload()
    assert page.locator("#overview").is_visible()
    page.go_back()
    assert text(page, "#shown") == shown


def test_a_link_to_what_is_not_there_is_said(open_report, pictures):
    page = open_report(pictures)
    for link, notice in {
        "#point=99": "has no test point 99",
        "#point=0&class=77": "does not explain 77",
        "#layer=9": "has no layer 9",
        "#steps=x": "has no range of steps x",
        "#layer=1&steps=1": "does not hold layer 3 (Linear) with step 1 alone",
    }.items():
        go(page, link)
        assert notice in text(page, "#notices")
        assert page.locator("#sum").get_attribute("data-agrees") == "true"
    go(page, "#layer=1")
    page.select_option("#steps", "2")  # a layer and steps that are not stored together replace each other
    assert (page.input_value("#layer"), page.input_value("#steps")) == ("*", "2")


def test_points_are_searched_and_sorted(open_report, content):
    page, points = open_report(content), content["points"]

    def listed():
        return page.locator("#points .point-name").all_inner_texts()

    assert listed() == [point["name"] for point in points[:40]]
    page.click("#more")
    assert len(listed()) == 60
    page.fill("#find", "wrong")
    wrong = [point for point in points if point["label"] != point["predicted"]]
    assert 0 < len(wrong) < 40
    assert listed() == [point["name"] for point in wrong]
    assert text(page, "#matches") == text(page, "#announcer") == f"{len(wrong)} of 60 test points"
    page.select_option("#sort", label="entropy, highest first")
    by_entropy = [point["name"] for point in sorted(wrong, key=lambda point: -point["scores"][2][1])]
    assert listed() == by_entropy
    page.reload()
    assert listed() == by_entropy
    page.click("#points a >> nth=1")
    page.click("#next")
    assert text(page, "#point-title") == by_entropy[2]
    page.click("#down")
    assert listed() == by_entropy[::-1]
    page.fill("#find", "no such point")
    assert listed() == []
    page.fill("#find", "label class b,")
    page.select_option("#sort", "name")
    assert listed() == [point["name"] for point in points[::-1] if point["label"] == 1]
    page.fill("#find", "point wrong")  # words that do not stand together
    assert sorted(listed()) == sorted(by_entropy)


def test_the_left_and_right_arrow_keys_show_the_neighbouring_points(open_report, content):
    """In the order of the list, to its ends; and not where they mean something else."""
    page, names = open_report(content), [point["name"] for point in content["points"]]
    for place, keys, number in (
        (None, ["ArrowLeft"], 0),
        (None, ["ArrowRight"] * 3, 3),
        ("#points a[aria-current]", ["ArrowLeft"], 2),
        ("#explanation summary >> nth=0", ["ArrowRight"], 3),
        ("#main", ["Shift+ArrowRight", "Control+ArrowRight", "Alt+ArrowUp"], 3),
        ("#find", ["e", "ArrowLeft", "t"], 3),
        ("#steps", ["ArrowRight"], 3),
    ):
        if place is not None:
            page.locator(place).focus()
        press(page, *keys)
        assert text(page, "#point-title") == names[number], place
    assert page.input_value("#find") == "te"


def test_the_keyboard_reaches_everything(open_report, content):
    page = open_report(content, viewport={"width": 400, "height": 800})
    page.locator(".chooser-body").evaluate("(details) => { details.open = true; }")
    name, reached = "e.id || e.dataset.view || e.dataset.key || e.className || e.tagName", []
    while len(reached) < 80:
        press(page, "Tab")
        reached.append(page.evaluate(f"(e => {name})({ACTIVE})"))
        assert page.evaluate(f"(e => e.tagName === 'BODY' || getComputedStyle(e).outlineStyle !== 'none')({ACTIVE})")
    assert reached[0] == "skip"
    assert set(reached) >= {
        "badge", "prediction", "overview", "run", "digits", "theme", "find", "sort", "down", "point 0", "more", "next",
        "class", "layer", "steps", "layer 1", "SUMMARY",
    }  # fmt: skip


def test_the_keyboard_changes_everything(open_report, content):
    page, names = open_report(content), [point["name"] for point in content["points"]]
    press(page, "Tab", "Enter")
    assert (page.evaluate(FOCUS), fragment(page)) == ("main", "")
    page.focus("#points a[tabindex='0']")
    press(page, "ArrowDown", "ArrowDown", "ArrowUp", "End", "Home", "ArrowDown", "Enter")
    assert text(page, "#point-title") == names[1]
    assert page.evaluate(f"{ACTIVE}.dataset.key") == "point 1"
    for control in ("layer", "steps"):
        page.focus(f"#{control}")
        press(page, "ArrowDown")
        assert (page.evaluate(FOCUS), page.input_value(f"#{control}")) == (control, "0")
    page.focus("#next")
    press(page, "Enter")
    assert text(page, "#point-title") == names[2]
    page.focus("#digits")
    press(page, "Space")
    assert page.locator("#digits").get_attribute("aria-pressed") == "true"


def test_changes_are_announced_and_only_what_is_visible_is_made(open_report, content):
    page = open_report(content)
    assert page.locator("#overview > *, #run > *").count() == 2  # their headings
    page.select_option("#layer", "1")
    assert f"layer {content['layers'][1]}, all steps. Sum" in text(page, "#announcer")
    assert text(page, "#announcer").endswith("equal to the stored value.")


def test_the_map_follows_pointer_and_arrow_keys(open_report, content):
    page = open_report(content, "#view=overview", viewport={"width": 1280, "height": 1200})
    given, panel = content["overview"]["map"], page.locator(".map-panel")
    (ny, nx), (my, mx) = given["shape"], given["coarse"]
    box = page.locator("#map").bounding_box()

    def check(row, column):
        cell = row * nx + column
        assert panel.locator("strong").inner_text() == content["outputs"]["classes"][given["predicted"][cell]]
        assert float(panel.locator(".number").first.get_attribute("value")) == given["wrong"][cell]
        coarse = min(my - 1, row * my // (ny - 1)) * mx + min(mx - 1, column * mx // (nx - 1))
        behind = [int(value) for value in panel.locator("li .sample-number .number").all_inner_texts()]
        assert behind == given["behind"][coarse]
        assert page.locator("#map .behind").count() == len(behind)

    for row, column in ((0, 0), (ny - 1, nx - 1), (5, 14), (12, 3)):
        shares = min(max(column / (nx - 1), 0.001), 0.999), min(max(1 - row / (ny - 1), 0.001), 0.999)
        page.mouse.move(box["x"] + shares[0] * box["width"], box["y"] + shares[1] * box["height"])
        check(row, column)
    page.locator("#map").focus()
    press(page, "ArrowUp", "ArrowRight")
    check(13, 4)
    press(page, "Home", "PageDown", "ArrowLeft")
    check(0, 0)


def test_a_map_of_categories_says_their_names_and_both_scores(open_report, tmp_path):
    run, X, y = report_case("momentum")
    more = torch.cat([X, X + 0.1, X - 0.1])
    model = epk.UncertainClassifier(run, nodes=2).fit(more, y.repeat(3))
    kinds = {4: {float(value): f"kind {k}" for k, value in enumerate(run.inputs[:, 4].sort().values)}}
    m = uncertainty_on_plane(model, column_plane(model, 0, 4, categories=kinds), size=7, num_samples=4)
    made = written(tmp_path, run, X, y, explained=1, posterior=model, uncertainty_map=m)
    page = open_report(made, "#view=overview", viewport={"width": 1280, "height": 1400})
    box, panel, given = page.locator("#map").bounding_box(), page.locator(".map-panel"), made["overview"]["map"]
    for row, column in ((0, 0), (5, 3), (11, 6)):
        left, down = min(max(column / 6, 0.001), 0.999), 1 - (row + 0.5) / 12
        page.mouse.move(box["x"] + left * box["width"], box["y"] + down * box["height"])
        said, cell = panel.inner_text(), 7 * row + column
        assert f"column 4 kind {row}\n" in said
        assert f"column 0 {float(m.x[column]):.4g}".replace("-", "\u2212") in said
        shown = [float(number.get_attribute("value")) for number in panel.locator(".number").all()[:2]]
        assert shown == [given["wrong"][cell], given["far"][cell]]
        behind = [int(value) for value in panel.locator("li .sample-number .number").all_inner_texts()]
        assert behind == given["behind"][7 * row + column]


def colour(page, place="body", name="background-color"):
    return page.evaluate(f"getComputedStyle(document.querySelector('{place}')).getPropertyValue('{name}')")


def test_the_theme_follows_the_system_and_the_button(open_report, pictures):
    light = colour(open_report(pictures, color_scheme="light"))
    page = open_report(pictures, "#view=overview", color_scheme="dark")
    assert colour(page) != light
    assert colour(page, ".figure text", "fill") == colour(page, "body", "color")  # figures can be read
    page.click("#theme")
    page.reload()
    assert (colour(page), text(page, "#theme")) == (light, "Dark theme")


def test_paper_has_every_part_and_no_controls(open_report, content):
    for link, number in (("#point=2", 2), ("#view=overview&point=4", 4)):  # the prediction too from the overview
        page = open_report(content, link, color_scheme="dark")
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # as the browser's print command does
        page.emulate_media(media="print")
        assert not any(page.locator(name).is_visible() for name in (".chooser", ".controls", "nav", ".switches"))
        for name in ("#prediction", "#overview", "#run", ".suspects", ".figure svg >> nth=0", "details table >> nth=0"):
            assert page.locator(name).is_visible(), name
        assert text(page, "#point-title") == content["points"][number]["name"]
        assert page.locator("#sum").get_attribute("data-agrees") == "true"
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf())) >= 3
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert not page.locator("main details[open]:not(.chooser-body)").count()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_report, content, pictures, theme):
    for case, view in (*((content, view) for view in VIEWS), (pictures, VIEWS[0])):
        found = Axe().run(open_report(case, view, color_scheme=theme)).response
        assert len(found["passes"]) > 20
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    page = open_report(content)  # the negative control
    page.evaluate("document.querySelector('#find').previousElementSibling.remove()")
    page.evaluate("document.querySelector('#find').placeholder = ''")
    assert "label" in {one["id"] for one in Axe().run(page).response["violations"]}


def test_no_width_scrolls_sideways(open_report, content, pictures, tmp_path):
    words = written(tmp_path, *report_case("words"), explained=2)
    for case, width in ((content, 360), (pictures, 360), (words, 360), (content, 768)):
        page = open_report(case, viewport={"width": width, "height": 700})
        for view in VIEWS:
            go(page, view)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view


@pytest.mark.parametrize("name", ["momentum", "regression", "images", "batch_norm", "words"])
def test_the_report_of_a_run_shows_its_content(open_file, tmp_path, name):
    """The sums and numbers of all explained outputs and of every fourth other view of the last one, and the input."""
    trajectory, X, y = report_case(name)
    file = epk.write_report(tmp_path / "report.html", trajectory, X, y, explained=2, top=3)
    page, content = open_file(file), embedded(file)
    outputs = [(n, target) for n, point in enumerate(content["points"]) for target in point["explanations"]]
    number, target = outputs[-1]
    others = list(content["points"][number]["explanations"][target]["views"])[1::4]
    for state in [(*output, "*", "*") for output in outputs] + [(number, target, *key.split("|")) for key in others]:
        go(page, fragment_of(state))
        assert shown_sum(page)[0] == view_sum(content, state)
        assert not page.get_by_role("alert").count()
        check_numbers(page, content, state)
    card, given = page.locator(".input-card"), content["points"][number]["input"]
    if name == "images":
        assert card.locator("img").get_attribute("src") == given["image"]
        assert page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")
    elif name == "words":
        assert card.locator("blockquote").inner_text() == given["text"]
    else:
        assert card.locator("tbody tr").count() == len(given["values"])
    assert ("wrong" in text(page, "#prediction").lower()) == (name != "regression")
    go(page, "#view=run")
    assert text(page, "#all-sums").startswith("✓ All")
    assert text(page, "#certificate h3") == "✓ Certified"
    go(page, "#view=overview")
    assert page.locator(".figure svg").count() == len(content["overview"]["figures"])
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

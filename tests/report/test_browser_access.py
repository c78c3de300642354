"""Reports in a browser: links, the keyboard, search, themes, paper, narrow screens and screen readers."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe

from synthetic_content import Sizes, made_content

pytestmark = pytest.mark.slow

VIEWS = ("#point=1", "#view=overview", "#view=run")


@pytest.fixture(scope="module")
def content():
    return made_content(Sizes(kind="position", points=60, classes=5, layers=3, samples=120, pairs=False))


@pytest.fixture(scope="module")
def pictures():
    return made_content(Sizes(points=3, classes=3, samples=60))


def fragment(page):
    return page.evaluate("location.hash")


def title(page):
    return page.locator("#point-title").inner_text()


def listed(page):
    """Return the names of the listed points."""
    return page.locator("#points .point-name").all_inner_texts()


def test_every_view_has_a_link(open_report, content):
    page = open_report(content)
    assert title(page) == content["points"][0]["name"]
    page.locator("#points [data-point='3']").click()
    target = sorted(content["points"][3]["explanations"], key=int)[-1]
    page.select_option("#class", target)
    page.select_option("#layer", "2")
    assert fragment(page) == f"#point=3&class={target}&layer=2"
    page.select_option("#layer", "*")
    page.select_option("#steps", "1")
    link, text = fragment(page), page.locator("#shown").inner_text()
    assert link == f"#point=3&class={target}&steps=1"
    page.reload()
    assert (fragment(page), page.locator("#shown").inner_text()) == (link, text)
    assert page.input_value("#steps") == "1"
    page.go_back()
    page.go_back()
    assert fragment(page).endswith("layer=2")
    assert page.input_value("#layer") == "2"
    assert "layer 2" in page.locator(".part-title").inner_text()
    page.go_forward()
    page.go_forward()
    assert page.locator("#shown").inner_text() == text
    page.click("nav a[data-view='overview']")
    assert fragment(page).startswith("#view=overview&point=3")
    page.reload()
    assert page.locator("#overview").is_visible()
    page.go_back()
    assert page.locator("#shown").inner_text() == text


def test_a_link_to_what_is_not_there_is_said(open_report, content):
    for link, notice in {
        "#point=99": "has no test point 99",
        "#point=0&class=77": "does not explain 77",
        "#layer=9": "has no layer 9",
        "#steps=x": "has no range of steps x",
        "#layer=1&steps=1": "does not hold layer 1 (Linear) with steps 50–99 alone",
    }.items():
        page = open_report(content, link)
        assert notice in page.locator("#notices").inner_text()
        assert page.locator("#sum").get_attribute("data-agrees") == "true"
    page = open_report(content, "#layer=1")
    page.select_option("#steps", "2")  # a layer and steps that are not stored together replace each other
    assert (page.input_value("#layer"), page.input_value("#steps")) == ("*", "2")
    assert not page.locator("#notices .notice").count()


def test_points_are_searched_and_sorted(open_report, content):
    points = content["points"]
    page = open_report(content)
    assert listed(page) == [point["name"] for point in points[:40]]
    assert page.locator("#matches").inner_text() == "60 explained test points"
    page.click("#more")
    assert len(listed(page)) == 60
    page.fill("#find", "wrong")
    wrong = [point for point in points if point["label"] != point["predicted"]]
    assert 0 < len(wrong) < 40
    assert listed(page) == [point["name"] for point in wrong]
    assert page.locator("#matches").inner_text() == f"{len(wrong)} of 60 test points"
    page.select_option("#sort", label="entropy, highest first")
    by_entropy = sorted(wrong, key=lambda point: -point["scores"][2][1])
    assert listed(page) == [point["name"] for point in by_entropy]
    assert page.locator("#points .number").first.get_attribute("value") == str(by_entropy[0]["scores"][2][1])
    page.reload()
    assert listed(page) == [point["name"] for point in by_entropy]
    page.click("#points a >> nth=1")
    assert title(page) == by_entropy[1]["name"]
    page.click("#next")
    assert title(page) == by_entropy[2]["name"]
    page.click("#down")
    assert listed(page) == [point["name"] for point in reversed(by_entropy)]
    page.fill("#find", "no such point")
    assert listed(page) == []
    page.fill("#find", "label class b,")
    page.select_option("#sort", "name")
    named_b = [point["name"] for point in points if point["label"] == 1]
    assert listed(page) == sorted(named_b, key=lambda name: -int(name.split()[-1]))
    page.fill("#find", "sample wrong")  # words that do not stand together
    assert sorted(listed(page)) == sorted(point["name"] for point in wrong)


def test_the_left_and_right_arrow_keys_show_the_neighbouring_points(open_report, content):
    """In the order of the list, to its ends; and not where they mean something else."""
    page, names = open_report(content), [point["name"] for point in content["points"]]
    page.keyboard.press("ArrowLeft")
    assert title(page) == names[0]
    for name in names[1:4]:
        page.keyboard.press("ArrowRight")
        assert title(page) == name
    assert names[3] in page.locator("#announcer").inner_text()
    page.keyboard.press("ArrowLeft")
    assert title(page) == names[2]
    page.locator("#points a[aria-current]").focus()
    page.keyboard.press("ArrowRight")
    assert title(page) == names[3]
    assert page.evaluate("document.activeElement.dataset.point") == "3"
    page.locator("#explanation summary").first.focus()
    page.keyboard.press("ArrowRight")
    assert title(page) == names[4]
    assert page.evaluate("document.activeElement.id") == "main"
    for keys in ("Shift+ArrowRight", "Control+ArrowRight", "Alt+ArrowUp"):
        page.keyboard.press(keys)
    assert title(page) == names[4]
    page.focus("#find")
    page.keyboard.type("test")
    page.keyboard.press("ArrowLeft")
    page.keyboard.type("x")
    assert page.input_value("#find") == "tesxt"
    page.fill("#find", "")
    page.focus("#steps")
    page.keyboard.press("ArrowRight")
    assert title(page) == names[4]
    page.click("nav a[data-view=overview]")
    page.keyboard.press("ArrowRight")
    page.click("nav a[data-view=prediction]")
    assert title(page) == names[4]


def test_the_keyboard_reaches_everything(open_report, content):
    page = open_report(content, viewport={"width": 400, "height": 800})
    page.locator(".chooser-body summary").click()
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.reload()
    page.locator(".chooser-body").evaluate("(details) => { details.open = true; }")
    reached, outlines = [], []
    while True:
        page.keyboard.press("Tab")
        at = page.evaluate(
            """() => { const e = document.activeElement; const style = getComputedStyle(e);
            return e === document.body ? null : [e.id || e.dataset.view || e.dataset.key || e.className || e.tagName,
              style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2]; }"""
        )
        if at is None or len(reached) > 80:
            break
        reached.append(at[0])
        outlines.append(at[1])
    assert reached[0] == "skip"
    assert len(reached) == len(set(reached)) or reached.count("SUMMARY") > 1
    for name in ("badge", "prediction", "overview", "run", "digits", "theme", "find", "sort", "down", "point 0", "more",
                 "next", "class", "layer", "steps", "layer 1", "SUMMARY"):  # fmt: skip
        assert name in reached, f"{name} is not among {reached}"
    assert [name for name in reached if name.startswith("class ")]
    assert all(outlines)


def test_the_keyboard_changes_everything(open_report, content):
    page = open_report(content)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert fragment(page) == ""
    page.focus("#points a[tabindex='0']")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "Home", "ArrowDown"):
        page.keyboard.press(key)
    assert title(page) == content["points"][0]["name"]
    page.keyboard.press("Enter")
    assert title(page) == content["points"][1]["name"]
    assert page.evaluate("document.activeElement.dataset.key") == "point 1"
    for control, key, value in (("layer", "ArrowDown", "0"), ("layer", "ArrowDown", "1"), ("steps", "ArrowDown", "0")):
        page.focus(f"#{control}")
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == control
        assert page.input_value(f"#{control}") == value
        assert f"{control}={value}" in fragment(page)
    page.focus("#next")
    page.keyboard.press("Enter")
    assert title(page) == content["points"][2]["name"]
    assert page.evaluate("document.activeElement.id") == "next"
    page.focus("#digits")
    page.keyboard.press("Space")
    assert page.locator("#digits").get_attribute("aria-pressed") == "true"
    assert content["points"][2]["name"] in page.title()


def test_changes_are_announced_and_only_what_is_visible_is_made(open_report, content):
    page = open_report(content)
    assert page.locator("#points li").count() == 40
    assert page.locator("#overview > *, #run > *").count() == 2  # their headings
    assert page.locator("svg").count() == 2  # the plane and the curve
    announcer = page.locator("#announcer")
    assert (announcer.get_attribute("aria-live"), announcer.inner_text()) == ("polite", "")
    page.select_option("#layer", "1")
    assert "layer 1 (Linear), all steps. Sum" in announcer.inner_text()
    assert announcer.inner_text().endswith("equal to the stored value.")
    page.fill("#find", "wrong")
    assert re.fullmatch(r"\d+ of 60 test points", announcer.inner_text())
    page.click("nav a[data-view='overview']")
    assert page.locator("#overview > *").count() > 1
    assert not page.locator("#overview details table").count()


def test_the_map_follows_pointer_and_arrow_keys(open_report, content):
    page = open_report(content, "#view=overview", viewport={"width": 1280, "height": 1200})
    given = content["overview"]["map"]
    ny, nx = given["shape"]
    area, panel = page.locator("#map"), page.locator(".map-panel")
    assert panel.get_attribute("aria-live") == "polite"
    box = area.bounding_box()

    def check(row, column):
        cell = row * nx + column
        assert panel.locator("strong").inner_text() == content["outputs"]["classes"][given["predicted"][cell]]
        assert panel.locator(".number").first.get_attribute("value") == str(given["wrong"][cell])
        my, mx = given["coarse"]
        coarse = min(my - 1, row * my // (ny - 1)) * mx + min(mx - 1, column * mx // (nx - 1))
        behind = [int(value) for value in panel.locator("li .sample-number .number").all_inner_texts()]
        assert behind == given["behind"][coarse]
        assert page.locator("#map .behind").count() == len(behind)

    for row, column in ((0, 0), (ny - 1, nx - 1), (5, 20), (17, 3)):
        x = box["x"] + min(max(column / (nx - 1), 0.001), 0.999) * box["width"]
        y = box["y"] + min(max(1 - row / (ny - 1), 0.001), 0.999) * box["height"]
        page.mouse.move(x, y)
        check(row, column)
    area.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    check(18, 4)
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    page.keyboard.press("ArrowLeft")
    check(0, 0)


def brightness(page, place, name="backgroundColor"):
    """Return the mean of red, green and blue of a place, from 0 to 255."""
    colour = page.evaluate(f"getComputedStyle(document.querySelector('{place}')).{name}")
    return sum(float(value) for value in re.findall(r"[\d.]+", colour)[:3]) / 3


def test_the_theme_follows_the_system_and_the_button_and_all_can_be_read(open_report, content):
    assert brightness(open_report(content, color_scheme="light"), "body") > 200
    page = open_report(content, "#view=overview", color_scheme="dark")
    assert brightness(page, "body") < 50
    assert brightness(page, ".figure text", "fill") > 200
    page.click("#theme")
    assert brightness(page, "body") > 200
    assert page.locator("#theme").inner_text() == "Dark theme"
    page.reload()
    assert brightness(page, "body") > 200
    page = open_report(content)
    page.click("#digits")  # pressed, and under the pointer
    assert abs(brightness(page, "#digits", "color") - brightness(page, "#digits")) > 150


def test_paper_has_every_part_and_no_controls(open_report, content):
    page = open_report(content, "#point=2", color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # as the browser's print command does
    page.emulate_media(media="print")
    for name in (".chooser", ".controls", "nav", ".switches"):
        assert not page.locator(name).is_visible()
    for name in ("#prediction", "#overview", "#run", ".suspects", ".figure svg >> nth=0", "details table >> nth=0"):
        assert page.locator(name).is_visible(), name
    assert title(page) == content["points"][2]["name"]
    assert brightness(page, "body") > 200
    pdf = page.pdf()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 3
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert not page.locator("main details[open]:not(.chooser-body)").count()
    page = open_report(content, "#view=overview&point=4")  # the prediction too where the overview is shown
    assert not page.locator("#sum").count()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert title(page) == content["points"][4]["name"]
    assert page.locator("#sum").get_attribute("data-agrees") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_report, content, pictures, theme):
    uncertified = {**pictures, "certificate": {**pictures["certificate"], "certified": False}}
    for case, view in (*((content, view) for view in VIEWS), (uncertified, VIEWS[0])):
        page = open_report(case, view, color_scheme=theme)
        found = Axe().run(page).response
        assert len(found["passes"]) > 20
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    page = open_report(content)  # the negative control
    page.evaluate("document.querySelector('#find').previousElementSibling.remove()")
    page.evaluate("document.querySelector('#find').placeholder = ''")
    assert "label" in {one["id"] for one in Axe().run(page).response["violations"]}


def test_no_width_scrolls_sideways(open_report, content, pictures):
    text = made_content(Sizes(kind="text", points=2, samples=60))
    for case, width in ((content, 360), (pictures, 360), (text, 360), (content, 768)):
        page = open_report(case, viewport={"width": width, "height": 700})
        for view in VIEWS:
            page.goto(page.url.split("#")[0] + view)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view


def test_a_faint_motion_is_left_out_where_it_is_not_wanted(open_report, content):
    duration = "getComputedStyle(document.querySelector('.fill')).transitionDuration"
    assert open_report(content, reduced_motion="reduce").evaluate(duration) == "0s"
    assert open_report(content, reduced_motion="no-preference").evaluate(duration) != "0s"

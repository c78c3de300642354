"""Texts in a browser: their words, shaded by their shares, and the sums of these."""

import copy

import pytest
from axe_playwright_python.sync_playwright import Axe

import epk_gp as epk
from report_cases import ALPHABET, letters_run, written
from shown_numbers import check_numbers, go

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of which the log-probability of every word is explained."""
    run, X, y = letters_run()
    asked = {"function": epk.RowFunction.log_probability(y), "tokenizer": ALPHABET, "top": 3}
    return written(tmp_path_factory.mktemp("texts"), run, X, **asked)


def text(page, place):
    return page.locator(place).inner_text()


def shaded(page, place, words, shares):
    """Check that words are shown, shaded by their shares, and return the colours of those that raised and lowered."""
    shown = page.locator(f"{place} .word").evaluate_all(
        "all => all.map((e) => [e.textContent, e.title, parseFloat(e.style.getPropertyValue('--strength') || 0),"
        "e.classList.contains('lowers'), getComputedStyle(e).backgroundColor])"
    )
    assert [row[0] for row in shown] == [word.replace("\n", "↵\n") for word in words]
    largest = max(abs(share or 0) for share in shares)
    for (_, title, strength, lowers, colour), share in zip(shown, shares, strict=True):
        assert (title == "") == (share is None)
        assert strength == pytest.approx(45 * abs(share or 0) / largest, abs=0.06)
        assert lowers == ((share or 0) < 0)
        assert (colour == "rgba(0, 0, 0, 0)") == (not share)


def test_texts_are_shown_with_their_words_shaded_by_their_shares(open_report, texts):
    page = open_report(texts)
    for number, point in enumerate(texts["points"]):
        go(page, f"#point={number}")
        (explanation,) = point["explanations"].values()
        shaded(page, ".text-card .passage", point["input"]["words"], explanation["words"]["shares"])
        view, rows = explanation["views"]["*|*"], page.locator(".passage-row")
        for k, (index, _, _) in enumerate(view["lowered"] + view["raised"]):
            words, part = texts["samples"]["shown"][str(index)]["words"], explanation["tokens"][str(index)]
            shaded(page, f".passage-row >> nth={k} >>", words, part["shares"])
        assert rows.count() == k + 1
        page.locator("summary", has_text="What training changed, by words").click()
        page.locator(".text-card table").wait_for()
        sources = check_numbers(page, texts, (number, 0, "*", "*"))
        words = {k for k, share in enumerate(explanation["words"]["shares"]) if share}
        assert {f"points.{number}.explanations.0.words.shares.{k}" for k in words} <= sources
        assert "before training" in text(page, ".headline")
    go(page, "#view=run")
    assert text(page, "#all-sums").startswith(f"✓ All {sum(map(number_of_sums, texts['points']))} ")


def number_of_sums(point):
    (explanation,) = point["explanations"].values()
    return 2 + len(explanation["views"]) + len(explanation["tokens"])


def test_shares_of_words_that_are_wrong_by_one_unit_are_an_error(open_report, texts):
    """The negative control."""
    for change in ("shares", "rest"):
        changed = copy.deepcopy(texts)
        part = changed["points"][0]["explanations"]["0"]["words"]
        if change == "rest":
            part["rest"] += 1
        else:
            part["shares"][1] += 1
        page = open_report(changed)
        assert "The shares of the words do not add up." in text(page, ".text-card [role=alert]")
        go(page, "#view=run")
        assert text(page, "#all-sums").startswith("✗ 1 of ")
    changed = copy.deepcopy(texts)
    next(iter(changed["points"][0]["explanations"]["0"]["tokens"].values()))["rest"] -= 1
    assert "The shares of the words do not add up." in text(open_report(changed), ".passage-row [role=alert]")


ODD = ["", " ", "\t", "\u202eback", "<b>bold</b>", "&amp;", "x" * 300, "שלום ", "עולם", "é🙂", "\u0007", "\r"]


def test_odd_words_are_shown_and_stay_words(open_report, texts):
    content = copy.deepcopy(texts)
    point = content["points"][0]
    point["input"]["words"], shares = ODD, [(-1) ** k * (20 - k) for k in range(len(ODD))]
    explanation = point["explanations"]["0"]
    whole = explanation["network"] - explanation["initial"]
    explanation["words"] = {"shares": shares, "rest": whole - sum(shares)}
    page = open_report(content, viewport={"width": 360, "height": 700})
    shown = page.locator(".text-card .passage .word").all_text_contents()
    assert shown == ["∅", " ", "⇥\t", "\\u202eback", *ODD[4:10], "\\u0007", "\\u000d"]
    assert not page.locator("#shown b").count()
    page.locator("summary", has_text="What training changed, by words").click()
    page.locator(".text-card table").wait_for()
    names = page.locator(".text-card .word-name").all_text_contents()
    assert names[:4] == ["∅", "␣", "⇥", "\\u202eback"]
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert not page.get_by_role("alert").count()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_texts(open_report, texts, theme):
    for options in ({}, {"viewport": {"width": 390, "height": 800}}):
        page = open_report(texts, color_scheme=theme, **options)
        for summary in page.locator("#shown summary").all():
            summary.click()
        page.locator(".text-card table").wait_for()
        found = Axe().run(page).response
        assert len(found["passes"]) > 20
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

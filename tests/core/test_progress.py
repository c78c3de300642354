"""Progress of long calls: tqdm's bars where a person sees them, and one warning of a call that shows none."""

import io
import re
import warnings
from pathlib import Path

import pytest

import epk_gp
from epk_gp.core.show import SlowCallWarning, tracked
from epk_gp.work.run import Advice, SlowCallNotice, progress_bar
from helpers import Terminal

ROOT = Path(epk_gp.__file__).parent


def test_a_bar_counts_the_items_with_rate_and_remaining_time(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(tracked(iter("abc"), "parts", total=3, unit="part")) == ["a", "b", "c"]
    shown = terminal.getvalue()
    assert all(text in shown for text in ("parts: 100%", "3/3 [", "part/s]"))
    with progress_bar(10, "steps", initial=7) as bar:
        bar.update(2)
        assert bar.n == 9
    assert "9/10" in terminal.getvalue()


def test_nothing_is_written_unless_progress_is_wanted_and_a_person_sees_it(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(tracked(range(20), "parts", shown=False)) == list(range(20))
    assert terminal.getvalue() == ""
    for stream in (io.StringIO(), None):  # as of a file or a pipe, and of a process without an error stream
        monkeypatch.setattr("sys.stderr", stream)
        assert list(tracked(range(3), "parts")) == [0, 1, 2]
        assert stream is None or stream.getvalue() == ""


@pytest.mark.slow
@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_has_a_widget_and_without_ipywidgets_text_and_no_warning(has_widgets):
    pytest.importorskip("ipywidgets", reason="comes with the development tools")
    client = pytest.importorskip("jupyter_client", reason="comes with the development tools")
    hide = "" if has_widgets else "sys.modules['ipywidgets'] = None;"
    code = f"import sys, warnings; {hide} warnings.simplefilter('error')\n"
    code += "from epk_gp.core.show import tracked\nfor _ in tracked(range(3), 'parts', shown=True): pass"
    found = []
    with client.run_kernel() as kernel:
        kernel.execute_interactive(code, timeout=120, output_hook=found.append)
    content = {message["msg_type"]: message["content"] for message in found}
    assert "error" not in content
    if has_widgets:
        assert "application/vnd.jupyter.widget-view+json" in content["display_data"]["data"]
        assert "stream" not in content
    else:
        assert "display_data" not in content
        texts = [message["content"] for message in found if message["msg_type"] == "stream"]
        assert {text["name"] for text in texts} == {"stderr"}
        assert "parts: 100%" in "".join(text["text"] for text in texts)
        assert "Warning" not in "".join(text["text"] for text in texts)


def test_every_bar_of_the_package_is_made_here():
    importing = re.compile(r"^ *(import|from) tqdm\b", re.MULTILINE)
    users = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if importing.search(file.read_text())}
    assert users == {"core/show.py", "work/run.py"}  # the latter makes none


def said_of(total, seconds_each, *, first=0.0, trainings=None):
    """What a call without a bar says, with the number of the item after which it says so."""
    now, said = [0.0], []
    bar = SlowCallNotice(total, "attribution", Advice("do less", trainings), clock=lambda: now[0])
    for done in range(1, total + 1):
        now[0] += seconds_each + (first if done == 1 else 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bar.update()
        said += [(done, warning.category, str(warning.message)) for warning in caught]
    return said


def test_a_quiet_call_that_will_be_long_says_so_once_after_three_seconds():
    for call, place, minutes in (((400, 0.6), 5, 4.0), ((10, 5), 2, 0.8)):
        message = f"the attribution will take about {minutes} minutes: do less."
        assert said_of(*call) == [(place, SlowCallWarning, message)]
    assert said_of(10, 5, first=30)[0][2] == "the attribution will take about 1.3 minutes: do less."


def test_a_long_call_says_how_many_trainings_an_output_costs_and_above_two_also_when_it_is_nearly_done():
    costs = "minutes, {} times a replay of the training for each output: do less."
    for replay, trainings in ((0.5, "480"), (33.0, "7.3"), (480.0, "0.5")):
        ((place, _, message),) = said_of(400, 0.6, trainings=lambda seconds, one=replay: seconds / one)
        assert (place, message) == (5, f"the attribution will take about 4.0 {costs.format(trainings)}")
    for replay, places in ((18.9, [2]), (19.0, []), (40.0, [])):  # 38 seconds, of which 4 are still to come
        said = said_of(3, 4, first=26, trainings=lambda seconds, one=replay: seconds / one)
        assert [place for place, *_ in said] == places
    assert said_of(3, 4, first=2, trainings=lambda _: 9.0) == []


@pytest.mark.parametrize(
    ("total", "seconds_each", "first"),
    [(400, 0.07, 0), (1, 300, 0), (3, 4, 30), (100_000, 2e-5, 0), (100, 0.02, 2.9)],
    ids=["28 seconds", "one item, which is done", "nearly done", "many quick items", "a slow start"],
)
def test_a_call_that_is_not_long_or_is_nearly_done_says_nothing(total, seconds_each, first):
    assert said_of(total, seconds_each, first=first) == []


def test_a_call_says_nothing_of_its_length_where_it_shows_a_bar_or_has_no_advice():
    shown = [(False, Advice("do less")), (True, Advice("do less")), (False, None)]
    bars = [progress_bar(9, "attribution", shown=is_shown, advice=advice) for is_shown, advice in shown]
    assert [isinstance(bar, SlowCallNotice) for bar in bars] == [True, False, False]

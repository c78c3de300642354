"""Progress of long calls: tqdm's bars, and one warning of a call that shows none."""

import re
import warnings
from pathlib import Path

import pytest

import epk_gp
from epk_gp.core.show import SlowCallWarning, tracked
from epk_gp.work.run import Advice, SlowCallNotice, progress_bar

ROOT = Path(epk_gp.__file__).parent


def test_a_bar_counts_the_items_with_rate_and_remaining_time(capsys):
    assert list(tracked(iter("abc"), "parts", total=3, unit="part")) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("parts: 100%", "3/3 [", "part/s]"))
    with progress_bar(10, "steps", initial=7) as bar:
        bar.update(2)
        assert bar.n == 9
    assert "9/10" in capsys.readouterr().err


def test_nothing_is_written_where_progress_is_not_shown_or_there_is_no_error_stream(capsys, monkeypatch):
    assert list(tracked(range(20), "parts", shown=False)) == list(range(20))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", None)
    assert list(tracked(range(3), "parts")) == [0, 1, 2]


def test_every_bar_of_the_package_is_made_here():
    importing = re.compile(r"^ *(import|from) tqdm\b", re.MULTILINE)
    users = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if importing.search(file.read_text())}
    assert users == {"core/show.py", "work/run.py", "cli/gram.py"}  # the last takes the format of sizes alone


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

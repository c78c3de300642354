"""Progress of long calls, on a terminal, in a log and in a notebook."""

import ast
import io
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm.std import tqdm as std_tqdm

import epk_gp
from epk_gp.core import show as progress
from epk_gp.core.show import LogLines, SlowCallNotice, SlowCallWarning, progress_bar, tracked

ROOT = Path(epk_gp.__file__).parent


class Stream(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.fixture
def log(monkeypatch):
    stream = Stream(is_terminal=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest sets that of `sys` itself
    return stream


@pytest.fixture
def terminal(monkeypatch):
    stream = Stream(is_terminal=True)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest sets that of `sys` itself
    return stream


def lines_of(total, seconds_each, **options):
    """The lines of a call whose items take some time each, by a clock of its own."""
    stream, now = io.StringIO(), [0.0]
    with LogLines(total, "training", unit="step", file=stream, clock=lambda: now[0], **options) as bar:
        for _ in range(total - options.get("initial", 0)):
            now[0] += seconds_each
            bar.update()
    return stream.getvalue().splitlines()


def test_a_log_has_a_line_for_each_tenth_with_rate_and_remaining_time():
    lines = lines_of(720, 0.5)
    assert len(lines) == 10
    assert lines[0] == "training: 10 %, 72 of 720, 2 step/s, 05:24 left"
    assert lines[-1] == "training: 100 %, 720 of 720, 2 step/s, took 06:00"


def test_slow_items_have_their_seconds_and_fewer_than_ten_have_a_line_each():
    lines = lines_of(3, 20.0)
    assert lines[0] == "training: 33 %, 1 of 3, 20 s/step, 00:40 left"
    assert len(lines) == 3


def test_a_resumed_call_counts_from_where_it_began():
    lines = lines_of(100, 1.0, initial=50)
    assert lines[0] == "training: 60 %, 60 of 100, 1 step/s, 00:40 left"
    assert len(lines) == 5


def test_a_call_of_less_than_a_second_writes_its_last_line_only():
    assert lines_of(100, 0.001) == ["training: 100 %, 100 of 100, 1e+03 step/s, took 00:00"]


def test_steps_of_several_items_write_one_line_for_the_tenths_they_pass():
    stream, now = io.StringIO(), [0.0]
    with LogLines(10, "points", file=stream, clock=lambda: now[0]) as bar:
        now[0] = 2.0
        bar.update(4)
        bar.update(0)
        bar.update(6)
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == ["points: 40 %", "points: 100 %"]


def test_an_interrupted_call_writes_nothing_more(log):
    items = tracked(range(10), "steps")
    next(items)
    with pytest.raises(KeyboardInterrupt):
        items.throw(KeyboardInterrupt)
    bar = progress_bar(10, "steps")
    bar.close()
    bar.update(10)
    assert log.getvalue() == ""


def test_the_error_stream_decides_between_lines_and_a_bar(log):
    assert list(tracked("abc", "parts", unit="part")) == ["a", "b", "c"]
    assert log.getvalue().startswith("parts: 100 %, 3 of 3")
    assert "\r" not in log.getvalue()


def test_a_terminal_shows_a_bar_with_rate_and_remaining_time(terminal):
    assert list(tracked(iter("abc"), "parts", total=3, unit="part")) == ["a", "b", "c"]
    assert "\rparts: 100%" in terminal.getvalue()
    assert "part/s]" in terminal.getvalue()
    assert "<" in terminal.getvalue()  # elapsed < remaining


def test_a_pseudo_terminal_of_no_columns_shows_a_bar_too(monkeypatch):
    """tqdm's own bar is empty there."""
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    with open(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert os.get_terminal_size(follower).columns == 0
        list(tracked(range(3), "parts", unit="part"))
        stream.write("end")
        stream.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(leader, 4096).decode(errors="ignore")
    os.close(leader)
    assert "parts: 100%" in shown


@pytest.mark.parametrize("stream", ["log", "terminal"])
def test_nothing_is_written_where_progress_is_not_shown(stream, request):
    written = request.getfixturevalue(stream)
    assert list(tracked(range(20), "parts", shown=False)) == list(range(20))
    assert written.getvalue() == ""


def test_without_an_error_stream_there_is_no_progress(monkeypatch):
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    assert list(tracked(range(3), "parts")) == [0, 1, 2]


def test_a_notebook_gets_its_own_bar_though_its_error_stream_is_no_terminal(log, monkeypatch):
    made = []

    class tqdm_notebook(std_tqdm):  # named as tqdm's: by this it is told
        def __init__(self, *args, **options):
            made.append(options["desc"])
            super().__init__(*args, **options, file=io.StringIO())

    monkeypatch.setattr(progress, "auto_tqdm", tqdm_notebook)
    assert list(tracked(range(3), "parts")) == [0, 1, 2]
    assert made == ["parts"]
    assert log.getvalue() == ""


def test_tqdm_calls_its_notebook_bar_by_this_name():
    notebook = pytest.importorskip("tqdm.notebook")
    assert notebook.tqdm_notebook.__name__ == "tqdm_notebook"


def test_a_written_line_stands_on_a_line_of_its_own(log):
    progress.write_line("the scheduler has no workers")
    assert log.getvalue() == "the scheduler has no workers\n"


def test_every_bar_of_the_package_is_made_here():
    users = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            users |= {file.relative_to(ROOT).as_posix() for name in names if name.split(".")[0] == "tqdm"}
    assert users == {"core/show.py"}


def said_of(total, seconds_each, *, first=0.0):
    """What a call without a bar says, with the number of the item after which it says so."""
    now, said = [0.0], []
    bar = SlowCallNotice(total, "attribution", "do less", clock=lambda: now[0])
    for done in range(1, total + 1):
        now[0] += seconds_each + (first if done == 1 else 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bar.update()
        said += [(done, warning.category, str(warning.message)) for warning in caught]
    return said


def test_a_quiet_call_that_will_be_long_says_so_once_after_three_seconds():
    assert said_of(400, 0.6) == [(5, SlowCallWarning, "the attribution will take about 4 minutes: do less.")]
    assert said_of(10, 5) == [(2, SlowCallWarning, "the attribution will take about 50 seconds: do less.")]
    assert said_of(10, 5, first=30) == [(2, SlowCallWarning, "the attribution will take about 80 seconds: do less.")]
    assert said_of(30_000, 0.5)[0][2] == "the attribution will take about 4 hours: do less."


@pytest.mark.parametrize(
    ("total", "seconds_each", "first"),
    [(400, 0.07, 0), (1, 300, 0), (3, 4, 30), (100_000, 2e-5, 0), (100, 0.02, 2.9)],
    ids=["28 seconds", "one item, which is done", "nearly done", "many quick items", "a slow start"],
)
def test_a_call_that_is_not_long_or_is_nearly_done_says_nothing(total, seconds_each, first):
    assert said_of(total, seconds_each, first=first) == []


def test_a_call_says_nothing_of_its_length_where_it_shows_a_bar_or_has_no_advice():
    assert isinstance(progress_bar(9, "attribution", shown=False, advice="do less"), SlowCallNotice)
    assert not isinstance(progress_bar(9, "attribution", shown=True, advice="do less"), SlowCallNotice)
    assert not isinstance(progress_bar(9, "attribution", shown=False), SlowCallNotice)

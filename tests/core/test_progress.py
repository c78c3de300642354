"""Progress of long calls: tqdm's bars."""

import re
from pathlib import Path

import epk_gp
from epk_gp.core.show import tracked
from epk_gp.work.run import progress_bar

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
    assert users == {"core/show.py", "work/run.py"}

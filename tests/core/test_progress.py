"""Progress of long calls: tqdm's bars where a person sees them."""

import io
import re
from pathlib import Path

import pytest

import epk_gp
from epk_gp.core.show import new_bar, tracked
from helpers import Terminal

ROOT = Path(epk_gp.__file__).parent


def test_a_bar_counts_the_items_with_rate_and_remaining_time(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert list(tracked(iter("abc"), "parts", total=3, unit="part")) == ["a", "b", "c"]
    shown = terminal.getvalue()
    assert all(text in shown for text in ("parts: 100%", "3/3 [", "part/s]"))
    with new_bar(None, "steps", shown=True, total=10, initial=7) as bar:
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
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    assert list(tracked(range(3), "parts")) == [0, 1, 2]


@pytest.mark.slow
def test_a_notebook_has_a_widget_and_without_ipywidgets_text_and_no_warning():
    pytest.importorskip("ipywidgets", reason="comes with the development tools")
    client, found = pytest.importorskip("jupyter_client", reason="comes with the development tools"), []
    code = "import sys, warnings\nwarnings.simplefilter('error')\nfrom epk_gp.core.show import tracked"
    bar = "for _ in tracked(range(3), 'parts', shown=True): pass"
    with client.run_kernel() as kernel:
        for text in (f"{code}\n{bar}", f"sys.modules['ipywidgets'] = None\n{bar}"):
            found.append([])
            kernel.execute_interactive(text, timeout=120, output_hook=found[-1].append)
    widget, plain = ([(message["msg_type"], message["content"]) for message in own] for own in found)
    assert "application/vnd.jupyter.widget-view+json" in dict(widget)["display_data"]["data"]
    assert not {"error", "stream"} & dict(widget).keys()
    assert not {"error", "display_data"} & dict(plain).keys()
    texts = [content for kind, content in plain if kind == "stream"]
    assert {text["name"] for text in texts} == {"stderr"}
    shown = "".join(text["text"] for text in texts)
    assert "parts: 100%" in shown
    assert "Warning" not in shown


def test_every_bar_of_the_package_is_made_here():
    importing = re.compile(r"^ *(import|from) tqdm\b", re.MULTILINE)
    users = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if importing.search(file.read_text())}
    assert users == {"core/show.py", "work/run.py"}  # the latter makes none

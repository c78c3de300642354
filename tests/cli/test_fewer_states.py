"""`epk-gp record --keep-every`: what a run takes is said beforehand, and is so."""

import pytest

from commands import SMALL, run

WIDE = ("--width", 200, "--steps", 6)
ADAM = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.01, *SMALL, *WIDE)
OPTIONS = [(), ("--keep-every", 2)]


def announced(text):
    """The size that was said, in bytes."""
    line = next(line for line in text.splitlines() if line.startswith("on disk: about"))
    return float(line.split()[3]) * 1e6, line


def on_disk(folder):
    files = [file for file in folder.iterdir() if file.name not in ("network.json", "held_out.safetensors")]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run_takes_what_was_announced(tmp_path, capsys, options):
    assert run("record", "--out", tmp_path / "run", *options, *ADAM) == 0
    size, line = announced(capsys.readouterr().out)
    assert 0.8 < on_disk(tmp_path / "run") / size < 1.05
    assert ("every weight state" in line) == (not options)

"""`epk-gp record --keep-every`, `--disk` and `--weights-dtype`: what a run takes is said beforehand, and is so."""

import pytest

from commands import SMALL, refused, run
from epk_gp.cli.parsing import parse_bytes
from epk_gp.storage.schema import read_header

WIDE = ("--width", 200, "--steps", 6)
ADAM = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.01, *SMALL, *WIDE)
OPTIONS = [(), ("--keep-every", 2), ("--keep-every", 3, "--weights-dtype", "bfloat16")]


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


def test_a_run_in_little_space_keeps_as_many_states_as_fit(tmp_path, capsys):
    assert run("record", "--out", tmp_path / "all", *ADAM) == 0
    whole = announced(capsys.readouterr().out)[0]
    room = int(0.85 * whole)
    assert run("record", "--out", tmp_path / "run", "--disk", f"{room}B", *ADAM) == 0
    size, line = announced(capsys.readouterr().out)
    k = read_header(tmp_path / "run")["keep_every"]
    assert f"(--keep-every {k}, the smallest that fits)" in line
    assert k > 1
    assert size <= room + 0.05e6
    assert run("verify", tmp_path / "run", "--quiet", "--num-points", 1) == 0
    assert run("info", tmp_path / "run", "--quiet") == 0
    assert f"one in {k} is kept" in capsys.readouterr().out
    assert run("record", "--resume", "--out", tmp_path / "run", "--steps", 7, "--quiet") == 0  # as it was chosen
    arguments = ("record", "--resume", "--out", tmp_path / "run", "--disk", "1GB", "--quiet")
    capsys.readouterr()
    assert "--disk must be given for a new run" in refused(capsys, *arguments)


def test_space_that_does_not_hold_the_run_is_refused(tmp_path, capsys):
    arguments = ("record", "--out", tmp_path / "a", *ADAM, "--disk")
    assert "with its first and last weight state it takes" in refused(capsys, *arguments, "4kB")
    assert "--disk must hold the run: with --keep-every 2" in refused(capsys, *arguments, "4kB", "--keep-every", 2)
    assert "--disk must be a number with a unit" in refused(capsys, *arguments, "4")
    assert not (tmp_path / "a").exists()


def test_amounts_of_memory_are_read_with_their_units():
    assert [parse_bytes(text, "--disk") for text in ("12B", "1.5kB", "2 GB", "2GiB")] == [12, 1500, 2 * 10**9, 2**31]


def test_a_recorded_run_is_exported_with_fewer_states(recorded, tmp_path, capsys):
    copy = tmp_path / "copy"
    assert run("export", recorded, "--keep-every", 3, "--out", copy, "--quiet") == 0
    assert f"epk-gp verify {copy}" in capsys.readouterr().out
    assert run("verify", copy, "--quiet", "--num-points", 1) == 0
    assert run("record", "--resume", "--out", copy, "--steps", 5, "--quiet") == 0
    assert read_header(copy)["keep_every"] == 3
    capsys.readouterr()
    assert "--out must be a new folder" in refused(capsys, "export", recorded, "--keep-every", 3)
    assert "must hold every state" in refused(capsys, "export", copy, "--quiet", "--out", tmp_path / "x.safetensors")

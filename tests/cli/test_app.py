"""The application: its commands, their progress, and how errors end it."""

import os
import subprocess
import sys
import warnings
from textwrap import dedent

import pytest

import epk_gp as epk
from commands import run
from epk_gp.cli import COMMANDS, _warnings_in_one_line
from epk_gp.cli.options import parse_path, parse_rule


def test_every_command_explains_itself(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        assert run(command, "--help") == 0
        out = capsys.readouterr().out
        assert f"Usage: epk-gp {command}" in out
        assert all(f" {option}" in out for option in ("--help", "--out"))


def test_the_application_answers_for_itself(capsys):
    for words in ((), ("--help",)):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)
    assert run("--version") == 0
    assert "epk-gp " + epk.__version__ in capsys.readouterr().out


@pytest.mark.slow
def test_help_does_not_wait_for_pytorch():
    """In a process of its own, as the type checks of this test run import it."""
    code = """
        import sys
        from epk_gp.cli import main
        for words in (["--help"], ["--version"], []):
            main(words)
        print("imported:", sorted({"torch", "gpytorch", "numpy", "scipy", "matplotlib"} & sys.modules.keys()))
    """
    ended = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("imported: []\n")
    assert ended.stdout.count("Usage: ") == 2


def test_the_package_is_run_as_the_command_under_its_name():
    wrong = subprocess.run([sys.executable, "-m", "epk_gp", "teach"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("epk-gp: error: No such command 'teach'")


def test_bars_go_to_a_terminal_and_not_to_a_file_or_a_pipe(recorded, monkeypatch, tmp_path, capsys):
    pty, termios = (pytest.importorskip(name, reason="a terminal of Unix") for name in ("pty", "termios"))
    ends = {"terminal": pty.openpty(), "pipe": os.pipe()}
    termios.tcsetwinsize(ends["terminal"][1], (24, 100))
    ends["file"] = (os.open(tmp_path / "log", os.O_CREAT), os.open(tmp_path / "log", os.O_WRONLY))
    for kind, (read, write) in ends.items():
        with monkeypatch.context() as patch, open(write, "w") as stream:
            patch.setattr(sys, "stderr", stream)
            assert run("verify", recorded, "--num-points", 2) == 0
            stream.write("end\n")  # a terminal or a pipe without content would wait for some
            stream.flush()
            shown = os.read(read, 1 << 16).decode()
        os.close(read)
        assert ("checking: 100%|" in shown) == ("reconstruction: 100%|" in shown) == (kind == "terminal")
        assert kind == "terminal" or shown == "end\n"
        assert "4 steps" in capsys.readouterr().out


def test_an_interrupted_command_says_so(recorded, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("epk_gp.cli.options.parse_rule", interrupt)
    assert run("verify", recorded) == 130
    assert capsys.readouterr().err.strip() == "epk-gp: error: interrupted."


def test_rules_and_paths_are_read_as_they_are_written():
    assert parse_rule("adaptive:1e-6") == epk.adaptive(1e-6)
    assert parse_rule("left-riemann:7") == epk.QuadratureRule.left_riemann(7)
    assert parse_rule("midpoint:2") == epk.QuadratureRule.midpoint(2)
    assert parse_rule("left-endpoint") == epk.QuadratureRule.left_endpoint()
    assert parse_path("straight") == epk.straight()
    assert parse_path("chords:20") == epk.chords(20)
    assert parse_path("layerwise") == epk.layerwise()
    assert parse_path("layerwise:20") == epk.layerwise(20)
    assert parse_path(None) is None


@pytest.mark.filterwarnings("always")
def test_what_torch_says_of_linear_operator_is_not_shown(capsys):
    """The user calls no `torch.jit.script`."""
    with _warnings_in_one_line():
        warnings.warn("`torch.jit.script` is deprecated. Please switch.", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "epk-gp: warning: another\n"

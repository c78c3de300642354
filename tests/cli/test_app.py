"""The application: its commands, their shared options, and how errors end it."""

import json
import subprocess
import sys
import warnings
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from commands import run
from epk_gp.cli import COMMANDS, _warnings_in_one_line
from epk_gp.cli.options import parse_path, parse_rule

# They compute nothing and draw nothing
NOT_MEANT = {(command, option) for command in ("info",) for option in ("--seed", "--dtype")}
NOT_MEANT |= {("audit", "--dtype")}  # its table is text


def test_every_command_explains_itself_and_has_the_options_they_share(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        assert run(command, "--help") == 0
        out = capsys.readouterr().out
        assert "Usage: epk-gp" in out
        for option in ("--help", "--out", "--seed", "--dtype", "--quiet"):
            assert (f" {option}" in out) == ((command, option) not in NOT_MEANT), (command, option)


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


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        (("verify", "--num-points", 2), "reconstruction"),
        (("info",), "checking"),
        (("gram", "--num-rows", 2, "--num-columns", 2), "kernel"),
    ],
)
def test_progress_goes_to_stderr_and_not_where_it_is_to_be_quiet(recorded, capsys, tmp_path, words, counted):
    command, *options = words
    for quiet in ([], ["--quiet"]):
        out = [] if command in ("verify", "info") else ["--out", tmp_path / f"{command}{len(quiet)}.safetensors"]
        assert run(command, recorded, *options, *out, *quiet) == 0
        captured = capsys.readouterr()
        assert "100%" not in captured.out
        assert command != "verify" or "4 steps" in captured.out
        lines = [line for line in captured.err.splitlines() if line]  # tqdm's bar goes back to the start of its line
        assert all(line.startswith(f"{counted}: ") for line in lines)
        assert any(line.startswith(f"{counted}: 100%|") for line in lines) != bool(quiet)
        assert not (quiet and lines)


SEEDED = {  # the file, its points, and a command for three of them
    "gram": ("gram", "row_inputs", ("--num-rows", 3, "--num-columns", 2)),
    "attribute": ("attribution", "inputs", ("--num-points", 3, "--outputs", "predicted")),
    "influence": ("influence", "inputs", ("--num-points", 3)),
}


@pytest.mark.parametrize("command", SEEDED)
def test_a_seed_draws_the_points_and_none_takes_the_first(recorded, tmp_path, no_pictures, command):
    inputs, (file, name, points) = [], SEEDED[command]
    for number, seed in enumerate((None, 1, 2, 1)):
        out, asked = tmp_path / str(number), () if seed is None else ("--seed", seed)
        assert run(command, recorded, "--out", out, *points, *asked, "--quiet") == 0
        assert json.loads((out / f"{file}.json").read_text())["config"]["seed"] == seed
        inputs.append(load_file(out / f"{file}.safetensors")[name])
    first, one, two, again = inputs
    assert torch.equal(first, load_file(recorded / "held_out.safetensors")["inputs"][:3])
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


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


@pytest.mark.filterwarnings("always")
def test_what_torch_says_of_linear_operator_is_not_shown(capsys):
    """The user calls no `torch.jit.script`."""
    with _warnings_in_one_line():
        warnings.warn("`torch.jit.script` is deprecated. Please switch.", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "epk-gp: warning: another\n"

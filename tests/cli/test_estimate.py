"""`epk-gp estimate`: what it says is what the command does, and nothing is written."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commands import run
from loops import file_hashes

ASKED = {
    "gram": ("--num-rows", 2, "--num-columns", 3, "--rule", "gauss-legendre:2"),
    "attribute": ("--num-points", 2, "--outputs", "predicted"),
}


@pytest.mark.parametrize("what", ["gram", pytest.param("attribute", marks=pytest.mark.slow)])
def test_the_estimate_says_what_the_command_does(recorded, tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    before = file_hashes(recorded)
    options = ("--what", what, *ASKED[what], "--workers", 2, "--seconds", 0.1, "--quiet")
    assert run("estimate", recorded, *options) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = [line.partition(":")[0] for line in shown.out.splitlines()]
    assert {"pieces", "result", "time"} <= set(lines)
    assert list(tmp_path.iterdir()) == []
    assert file_hashes(recorded) == before

    assert run("estimate", recorded, "--out", "said", *options) == 0
    assert [file.name for file in Path("said").iterdir()] == ["estimate.json"]
    said = json.loads(Path("said/estimate.json").read_text())["results"]
    if what == "gram":
        assert run(what, recorded, "--out", "done", *ASKED[what], "--quiet") == 0
        assert said["result_bytes"] == load_file("done/gram.safetensors")["gram"].nbytes
    assert said["pieces"] == said["workers_of_use"] == 1
    assert said["seconds_with_workers"] == said["seconds"] > 0


def test_the_rule_is_the_command_s_own_and_the_path_as_asked_for(recorded, tmp_path):
    for what, rule in (("gram", "gauss-legendre:4"), ("attribute", "adaptive")):
        asked = ("--what", what, "--path", "chords:2", "--seconds", 0.1, "--quiet")
        assert run("estimate", recorded, "--out", tmp_path / what, *asked) == 0
        config = json.loads((tmp_path / what / "estimate.json").read_text())["config"]
        assert (config["rule"], config["path"]) == (rule, "chords:2")

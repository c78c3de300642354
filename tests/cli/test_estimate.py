"""`--estimate`: what it says is what the command does, and nothing is written."""

import re

import pytest
from safetensors.torch import load_file

from commands import run
from loops import file_hashes

ASKED = {
    "gram": ("--num-rows", 2, "--num-columns", 3, "--rule", "gauss-legendre:2"),
    "attribute": ("--num-points", 2, "--outputs", "predicted", "--path", "chords:2"),
}


@pytest.mark.parametrize("command", ["gram", pytest.param("attribute", marks=pytest.mark.slow)])
def test_the_estimate_says_what_the_command_does(recorded, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    before = file_hashes(recorded)
    options = (command, recorded, "--out", "done", *ASKED[command], "--quiet")
    assert run(*options, "--workers", 2, "--estimate", 0.1) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    pieces, result, seconds = (
        re.search(pattern, shown.out)[1]
        for pattern in (
            r"pieces:  (\d+), of up to .*B",
            r"result:  (.*)B",
            r"time:    (.*) s of one process; \1 s with 1 w",
        )
    )
    assert list(tmp_path.iterdir()) == []
    assert file_hashes(recorded) == before
    assert int(pieces) == 1
    assert float(seconds) > 0
    if command == "gram":
        assert run(*options) == 0
        assert float(result) == load_file("done/gram.safetensors")["gram"].nbytes

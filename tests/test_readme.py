import re
import shlex
from pathlib import Path

import pytest
import torch

from epk_gp.cli import main

README = Path(__file__).parents[1] / "README.md"


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def exit_status(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
def test_the_readme_s_code_runs_as_it_stands(capsys):
    names: dict[str, object] = {}
    for block in code("python"):
        exec(compile(block, str(README), "exec"), names)
    K, X, X_test = names["K"], names["X"], names["X_test"]
    assert isinstance(K, torch.Tensor)
    assert isinstance(X, torch.Tensor)
    assert isinstance(X_test, torch.Tensor)
    assert K.shape == (len(X_test), 3, len(X), 3)
    assert "torch.Size([20, 3]) torch.Size([20, 3]) torch.Size([20])" in capsys.readouterr().out


def test_the_readme_s_command_lines_are_understood():
    """All options are parsed before --help is answered; the negative control is an option that does not exist."""
    lines = [line.partition("#")[0] for block in code("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("epk-gp")]
    assert len(commands) >= 6
    for words in commands:
        assert exit_status([*words, "--help"]) == 0
        assert exit_status([*words, "--no-such-option"]) == 1


def test_the_readme_s_links_lead_somewhere():
    targets = re.findall(r"\]\((?!http)([^)#]+)", README.read_text())
    assert {"docs/design.md", "docs/format.md", "docs/notation.md", "LICENSE"} <= set(targets)
    for target in targets:
        assert (README.parent / target).is_file(), target

"""Commands run in this process, and the small inputs that the tests of the command line share."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from epk_gp.cli import main

SMALL = ("--num-train", "24", "--num-test", "6", "--width", "5", "--steps", "4")


def run(*arguments: object) -> int:
    """Run a command in this process and give its exit status."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must end with one line on stderr, and give the line."""
    assert run(*arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("epk-gp: error: ")
    return lines[0]


def write_data(path: Path, *, n: int = 12, D: int = 3) -> Path:
    g = torch.Generator().manual_seed(1)
    X, y = torch.randn(n, D, generator=g, dtype=torch.float64), torch.arange(n) % 2
    if path.suffix == ".npz":
        np.savez(path, inputs=X.numpy(), labels=y.numpy())
    else:
        save_file({"inputs": X, "labels": y}, path)
    return path

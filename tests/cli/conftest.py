"""Fixtures of the tests of the command line."""

import sys
import textwrap
from pathlib import Path

import pytest

from commands import SMALL, run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert run("record", "--out", folder, *SMALL) == 0
    return folder


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds."""
    drawn = {
        "attribute": ("attribution_figure",),
        "uncertainty": ("map_figure", "scores_figure"),
    }
    for command, names in drawn.items():
        for name in (*names, "save_figure"):
            monkeypatch.setattr(f"epk_gp.cli.{command}.{name}", lambda *args, **options: None)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = """
        import torch
        from torch import nn

        def tanh_net():
            return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def normed_net():
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))

        def broken():
            raise KeyError("no weights here")

        def no_module():
            return 3

        number = 4
    """
    (tmp_path / "user_networks_of_test_cli.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "user_networks_of_test_cli"

"""`epk-gp record --resume`: the manifest stays true, and what differs from the recorded options is refused by name."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from commands import SMALL, refused, run, write_data
from epk_gp.storage.schema import read_journal
from loops import file_hashes

OPTIONS = ("--batch-size", 7, "--momentum", 0.5)


@pytest.fixture(scope="module")
def options_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with options that are not the default ones."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    assert run("record", "--out", folder, *SMALL, *OPTIONS) == 0
    return folder


def manifest(folder: Path) -> dict[str, object]:
    return json.loads((folder / "network.json").read_text())


# Options that differ from those of `options_of`, how the recorded value is said, and the given one.
OTHERS = {
    "--data": ("three-gaussians", "digits"), "--num-train": (24, 25), "--num-test": (6, 4), "--num-classes": (None, 3),
    "--network": ("mlp", "cnn"), "--width": (5, 6), "--seed": (0, 5),
    "--optimizer": ("sgd", "adam"), "--lr": (0.1, 0.2), "--momentum": (0.5, 0.25), "--weight-decay": (0.0, 0.5),
    "--batch-size": (7, 8), "--dtype": ("float64", "float32"), "--check-every": (1, 2),
    "--zero-final-layer": (False, True),
}  # fmt: skip


def test_an_option_that_differs_is_refused_by_name_with_both_values(options_of, capsys):
    before = file_hashes(options_of)
    for option, (recorded, got) in OTHERS.items():
        given = (option,) if got is True else (option, got)
        line = refused(capsys, "record", "--out", options_of, "--resume", "--steps", 6, *given)
        said = f"{option} must be the recorded one to resume the run at {options_of}: it has {recorded}, got {got}."
        assert said in line
    assert file_hashes(options_of) == before


def test_options_that_are_not_given_are_as_recorded(options_of, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    seeded = (*SMALL, *OPTIONS, "--seed", 3, "--zero-final-layer")
    assert run("record", "--out", whole, *seeded, "--steps", 6) == 0
    assert run("record", "--out", resumed, *seeded) == 0
    assert run("record", "--out", resumed, "--resume", "--steps", 6, "--seed", 3) == 0
    assert read_journal(resumed).chunks[-1].digest == read_journal(whole).chunks[-1].digest
    assert manifest(resumed) == manifest(whole)
    assert manifest(resumed)["recorded_with"]["seed"] == 3
    assert run("record", "--out", resumed, "--resume") == 0  # nor is the number of steps another
    fewer = ("record", "--out", resumed, "--resume", "--steps", 2)
    assert "steps must be at least the 6" in refused(capsys, *fewer)
    assert manifest(resumed) == manifest(whole)


def test_a_crash_while_the_manifest_is_written_does_not_block_the_folder(tmp_path):
    (tmp_path / "network.json.part").write_bytes(b"{")
    assert run("record", "--out", tmp_path, *SMALL, "--resume") == 0
    assert manifest(tmp_path)["recorded_with"]["seed"] == 0


def test_a_recording_that_did_not_start_leaves_nothing(tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise ValueError("no")

    monkeypatch.setattr("epk_gp.cli.record.train", fail)
    assert refused(capsys, "record", "--out", tmp_path / "run", *SMALL).endswith(" no")
    assert not (tmp_path / "run").exists()


def test_data_that_moved_are_resumed_and_other_held_out_points_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_data(Path("a.npz"))
    assert run("record", "--data", "a.npz", "--num-train", 9, "--width", 3, "--steps", 2) == 0
    os.rename("a.npz", "b.npz")
    assert run("record", "--data", "b.npz", "--resume", "--steps", 3) == 0
    assert manifest(Path("run"))["recorded_with"]["data"] == "b.npz"
    with np.load("b.npz") as arrays:
        X, y = arrays["inputs"].copy(), arrays["labels"]
    X[10] += 1
    np.savez("b.npz", inputs=X, labels=y)
    before = file_hashes(Path("run"))
    line = refused(capsys, "record", "--resume", "--steps", 4)
    assert "the held-out points must be the recorded ones to resume run" in line
    assert file_hashes(Path("run")) == before


def test_a_factory_that_only_the_manifest_names_is_not_executed(user_module, tmp_path, capsys):
    data, network = write_data(tmp_path / "data.npz"), f"{user_module}:tanh_net"
    assert run("record", "--data", data, "--network", network, "--steps", 2) == 0
    line = refused(capsys, "record", "--resume", "--steps", 3)
    assert f"If you trust it, pass --network {network}" in line
    assert run("record", "--resume", "--steps", 3, "--network", network) == 0

"""Files that commands read: the user's data and networks, and damaged or hostile files of a run."""

import math
import os
import shutil

import pytest
import torch

import epk_gp as epk
from commands import refused, run, write_data
from epk_gp.storage.files import checksummed_json, read_checksummed_json
from stored_runs import flip


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_users_bring_their_own_network_and_data(user_module, tmp_path, suffix, capsys):
    data = write_data(tmp_path / f"data{suffix}")
    network = f"{user_module}:tanh_net"
    arguments = ("--data", data, "--num-train", 9, "--network", network, "--steps", 3)
    assert run("record", "--out", "mine", *arguments) == 0
    said = refused(capsys, "verify", "mine")  # what a run names is not executed
    assert f"If you trust it, pass --network {network}" in said
    assert run("verify", "mine", "--network", network) == 0
    assert "verifying at 3 held-out points\n" in capsys.readouterr().out
    assert run("verify", "mine", "--network", network, "--points", data) == 0
    assert f"verifying at 12 points of {data}\n" in capsys.readouterr().out


def test_runs_of_the_library_need_a_network_and_take_one(user_module, tmp_path, capsys):
    X, y = torch.randn(6, 3), torch.arange(6) % 2
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2, folder=tmp_path / "run")
    assert "--network must name the network" in refused(capsys, "verify", "run")
    assert run("verify", "run", "--network", f"{user_module}:tanh_net") == 0  # float32, training inputs
    assert "must be the recorded one" in refused(capsys, "verify", "run", "--network", "mlp")


def manifest(**entries):
    """Other entries of a part of the manifest, with its checksum."""

    def change(folder):
        content = read_checksummed_json((folder / "network.json").read_bytes(), "")
        for part, values in entries.items():
            content[part] |= values
        (folder / "network.json").write_bytes(checksummed_json(content))

    return change


NO_NETWORK = "network.json must describe how the network is made"
NO_OPTIONS = "must hold the options of the recording: seed is damaged"
DAMAGE = {
    "flipped manifest": (lambda folder: flip(folder / "network.json", 99), "network.json"),
    "flipped points": (lambda folder: flip(folder / "held_out.safetensors", 999), "held_out.safetensors"),
    "empty manifest": (lambda folder: (folder / "network.json").write_text("{}"), NO_NETWORK),
    **{f"width {width}": (manifest(network={"width": width}), NO_NETWORK) for width in (math.inf, 1e308, -1, "8")},
    "large points": (lambda folder: os.truncate(folder / "held_out.safetensors", 1 << 40), "held_out.safetensors must"),
    "no points": (lambda folder: (folder / "held_out.safetensors").unlink(), "must hold the held-out points of the"),
    **{f"seed {seed}": (manifest(recorded_with={"seed": seed}), NO_OPTIONS) for seed in ("many", None, 1.5)},
    "flipped chunk": (lambda folder: flip(folder / "chunk-000000.safetensors", -9), "must have the checksum"),
    "no manifest": (lambda folder: (folder / "network.json").unlink(), "must hold the network.json that epk-gp record"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_in_the_command_line_s_own_files_is_found(recorded, tmp_path, capsys, damage, message):
    folder = shutil.copytree(recorded, tmp_path / "damaged")
    damage(folder)
    resumes = message == NO_OPTIONS or "epk-gp record" in message
    command = ("record", "--resume", "--out", folder) if resumes else ("verify", folder)
    assert message in refused(capsys, *command)

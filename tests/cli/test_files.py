"""Files that commands read: the user's data and networks, and damaged or hostile files."""

import math
import shutil
import zipfile

import numpy as np
import pytest
import torch

import epk_gp as epk
from commands import refused, run, write_data
from epk_gp.storage.files import checksummed_json, read_checksummed_json


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_users_bring_their_own_network_and_data(user_module, tmp_path, suffix, capsys):
    data = write_data(tmp_path / f"data{suffix}")
    network = f"{user_module}:tanh_net"
    arguments = ("--data", data, "--num-train", 9, "--network", network, "--steps", 3, "--quiet")
    assert run("record", "--out", "mine", *arguments) == 0
    said = refused(capsys, "verify", "mine", "--quiet")  # what a run names is not executed
    assert f"If you trust it, pass --network {network}" in said
    assert run("verify", "mine", "--network", network, "--quiet") == 0
    assert "verifying at 3 held-out points\n" in capsys.readouterr().out
    assert run("verify", "mine", "--network", network, "--points", data, "--quiet") == 0
    assert f"verifying at 12 points of {data}\n" in capsys.readouterr().out


def test_runs_of_the_library_need_a_network_and_take_one(user_module, tmp_path, capsys):
    X, y = torch.randn(6, 3), torch.arange(6) % 2
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2, folder=tmp_path / "run")
    assert "--network must name the network" in refused(capsys, "verify", "run", "--quiet")
    assert run("verify", "run", "--network", f"{user_module}:tanh_net", "--quiet") == 0  # float32, training inputs
    assert "must be the recorded one" in refused(capsys, "verify", "run", "--network", "mlp", "--quiet")


def test_verify_checks_files(recorded, tmp_path, capsys):
    assert run("verify", recorded, "--checksums") == 0
    assert "4 steps" in capsys.readouterr().out
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in recorded.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    chunk = damaged / "chunk-000000.safetensors"
    content = bytearray(chunk.read_bytes())
    content[-9] ^= 1
    chunk.write_bytes(content)
    assert "checksum" in refused(capsys, "verify", damaged, "--checksums", "--quiet")


@pytest.mark.parametrize("name", ["network.json", "held_out.safetensors"])
def test_damage_in_the_command_line_s_own_files_is_found(recorded, tmp_path, capsys, name):
    damaged = shutil.copytree(recorded, tmp_path / "damaged")
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 2
    (damaged / name).write_bytes(content)
    assert name in refused(capsys, "verify", damaged, "--quiet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.npz", b"PK\x03\x04 not a zip", "must be a whole .npz file"),
        ("bad.safetensors", b"\x00" * 20, "must be a whole .safetensors file"),
        ("bad.txt", b"1 2 3", "must be a .safetensors or .npz file"),
    ],
)
def test_damaged_points_are_refused(recorded, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refused(capsys, "verify", recorded, "--points", tmp_path / name, "--quiet")


def test_pickles_are_refused(recorded, tmp_path, capsys):
    np.savez(tmp_path / "objects.npz", inputs=np.array([{"a": 1}], dtype=object))
    assert "must be a whole .npz file of numbers" in refused(
        capsys, "verify", recorded, "--points", tmp_path / "objects.npz", "--quiet"
    )


def test_a_damaged_manifest_is_refused(recorded, tmp_path, capsys):
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "network.json").write_text("{}")
    assert "network.json must describe how the network is made" in refused(capsys, "verify", tmp_path, "--quiet")


@pytest.mark.parametrize("width", [math.inf, 1e308, -1, "8", None], ids=repr)
def test_a_manifest_whose_numbers_are_no_sizes_is_refused(recorded, tmp_path, capsys, width):
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = read_checksummed_json((tmp_path / "network.json").read_bytes(), "")
    manifest["network"]["width"] = width
    (tmp_path / "network.json").write_bytes(checksummed_json(manifest))
    assert "network.json must describe how the network is made" in refused(capsys, "verify", tmp_path, "--quiet")


def test_held_out_points_without_measure_are_refused_unread(recorded, tmp_path, capsys):
    """A sparse file of 1 TB would be hashed without end."""
    run_folder = shutil.copytree(recorded, tmp_path / "sparse")
    file = run_folder / "held_out.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)
    assert f"held_out.safetensors must have {size} bytes" in refused(capsys, "verify", run_folder, "--quiet")


def test_an_array_that_claims_more_than_memory_is_refused(recorded, tmp_path, capsys):
    """numpy allocates what the header of an array claims before it reads the array."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776000, 3), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "large.npz", "w") as archive:
        archive.writestr("inputs.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    said = refused(capsys, "verify", recorded, "--points", tmp_path / "large.npz", "--quiet")
    assert "large.npz must be a whole .npz file of numbers" in said

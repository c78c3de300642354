"""`--path` and `--nodes`: the commands' results are the library's along the path that is asked for."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from commands import run
from epk_gp.cli.data import draw_rows
from epk_gp.cli.networks import open_run
from epk_gp.cli.options import parse_path
from helpers import assert_close

PATHS = {"chords:3": epk.chords(3)}


@pytest.mark.parametrize("path", PATHS)
def test_gram_and_attribute_follow_the_path(recorded, tmp_path, path):
    """The blocks and the contributions of straight steps are others."""
    trajectory, own = open_run(recorded, None), PATHS[path]
    asked = ("--path", path, "--rule", "gauss-legendre:2", "--quiet")
    assert run("gram", recorded, "--num-rows", 2, "--out", tmp_path / "gram", *asked) == 0
    arrays = load_file(tmp_path / "gram" / "gram.safetensors")
    test, train = (
        epk.Points(arrays[f"{side}_inputs"], is_train=is_train) for side, is_train in (("row", False), ("column", True))
    )
    K, straight = (
        epk.gram_block(trajectory, test, train, rule=epk.gauss_legendre(2), path=along)
        for along in (own, epk.straight())
    )
    assert torch.equal(arrays["gram"], K)
    assert (K - straight).abs().max() > 1e-4 * K.abs().max()
    assert json.loads((tmp_path / "gram" / "gram.json").read_text())["config"]["path"] == path
    assert run("attribute", recorded, "--num-points", 2, "--out", tmp_path / "parts", *asked) == 0
    arrays = load_file(tmp_path / "parts" / "attribution.safetensors")
    parts, straight_parts = (
        epk.attribute(trajectory, arrays["inputs"], rule=epk.gauss_legendre(2), path=along)
        for along in (own, epk.straight())
    )
    assert_close(arrays["samples"], parts.samples)
    assert not torch.allclose(parts.samples, straight_parts.samples, rtol=1e-4)
    assert json.loads((tmp_path / "parts" / "attribution.json").read_text())["config"]["path"] == path


def test_attribute_averages_layer_by_layer_and_what_integrates_refuses_to(recorded, tmp_path, capsys):
    asked = ("--path", "layerwise:2", "--num-points", 2, "--quiet")
    assert run("attribute", recorded, "--out", tmp_path / "parts", *asked) == 0
    arrays = load_file(tmp_path / "parts" / "attribution.safetensors")
    parts = epk.attribute(open_run(recorded, None), arrays["inputs"], path=epk.layerwise(2))
    assert_close(arrays["samples"], parts.samples)
    assert json.loads((tmp_path / "parts" / "attribution.json").read_text())["config"]["path"] == "layerwise:2"
    for command in ("verify", "gram"):
        assert run(command, recorded, "--out", tmp_path / command, "--path", "layerwise", "--quiet") == 1
        assert "integrates along a path of the weights" in capsys.readouterr().err


@pytest.mark.parametrize("path", PATHS)
def test_verify_holds_along_every_path(recorded, tmp_path, path):
    assert run("verify", recorded, "--path", path, "--num-points", 2, "--out", tmp_path, "--quiet") == 0
    said = json.loads((tmp_path / "verify.json").read_text())
    assert said["config"]["path"] == path
    assert said["results"]["passed"]


@pytest.mark.parametrize("what", ["gram", "attribute"])
def test_estimates_are_those_of_the_path(recorded, tmp_path, what):
    asked = ("--what", what, "--path", "chords:2", "--rule", "gauss-legendre:2", "--seconds", 0.1, "--quiet")
    assert run("estimate", recorded, *asked, "--out", tmp_path) == 0
    said = json.loads((tmp_path / "estimate.json").read_text())
    assert said["config"]["path"] == "chords:2"
    assert said["results"]["seconds"] > 0


@pytest.mark.mostly_slow
@pytest.mark.parametrize("options", [("--nodes", "4"), ("--path", "chords:2"), ("--nodes", "3", "--path", "chords:2")])
def test_maps_are_those_of_the_path_and_its_nodes(recorded, tmp_path, options):
    small = ("--num-condition", 12, "--grid", 3, "--fit-steps", 2, "--num-samples", 8, "--quiet")
    assert run("uncertainty", recorded, *small, *options, "--out", tmp_path) == 0
    given = dict(zip(options[::2], options[1::2], strict=True))
    config = json.loads((tmp_path / "uncertainty.json").read_text())["config"]
    nodes = int(given["--nodes"]) if "--nodes" in given else None
    path = given.get("--path", "straight")
    assert (config["nodes"], config["path"]) == (nodes, path)
    trajectory = open_run(recorded, None)
    with np.load(tmp_path / "points.npz") as arrays:
        X, std = torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["std"])
    expected = []
    for asked in ({"nodes": nodes, "path": parse_path(path)}, {}):
        gp = epk.LogitGP(trajectory, points=draw_rows(24, 12, 0).tolist(), **asked)
        gp.fit(2)
        u = epk.softmax_uncertainty(gp.logit_posterior(X), 8, torch.Generator().manual_seed(0))
        expected.append(u.std)
    assert_close(std, expected[0], rounding=1e6)
    assert (std - expected[1]).abs().max() > 1e-8  # the control: the map of all straight steps

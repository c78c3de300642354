"""`epk-gp uncertainty`: its scores and its map are the library's."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from commands import refused, run
from epk_gp.analysis.maps import principal_plane
from epk_gp.cli.data import read_labelled
from epk_gp.cli.networks import open_run
from epk_gp.gp.stacking import Stacking


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run with 60 held-out points, and files of points."""
    folder = tmp_path_factory.mktemp("scores")
    options = ("--num-train", 40, "--num-test", 60, "--width", 5, "--steps", 6)
    assert run("record", "--out", folder / "run", *options) == 0
    held_out = load_file(folder / "run" / "held_out.safetensors")
    X, y = held_out["inputs"].numpy(), held_out["labels"].numpy()
    np.savez(folder / "labelled.npz", inputs=X, labels=y)
    np.savez(folder / "points.npz", inputs=X[:9] + 30)
    return folder


def test_scores_are_those_of_the_library(judged, tmp_path):
    asked = ("--validation", judged / "labelled.npz", "--points", judged / "points.npz", "--alpha", 0.2)
    assert run("uncertainty", judged / "run", *asked, "--out", tmp_path) == 0
    trajectory = open_run(judged / "run", None)
    source = read_labelled(str(judged / "labelled.npz"), judged / "run", trajectory)
    X = torch.from_numpy(np.load(judged / "points.npz")["inputs"])
    model = epk.UncertainClassifier(trajectory).fit(source.X, source.labels)
    u = model.uncertainty(X)
    with np.load(tmp_path / "scores.npz") as scores:
        for name in ("error", "out_of_distribution", "entropy", "mutual_information", "std"):
            np.testing.assert_allclose(scores[name], getattr(u, name).numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(scores["predicted"], model.predict(X))
        np.testing.assert_array_equal(scores["sets"], model.predict_set(X, 0.2))
        np.testing.assert_array_equal(scores["row"], np.arange(9))
        assert "labels" not in scores.files
    results = json.loads((tmp_path / "uncertainty.json").read_text())["results"]
    assert results["share_beyond_95_percent_of_validation"] == 1  # the points lie far from all data
    assert "accuracy" not in results
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_without_points_half_of_the_held_out_points_are_scored_and_what_the_process_gains_is_said(
    judged, tmp_path, capsys, no_pictures
):
    """Few points calibrate the sets: at 0.01 no class is left out."""
    assert run("uncertainty", judged / "run", "--alpha", 0.01, "--seed", 3, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "scoring 30 held-out points, with 30 held-out points as validation points" in out
    assert "area under the ROC curve: error score" in out
    held_out = load_file(judged / "run" / "held_out.safetensors")
    assert "99 %: 3.00 classes on average, 100.0 % hold the true one (too few validation points for smaller" in out
    with np.load(tmp_path / "scores.npz") as scores:
        np.testing.assert_array_equal(scores["labels"], held_out["labels"][scores["row"]])
        rows, probability = scores["row"], scores["probability"]
    results = json.loads((tmp_path / "uncertainty.json").read_text())["results"]
    assert f"the process gains {Stacking(**results['stacking']).gain_words}" in out
    assert results["classes_in_every_set"] == [0, 1, 2]
    accuracy = (probability.argmax(1) == held_out["labels"][rows].numpy()).mean()
    assert results["accuracy"] == pytest.approx(accuracy)


def test_a_network_that_gives_all_points_the_same_outputs_is_told_of(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(20, 70, 60), 2e4 * rng.lognormal(size=60), rng.integers(0, 3, 60)]
    for name, inputs in (("raw", X), ("standardised", (X - X.mean(0)) / X.std(0))):
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=(X[:, 0] > 45).astype(int))
        options = ("--data", tmp_path / f"{name}.npz", "--num-train", 40, "--width", 8, "--steps", 40)
        assert run("record", "--out", tmp_path / name, *options) == 0
        assert ("the network gives all points the same outputs" in capsys.readouterr().out) == (name == "raw")


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A run on ages, sexes and incomes, with 50 held-out people."""
    folder, rng = tmp_path_factory.mktemp("people"), np.random.default_rng(0)
    X = np.c_[rng.uniform(2, 7, 90), rng.integers(0, 2, 90), rng.normal(size=90)]
    np.savez(folder / "people.npz", inputs=X, labels=(X[:, 0] + X[:, 1] > 5).astype(int))
    data = ("--data", folder / "people.npz", "--num-train", 40, "--width", 4, "--steps", 5)
    assert run("record", "--out", folder / "run", *data) == 0
    return folder / "run"


def test_scores_are_mapped_over_two_columns_of_a_table(people, tmp_path, capsys):
    named = ("--feature-names", "age,sex,income", "--others", "income=0.5")
    named += ("--columns", "age=0..10,sex=0:female/1:male")
    assert run("uncertainty", people, *named, "--grid", 5, "--out", tmp_path) == 0
    assert "scores.npz, scores.png, uncertainty.json, map.png, map.safetensors (" in capsys.readouterr().out
    trajectory = open_run(people, None)
    fitted, _ = read_labelled("held-out", people, trajectory).halves(0)
    model = epk.UncertainClassifier(trajectory).fit(fitted.X, fitted.labels)
    arrays = load_file(tmp_path / "map.safetensors")
    assert (arrays["x"].tolist(), arrays["y"].tolist()) == ([0, 2.5, 5, 7.5, 10], [0, 1])
    rows = torch.tensor([[age, sex, 0.5] for sex in (0, 1) for age in (0, 2.5, 5, 7.5, 10)]).to(trajectory.dtype)
    u = model.uncertainty(rows)
    torch.testing.assert_close(1 - arrays["probability"].flatten(), u.error, check_dtype=False)
    torch.testing.assert_close(arrays["out_of_distribution"].flatten(), u.out_of_distribution, check_dtype=False)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_scores_are_mapped_over_the_principal_directions(people, tmp_path):
    assert run("uncertainty", people, "--map", "--grid", 3, "--out", tmp_path) == 0
    arrays, plane = load_file(tmp_path / "map.safetensors"), principal_plane(open_run(people, None).inputs)
    assert torch.equal(arrays["axes"], plane.axes)
    assert torch.equal(arrays["origin"], plane.origin)
    assert arrays["probability"].shape == (3, 3)


def test_halves_share_no_point(judged):
    trajectory = open_run(judged / "run", None)
    source = read_labelled("held-out", judged / "run", trajectory)
    first, second = source.halves(0)
    assert sorted(torch.cat([first.rows, second.rows]).tolist()) == list(range(60))
    assert torch.equal(source.X[second.rows], second.X)
    assert not torch.equal(source.halves(1)[0].rows, first.rows)


def test_only_classifiers_are_judged(tmp_path, capsys, monkeypatch):
    net, X = torch.nn.Linear(100, 3), torch.randn(6, 100)
    optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.1), torch.nn.MSELoss()
    epk.train(net, X, torch.randn(6, 3), optimizer=optimizer, steps=2, loss=loss, folder=tmp_path / "run")
    monkeypatch.setattr("epk_gp.cli.networks.network_and_output", lambda spec: (net, None))
    line = refused(capsys, "uncertainty", tmp_path / "run", "--network", "mlp", "--out", tmp_path / "out")
    assert "uncertainty needs the run of a classifier" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_of_images_gives_validation_points_and_points_without_labels(tmp_path, capsys, no_pictures):
    y, more = (np.arange(90) % 2).astype(np.uint8), tmp_path / "more"
    X = np.random.default_rng(0).integers(0, 255, (90, 6, 6), dtype=np.uint8)
    X[y == 1, :3] //= 4
    np.savez(tmp_path / "data.npz", inputs=X[:30, None] / 255, labels=y[:30].astype(np.int64))
    more.mkdir()
    for name, values, magic in (("images-idx3", X[30:], 0x803), ("labels-idx1", y[30:], 0x801)):
        head = struct.pack(f">I{values.ndim}I", magic, *values.shape)
        (more / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))
    record = ("record", "--data", tmp_path / "data.npz", "--width", 4, "--steps", 3, "--out", tmp_path / "run")
    assert run(*record) == 0
    asked = ("uncertainty", tmp_path / "run", "--validation", more)
    assert run(*asked, "--out", tmp_path / "half") == 0
    with np.load(tmp_path / "half" / "scores.npz") as scores:
        assert len(scores["labels"]) == 30
    assert run(*asked, "--points", more, "--out", tmp_path / "whole") == 0
    with np.load(tmp_path / "whole" / "scores.npz") as scores:
        assert len(scores["error"]) == 60
        assert "labels" not in scores.files
    assert "60 points of" in capsys.readouterr().out


def test_points_that_the_loss_leaves_out_are_not_counted(user_module, tmp_path, capsys, no_pictures):
    draws = torch.Generator().manual_seed(0)
    X, y = torch.randn(9, 3, generator=draws), torch.arange(9) % 2
    y[:3] = -100
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2, folder=tmp_path / "run")
    np.savez(tmp_path / "labelled.npz", inputs=torch.randn(40, 3, generator=draws).numpy(), labels=np.arange(40) % 2)
    asked = ("--network", f"{user_module}:tanh_net", "--validation", tmp_path / "labelled.npz")
    assert run("uncertainty", tmp_path / "run", *asked, "--out", tmp_path / "out") == 0
    assert "process on 6 labels (exact)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "uncertainty.json").read_text())["results"]["num_condition"] == 6

"""`epk-gp uncertainty --validation` and `epk-gp audit`: their results are the library's."""

import csv
import gzip
import json
import re
import shlex
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from commands import refused, run
from epk_gp.cli.data import read_labelled
from epk_gp.cli.networks import NetworkSpec, network_and_output, open_run
from epk_gp.cli.options import parse_path
from epk_gp.gp.data import count_seen
from epk_gp.plots.scores import suspicious_labels_figure

FAST = ("--nodes", 3, "--num-samples", 16, "--quiet")


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run with 60 held-out points, and files of points."""
    folder = tmp_path_factory.mktemp("scores")
    options = ("--num-train", 40, "--num-test", 60, "--width", 5, "--steps", 6, "--quiet")
    assert run("record", "--out", folder / "run", *options) == 0
    held_out = load_file(folder / "run" / "held_out.safetensors")
    X, y = held_out["inputs"].numpy(), held_out["labels"].numpy()
    np.savez(folder / "labelled.npz", inputs=X, labels=y)
    np.savez(folder / "points.npz", inputs=X[:9] + 30)
    return folder


def test_scores_are_those_of_the_library(judged, tmp_path):
    asked = ("--validation", judged / "labelled.npz", "--points", judged / "points.npz", "--alpha", 0.2)
    assert run("uncertainty", judged / "run", *asked, "--out", tmp_path, *FAST) == 0
    trajectory = open_run(judged / "run", None)
    source = read_labelled(str(judged / "labelled.npz"), judged / "run", trajectory)
    X = torch.from_numpy(np.load(judged / "points.npz")["inputs"])
    model = epk.UncertainClassifier(trajectory, nodes=3).fit(source.X, source.labels)
    u = model.uncertainty(X, 16)
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


def test_without_points_half_of_the_validation_source_is_scored(judged, tmp_path, capsys, no_pictures):
    asked = ("--validation", "held-out", "--seed", 3, "--dtype", "float32", "--save-model", tmp_path / "model")
    assert run("uncertainty", judged / "run", *asked, "--out", tmp_path / "out", *FAST) == 0
    out = capsys.readouterr().out
    assert "scoring 30 held-out points, with 30 held-out points as validation points" in out
    assert "area under the ROC curve: error score" in out
    held_out = load_file(judged / "run" / "held_out.safetensors")
    with np.load(tmp_path / "out" / "scores.npz") as scores:
        assert scores["error"].dtype == np.float32
        np.testing.assert_array_equal(scores["labels"], held_out["labels"][scores["row"]])
        rows, probability = scores["row"], scores["probability"]
    results = json.loads((tmp_path / "out" / "uncertainty.json").read_text())["results"]
    accuracy = (probability.argmax(1) == held_out["labels"][rows].numpy()).mean()
    assert results["accuracy"] == pytest.approx(accuracy)
    read = epk.UncertainClassifier.load(
        tmp_path / "model",
        network_and_output(NetworkSpec(name="mlp", input_shape=[100], num_outputs=3, width=5))[0].double(),
    )
    np.testing.assert_allclose(read.predict_proba(held_out["inputs"][rows]), probability, atol=1e-6)


def test_a_network_that_gives_all_points_the_same_outputs_is_told_of(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(20, 70, 60), 2e4 * rng.lognormal(size=60), rng.integers(0, 3, 60)]
    for name, inputs in (("raw", X), ("standardised", (X - X.mean(0)) / X.std(0))):
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=(X[:, 0] > 45).astype(int))
        options = ("--data", tmp_path / f"{name}.npz", "--num-train", 40, "--width", 8, "--steps", 40, "--quiet")
        assert run("record", "--out", tmp_path / name, *options) == 0
        assert ("the network gives all points the same outputs" in capsys.readouterr().out) == (name == "raw")


@pytest.mark.filterwarnings("default:Classes of which too few labels")
def test_the_command_holds_the_promise_in_each_class_and_says_what_the_process_gains(
    judged, tmp_path, capsys, no_pictures
):
    """Seven labels of each class or fewer calibrate: at 0.05 no set leaves a class out, at 0.5 each has a threshold."""
    trajectory = open_run(judged / "run", None)
    source = read_labelled(str(judged / "labelled.npz"), judged / "run", trajectory)
    model = epk.UncertainClassifier(trajectory, nodes=3).fit(source.X, source.labels)
    X = torch.from_numpy(np.load(judged / "points.npz")["inputs"])
    for alpha, few in ((0.05, [0, 1, 2]), (0.5, [])):
        out, points = tmp_path / str(alpha), ("--points", judged / "points.npz", "--out", tmp_path / str(alpha))
        asked = ("--validation", judged / "labelled.npz", "--by-class", "--alpha", alpha, *FAST)
        assert run("uncertainty", judged / "run", *points, *asked) == 0
        printed, results = capsys.readouterr().out, json.loads((out / "uncertainty.json").read_text())["results"]
        assert ("too few points calibrate classes [0, 1, 2], which are in each" in printed) == bool(few)
        assert results["classes_in_every_set"] == few
        assert f"the process gains {model.stacking_.gain_words}" in printed
        assert results["stacking"] == pytest.approx(asdict(model.stacking_))
        with np.load(out / "scores.npz") as scores:
            expected = np.ones((9, 3)) if few else model.predict_set(X, alpha, by_class=True)
            np.testing.assert_array_equal(scores["sets"], expected)


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A run on ages, sexes and incomes, with 50 held-out people."""
    folder, rng = tmp_path_factory.mktemp("people"), np.random.default_rng(0)
    X = np.c_[rng.uniform(2, 7, 90), rng.integers(0, 2, 90), rng.normal(size=90)]
    np.savez(folder / "people.npz", inputs=X, labels=(X[:, 0] + X[:, 1] > 5).astype(int))
    data = ("--data", folder / "people.npz", "--num-train", 40, "--width", 4, "--steps", 5, "--quiet")
    assert run("record", "--out", folder / "run", *data) == 0
    return folder / "run"


def test_scores_are_mapped_over_two_columns_of_a_table(people, tmp_path, capsys):
    named = ("--feature-names", "age,sex,income", "--others", "income=0.5")
    named += ("--columns", "age=0..10,sex=0:female/1:male")
    asked = ("--validation", "held-out", *named, "--grid", 5, *FAST)
    assert run("uncertainty", people, *asked, "--out", tmp_path) == 0
    assert "scores.npz, scores.png, uncertainty.json, map.png, map.safetensors (" in capsys.readouterr().out
    trajectory = open_run(people, None)
    fitted, _ = read_labelled("held-out", people, trajectory).halves(0)
    model = epk.UncertainClassifier(trajectory, nodes=3).fit(fitted.X, fitted.labels)
    arrays = load_file(tmp_path / "map.safetensors")
    assert (arrays["x"].tolist(), arrays["y"].tolist()) == ([0, 2.5, 5, 7.5, 10], [0, 1])
    rows = torch.tensor([[age, sex, 0.5] for sex in (0, 1) for age in (0, 2.5, 5, 7.5, 10)]).to(trajectory.dtype)
    u = model.uncertainty(rows, 16)
    torch.testing.assert_close(1 - arrays["probability"].flatten(), u.error, check_dtype=False)
    torch.testing.assert_close(arrays["out_of_distribution"].flatten(), u.out_of_distribution, check_dtype=False)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    by_number = ("--columns", "0=0..10,1=0:female/1:male", "--others", "2=0.5")
    asked = ("--validation", "held-out", *by_number, "--grid", 5, *FAST)
    assert run("uncertainty", people, *asked, "--out", tmp_path / "numbers") == 0
    assert torch.equal(load_file(tmp_path / "numbers" / "map.safetensors")["std"], arrays["std"])


def test_halves_share_no_point_and_training_points_are_recognised(judged):
    trajectory = open_run(judged / "run", None)
    source = read_labelled("held-out", judged / "run", trajectory)
    first, second = source.halves(0)
    assert sorted(torch.cat([first.rows, second.rows]).tolist()) == list(range(60))
    assert torch.equal(source.X[second.rows], second.X)
    assert not torch.equal(source.halves(1)[0].rows, first.rows)
    X = trajectory.inputs[5:9]
    with pytest.warns(UserWarning, match="4 of 8 validation points are equal to training points"):
        assert count_seen(torch.cat([X, X + 1e-9]), trajectory) == 4
    with pytest.raises(ValueError, match="must be unseen: 4 of 7 are training points"):
        count_seen(torch.cat([X, X[:3] + 1e-9]), trajectory)


def test_only_classifiers_are_judged(tmp_path, capsys):
    options = ("--num-train", 24, "--num-test", 60, "--width", 5, "--steps", 2, "--loss", "mse", "--quiet")
    assert run("record", "--out", tmp_path / "run", *options) == 0
    no_logits, no_classes = "the run's loss is MeanSquaredError.", "needs the run of a classifier"
    scores = ("uncertainty", "--validation", "held-out")
    for (command, *asked), message in ((scores, no_classes), (("audit",), no_classes), (("uncertainty",), no_logits)):
        line = refused(capsys, command, tmp_path / "run", *asked, "--out", tmp_path / "out", "--quiet")
        assert message in line
        assert not (tmp_path / "out").exists()


def write_idx(folder, images, labels):
    """A test part in MNIST's format."""
    folder.mkdir()
    for name, values, magic in (("images-idx3", images, 0x803), ("labels-idx1", labels, 0x801)):
        head = struct.pack(f">I{values.ndim}I", magic, *values.shape)
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A run on images, and a folder of more of them."""
    folder = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    X, y = draws.integers(0, 255, (90, 6, 6), dtype=np.uint8), (np.arange(90) % 2).astype(np.uint8)
    X[y == 1, :3] //= 4
    np.savez(folder / "data.npz", inputs=X[:30, None] / 255, labels=y[:30].astype(np.int64))
    write_idx(folder / "more", X[30:], y[30:])
    record = ("record", "--data", folder / "data.npz", "--width", 4, "--steps", 3, "--out", folder / "run")
    assert run(*record, "--quiet") == 0
    return folder


@pytest.mark.slow
def test_a_folder_of_images_gives_validation_points_and_points_without_labels(images, tmp_path, capsys, no_pictures):
    asked = ("uncertainty", images / "run", "--validation", images / "more")
    assert run(*asked, "--out", tmp_path / "half", *FAST) == 0
    with np.load(tmp_path / "half" / "scores.npz") as scores:
        assert len(scores["labels"]) == 30
    assert run(*asked, "--points", images / "more", "--out", tmp_path / "whole", *FAST) == 0
    with np.load(tmp_path / "whole" / "scores.npz") as scores:
        assert len(scores["error"]) == 60
        assert "labels" not in scores.files
    assert "60 points of" in capsys.readouterr().out


@pytest.mark.parametrize(("which", "path"), [("judged", "straight"), ("images", "chords:2")])
def test_audit_ranks_every_label_as_the_library_does(request, tmp_path, capsys, which, path):
    folder = request.getfixturevalue(which)
    capsys.readouterr()  # of the fixture
    options = ("--top", 12, "--nodes", 3, "--path", path, "--quiet")
    assert run("audit", folder / "run", "--out", tmp_path, *options) == 0
    trajectory = open_run(folder / "run", None)
    found = epk.label_errors(trajectory, nodes=3, path=parse_path(path))
    with (tmp_path / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == found.indices.tolist()
    assert [int(row["label"]) for row in rows] == trajectory.targets[found.indices].tolist()
    assert [float(row["margin"]) for row in rows] == pytest.approx(found.margin[found.indices].tolist(), rel=1e-9)
    assert [float(row["score"]) for row in rows] == found.scores[found.indices].tolist()
    out = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in out[1:13]] == found.indices[:12].tolist()
    saved = json.loads((tmp_path / "audit.json").read_text())["results"]
    assert saved["another_class_expected"] == int((found.predicted != trajectory.targets).sum())
    assert len(saved["first"]) == 12
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_the_worst_images_are_drawn_in_their_order(images):
    trajectory = open_run(images / "run", None)
    found = epk.label_errors(trajectory, nodes=2)
    figure = suspicious_labels_figure(found, trajectory.inputs, trajectory.targets, 13)
    captions = [ax.get_title() for ax in figure.get_axes() if ax.images]
    assert [int(caption.split()[0].removeprefix("#")) for caption in captions] == found.indices[:13].tolist()


@pytest.mark.parametrize("page", ["deciding.md", "capabilities/command-line.md"])
def test_command_lines_of_the_pages_are_understood(page):
    """All options are parsed before --help is answered."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines() if line.startswith("epk-gp")]
    lines += re.findall(r"`(epk-gp [a-z]+ run[^`]*)`", text)
    commands = [shlex.split(line)[1:] for line in lines]
    assert sum(words[0] in ("uncertainty", "audit") for words in commands) >= 2
    for words in commands:
        assert run(*words, "--help") == 0, words
        assert run(*words, "--no-such-option") == 1


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("features", "process"), [("exact", "exact"), (16, "16 sketched features")])
def test_points_that_the_loss_leaves_out_are_not_counted(user_module, tmp_path, capsys, no_pictures, features, process):
    draws = torch.Generator().manual_seed(0)
    X, y = torch.randn(9, 3, generator=draws), torch.arange(9) % 2
    y[:3] = -100
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2, folder=tmp_path / "run")
    np.savez(tmp_path / "labelled.npz", inputs=torch.randn(40, 3, generator=draws).numpy(), labels=np.arange(40) % 2)
    asked = ("--network", f"{user_module}:tanh_net", "--validation", tmp_path / "labelled.npz", "--features", features)
    assert run("uncertainty", tmp_path / "run", *asked, "--out", tmp_path / "out", *FAST) == 0
    assert f"process on 6 labels ({process})" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "uncertainty.json").read_text())["results"]["num_condition"] == 6

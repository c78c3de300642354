"""Wrong, extreme and odd uses of every command: status 1, nothing computed, one line that says what must hold."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import refused, run
from epk_gp.cli.networks import NetworkSpec, build_network, open_run

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.arange(12) % 2
FILES = {
    "ok": {"inputs": X, "labels": Y},
    "from_one": {"inputs": X, "labels": Y + 1},
    "from_minus_one": {"inputs": X, "labels": Y - 1},
    "gap": {"inputs": X, "labels": 2 * Y},
    "huge": {"inputs": X, "labels": 10**9 * Y},
    "larger_than_int64": {"inputs": X, "labels": np.where(Y, 2**64 - 1, 0).astype(np.uint64)},
    "one_class": {"inputs": X, "labels": 0 * Y},
    "one_point": {"inputs": X[:1], "labels": Y[:1]},
    "no_points": {"inputs": X[:0], "labels": Y[:0]},
    "float_labels": {"inputs": X, "labels": 1.0 * Y},
    "columns_of_labels": {"inputs": X, "labels": Y[:, None]},
    "one_label": {"inputs": X, "labels": np.int64(1)},
    "few_labels": {"inputs": X, "labels": Y[:5]},
    "text_labels": {"inputs": X, "labels": np.array(["cat", "dog"])[Y]},
    "text": {"inputs": X.astype(str), "labels": Y},
    "nan": {"inputs": np.where(X[3, 1] == X, np.nan, X), "labels": Y},
    "large": {"inputs": 1e300 * X, "labels": Y},
    "complex": {"inputs": X + 1j, "labels": Y},
    "whole_numbers": {"inputs": (9 * X).astype(np.int32), "labels": Y},
    "flat": {"inputs": X[:, 0], "labels": Y},
    "no_entries": {"inputs": X[:, :0], "labels": Y},
    "wide": {"inputs": np.zeros((12, 7)), "labels": Y},
    "test_of_another_shape": {"inputs": X, "labels": Y, "test_inputs": X[:, :2], "test_labels": Y},
    "test_with_nan": {"inputs": X, "labels": Y, "test_inputs": X * np.nan, "test_labels": Y},
    "test_without_labels": {"inputs": X, "labels": Y, "test_inputs": X},
    "test_labels_alone": {"inputs": X, "labels": Y, "test_labels": Y},
    "sorted": {"inputs": X, "labels": np.arange(12) // 4},
    "last_is_other": {"inputs": X, "labels": np.arange(12) // 11},
    "train_0_to_2_test_1_to_3": {
        "inputs": X,
        "labels": np.arange(12) % 3,
        "test_inputs": X[:3],
        "test_labels": Y[:3] + 2,
    },
    "train_gap_in_test": {"inputs": X, "labels": 2 * Y, "test_inputs": X, "test_labels": np.arange(12) % 3},
    "sorted_and_test": {"inputs": X, "labels": np.arange(12) // 4, "test_inputs": X[:2], "test_labels": Y[:2]},
    "no_labels": {"inputs": X},
    "many_names": {f"a{k}": Y for k in range(12)},
    "other_names": {"X": X, "y": Y},
}
RECORD = ("record", "--out", "new", "--steps", 2, "--width", 3, "--quiet")
OWN = (*RECORD, "--data", "ok.npz")

# fmt: off
USES = [
    # labels
    ((*RECORD, "--data", "from_one.npz"), "must be 0..C-1 without gaps: got 2 different ones from 1 to 2. Subtract 1."),
    ((*RECORD, "--data", "from_minus_one.npz"), "got 2 different ones from -1 to 0. Add 1."),
    ((*RECORD, "--data", "gap.npz"), "got 2 different ones from 0 to 2. Renumber them"),
    ((*RECORD, "--data", "huge.npz"), "got 2 different ones from 0 to 1000000000. Renumber them"),
    ((*RECORD, "--data", "larger_than_int64.npz"), "`labels` in larger_than_int64.npz must be class indices"),
    ((*RECORD, "--data", "one_class.npz"), "must name at least two classes"),
    ((*RECORD, "--data", "one_point.npz"), "must name at least two classes"),
    ((*RECORD, "--data", "gap.npz", "--num-classes", 2), "must lie in 0..1 (--num-classes 2): got 0..2"),
    ((*RECORD, "--data", "from_minus_one.npz", "--num-classes", 2), "must lie in 0..1 (--num-classes 2): got -1..0"),
    ((*RECORD, "--data", "train_0_to_2_test_1_to_3.npz"),
     "`test_labels` in train_0_to_2_test_1_to_3.npz must lie in 0..2, the classes of the training points: got 2..3."),
    ((*RECORD, "--data", "train_gap_in_test.npz"), "labels in train_gap_in_test.npz must be 0..C-1 without gaps"),
    ((*RECORD, "--data", "sorted.npz", "--num-train", 8),
     "labels of the other points of sorted.npz must lie in 0..1, the classes of the training points: got 2..2. "
     "The file may be sorted by class: shuffle its points"),
    ((*RECORD, "--data", "sorted.npz", "--num-train", 6, "--num-test", 1), "The file may be sorted by class: shuffle"),
    ((*RECORD, "--data", "sorted.npz", "--num-test", 4), "The file may be sorted by class: shuffle"),
    ((*RECORD, "--data", "sorted_and_test.npz", "--num-train", 8), "The file may be sorted by class: shuffle"),
    ((*RECORD, "--data", "last_is_other.npz", "--num-train", 9),
     "labels of the first 9 points of last_is_other.npz, the training points, must name at least two classes: all are "
     "0. The file may be sorted by class: shuffle its points"),
    ((*OWN, "--num-classes", 1), "--num-classes must be at least 2: got 1"),
    ((*OWN, "--num-classes", 10**9), "--num-classes must be at most 1000000: got 1000000000"),
    ((*RECORD, "--num-classes", 3), "--num-classes belongs to a file of one's own: got --data three-gaussians"),
    ((*RECORD, "--data", "float_labels.npz"), "must be a list of class indices: got shape (12,), torch.float64"),
    ((*RECORD, "--data", "columns_of_labels.npz"), "must be a list of class indices: got shape (12, 1), torch.int64"),
    ((*RECORD, "--data", "one_label.npz"), "`labels` in one_label.npz must have one entry per point: got shape ()"),
    ((*RECORD, "--data", "few_labels.npz"), "`labels` in few_labels.npz must have one entry per point: got 5 for 12"),
    ((*RECORD, "--data", "text_labels.npz"), "must be a whole .npz file of numbers: got an array of <U3"),
    # data of one's own
    ((*RECORD, "--data", "text.npz"), "must be a whole .npz file of numbers: got an array of <U"),
    ((*RECORD, "--data", "no_points.npz"), "must hold at least one point"),
    ((*RECORD, "--data", "nan.npz"), "`inputs` in nan.npz as torch.float64 must be finite: row 3"),
    ((*RECORD, "--data", "large.npz", "--dtype", "float32"), "as torch.float32 must be finite: row 0"),
    ((*RECORD, "--data", "complex.npz"), "must be real numbers: got shape (12, 3), torch.complex128"),
    ((*RECORD, "--data", "whole_numbers.npz"), "--network mlp must have floating-point inputs: got torch.int32"),
    ((*RECORD, "--data", "flat.npz"), "must have inputs of shape (n, D) or more: got (12,)"),
    ((*RECORD, "--data", "no_entries.npz"), "must have at least one entry per point: got shape (12, 0)"),
    ((*RECORD, "--data", "test_of_another_shape.npz"), "must have the shape of `inputs`, (3,) each: got (2,)"),
    ((*RECORD, "--data", "test_with_nan.npz"), "`test_inputs` in test_with_nan.npz as torch.float64 must be finite"),
    ((*RECORD, "--data", "test_without_labels.npz"), "must hold `test_labels`: got `inputs`, `labels`, `test_inputs`"),
    ((*RECORD, "--data", "test_labels_alone.npz"),
     "must hold `test_inputs`: got `inputs`, `labels`, `test_labels`."),
    ((*RECORD, "--data", "no_labels.npz"), "must hold `labels`: got `inputs`."),
    ((*RECORD, "--data", "other_names.npz"), "other_names.npz must hold `inputs`: got `X`, `y`."),
    ((*RECORD, "--data", "many_names.npz"), "`a8`, `a9` and 2 more."),
    ((*RECORD, "--data", "other_names.safetensors"), "must hold `inputs`: got `X`."),
    ((*RECORD, "--data", "array.npz"), "it holds a single array, as an .npy file does"),
    ((*RECORD, "--data", "folder.npz"), "folder.npz must be a .safetensors or .npz file: it is a folder"),
    ((*RECORD, "--data", "empty.npz"), "empty.npz must be a whole .npz file"),
    ((*RECORD, "--data", "empty.safetensors"), "empty.safetensors must be a whole .safetensors file"),
    ((*RECORD, "--data", ""), "arguments must not be empty"),
    ((*RECORD, "--data="), "arguments must not be empty"),
    ((*RECORD, "--data-dir", "folder"), "--data-dir belongs to --data mnist: got --data three-gaussians"),
    # sizes of the data
    ((*OWN, "--num-train", 0), "--num-train must lie in 1..12"),
    ((*OWN, "--num-train", 10**30), "--num-train must lie in 1..12"),
    ((*OWN, "--num-test", 12), "--num-test must leave training points: got 12 of the 12 points of ok.npz"),
    ((*OWN, "--num-test", -1), "--num-test must be at least 1: got -1"),
    ((*OWN, "--num-test", 10**30), "--num-test must be at most 1000000"),
    ((*RECORD, "--num-test", 10**7), "--num-test must be at most 1000000"),
    ((*OWN, "--num-train", 12, "--num-test", 1), "must sum to at most the 12 points of ok.npz: got 12 and 1"),
    ((*OWN, "--batch-size", 13), "--batch-size must be at most the 12 training points: got 13"),
    ((*OWN, "--batch-size", -1), "--batch-size must be at least 1"),
    # training
    ((*OWN, "--steps", 0), "--steps must be at least 1"),
    ((*OWN, "--steps", 10**30), "--steps must be at most 1000000000"),
    ((*OWN, "--steps", "1e3"), "--steps must be a whole number: got '1e3'."),
    *(((*OWN, "--lr", value), "--lr must be positive and finite: got") for value in (0, -0.1, "nan", "inf")),
    *(((*OWN, "--momentum", value), "--momentum must be at least 0 and below 1: got")
      for value in (2, 1, -0.1, "nan", "inf", "1e300")),
    *(((*OWN, "--weight-decay", value), "--weight-decay must be at least 0 and finite: got")
      for value in (-1, "nan", "inf")),
    *(((*OWN, "--clip-norm", value), "--clip-norm must be positive and finite: got") for value in (0, -1, "nan")),
    *(((*OWN, "--commit-seconds", value), "--commit-seconds must be positive and finite: got")
      for value in (0, -1, "nan", "inf")),
    *(((*OWN, "--check-every", value), "--check-every must be at") for value in (0, -1, 10**30)),
    ((*OWN, "--nesterov"), "--nesterov must come with a positive --momentum"),
    ((*OWN, "--optimizer", "adam", "--momentum", 0.9), "--momentum belongs to sgd and rmsprop: got 0.9 with adam"),
    ((*OWN, "--optimizer", "rmsprop", "--nesterov"), "--nesterov belongs to sgd"),
    ((*OWN, "--width", 10**9), "--width must be at most 1000000"),
    ((*OWN, "--network", "cnn"), "--width belongs to --network mlp: got --network cnn"),
    ((*OWN, "--network", "transformer"), "--network must be mlp, cnn or package.module:factory: got 'transformer'"),
    (("record", "--out", "new", "--network", "a:b", "--activation", "tanh"), "--activation belongs to --network mlp"),
    ((*OWN, "--out", "file"), "--out must be a new folder: file is a file"),
    ((*OWN, "--out", "full"), "--out must be a new or empty folder: full already holds something"),
    # seeds
    *(((command, "run", "--seed", value), "--seed must be at")
      for command in ("verify", "attribute", "report", "gram", "uncertainty", "audit")
      for value in (-1, 2**63, 10**30)),
    *(((*OWN, "--seed", value), "--seed must be at") for value in (-1, 2**64, 10**30)),
    (("demo", "--seed", -1), "--seed must be at least 0: got -1"),
    # what is no run
    *(((command, "ok.npz"), "RUN must be the folder of a recorded run: ok.npz is a file.")
      for command in ("info", "verify", "export", "attribute", "report", "gram", "uncertainty", "audit")),
    *(((command, "nowhere"), "must hold a recorded run") for command in ("info", "verify", "export", "gram")),
    # rules
    *(((command, "run", "--rule", "gauss-legendre:100000"), "the number of nodes must be at most 1000: got 100000")
      for command in ("verify", "attribute", "gram", "uncertainty")),
    (("gram", "run", "--rule", "left-riemann:1000000000"), "the number of nodes must be at most 10000"),
    (("gram", "run", "--rule", "midpoint:10001"), "the number of nodes must be at most 10000: got 10001"),
    (("gram", "run", "--rule", "gauss-legendre:" + "9" * 5000), "N must be a whole number of nodes"),
    (("gram", "run", "--rule", "gauss-legendre:²"), "N must be a whole number of nodes"),
    (("gram", "run", "--rule", "left-endpoint:3"), "--rule must be adaptive[:TOL], gauss-legendre:N"),
    *(((command, "run", "--rule", f"adaptive:{value}"), "needs a positive number as its tolerance")
      for command in ("verify", "attribute") for value in ("nan", "inf", "0", "-1", "")),
    # other numbers
    *(((command, "run", option, value), f"{option} must be at")
      for command, option in (
          ("verify", "--num-points"), ("attribute", "--num-points"), ("attribute", "--top"), ("gram", "--num-rows"),
          ("report", "--num-points"), ("report", "--top"),
          ("gram", "--num-columns"), ("uncertainty", "--num-condition"), ("uncertainty", "--grid"),
          ("uncertainty", "--num-samples"), ("uncertainty", "--fit-steps"),
      )
      for value in (0, -1, 10**30)),
    (("attribute", "run", "--top", 51), "--top must be at most 50: got 51"),
    (("uncertainty", "run", "--grid", 1), "--grid must be at least 2: got 1"),
    *(((command, "run", "--memory", value), "--memory must be at least 0.001 and below 1e+06: got")
      for command in ("attribute", "report", "gram", "audit") for value in (0, -1, "nan", "inf", "1e300", "1e-300")),
    *((("uncertainty", "run", "--margin", value), "--margin must be at least 0 and below 1000: got")
      for value in (-1, "nan", "inf")),
    *((("verify", "run", "--tol", value), "--tol must be at least 0 and finite: got") for value in (-1, "nan", "inf")),
    # options that would be ignored
    (("verify", "run", "--checksums", "--num-points", 3), "--checksums must stand without --num-points"),
    (("verify", "run", "--all-points", "--num-points", 3), "--all-points must stand without --num-points"),
    (("gram", "run", "--rows", "train", "--points", "ok.npz"), "--points must have a side"),
    # files and folders
    *(((command, "run", "--points", "folder.npz"), "it is a folder") for command in ("verify", "attribute", "gram")),
    (("verify", "run", "--points", "nan.npz"), "`inputs` in nan.npz as torch.float64 must be finite: row 3"),
    (("verify", "run", "--points", "complex.npz"), "must be real numbers"),
    (("verify", "run", "--points", "wide.npz"), "must have the shape of the run's, (3,) each: got shape (12, 7)"),
    (("verify", "run", "--points", "text.npz"), "must be a whole .npz file of numbers"),
    (("verify", "run", "--points", "other_names.npz"), "must hold `inputs`"),
    *(((command, "run", "--out", "file"), "--out must be a folder: file is a file")
      for command in ("info", "verify", "attribute", "gram", "uncertainty", "audit")),
    (("demo", "--out", "file"), "--out must be a folder: file is a file"),
    (("info", "run", "--out", "file/below"), "file/below cannot be used: not a directory."),
    (("info", "run", "--out", "a" * 300), "cannot be used: file name too long."),
    (("export", "run", "--out", "file.safetensors"), "--out must be a new file: file.safetensors exists"),
    *((("export", "run", "--out", name), f"--out must be a .safetensors file, the one format of exports: got {name}.")
      for name in ("x.npz", "x", "x.safetensors.gz")),
    *(((command, "run", "--out", out), f"--out must lie outside the folder of the run: got {out}, and the run is run.")
      for command in ("info", "verify", "attribute", "gram", "uncertainty", "audit")
      for out in ("run", "run/below", "full/../run", "link")),
    (("report", "run", "--out", "run/report.html"), "--out must lie outside the folder of the run"),
    (("report", "run", "--out", "file/report.html"), "cannot be used"),
    (("export", "run", "--out", "run/run.safetensors"), "--out must lie outside the folder of the run"),
    (("export", "run", "--out", "no/where.safetensors"), "no/where"),
]
# fmt: on


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of one's own, a run without held-out points, and things that are neither."""
    folder = tmp_path_factory.mktemp("own")
    for name, arrays in FILES.items():
        np.savez(folder / f"{name}.npz", **arrays)
    np.save(folder / "array.npy", X)
    (folder / "array.npy").rename(folder / "array.npz")
    (folder / "folder.npz").mkdir()
    (folder / "full").mkdir()
    for name in ("full/file", "file", "file.safetensors", "empty.npz", "empty.safetensors"):
        (folder / name).write_bytes(b"")
    save_file({"X": torch.zeros(2)}, folder / "other_names.safetensors")
    (folder / "link").symlink_to("run")
    assert run(*RECORD, "--data", folder / "ok.npz", "--out", folder / "run") == 0
    return folder


@pytest.mark.parametrize(
    ("words", "message"), USES, ids=lambda value: "_".join(map(str, value))[:80] if isinstance(value, tuple) else ""
)
def test_a_wrong_use_ends_with_one_line(own, monkeypatch, capsys, words, message):
    monkeypatch.chdir(own)
    before = sorted(own.rglob("*"))
    line = refused(capsys, *words, *(() if "--quiet" in words else ("--quiet",)))
    assert message in line
    assert "Traceback" not in line
    assert sorted(own.rglob("*")) == before


def test_odd_uses_that_mean_something_pass(own, tmp_path, monkeypatch, capsys):
    """The negative control."""
    monkeypatch.chdir(own)
    names = {"inputs": X.astype(">f8"), "labels": Y.astype(bool), "names": np.array([{}], dtype=object)}
    np.savez(tmp_path / "odd.npz", **names)
    assert run(*RECORD, "--data", tmp_path / "odd.npz", "--momentum", 0.999, "--out", tmp_path / "odd") == 0
    assert run(*OWN, "--seed", 2**63 - 1, "--batch-size", 12, "--out", tmp_path / "seed") == 0
    assert run("verify", "run", "--num-points", 10**9, "--tol", 0.5, "--rule", "gauss-legendre:20", "--quiet") == 0
    assert "12 training inputs" in capsys.readouterr().out


def test_a_sorted_file_is_split_where_the_number_of_classes_is_given(own, tmp_path):
    """And labels of held-out points need not name every class."""
    asked = ("--data", own / "sorted.npz", "--num-train", 8, "--num-classes", 3)
    assert run(*RECORD, *asked, "--out", tmp_path / "run") == 0
    assert open_run(tmp_path / "run", None).num_outputs == 3
    assert run(*RECORD, "--data", own / "sorted_and_test.npz", "--out", tmp_path / "test") == 0
    assert open_run(tmp_path / "test", None).num_outputs == 3


def test_a_class_without_a_point_is_an_output_where_the_number_of_classes_is_given(own, tmp_path):
    out = tmp_path / "run"
    assert run(*RECORD, "--data", own / "gap.npz", "--num-classes", 4, "--out", out) == 0
    trajectory = open_run(out, None)
    assert trajectory.num_outputs == 4
    assert trajectory.targets.unique().tolist() == [0, 2]


@pytest.mark.parametrize(
    ("options", "train", "held_out"),
    [
        ((), slice(0, 12), None),
        (("--num-test", 4), slice(0, 8), slice(8, 12)),
        (("--num-train", 9), slice(0, 9), slice(9, 12)),
        (("--num-train", 5, "--num-test", 2), slice(0, 5), slice(5, 7)),
    ],
    ids=["all", "num_test", "num_train", "both"],
)
def test_points_of_a_file_are_held_out_as_asked(own, tmp_path, capsys, options, train, held_out):
    out = tmp_path / "run"
    assert run(*RECORD, "--data", own / "ok.npz", *options, "--out", out) == 0
    said = capsys.readouterr().out
    assert torch.equal(open_run(out, None).inputs, torch.from_numpy(X[train]))
    if held_out is None:
        assert "no held-out points: all points were trained on" in said
        assert not (out / "held_out.safetensors").exists()
    else:
        assert torch.equal(load_file(out / "held_out.safetensors")["inputs"], torch.from_numpy(X[held_out]))
        assert f"held-out {said.split('held-out ')[1].split(' %')[0]} % of {len(X[held_out])} points" in said


@pytest.mark.parametrize("command", ["verify", pytest.param("attribute", marks=pytest.mark.slow), "gram"])
def test_training_inputs_are_explained_only_aloud(own, recorded, tmp_path, capsys, command):
    few = ("--rule", "gauss-legendre:1", "--out", tmp_path, "--quiet")
    limit = {"verify": ("--tol", 9), "attribute": ("--num-points", 1), "gram": ("--num-rows", 3)}[command]
    assert run(command, own / "run", *few, *limit) == 0
    assert " training inputs, for the run has no held-out points" in capsys.readouterr().out
    assert run(command, recorded, *few, *limit) == 0
    assert "6 held-out points" in capsys.readouterr().out
    numbers = json.loads(next(tmp_path.glob("*.json")).read_text())["config"]
    assert "6 held-out points" in str([numbers.get("points"), numbers.get("row_points")])


def test_held_out_points_that_are_gone_are_not_replaced(recorded, tmp_path, capsys):
    for file in recorded.iterdir():
        if file.name != "held_out.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "must hold the held-out points of the run: it is missing" in refused(capsys, "verify", tmp_path, "--quiet")


def test_verify_takes_ten_points_and_says_how_to_take_all(own, tmp_path, capsys):
    asked = ("verify", own / "run", "--head", "logits", "--rule", "gauss-legendre:4", "--tol", 1, "--quiet")
    assert run(*asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("verifying at 10 of 12 training inputs")
    assert "--all-points takes all" in said.splitlines()[0]
    assert run(*asked, "--all-points") == 0
    assert capsys.readouterr().out.startswith("verifying at 12 training inputs")
    save_file({"inputs": torch.from_numpy(X[:11].copy())}, tmp_path / "points.safetensors")
    assert run(*asked, "--points", tmp_path / "points.safetensors") == 0
    assert capsys.readouterr().out.startswith("verifying at 11 points of")


def test_a_network_that_cannot_fit_into_the_memory_is_refused_before_it_is_made():
    with pytest.raises(ValueError, match="the network must fit into the memory, .* GiB: its 1.0e[+]12 weights take"):
        build_network(NetworkSpec("mlp", (10**6,), 2, 10**6))

"""Wrong, extreme and odd uses of every command: status 1, nothing computed, one line that says what must hold."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import refused, run
from epk_gp.cli.networks import open_run

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.arange(12) % 2
# fmt: off
LABELS = {  # with the inputs X
    "ok": Y, "from_one": Y + 1, "from_minus_one": Y - 1, "gap": 2 * Y, "huge": 10**9 * Y, "one_class": 0 * Y,
    "larger_than_int64": Y.astype(np.uint64) * np.uint64(2**64 - 1), "float_labels": 1.0 * Y,
    "columns_of_labels": Y[:, None], "one_label": np.int64(1), "few_labels": Y[:5],
    "text_labels": np.array(["cat", "dog"])[Y], "sorted": np.arange(12) // 4, "last_is_other": np.arange(12) // 11,
}
INPUTS = {  # with the labels Y
    "text": X.astype(str), "nan": np.where(X[3, 1] == X, np.nan, X), "large": 1e300 * X, "complex": X + 1j,
    "whole_numbers": (9 * X).astype(np.int32), "flat": X[:, 0], "no_entries": X[:, :0], "wide": np.zeros((12, 7)),
}
TESTS = {  # labels, and what is to be held out
    "test_of_another_shape": (Y, X[:, :2], Y), "test_with_nan": (Y, X * np.nan, Y),
    "train_0_to_2_test_1_to_3": (np.arange(12) % 3, X[:3], Y[:3] + 2),
    "train_gap_in_test": (2 * Y, X, np.arange(12) % 3), "sorted_and_test": (np.arange(12) // 4, X[:2], Y[:2]),
}
FILES = {
    **{name: {"inputs": X, "labels": y} for name, y in LABELS.items()},
    **{name: {"inputs": x, "labels": Y} for name, x in INPUTS.items()},
    **{name: {"inputs": X, "labels": y, "test_inputs": x, "test_labels": z} for name, (y, x, z) in TESTS.items()},
    "one_point": {"inputs": X[:1], "labels": Y[:1]}, "no_points": {"inputs": X[:0], "labels": Y[:0]},
    "test_without_labels": {"inputs": X, "labels": Y, "test_inputs": X},
    "test_labels_alone": {"inputs": X, "labels": Y, "test_labels": Y},
    "no_labels": {"inputs": X}, "many_names": {f"a{k}": Y for k in range(12)}, "other_names": {"X": X, "y": Y},
    "objects": {"inputs": np.array([{"a": 1}], dtype=object)},
}
# fmt: on
RECORD = ("record", "--out", "new", "--steps", 2, "--width", 3)
OWN = (*RECORD, "--data", "ok.npz")


def expanded(uses: str) -> list[str]:
    """The uses between semicolons; words in braces stand for as many uses, as in a shell."""
    found = []
    for use in uses.split("; "):
        before, brace, rest = use.partition("{")
        words, _, after = rest.partition("}")
        found += expanded("; ".join(before + word + after for word in words.split(","))) if brace else [use]
    return found


# Messages of typer, which end with the command's help, and the uses that end with each.
OF_TYPER = {
    "No such command 'teach'": "teach",
    "No such option: --fast": "--fast; verify run --fast",
    "Missing argument 'RUN'": "verify",
    "unexpected extra argument": "verify run more",
    "'foo' is not one of 'logits', 'log_softmax'": "attribute run --head foo",
    "'foo' is not one of 'all', 'predicted', 'answers'": "attribute run --outputs foo",
    "'float16' is not one of 'float32', 'float64'": "OWN --dtype float16",
    "Invalid value for '--lr'": "OWN --lr fast",
}
BEYOND = str(10**30)
# What a message says, and the uses that end with it.
USES = OF_TYPER | {
    "must be 0..C-1 for C >= 2 classes":
        "RECORD --data {from_one,from_minus_one,gap,huge,larger_than_int64,one_class,one_point}.npz; "
        "RECORD --data {train_gap_in_test,train_0_to_2_test_1_to_3}.npz; "
        "RECORD --data {gap,from_minus_one}.npz --num-classes 2; RECORD --data sorted.npz --num-train 8; "
        "RECORD --data sorted.npz --num-train 6 --num-test 1; RECORD --data sorted.npz --num-test 4; "
        "RECORD --data sorted_and_test.npz --num-train 8; RECORD --data last_is_other.npz --num-train 9",
    "must hold `labels`, a whole number 0..C-1 for each of":
        "RECORD --data {float_labels,columns_of_labels,one_label,few_labels,no_points,no_labels}.npz",
    "must hold `test_labels`": "RECORD --data test_without_labels.npz",
    "must hold `test_inputs`": "RECORD --data test_labels_alone.npz",
    "must be a whole .npz file of numbers":
        "RECORD --data {text_labels,text,array,empty}.npz; verify run --points {text,objects,large_array}.npz",
    "must be a whole .safetensors file": "RECORD --data empty.safetensors",
    "must be finite: row":
        "RECORD --data {nan,test_with_nan}.npz; RECORD --data large.npz --dtype float32; verify run --points nan.npz",
    "must hold `inputs`, at least one real number per point":
        "RECORD --data {complex.npz,no_entries.npz,other_names.npz,other_names.safetensors}; "
        "verify run --points {complex,other_names}.npz",
    "must have floating-point inputs of shape (n, D)": "RECORD --data {whole_numbers,flat}.npz",
    "must have the shape of `inputs`": "RECORD --data test_of_another_shape.npz",
    "must be points of the run's shape, (3,) each": "verify run --points wide.npz",
    "must be a .safetensors or .npz file":
        "verify run --points file; uncertainty judged --validation nowhere.npz; RECORD --data folder.npz; "
        "{verify,attribute} run --points folder.npz",
    "--data must be three-gaussians, digits, mnist": "RECORD --data cifar",
    "it does not exist": "RECORD --data missing.npz; verify run --points nowhere.npz",
    "the data folder must exist, with four idx-ubyte files: got nowhere": "RECORD --data mnist --data-dir nowhere",
    "the cnn needs images": "record --out new --network cnn; verify run --network cnn",
    "it raised ModuleNotFoundError": "record --out new --network no.such.module:net",
    "arguments must not be empty": "RECORD --data=; verify run --rule=",
    "--data-dir belongs to --data mnist": "RECORD --data-dir folder",
    "--num-classes belongs to a file of one's own": "RECORD --num-classes 3",
    "--num-train and --num-test must divide 12 points":
        "OWN --num-train 13; OWN --num-test 12; OWN --num-train 12 --num-test 1",
    "--batch-size must be at most the 12 training points": "OWN --batch-size 13",
    "--momentum belongs to sgd and rmsprop": "OWN --optimizer adam --momentum 0.9",
    "--width belongs to --network mlp": "OWN --network cnn",
    "--network must be mlp, cnn or package.module:factory": "record --out new --data ok.npz --network transformer",
    "--out must be a new or empty folder": "OWN --out {file,full}",
    "RUN must hold a recorded run: ok.npz/run.json does not exist":
        "{verify,attribute,uncertainty,report} ok.npz",
    "must hold a recorded run": "verify nowhere",
    "--rule must be adaptive[:TOL], gauss-legendre:N":
        "{verify,attribute} run --rule gauss-legendre:100000; report run --rule simpson; "
        "verify run --rule {left-endpoint:3,left-riemann:1000000000,midpoint:10001}; "
        f"verify run --rule gauss-legendre:{{{'9' * 5000},\u00b2}}; verify run --rule adaptive:{{nan,inf,0,-1,abc}}; "
        "verify run --rule {simpson,gauss-legendre:0,gauss-legendre:2.5,gauss-legendre,gauss-legendre:}",
    "chords:K or layerwise[:K]: got":
        "attribute run --path {chords,chords:0,straight:2,zigzag,chords:-1}; report run --path layerwise:0",
    "--out must be an HTML file, as in report.html: got report.pdf": "report run --out report.pdf",
    "is a folder": "report run --out folder.html",
    "--outputs must be predicted, all, answers, or a number of classes from 1": "report run --outputs {most,0}",
    "a number of the 2 classes of a classifier: got 4": "report run --outputs 4",
    "--outputs answers must stand without": "report run --outputs answers --validation held-out",
    "of `answers`, a tensor beside `inputs` in the file of --points: got training inputs":
        "{attribute,report} run --outputs answers",
    "class_names must name each of the 2 outputs": "report run --class-names a",
    "names must name each of the": "report run --feature-names a,b",
    "at least 20 validation points: got 19": "uncertainty judged --validation few.npz --points points.npz",
    "validation points: got 10": "uncertainty judged --validation few.npz",
    "validation points must have labels: points.npz has no `labels`.": "uncertainty judged --validation points.npz",
    "`labels` in wrong.npz must lie in 0..2: got 1..3.": "uncertainty judged --validation wrong.npz",
    "20 of 20 are training points. Hold others out": "uncertainty judged --validation seen.npz",
    "t10k-images": "uncertainty judged --validation .",
    "--validation must name labelled points: run has no held-out ones":
        "uncertainty run; report run --validation held-out",
    "--alpha must be positive and below 1": "uncertainty judged --validation held-out --alpha {0,1}",
    "--grid must stand beside --map or --columns, --feature-names beside":
        "uncertainty judged --grid 3; uncertainty judged --map --feature-names a",
    "'age' must be the name or the number of one column": "uncertainty run --columns age,0",
    "--columns must be X,Y, and --others NAME=VALUE":
        "uncertainty run --columns 0; uncertainty run --columns 0,1,2; uncertainty run --columns 0=1..,1; "
        "uncertainty run --columns 0=1,1; uncertainty run --columns 0,1 --others 2",
    "axes must be two columns": "uncertainty run --columns 0,0",
    "others= must be of columns beside the axes": "uncertainty run --columns 0,1 --others 1=2",
    "extent= two ends that ascend": "uncertainty run --columns 0=2..1,1",
    "categories of 'column 1' must name each of its values": "uncertainty run --columns 0,1=7:a",
    "--columns must stand without --map, and --others beside --columns":
        "{uncertainty,report} judged --validation held-out {--others 1=2,--columns 0 --map}",
    "--map and --columns must stand beside --validation": "report judged {--map,--columns 0}",
    "cannot be used: ":
        "{verify,attribute} run --out file; uncertainty judged --out file; demo --out file; "
        f"verify run --out {{file/below,{'a' * 300}}}; report run --out file/report.html",
    "--out must lie outside the folder of the run":
        "{verify,attribute,uncertainty} run --out {run,run/below,full/../run,link}; report run --out run/report.html",
    "--memory must be at least 0.001": "{attribute,report} run --memory {0,-1,nan,inf,1e300,1e-300}",
    "--lr must be positive and finite": "OWN --lr {0,-1,nan,inf}",
    "--momentum must be at least 0 and below 1": "OWN --momentum {2,1,-0.1,nan,inf,1e300}",
    "--weight-decay must be at least 0 and finite": "OWN --weight-decay {-1,nan,inf}",
    "--commit-seconds must be positive and finite": "OWN --commit-seconds {0,-1,nan,inf}",
    "--tol must be at least 0 and finite": "verify run --tol {-1,nan,inf}",
    **{f"Invalid value for '{option}'": f"{uses} {option} {{{values}}}" for option, uses, values in (
        ("--num-classes", "OWN", "1,1000000000"),
        ("--num-test", "{OWN,RECORD}", f"-1,10000000,{BEYOND}"),
        ("--num-train", "OWN", f"0,-1,{BEYOND}"),
        ("--batch-size", "OWN", "-1"),
        ("--steps", "OWN", f"0,{BEYOND},1e3"),
        ("--check-every", "OWN", f"0,-1,{BEYOND}"),
        ("--width", "OWN", "1000000000"),
        ("--seed", "{OWN,demo,report run,uncertainty run}", f"-1,{2**63},{BEYOND}"),
        ("--num-points", "{verify,attribute,report} run", f"0,-1,{BEYOND}"),
        ("--top", "attribute run", f"0,-1,{BEYOND},51"),
        ("--workers", "attribute run", "0,5000"),
        ("--grid", "uncertainty run", f"1,0,-1,{BEYOND}"),
    )},
}  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of one's own, a run without held-out points, and things that are neither."""
    folder = tmp_path_factory.mktemp("own")
    for name, arrays in FILES.items():
        np.savez(folder / f"{name}.npz", **arrays)
    np.save(folder / "array.npy", X)
    (folder / "array.npy").rename(folder / "array.npz")
    for name in ("folder.npz", "folder.html", "full"):
        (folder / name).mkdir()
    for name in ("full/file", "file", "file.safetensors", "empty.npz", "empty.safetensors"):
        (folder / name).write_bytes(b"")
    save_file({"X": torch.zeros(2)}, folder / "other_names.safetensors")
    (folder / "link").symlink_to("run")
    # numpy allocates what the header of an array claims before it reads the array
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776000, 3), }".ljust(117) + b"\n"
    with zipfile.ZipFile(folder / "large_array.npz", "w") as archive:
        archive.writestr("inputs.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert run(*RECORD, "--data", folder / "ok.npz", "--out", folder / "run") == 0
    assert run(*RECORD, "--num-train", 40, "--num-test", 60, "--out", folder / "judged") == 0
    held_out, trained = load_file(folder / "judged" / "held_out.safetensors"), open_run(folder / "judged", None)
    A, b = held_out["inputs"].numpy(), held_out["labels"].numpy()
    np.savez(folder / "points.npz", inputs=A[:9])
    np.savez(folder / "few.npz", inputs=A[:19], labels=b[:19])
    np.savez(folder / "wrong.npz", inputs=A, labels=b + 1)
    np.savez(folder / "seen.npz", inputs=trained.inputs.numpy(), labels=trained.targets.numpy())
    return folder


CASES = [(message, use) for message, uses in USES.items() for use in expanded(uses)]


@pytest.mark.parametrize(("message", "use"), CASES, ids=map(str, range(len(CASES))))
def test_a_wrong_use_ends_with_one_line(own, monkeypatch, capsys, message, use):
    monkeypatch.chdir(own)
    before, named = sorted(own.rglob("*")), {"RECORD": RECORD, "OWN": OWN}
    first, *words = use.split(" ")
    line = refused(capsys, *named.get(first, (first,)), *words)
    assert message in line, use
    assert message not in OF_TYPER or line.endswith(" --help.")
    assert sorted(own.rglob("*")) == before, use


def test_odd_uses_that_mean_something_pass(own, tmp_path, monkeypatch, capsys):
    """The negative control."""
    monkeypatch.chdir(own)
    names = {"inputs": X.astype(">f8"), "labels": Y.astype(bool), "names": np.array([{}], dtype=object)}
    np.savez(tmp_path / "odd.npz", **names)
    assert run(*RECORD, "--data", tmp_path / "odd.npz", "--momentum", 0.999, "--out", tmp_path / "odd") == 0
    assert run(*OWN, "--seed", 2**63 - 1, "--batch-size", 12, "--out", tmp_path / "seed") == 0
    assert run("verify", "run", "--num-points", 10**9, "--tol", 0.5, "--rule", "gauss-legendre:20") == 0
    assert "12 training inputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "options", "labels", "outputs"),
    [("sorted", ("--num-train", 8, "--num-classes", 3), [0, 1], 3), ("sorted_and_test", (), [0, 1, 2], 3),
     ("gap", ("--num-classes", 4), [0, 2], 4)],
)  # fmt: skip
def test_a_class_without_a_training_point_is_an_output_where_the_number_of_classes_is_given(
    own, tmp_path, file, options, labels, outputs
):
    """And labels of held-out points need not name every class."""
    assert run(*RECORD, "--data", own / f"{file}.npz", *options, "--out", tmp_path / "run") == 0
    trajectory = open_run(tmp_path / "run", None)
    assert trajectory.num_outputs == outputs
    assert trajectory.targets.unique().tolist() == labels


@pytest.mark.parametrize(
    ("options", "train", "held_out"),
    [((), 12, 0), (("--num-test", 4), 8, 4), (("--num-train", 9), 9, 3), (("--num-train", 5, "--num-test", 2), 5, 2)],
)
def test_points_of_a_file_are_held_out_as_asked(own, tmp_path, capsys, options, train, held_out):
    out = tmp_path / "run"
    assert run(*RECORD, "--data", own / "ok.npz", *options, "--out", out) == 0
    said = capsys.readouterr().out
    assert torch.equal(open_run(out, None).inputs, torch.from_numpy(X[:train]))
    assert ("no held-out points: all points were trained on" in said) == (not held_out)
    assert (out / "held_out.safetensors").exists() == bool(held_out)
    if held_out:
        kept = load_file(out / "held_out.safetensors")["inputs"]
        assert torch.equal(kept, torch.from_numpy(X[train : train + held_out]))
        assert f" % of {held_out} points" in said.split("held-out ")[1]


def test_verify_takes_ten_points_and_says_how_to_take_all(own, tmp_path, capsys):
    asked = ("verify", own / "run", "--rule", "gauss-legendre:4", "--tol", 1)
    assert run(*asked) == 0
    said = capsys.readouterr().out.splitlines()[2]
    assert said.startswith("verifying at 10 of 12 training inputs, for the run has no held-out points")
    assert "--num-points 12 takes all" in said
    assert run(*asked, "--num-points", 12) == 0
    assert "\nverifying at 12 training inputs" in capsys.readouterr().out
    save_file({"inputs": torch.from_numpy(X[:11].copy())}, tmp_path / "points.safetensors")
    assert run(*asked, "--points", tmp_path / "points.safetensors") == 0
    assert "\nverifying at 11 points of" in capsys.readouterr().out

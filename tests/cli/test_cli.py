import json
import re
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import epk_gp as epk
from epk_gp.cli import main
from epk_gp.cli.app import parse_rule
from epk_gp.cli.networks import NetworkSpec, build_network, open_run
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.storage.index import read_journal

SMALL = ("--num-train", "24", "--num-test", "6", "--width", "5", "--steps", "4", "--quiet")


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
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert run("record", "--out", folder, *SMALL) == 0
    return folder


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = """
        import torch
        from torch import nn

        def tanh_net():
            return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

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


def write_data(path: Path, *, n: int = 12, D: int = 3) -> Path:
    g = torch.Generator().manual_seed(1)
    X, y = torch.randn(n, D, generator=g, dtype=torch.float64), torch.arange(n) % 2
    if path.suffix == ".npz":
        np.savez(path, inputs=X.numpy(), labels=y.numpy())
    else:
        save_file({"inputs": X, "labels": y}, path)
    return path


# What commands do


@pytest.mark.parametrize("command", ["", "demo", "record", "info", "verify", "attribute", "gram", "uncertainty"])
def test_every_command_explains_itself(capsys, command):
    assert run(*command.split(), "--help") == 0
    assert "Usage: epk-gp" in capsys.readouterr().out


COMMANDS = ("demo", "record", "info", "verify", "export", "attribute", "gram", "uncertainty")
# they compute nothing and draw nothing
NOT_MEANT = {(command, option) for command in ("info", "export") for option in ("--seed", "--dtype")}


@pytest.mark.parametrize("option", ["--help", "--out", "--seed", "--dtype", "--quiet"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_they_share(capsys, monkeypatch, command, option):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(command, "--help") == 0
    assert (f" {option}" in capsys.readouterr().out) == ((command, option) not in NOT_MEANT)


def test_without_a_command_the_commands_are_listed(capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_a_recorded_run_is_the_library_s(recorded):
    note = json.loads((recorded / "network.json").read_text())["network"]
    net = build_network(NetworkSpec(note["name"], tuple(note["input_shape"]), note["num_outputs"], note["width"]))
    trajectory = epk.load_trajectory(recorded, net.double())
    assert (trajectory.num_steps, trajectory.num_points, trajectory.num_outputs) == (4, 24, 3)
    assert load_file(recorded / "held_out.safetensors")["inputs"].shape == (6, 100)


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path):
    seeds = {"a": 1, "b": 1, "c": 2}
    for name, seed in seeds.items():
        assert run("record", "--out", tmp_path / name, "--seed", seed, "--batch-size", 7, *SMALL) == 0
    digests = {name: read_journal(tmp_path / name).chunks[-1].digest for name in seeds}
    assert digests["a"] == digests["b"] != digests["c"]


def test_info_names_what_a_run_holds(recorded, capsys):
    assert run("info", recorded) == 0
    out = re.sub(" +", " ", capsys.readouterr().out)
    for line in ("network: mlp", "steps: 4", "step sizes: 0.1", "weights: 523", "training points: 24", "CrossEntropy"):
        assert line in out
    assert re.search(r"digest: [0-9a-f]{32}", out)
    assert re.search(r"size on disk: 0\.\d+ MB", out)


def test_info_writes_what_it_says(recorded, tmp_path, capsys):
    assert run("info", recorded, "--out", tmp_path, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    results = json.loads((tmp_path / "info.json").read_text())["results"]
    for name, value in results.items():
        assert re.search(rf"^{re.escape(name)}: +{re.escape(str(value))}$", captured.out, re.MULTILINE)


@pytest.mark.parametrize("command", ["verify", "attribute", "gram"])
def test_a_seed_draws_the_points_and_none_takes_the_first(recorded, tmp_path, command):
    inputs = {}
    for seed in (None, 1, 2, 1):
        out = tmp_path / f"{seed}{len(inputs)}"
        number = ("--num-rows", 3, "--num-columns", 2) if command == "gram" else ("--num-points", 3)
        seeded = () if seed is None else ("--seed", seed)
        assert run(command, recorded, "--out", out, *number, *seeded, "--quiet") == 0
        assert json.loads(next(out.glob("*.json")).read_text())["config"]["seed"] == seed
        if command != "verify":
            file, name = {"gram": ("gram", "row_inputs"), "attribute": ("attribution", "inputs")}[command]
            inputs[out] = load_file(out / f"{file}.safetensors")[name]
    if command != "verify":
        first, one, two, again = inputs.values()
        assert torch.equal(first, load_file(recorded / "held_out.safetensors")["inputs"][:3])
        assert torch.equal(one, again)
        assert not torch.equal(one, two)


def test_uncertainty_writes_arrays_in_the_type_asked_for(recorded, tmp_path):
    arguments = (
        "--num-condition",
        8,
        "--grid",
        3,
        "--num-samples",
        8,
        "--fit-steps",
        1,
        "--dtype",
        "float32",
        "--quiet",
    )
    assert run("uncertainty", recorded, "--out", tmp_path, *arguments) == 0
    assert load_file(tmp_path / "map.safetensors")["std"].dtype == torch.float32
    with np.load(tmp_path / "points.npz") as points:
        assert points["mean"].dtype == np.float32


def test_verify_passes_on_a_whole_run(recorded, tmp_path, capsys):
    assert run("verify", recorded, "--out", tmp_path, "--quiet") == 0
    assert "verified" in capsys.readouterr().out
    results = json.loads((tmp_path / "verify.json").read_text())
    assert results["results"]["passed"]
    for head in ("logits", "log_softmax"):
        assert results["results"][head]["max_error"] < 1e-12
    assert {"epk_gp", "torch", "python"} <= results["versions"].keys()
    assert results["seconds"]["total"] > 0


def test_verify_fails_where_the_rule_is_not_good_enough(recorded, capsys):
    """The control: one left node is not the integral."""
    line = refused(capsys, "verify", recorded, "--rule", "left-endpoint", "--quiet")
    assert "must equal the network to within 1e-09: it differs by" in line
    assert run("verify", recorded, "--rule", "left-endpoint", "--tol", 10, "--quiet") == 0


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


def test_record_goes_on_after_an_interrupt_as_if_it_had_not_been(tmp_path, monkeypatch, capsys):
    arguments = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.01, *SMALL)
    assert run("record", "--out", tmp_path / "whole", *arguments) == 0
    left, real = [2], epk.Recorder._before_step

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(epk.Recorder, "_before_step", interrupted)
        assert run("record", "--out", tmp_path / "run", *arguments) == 130
    capsys.readouterr()
    assert run("info", tmp_path / "run", "--quiet") == 0
    assert "not finished: record --resume goes on with it" in capsys.readouterr().out
    assert "already holds something" in refused(capsys, "record", "--out", tmp_path / "run", *arguments)
    assert run("record", "--out", tmp_path / "run", "--resume", *arguments) == 0
    digests = [read_journal(tmp_path / name).chunks[-1].digest for name in ("whole", "run")]
    assert digests[0] == digests[1]
    other = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.02, *SMALL)
    assert "must have the recorded options" in refused(capsys, "record", "--out", tmp_path / "run", "--resume", *other)


def test_export_writes_the_run_to_one_file(recorded, tmp_path, capsys):
    assert run("export", recorded, "--out", tmp_path / "run.safetensors", "--quiet") == 0
    found = load_file(tmp_path / "run.safetensors")
    trajectory = open_run(recorded, None)
    assert torch.equal(found["states"], torch.stack(list(trajectory.states)))
    assert torch.equal(found["inputs"], trajectory.inputs)
    assert torch.equal(found["sizes"], trajectory.step_sizes)
    assert (found["update.direct"] == 0.1).all()
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        assert file.metadata()["digest"] == trajectory.digest
        assert json.loads(file.metadata()["header"])["num_points"] == 24
    assert "must be a new file" in refused(capsys, "export", recorded, "--out", tmp_path / "run.safetensors")


@pytest.mark.parametrize("name", ["network.json", "held_out.safetensors"])
def test_damage_in_the_command_line_s_own_files_is_found(recorded, tmp_path, capsys, name):
    damaged = shutil.copytree(recorded, tmp_path / "damaged")
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 2
    (damaged / name).write_bytes(content)
    assert name in refused(capsys, "verify", damaged, "--quiet")


def test_progress_bars_go_to_stderr(recorded, capsys):
    assert run("verify", recorded, "--num-points", 2) == 0
    captured = capsys.readouterr()
    assert "steps: 100%" in captured.err
    assert "100%" not in captured.out
    assert run("verify", recorded, "--num-points", 2, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_attribute_writes_terms_that_sum_to_the_network(recorded, tmp_path):
    assert run("attribute", recorded, "--out", tmp_path, "--num-points", 4, "--top", 3, "--quiet") == 0
    arrays = load_file(tmp_path / "attribution.safetensors")
    assert arrays["samples"].shape == (4, 3, 24)
    total = arrays["initial"] + arrays["samples"].sum(2) + arrays["decay"]
    assert (total - arrays["network"]).abs().max() < 1e-12
    assert (arrays["initial"] - arrays["network"]).abs().max() > 1e-2  # the control: the samples say something
    summary = json.loads((tmp_path / "attribution.json").read_text())["results"]
    assert len(summary["points"]) == 4
    strongest = summary["points"][0]["most_raising"][0]
    c = summary["points"][0]["output"]
    assert strongest["contribution"] == arrays["samples"][0, c].max().item()
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")


def test_contributions_that_do_not_sum_are_an_error(recorded, tmp_path, capsys, monkeypatch):
    def wrong(*args, **kwargs):
        return tuple(replace(parts, values=1.001 * parts.values) for parts in attribute_many(*args, **kwargs))

    monkeypatch.setattr("epk_gp.cli.attribute.attribute_many", wrong)
    asked = ("attribute", recorded, "--out", tmp_path, "--num-points", 2, "--quiet")
    assert "must sum to the network's outputs" in refused(capsys, *asked)
    assert run(*asked, "--rule", "gauss-legendre:2") == 0  # it promises nothing


def test_a_predicted_output_is_explained_alone(recorded, tmp_path):
    asked = ("--num-points", 4, "--head", "logits", "--outputs", "predicted", "--quiet")
    assert run("attribute", recorded, "--out", tmp_path, *asked) == 0
    arrays = load_file(tmp_path / "attribution.safetensors")
    assert arrays["samples"].shape == (4, 1, 24)
    assert not (tmp_path / "partial").exists()
    assert (arrays["total"] - arrays["network"]).abs().max() < 1e-12


def test_gram_writes_the_library_s_block(recorded, tmp_path):
    arguments = ("--head", "logits", "--rule", "gauss-legendre:2", "--num-rows", 3, "--num-columns", 5, "--quiet")
    assert run("gram", recorded, "--out", tmp_path, *arguments) == 0
    arrays = load_file(tmp_path / "gram.safetensors")
    trajectory = epk.load_trajectory(recorded, build_network(NetworkSpec("mlp", (100,), 3, 5)).double())
    a = epk.Points(arrays["row_inputs"], is_train=False)
    b = epk.Points(trajectory.inputs[:5], is_train=True)
    expected = epk.gram_block(trajectory, a, b, head="logits", rule=epk.gauss_legendre(2))
    torch.testing.assert_close(arrays["gram"], expected, rtol=0, atol=0)
    assert not arrays["row_is_train"].any()
    assert arrays["column_is_train"].all()


@pytest.mark.parametrize("plane", ["principal", "coordinates"])
def test_uncertainty_writes_numbers_and_a_map(recorded, tmp_path, plane):
    arguments = ("--num-condition", 8, "--grid", 5, "--num-samples", 32, "--fit-steps", 3, "--plane", plane, "--quiet")
    assert run("uncertainty", recorded, "--out", tmp_path, *arguments) == 0
    arrays = load_file(tmp_path / "map.safetensors")
    assert arrays["std"].shape == arrays["kernel"].shape == arrays["entropy"].shape == (5, 5)
    assert (arrays["std"] > 0).all()
    assert torch.allclose(arrays["axes"] @ arrays["axes"].T, torch.eye(2, dtype=torch.float64))
    with np.load(tmp_path / "points.npz") as points:
        assert points["mean"].shape == points["std"].shape == (6, 3)
        np.testing.assert_allclose(points["mean"].sum(1), 1)
    results = json.loads((tmp_path / "uncertainty.json").read_text())
    assert -1 <= results["results"]["rank_correlation_of_std_with_distance"] <= 1
    assert results["config"]["num_condition"] == 8
    assert (tmp_path / "uncertainty.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo_shows_a_network_that_is_its_kernel_machine(tmp_path, capsys):
    assert run("demo", "--smoke", "--out", tmp_path, "--quiet") == 0
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    errors = {row["rule"]: row["max_error"] for row in results["reconstruction"]}
    assert errors["adaptive Gauss-Legendre 4, tol 1e-12"] < 1e-12
    assert errors["left Riemann 1"] > 1e-3  # the control
    assert results["attribution"]["max_error"] < 1e-12
    out = capsys.readouterr().out
    for picture in ("reconstruction", "error_vs_evaluations", "attribution", "uncertainty"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert picture in out


# Networks and data


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_users_bring_their_own_network_and_data(user_module, tmp_path, suffix, capsys):
    data = write_data(tmp_path / f"data{suffix}")
    network = f"{user_module}:tanh_net"
    arguments = ("--data", data, "--num-train", 9, "--network", network, "--steps", 3, "--quiet")
    assert run("record", "--out", "mine", *arguments) == 0
    said = refused(capsys, "verify", "mine", "--quiet")  # what a run names is not executed
    assert f"If you trust it, pass --network {network}" in said
    assert run("verify", "mine", "--network", network, "--quiet") == 0
    assert "3 points, 3 steps" in capsys.readouterr().out
    assert run("verify", "mine", "--network", network, "--points", data, "--quiet") == 0
    assert "12 points" in capsys.readouterr().out


def test_runs_of_the_library_need_a_network_and_take_one(user_module, tmp_path, capsys):
    X, y = torch.randn(6, 3), torch.arange(6) % 2
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2, path=tmp_path / "run")
    assert "--network must say how the network is made" in refused(capsys, "verify", "run", "--quiet")
    assert run("verify", "run", "--network", f"{user_module}:tanh_net", "--quiet") == 0  # float32, training inputs
    assert "must be the recorded one" in refused(capsys, "verify", "run", "--network", "mlp", "--quiet")


@pytest.mark.parametrize("options", [("--loss", "mse"), ("--dtype", "float32"), ("--zero-final-layer",)], ids=str)
def test_variants_record_and_verify(tmp_path, options):
    assert run("record", "--out", tmp_path / "run", *options, *SMALL) == 0
    assert run("verify", tmp_path / "run", "--quiet") == 0


def test_a_cnn_learns_digits(tmp_path):
    arguments = ("--data", "digits", "--network", "cnn", "--num-train", 8, "--num-test", 2, "--steps", 2, "--quiet")
    assert run("record", "--out", tmp_path / "run", *arguments) == 0
    assert run("verify", tmp_path / "run", "--quiet") == 0


# What commands refuse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "cifar"), "--data must be three-gaussians, digits, mnist"),
        (("--data", "missing.npz"), "missing.npz must be a .safetensors or .npz file: it does not exist"),
        (("--data", "mnist", "--data-dir", "nowhere"), "the data folder must exist: got nowhere"),
        (("--num-train", 0), "--num-train must lie in 1..3000"),
        (("--num-test", 0), "--num-test must be at least 1"),
        (("--network", "transformer"), "--network must be mlp, cnn or package.module:factory"),
        (("--network", "cnn"), "the cnn needs images"),
        (("--network", "no.such.module:net"), "module 'no.such.module' cannot be imported"),
        (("--activation", "sine"), "--activation must be one of"),
        (("--width", 0), "--width must be at least 1"),
        (("--steps", 0), "steps must be at least 1"),
        (("--lr", -1), "--lr must be positive and finite"),
        (("--lr", 1e300), "training diverged"),
        (("--batch-size", 0), "batch_size must be at least 1"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_record_refuses_what_it_cannot_use(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "record", *SMALL, *options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "has no 'missing'"),
        ("broken", "the factory raised KeyError"),
        ("no_module", "must return a torch.nn.Module: got int"),
        ("number", "must be a function: got int"),
        ("tanh_net", "must take inputs of shape (100,)"),
    ],
)
def test_record_refuses_factories_that_make_no_network(user_module, capsys, function, message):
    assert message in refused(capsys, "record", "--network", f"{user_module}:{function}", "--quiet")


def test_a_run_is_never_overwritten(recorded, capsys):
    assert "already holds something" in refused(capsys, "record", "--out", recorded, *SMALL)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("verify", ("--rule", "simpson"), "--rule must be adaptive"),
        ("verify", ("--rule", "gauss-legendre:0"), "the number of nodes must be at least 1: got 0"),
        ("verify", ("--rule", "gauss-legendre:2.5"), "N must be a whole number of nodes, as in gauss-legendre:4"),
        (
            "verify",
            ("--rule", "adaptive:abc"),
            "--rule adaptive:TOL needs a positive number as its tolerance: got 'abc'",
        ),
        ("verify", ("--rule", "adaptive:-1"), "needs a positive number as its tolerance: got '-1'"),
        ("verify", ("--tol", -1), "--tol must not be negative"),
        ("verify", ("--num-points", 0), "--num-points must be at least 1"),
        ("verify", ("--points", "nowhere.npz"), "it does not exist"),
        ("verify", ("--network", "cnn"), "the cnn needs images"),
        ("attribute", ("--top", 0), "--top must be at least 1"),
        ("gram", ("--num-rows", 0), "--num-rows must be at least 1"),
        ("uncertainty", ("--num-condition", 0), "--num-condition must be at least 1"),
        ("uncertainty", ("--rule", "adaptive"), "--rule must be a fixed rule"),
    ],
    ids=str,
)
def test_commands_refuse_what_they_cannot_use(recorded, tmp_path, monkeypatch, capsys, command, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, command, recorded, "--quiet", *options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("teach",), "No such command 'teach'"),
        (("--fast",), "No such option: --fast"),
        (("verify",), "Missing argument 'RUN'"),
        (("verify", "run", "--fast"), "No such option: --fast"),
        (("verify", "run", "more"), "unexpected extra argument"),
        (("verify", "run", "--head", "foo"), "'foo' is not one of 'both', 'logits', 'log_softmax'"),
        (("verify", "run", "--rule"), "'--rule' requires an argument"),
        (("gram", "run", "--head", "foo"), "'foo' is not one of 'logits', 'log_softmax'"),
        (("uncertainty", "run", "--outputs", "foo"), "'foo' is not one of 'full', 'independent'"),
        (("record", "--dtype", "float16"), "'float16' is not one of 'float32', 'float64'"),
        (("record", "--steps", "abc"), "Invalid value for '--steps': "),
        (("record", "--lr", "fast"), "Invalid value for '--lr': "),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_words_that_mean_nothing_are_refused_in_one_line(capsys, words, message):
    line = refused(capsys, *words)
    assert message in line
    assert line.endswith(" --help.")


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("epk_gp.cli.verify.parse_rule", interrupt)
    assert run("verify", "nowhere") == 130
    assert capsys.readouterr().err.strip() == "error: interrupted."


@pytest.mark.parametrize("command", ["info", "verify", "attribute", "gram", "uncertainty"])
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, command):
    assert "must hold a recorded run" in refused(capsys, command, tmp_path)


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


def test_a_damaged_note_is_refused(recorded, tmp_path, capsys):
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "network.json").write_text("{}")
    assert "must say how the network is made: it is damaged" in refused(capsys, "verify", tmp_path, "--quiet")


def test_rules_are_read_as_they_are_written():
    assert parse_rule("adaptive:1e-6") == epk.adaptive(1e-6)
    assert parse_rule("left-riemann:7") == epk.left_riemann(7)
    assert parse_rule("midpoint:2") == epk.midpoint(2)
    assert parse_rule("left-endpoint") == epk.left_endpoint()

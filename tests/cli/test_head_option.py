"""`--head` that is not given follows the run's loss, in every command that has it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import epk_gp as epk
from commands import run

ASK = {
    "gram": ("--rule", "gauss-legendre:2", "--columns", "test"),
    "attribute": ("--rule", "gauss-legendre:2", "--top", 2),
}
FILE = {"gram": ("gram.safetensors", "gram"), "attribute": ("attribution.safetensors", "samples")}

every_command = pytest.mark.parametrize("command", ASK)


def outputs_of(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that a regression made, and the points at which they are explained."""
    folder, g = tmp_path_factory.mktemp("head"), torch.Generator().manual_seed(0)
    X = torch.randn(6, 3, generator=g, dtype=torch.float64)
    for name, outputs, loss in (
        ("regression", 2, epk.MeanSquaredError()),
        ("one_output", 1, epk.MeanSquaredError()),
        ("classes", 2, epk.CrossEntropy()),
    ):
        torch.manual_seed(0)
        net = outputs_of(outputs).double()
        y = torch.randn(6, outputs, generator=g, dtype=torch.float64)
        y = torch.arange(6) % 2 if name == "classes" else y
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        epk.train(net, X, y, optimizer=optimizer, steps=3, loss=loss, folder=folder / name)
    save_file({"inputs": X[:2] + 0.1}, folder / "points.safetensors")
    code = "from torch import nn\n\n" + "".join(
        f"def {name}():\n    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, {outputs}))\n\n"
        for name, outputs in (("regression", 2), ("one_output", 1), ("classes", 2))
    )
    (folder / "networks_of_test_head_option.py").write_text(code)
    return folder


@pytest.fixture
def ask(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command on one of the runs, and return its folder of results."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("attribution_figure", "save_figure"):  # the picture takes a second
        monkeypatch.setattr(f"epk_gp.cli.attribute.{name}", lambda *args, **options: None)

    def ask(command: str, name: str, *arguments: object) -> Path:
        out = tmp_path / "_".join(["out", *map(str, arguments)])
        network = ("--network", f"networks_of_test_head_option:{name}", "--points", "points.safetensors")
        assert run(command, name, "--out", out, *network, *ASK.get(command, ()), *arguments, "--quiet") == 0
        return out

    return ask


def values_and_head(command: str, out: Path) -> tuple[torch.Tensor, str]:
    file, key = FILE[command]
    with safe_open(out / file, framework="pt") as stored:
        head = stored.metadata()["head"]
    (config,) = (json.loads(path.read_text())["config"] for path in out.glob("*.json"))
    assert config["head"] == head  # the head itself, in both places
    return load_file(out / file)[key], head


@every_command
@pytest.mark.parametrize(
    ("name", "head", "other"), [("regression", "logits", "log_softmax"), ("classes", "log_softmax", "logits")]
)
def test_a_command_follows_the_loss(ask, command, name, head, other):
    found, used = values_and_head(command, ask(command, name))
    named, _ = values_and_head(command, ask(command, name, "--head", head))
    control, _ = values_and_head(command, ask(command, name, "--head", other))
    assert used == head
    assert torch.equal(found, named)
    assert (found - control).abs().max() > 1e-3 * found.abs().max()


@every_command
def test_one_output_needs_no_head(ask, command):
    assert values_and_head(command, ask(command, "one_output"))[1] == "logits"


@pytest.mark.parametrize(
    ("name", "heads"), [("regression", {"logits"}), ("one_output", {"logits"}), ("classes", {"logits", "log_softmax"})]
)
def test_verify_checks_what_the_loss_sees(ask, name, heads):
    results = json.loads((ask("verify", name) / "verify.json").read_text())["results"]
    assert results.keys() - {"passed"} == heads
    assert results["passed"]


def test_verify_checks_both_heads_of_a_regression_if_asked_to(ask):
    results = json.loads((ask("verify", "regression", "--head", "both") / "verify.json").read_text())["results"]
    assert results.keys() - {"passed"} == {"logits", "log_softmax"}


@pytest.mark.parametrize("command", ["gram", "attribute", "verify"])
def test_the_help_says_what_the_default_is(command, capsys):
    run(command, "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "for cross entropy" in text
    assert "logits otherwise" in text

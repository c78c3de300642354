"""`--head` that is not given follows the run's loss, in every command that has it."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import epk_gp as epk
from commands import run

# Each command, its options, its file and its array.
COMMANDS = {
    "gram": (("--rule", "gauss-legendre:2", "--columns", "test"), "gram.safetensors", "gram"),
    "attribute": (("--rule", "gauss-legendre:2", "--top", 2), "attribution.safetensors", "samples"),
    "verify": ((), "", ""),
}
# The outputs of a run, its loss, and the head that follows from it.
RUNS = {
    "regression": (2, epk.MeanSquaredError(), "logits"),
    "one_output": (1, epk.MeanSquaredError(), "logits"),
    "classes": (2, epk.CrossEntropy(), "log_softmax"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs, and the points at which they are explained."""
    folder, g = tmp_path_factory.mktemp("head"), torch.Generator().manual_seed(0)
    X, code = torch.randn(6, 3, generator=g, dtype=torch.float64), "from torch import nn\n"
    for name, (outputs, loss, head) in RUNS.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
        y = torch.arange(6) % 2 if head == "log_softmax" else torch.randn(6, outputs, generator=g, dtype=torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        epk.train(net, X, y, optimizer=optimizer, steps=3, loss=loss, folder=folder / name)
        made = f"nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, {outputs}))"
        code += f"\ndef {name}():\n    return {made}\n"
    save_file({"inputs": X[:2] + 0.1}, folder / "points.safetensors")
    (folder / "networks_of_test_head_option.py").write_text(code)
    return folder


@pytest.fixture
def ask(folder, tmp_path, monkeypatch, no_pictures):
    """Run a command on one of the runs, and return its folder of results."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def ask(command, name, *arguments):
        out = tmp_path / "_".join(["out", name, *arguments])
        network = ("--network", f"networks_of_test_head_option:{name}", "--points", "points.safetensors")
        assert run(command, name, "--out", out, *network, *COMMANDS[command][0], *arguments, "--quiet") == 0
        return out

    return ask


@pytest.mark.parametrize("command", ["gram", "attribute"])
def test_a_command_follows_the_loss(ask, command):
    def values_and_head(*asked):
        out, (_, file, array) = ask(command, *asked), COMMANDS[command]
        with safe_open(out / file, framework="pt") as stored:
            head = stored.metadata()["head"]
        (config,) = (json.loads(path.read_text())["config"] for path in out.glob("*.json"))
        assert config["head"] == head  # the head itself, in both places
        return load_file(out / file)[array], head

    for name, head, other in (("regression", "logits", "log_softmax"), ("classes", "log_softmax", "logits")):
        found, used = values_and_head(name)
        named, control = (values_and_head(name, "--head", own)[0] for own in (head, other))
        assert used == head
        assert torch.equal(found, named)
        assert (found - control).abs().max() > 1e-3 * found.abs().max()
    assert values_and_head("one_output")[1] == "logits"


def test_verify_checks_what_the_loss_sees_and_both_heads_if_asked_to(ask):
    both = {"logits", "log_softmax"}
    for name, asked, heads in (
        ("regression", (), {"logits"}),
        ("one_output", (), {"logits"}),
        ("classes", (), both),
        ("regression", ("--head", "both"), both),
    ):
        results = json.loads((ask("verify", name, *asked) / "verify.json").read_text())["results"]
        assert results.keys() - {"passed"} == heads
        assert results["passed"]

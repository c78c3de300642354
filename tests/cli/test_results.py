"""`epk-gp verify`, `attribute` and `demo`: their results are the library's."""

import importlib
import json
import re
import textwrap
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from commands import refused, run, write_data
from epk_gp.cli.networks import open_run
from epk_gp.cli.options import parse_path
from helpers import assert_close
from report_cases import embedded
from written_files import described


def results(file):
    return json.loads(file.read_text())["results"]


def config(file):
    return json.loads(file.read_text())["config"]


def test_verify_says_which_run_it_is_that_its_files_are_whole_and_passes(recorded, tmp_path, capsys):
    assert run("verify", recorded, "--num-points", 2, "--out", tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    digest = open_run(recorded, None).digest
    assert out[0] == f"run {digest}: 4 steps of SGD on 24 points, 523 weights, finished"
    assert out[1] == f"all {len(list(recorded.glob('[!hnw]*')))} files of the recording are those that were written"
    assert out[-1].startswith("verified: the largest error is ")
    said = json.loads((tmp_path / "verify.json").read_text())
    assert said["results"]["passed"]
    assert said["config"]["points"] == "2 of 6 held-out points"
    for head in ("logits", "log_softmax"):
        assert said["results"][head]["max_error"] < 1e-12
    assert {"epk_gp", "torch", "python"} <= said["versions"].keys()
    assert said["seconds"]["total"] > 0


def test_verify_fails_where_the_rule_is_not_good_enough(recorded, capsys):
    """The negative control: one left node is not the integral."""
    line = refused(capsys, "verify", recorded, "--rule", "left-endpoint")
    assert "must equal the network to within 1e-09: it differs by" in line
    assert run("verify", recorded, "--rule", "left-endpoint", "--tol", 10) == 0


def test_attribute_writes_terms_that_sum_to_the_network(recorded, tmp_path):
    assert run("attribute", recorded, "--out", tmp_path, "--num-points", 4, "--top", 3) == 0
    arrays = load_file(tmp_path / "attribution.safetensors")
    assert arrays["samples"].shape == (4, 3, 24)
    total = arrays["initial"] + arrays["samples"].sum(2) + arrays["decay"]
    assert (total - arrays["network"]).abs().max() < 1e-12
    assert (arrays["initial"] - arrays["network"]).abs().max() > 1e-2  # the negative control: the samples say something
    points = results(tmp_path / "attribution.json")["points"]
    assert len(points) == 4
    largest = arrays["samples"][0, points[0]["output"]].max().item()
    assert points[0]["most_raising"][0]["contribution"] == largest
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")


def test_all_terms_of_a_network_with_statistics_are_written(user_module, tmp_path, no_pictures):
    file, network = write_data(tmp_path / "mine.npz"), f"{user_module}:normed_net"
    options = ("--network", network, "--steps", 3, "--batch-size", 4, "--num-test", 2)
    assert run("record", "--data", file, "--out", tmp_path / "run", *options) == 0
    out = tmp_path / "out"
    assert run("attribute", tmp_path / "run", "--network", network, "--out", out) == 0
    arrays = load_file(out / "attribution.safetensors")
    total = arrays["initial"] + arrays["samples"].sum(2) + arrays["decay"] + arrays["unexplained"]
    assert (total + arrays["statistics"] - arrays["network"]).abs().max() < 1e-12
    assert (total - arrays["network"]).abs().max() > 1e-4  # the negative control: the statistics are no rounding
    for point in results(out / "attribution.json")["points"]:
        terms = ("initial", "raised_by", "lowered_by", "decay", "statistics", "unexplained")
        assert sum(point[name] for name in terms) == pytest.approx(point["network"], abs=1e-12)


def test_contributions_that_do_not_sum_are_an_error(recorded, tmp_path, capsys, monkeypatch, no_pictures):
    def wrong(*args, **kwargs):
        return tuple(replace(p, values=1.001 * p.values, max_error=1.0) for p in epk.attribute(*args, **kwargs))

    monkeypatch.setattr("epk_gp.cli.attribute.attribution_of", wrong)
    asked = ("attribute", recorded, "--out", tmp_path, "--num-points", 2)
    assert "must sum to the outputs, certified" in refused(capsys, *asked)
    assert run(*asked, "--rule", "gauss-legendre:2") == 0  # it promises nothing


@pytest.mark.parametrize("path", ["chords:3", "layerwise:2"])
def test_attribute_follows_the_path_and_explains_the_predicted_output_alone(recorded, tmp_path, no_pictures, path):
    trajectory = open_run(recorded, None)
    asked = ("--num-points", 4, "--head", "logits", "--outputs", "predicted", "--path", path)
    assert run("attribute", recorded, "--out", tmp_path, *asked) == 0
    arrays = load_file(tmp_path / "attribution.safetensors")
    assert arrays["samples"].shape == (4, 1, 24)
    assert not (tmp_path / "partial").exists()
    assert (arrays["total"] - arrays["network"]).abs().max() < 1e-12
    parts, straight = (
        epk.attribute(trajectory, arrays["inputs"], head="logits", path=own).samples
        for own in (parse_path(path), epk.straight())
    )
    n = torch.arange(4)
    assert_close(arrays["samples"][:, 0], parts[n, arrays["predicted"]])
    assert not torch.allclose(parts, straight, rtol=1e-4)  # the control
    assert config(tmp_path / "attribution.json")["path"] == path


def test_the_head_follows_the_loss_and_verify_checks_what_the_loss_sees(recorded, user_module, tmp_path, no_pictures):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer, how = torch.optim.SGD(net.parameters(), lr=0.1), {"steps": 3, "loss": nn.MSELoss()}
    epk.train(net, torch.randn(6, 3), torch.randn(6, 2), optimizer=optimizer, folder=tmp_path / "regression", **how)
    network = ("--network", f"{user_module}:tanh_net")
    for folder, own, heads in (
        (recorded, (), ["logits", "log_softmax"]),
        (tmp_path / "regression", network, ["logits"]),
    ):
        out = tmp_path / f"out of {folder.name}"
        assert run("verify", folder, *own, "--num-points", 2, "--out", out) == 0
        assert list(results(out / "verify.json")) == [*heads, "passed"]
        assert run("attribute", folder, *own, "--num-points", 2, "--outputs", "predicted", "--out", out) == 0
        assert config(out / "attribution.json")["head"] == heads[-1]


@pytest.mark.slow
def test_the_demo_shows_a_network_that_is_its_kernel_machine(tmp_path, capsys):
    assert run("demo", "--smoke", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("\nepk-gp ") == 6
    assert results(tmp_path / "verify.json")["logits"]["max_error"] < 1e-12
    assert re.search(r"left Riemann 1\n.*\nlogits +[0-9.]+e-0[0-6]", out)  # the negative control
    assert sorted(described("demo").files) == sorted(file.name for file in tmp_path.iterdir())
    assert len(embedded(tmp_path / "report.html")["points"]) == 3
    # a second demo goes on from the run of the first
    assert "--seed must be the recorded one" in refused(capsys, "demo", "--smoke", "--seed", 1, "--out", tmp_path)


def test_answers_beside_the_inputs_of_texts_are_explained(tmp_path, monkeypatch, capsys):
    """The log-probability of words, by a network that returns all positions."""
    code = """
        from torch import nn

        def words():
            return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), lambda logits: logits[:, -1]
    """
    (tmp_path / "words_of_test_cli.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    net, output = importlib.import_module("words_of_test_cli").words()
    X, y = torch.arange(24).view(6, 4) % 5, (torch.arange(24).view(6, 4) + 2) % 5
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1)
    options = {"loss": nn.CrossEntropyLoss(), "output": output, "folder": tmp_path / "run"}
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(X).flatten(0, 1), y.flatten()).backward()
            recorder.batch()
            optimizer.step()
    answers = torch.tensor([[1, 2], [-100, 4]])
    save_file({"inputs": X[:2].clone(), "answers": answers}, tmp_path / "prompts.safetensors")
    asked = (tmp_path / "run", "--points", tmp_path / "prompts.safetensors", "--network", "words_of_test_cli:words")
    asked = (*asked, "--outputs", "answers")
    assert run("attribute", *asked, "--out", tmp_path / "attribute") == 0
    assert "2 points x 1 outputs x 6 training points" in capsys.readouterr().out
    arrays = load_file(tmp_path / "attribute" / "attribution.safetensors")
    parts = epk.attribute(recorder.trajectory, X[:2], function=epk.RowFunction.log_probability(answers))
    assert torch.allclose(arrays["samples"], parts.samples, rtol=0, atol=1e-12)
    page = tmp_path / "report.html"
    assert run("report", *asked, "--out", page, "--num-points", 1) == 0
    (explanation,), quantum = embedded(page)["points"][0]["explanations"].values(), embedded(page)["quantum"]
    assert explanation["network"] * quantum == pytest.approx(float(parts.network[0, 0]), abs=quantum)
    for index, value, _ in explanation["views"]["*|*"]["raised"]:
        assert value * quantum == pytest.approx(float(parts.samples[0, 0, index]), abs=1e-10)
    said = refused(capsys, "attribute", *asked, "--out", tmp_path / "no", "--head", "logits")
    assert "--outputs answers must stand without --head" in said

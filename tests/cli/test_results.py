"""`epk-gp verify`, `attribute`, `influence`, `datamodel`, `gram`, `uncertainty`, `demo`: results are the library's."""

import importlib
import json
import re
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from commands import SMALL, refused, run, write_data
from epk_gp.cli.data import draw_rows
from epk_gp.cli.networks import open_run
from epk_gp.cli.options import parse_path
from epk_gp.datamodels.fit import datamodel
from helpers import assert_close
from report_cases import embedded
from written_files import described

SMALL_MAP = ("--num-condition", 8, "--num-samples", 8, "--fit-steps", 2, "--quiet")


def results(file):
    return json.loads(file.read_text())["results"]


def config(file):
    return json.loads(file.read_text())["config"]


@pytest.mark.parametrize("path", ["straight", "chords:3"])
def test_verify_passes_on_a_whole_run(recorded, tmp_path, capsys, path):
    assert run("verify", recorded, "--path", path, "--num-points", 2, "--out", tmp_path, "--quiet") == 0
    assert "verified" in capsys.readouterr().out
    said = json.loads((tmp_path / "verify.json").read_text())
    assert said["results"]["passed"]
    assert said["config"]["path"] == path
    for head in ("logits", "log_softmax"):
        assert said["results"][head]["max_error"] < 1e-12
    assert {"epk_gp", "torch", "python"} <= said["versions"].keys()
    assert said["seconds"]["total"] > 0


def test_verify_fails_where_the_rule_is_not_good_enough(recorded, capsys):
    """The negative control: one left node is not the integral."""
    line = refused(capsys, "verify", recorded, "--rule", "left-endpoint", "--quiet")
    assert "must equal the network to within 1e-09: it differs by" in line
    assert run("verify", recorded, "--rule", "left-endpoint", "--tol", 10, "--quiet") == 0


def test_attribute_writes_terms_that_sum_to_the_network(recorded, tmp_path):
    assert run("attribute", recorded, "--out", tmp_path, "--num-points", 4, "--top", 3, "--quiet") == 0
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
    options = ("--network", network, "--steps", 3, "--batch-size", 4, "--num-test", 2, "--quiet")
    assert run("record", "--data", file, "--out", tmp_path / "run", *options) == 0
    out = tmp_path / "out"
    assert run("attribute", tmp_path / "run", "--network", network, "--out", out, "--quiet") == 0
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
    asked = ("attribute", recorded, "--out", tmp_path, "--num-points", 2, "--quiet")
    assert "must sum to the outputs, certified" in refused(capsys, *asked)
    assert run(*asked, "--rule", "gauss-legendre:2") == 0  # it promises nothing


@pytest.mark.parametrize("path", ["chords:3", "layerwise:2"])
def test_attribute_follows_the_path_and_explains_the_predicted_output_alone(recorded, tmp_path, no_pictures, path):
    trajectory = open_run(recorded, None)
    asked = ("--num-points", 4, "--head", "logits", "--outputs", "predicted", "--path", path, "--quiet")
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


def test_influence_writes_the_library_s_derivatives(recorded, tmp_path):
    assert run("influence", recorded, "--out", tmp_path, "--num-points", 3, "--top", 2, "--quiet") == 0
    arrays = load_file(tmp_path / "influence.safetensors")
    effect = epk.influence(open_run(recorded, None), arrays["inputs"], classes=arrays["predicted"])
    assert torch.equal(arrays["values"], effect.values)
    assert torch.equal(arrays["std"], effect.std)
    lines = (tmp_path / "influence.csv").read_text().splitlines()
    assert lines[0] == "point,output,network,training_point,label,influence,predicted_without"
    first = lines[1].split(",")
    assert float(first[5]) == float(effect.values[0, 0].max())
    assert float(first[6]) == pytest.approx(float(effect.outputs[0, 0]) - float(first[5]))
    saved = results(tmp_path / "influence.json")
    assert saved["certified"]
    assert saved["points"][0]["std"] == pytest.approx(float(effect.std[0, 0]))
    assert (tmp_path / "influence.png").stat().st_size > 10_000
    assert not (tmp_path / "partial").exists()


def test_smoothed_influence_averages_over_runs_trained_again(recorded, tmp_path, no_pictures):
    options = ("--num-points", 2, "--smoothing", 2, "--outputs", "all", "--quiet")
    assert run("influence", recorded, "--out", tmp_path, *options) == 0
    arrays = load_file(tmp_path / "influence.safetensors")
    expected = epk.influence(open_run(recorded, None), arrays["inputs"], smoothing=epk.Smoothing(2)).values
    assert torch.equal(arrays["values"], expected)


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """A run of as many steps as a datamodel needs."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    assert run("record", "--out", folder, *SMALL, "--steps", 8) == 0
    return folder


def test_datamodel_writes_the_library_s_scores_of_labels_and_its_predictions(longer, tmp_path):
    assert run("datamodel", longer, "--out", tmp_path, "--num-points", 3, "--top", 2, "--quiet") == 0
    arrays, y = load_file(tmp_path / "datamodel.safetensors"), load_file(longer / "held_out.safetensors")["labels"][:3]
    model = datamodel(open_run(longer, None), arrays["inputs"], y)
    assert torch.equal(arrays["classes"], y)
    assert torch.equal(arrays["scores"], model.scores[:, None])
    assert torch.equal(arrays["outputs"], model.outputs[:, None])
    lines = (tmp_path / "datamodel.csv").read_text().splitlines()
    assert lines[0] == "point,class,network,training_point,label,score"
    samples, scores = model.top(0, 2)
    kept = torch.ones(3, 24, dtype=torch.bool)
    kept[1:, samples[0]] = kept[2, samples[1]] = False
    assert [float(line.split(",")[5]) for line in lines[1:3]] == scores.tolist()
    saved = results(tmp_path / "datamodel.json")
    assert saved["without_largest"][0] == pytest.approx(model.predict(kept)[:, 0].tolist())
    assert saved["forecast"] is None
    assert (tmp_path / "datamodel.png").stat().st_size > 10_000
    assert not (tmp_path / "partial").exists()


def test_datamodel_explains_predicted_classes_without_labels_and_forecasts(longer, tmp_path, no_pictures, capsys):
    X = load_file(longer / "held_out.safetensors")["inputs"]
    save_file({"inputs": X[:4].clone()}, tmp_path / "points.safetensors")
    asked = ("--points", tmp_path / "points.safetensors", "--pairs", 3, "--out", tmp_path, "--quiet")
    assert run("datamodel", longer, *asked) == 0
    arrays, trajectory = load_file(tmp_path / "datamodel.safetensors"), open_run(longer, None)
    predicted = epk.network_outputs(trajectory, X[:4]).argmax(1)
    model = datamodel(trajectory, X[:4], predicted, pairs=3)
    assert torch.equal(arrays["classes"], predicted)
    assert_close(arrays["measured"], model.forecast.measured)
    assert results(tmp_path / "datamodel.json")["forecast"]["lds"] == pytest.approx(model.forecast.lds)
    out = capsys.readouterr().out
    assert "their predicted classes" in out
    assert f"forecast: LDS {model.forecast.lds:.2f} [" in out


def test_datamodel_refuses_a_run_that_is_too_short(recorded, tmp_path, capsys):
    assert "needs 6 steps at least" in refused(capsys, "datamodel", recorded, "--out", tmp_path, "--quiet")


def test_gram_writes_the_library_s_block_along_the_path(recorded, tmp_path):
    size = ("--num-rows", 3, "--num-columns", 5)
    asked = ("--head", "logits", "--rule", "gauss-legendre:2", *size, "--path", "chords:3")
    assert run("gram", recorded, "--out", tmp_path, *asked, "--quiet") == 0
    arrays, trajectory = load_file(tmp_path / "gram.safetensors"), open_run(recorded, None)
    a, b = epk.Points(arrays["row_inputs"], is_train=False), epk.Points(trajectory.inputs[:5], is_train=True)
    K, straight = (
        epk.gram_block(trajectory, a, b, head="logits", rule=epk.gauss_legendre(2), path=path)
        for path in (epk.chords(3), epk.straight())
    )
    assert torch.equal(arrays["gram"], K)
    assert (K - straight).abs().max() > 1e-4 * K.abs().max()  # the control
    assert not arrays["row_is_train"].any()
    assert arrays["column_is_train"].all()
    assert config(tmp_path / "gram.json")["path"] == "chords:3"


def test_uncertainty_writes_numbers_and_a_map_in_the_type_asked_for(recorded, tmp_path):
    asked = ("--grid", 5, "--columns", "1,0", "--dtype", "float32", *SMALL_MAP)
    assert run("uncertainty", recorded, "--out", tmp_path, *asked) == 0
    arrays = load_file(tmp_path / "map.safetensors")
    assert arrays["std"].shape == arrays["kernel"].shape == arrays["entropy"].shape == (5, 5)
    assert arrays["std"].dtype == torch.float32
    assert (arrays["std"] > 0).all()
    assert torch.allclose(arrays["axes"] @ arrays["axes"].T, torch.eye(2))
    with np.load(tmp_path / "points.npz") as points:
        assert points["mean"].shape == points["std"].shape == (6, 3)
        assert points["mean"].dtype == np.float32
        np.testing.assert_allclose(points["mean"].sum(1), 1, rtol=1e-6)
    assert -1 <= results(tmp_path / "uncertainty.json")["rank_correlation_of_std_with_distance"] <= 1
    assert config(tmp_path / "uncertainty.json")["num_condition"] == 8
    assert (tmp_path / "uncertainty.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("options", [("--nodes", 3, "--path", "chords:2"), ("--nodes", 4), ("--path", "chords:2")])
def test_maps_are_those_of_the_path_and_its_nodes(recorded, tmp_path, options, capsys, no_pictures):
    assert run("uncertainty", recorded, "--grid", 3, *SMALL_MAP, *options, "--out", tmp_path) == 0
    assert "add --validation held-out, or a file of labelled points" in capsys.readouterr().out.splitlines()[-1]
    given, trajectory = dict(zip(options[::2], options[1::2], strict=True)), open_run(recorded, None)
    nodes, path = given.get("--nodes"), given.get("--path", "straight")
    said = config(tmp_path / "uncertainty.json")
    assert (said["nodes"], said["path"]) == (nodes, path)
    with np.load(tmp_path / "points.npz") as arrays:
        X, std = torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["std"])
    expected = []
    for asked in ({"nodes": nodes, "path": parse_path(path)}, {}):
        gp = epk.LogitGP(trajectory, points=draw_rows(24, 8, 0).tolist(), **asked)
        gp.fit(2)
        u = gp.logit_posterior(X).softmax_uncertainty(8, torch.Generator().manual_seed(0))
        expected.append(u.std)
    assert_close(std, expected[0], rounding=1e6)
    assert (std - expected[1]).abs().max() > 1e-8  # the control: the map of all straight steps


@pytest.mark.slow
def test_the_demo_shows_a_network_that_is_its_kernel_machine(tmp_path, capsys):
    assert run("demo", "--smoke", "--out", tmp_path, "--quiet") == 0
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
    asked = (*asked, "--outputs", "answers", "--quiet")
    for command in ("attribute", "influence"):
        assert run(command, *asked, "--out", tmp_path / command) == 0
        assert "2 points x 1 outputs x 6 training points" in capsys.readouterr().out
    arrays = load_file(tmp_path / "attribute" / "attribution.safetensors")
    parts = epk.attribute(recorder.trajectory, X[:2], function=epk.RowFunction.log_probability(answers))
    assert torch.allclose(arrays["samples"], parts.samples, rtol=0, atol=1e-12)
    arrays = load_file(tmp_path / "influence" / "influence.safetensors")
    effect = epk.influence(recorder.trajectory, X[:2], function=epk.RowFunction.log_probability(answers))
    assert torch.allclose(arrays["values"], effect.values, rtol=0, atol=1e-12)
    of_model = [word for word in asked if word not in ("--outputs", "answers")]
    assert run("datamodel", *of_model, "--out", tmp_path / "datamodel") == 0
    assert "their answers" in capsys.readouterr().out
    model = datamodel(recorder.trajectory, X[:2], function=epk.RowFunction.log_probability(answers))
    scores = load_file(tmp_path / "datamodel" / "datamodel.safetensors")["scores"]
    assert torch.allclose(scores[:, 0], model.scores, rtol=0, atol=1e-12)
    page = tmp_path / "report.html"
    assert run("report", *asked, "--out", page, "--kernel-points", 0, "--influence", "--num-points", 1) == 0
    (explanation,), quantum = embedded(page)["points"][0]["explanations"].values(), embedded(page)["quantum"]
    assert explanation["network"] * quantum == pytest.approx(float(parts.network[0, 0]), abs=quantum)
    for index, value, derivative in explanation["views"]["*|*"]["raised"]:
        assert value * quantum == pytest.approx(float(parts.samples[0, 0, index]), abs=1e-10)
        assert derivative == pytest.approx(float(effect.values[0, 0, index]), rel=1e-4)
    said = refused(capsys, "attribute", *asked, "--out", tmp_path / "no", "--head", "logits")
    assert "--outputs answers explains the log-probability of `answers`" in said

"""`epk-gp verify`, `attribute`, `gram`, `uncertainty` and `demo`: their results are the library's."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from commands import SMALL, refused, run, write_data
from epk_gp.cli.networks import NetworkSpec, build_network, open_run
from epk_gp.kernel_machine.attribute import attribute_many
from report_cases import embedded
from written_files import described


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
    summary = json.loads((tmp_path / "attribution.json").read_text())["results"]
    assert len(summary["points"]) == 4
    strongest = summary["points"][0]["most_raising"][0]
    c = summary["points"][0]["output"]
    assert strongest["contribution"] == arrays["samples"][0, c].max().item()
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")


def test_all_terms_of_a_network_with_statistics_are_written(user_module, tmp_path):
    file, network = write_data(tmp_path / "mine.npz"), f"{user_module}:normed_net"
    options = ("--network", network, "--steps", 3, "--batch-size", 4, "--num-test", 2, "--quiet")
    assert run("record", "--data", file, "--out", tmp_path / "run", *options) == 0
    out = tmp_path / "out"
    assert run("attribute", tmp_path / "run", "--network", network, "--out", out, "--quiet") == 0
    arrays = load_file(out / "attribution.safetensors")
    total = arrays["initial"] + arrays["samples"].sum(2) + arrays["decay"] + arrays["unexplained"]
    assert (total + arrays["statistics"] - arrays["network"]).abs().max() < 1e-12
    assert (total - arrays["network"]).abs().max() > 1e-4  # the negative control: the statistics are no rounding
    for point in json.loads((out / "attribution.json").read_text())["results"]["points"]:
        terms = ("initial", "raised_by", "lowered_by", "decay", "statistics", "unexplained")
        assert sum(point[name] for name in terms) == pytest.approx(point["network"], abs=1e-12)


def test_contributions_that_do_not_sum_are_an_error(recorded, tmp_path, capsys, monkeypatch):
    def wrong(*args, **kwargs):
        told = {"max_error": 1.0}
        return tuple(replace(p, values=1.001 * p.values, **told) for p in attribute_many(*args, **kwargs))

    monkeypatch.setattr("epk_gp.cli.attribute.attribute_many", wrong)
    asked = ("attribute", recorded, "--out", tmp_path, "--num-points", 2, "--quiet")
    assert "must sum to the outputs, certified" in refused(capsys, *asked)
    assert run(*asked, "--rule", "gauss-legendre:2") == 0  # it promises nothing


def test_influence_writes_the_library_s_derivatives(recorded, tmp_path):
    assert run("influence", recorded, "--out", tmp_path, "--num-points", 3, "--top", 2, "--quiet") == 0
    arrays = load_file(tmp_path / "influence.safetensors")
    trajectory = open_run(recorded, None)
    effect = epk.influence(trajectory, arrays["inputs"], classes=arrays["predicted"])
    assert torch.equal(arrays["values"], effect.values)
    assert torch.equal(arrays["std"], effect.std)
    lines = (tmp_path / "influence.csv").read_text().splitlines()
    assert lines[0] == "point,output,network,training_point,label,influence,predicted_without"
    first = lines[1].split(",")
    assert float(first[5]) == float(effect.values[0, 0].max())
    assert float(first[6]) == pytest.approx(float(effect.outputs[0, 0]) - float(first[5]))
    saved = json.loads((tmp_path / "influence.json").read_text())["results"]
    assert saved["certified"]
    assert saved["points"][0]["std"] == pytest.approx(float(effect.std[0, 0]))
    assert (tmp_path / "influence.png").stat().st_size > 10_000
    assert not (tmp_path / "partial").exists()


def test_smoothed_influence_averages_over_runs_trained_again(recorded, tmp_path):
    options = ("--num-points", 2, "--smoothing", 2, "--outputs", "all", "--quiet")
    assert run("influence", recorded, "--out", tmp_path, *options) == 0
    arrays = load_file(tmp_path / "influence.safetensors")
    trajectory = open_run(recorded, None)
    expected = epk.influence(trajectory, arrays["inputs"], smoothing=epk.Smoothing(2)).values
    assert torch.equal(arrays["values"], expected)


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
    trajectory = epk.load_trajectory(
        recorded, build_network(NetworkSpec(name="mlp", input_shape=[100], num_outputs=3, width=5)).double()
    )
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


def test_uncertainty_writes_arrays_in_the_type_asked_for(recorded, tmp_path):
    small = ("--num-condition", 8, "--grid", 3, "--num-samples", 8, "--fit-steps", 1)
    arguments = (*small, "--dtype", "float32", "--quiet")
    assert run("uncertainty", recorded, "--out", tmp_path, *arguments) == 0
    assert load_file(tmp_path / "map.safetensors")["std"].dtype == torch.float32
    with np.load(tmp_path / "points.npz") as points:
        assert points["mean"].dtype == np.float32


def test_uncertainty_refuses_outputs_that_are_no_logits(tmp_path, capsys):
    assert run("record", "--out", tmp_path / "run", "--loss", "mse", *SMALL) == 0
    line = refused(capsys, "uncertainty", tmp_path / "run", "--out", tmp_path / "out", "--quiet")
    assert "the network's outputs must be logits" in line
    assert "the run's loss is MeanSquaredError." in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_demo_shows_a_network_that_is_its_kernel_machine(tmp_path, capsys):
    for _ in range(2):  # the second goes on from the run of the first
        assert run("demo", "--smoke", "--out", tmp_path, "--quiet") == 0
        out = capsys.readouterr().out
        assert out.count("\nepk-gp ") == 6
    results = json.loads((tmp_path / "verify.json").read_text())["results"]
    assert results["logits"]["max_error"] < 1e-12
    assert re.search(r"left Riemann 1\n.*\nlogits +[0-9.]+e-0[0-3]", out)  # the negative control
    assert sorted(described("demo").files) == sorted(file.name for file in tmp_path.iterdir())
    assert len(embedded(tmp_path / "report.html")["points"]) == 3
    assert "--seed must be the recorded one" in refused(capsys, "demo", "--smoke", "--seed", 1, "--out", tmp_path)

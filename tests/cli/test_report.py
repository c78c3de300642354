"""`epk-gp report`: its file holds what the library's report holds, and wrong options are refused."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import epk_gp as epk
from commands import refused, run
from epk_gp.cli.networks import open_run
from epk_gp.quadrature.rules import adaptive
from report_cases import Words, embedded, report_case

QUICK = ("--rule", "adaptive:1e-8")


def test_the_command_writes_the_report_of_the_library(recorded, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    asked = ("--num-points", 2, "--title", "Mine", "--class-names", "a, b, c")
    assert run("report", recorded, "--out", out, *asked, *QUICK) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "explaining 2 of 6 held-out points"
    assert said[1].startswith(f"written to {out}: ")
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]  # partial sums are removed
    held_out = load_file(recorded / "held_out.safetensors")
    points = (held_out["inputs"], held_out["labels"])
    options = {"title": "Mine", "class_names": ["a", "b", "c"], "explained": 2}
    where = (tmp_path / "expected.html", open_run(recorded, None))
    expected = epk.write_report(*where, *points, rule=adaptive(1e-8), **options)
    assert out.read_bytes() == expected.read_bytes()


def test_features_have_the_names_and_contributions_the_path_of_the_options(recorded, tmp_path):
    count = load_file(recorded / "held_out.safetensors")["inputs"].shape[1]
    names = [f"feature {k}" for k in range(count)]
    out = tmp_path / "report.html"
    asked = ("--num-points", 1, "--outputs", 1, "--path", "layerwise:2", "--feature-names", ", ".join(names))
    assert run("report", recorded, "--out", out, *asked, *QUICK) == 0
    content = embedded(out)
    assert [name for name, _ in content["points"][0]["input"]["values"]] == names[:60]
    card = dict(next(section["rows"] for section in content["card"] if section["title"] == "This report"))
    assert card["path of integration"] == "derivatives averaged operation by operation, each over 2 steps"


def test_token_ids_are_shown_as_the_words_of_a_tokenizer_file(tmp_path, capsys, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{k}": k for k in range(9)}, unk_token="word0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trajectory, X, _ = report_case("words")
    optimizer = torch.optim.SGD((net := Words().double()).parameters(), lr=0.1)
    epk.train(net, trajectory.inputs, trajectory.targets, optimizer=optimizer, steps=2, folder=tmp_path / "run")
    save_file({"inputs": X}, tmp_path / "points.safetensors")
    monkeypatch.setattr("report_cases.network", lambda: Words().double(), raising=False)
    network = ("--network", "report_cases:network", "--points", tmp_path / "points.safetensors")
    asked = ("report", tmp_path / "run", "--out", tmp_path / "report.html", *network, "--num-points", 1, *QUICK)
    assert run(*asked, "--tokenizer", tmp_path / "tokenizer.json") == 0
    words = embedded(tmp_path / "report.html")["points"][0]["input"]["words"]
    assert "".join(words) == " ".join(f"word{k}" for k in X[0].tolist())
    capsys.readouterr()
    said = refused(capsys, *asked, "--tokenizer", tmp_path / "points.safetensors")
    assert "--tokenizer must be a tokenizer.json of the package tokenizers" in said
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "--tokenizer needs the package tokenizers" in refused(capsys, *asked, "--tokenizer", "none.json")


@pytest.mark.slow
def test_everything_that_a_report_can_show_is_asked_for_by_an_option(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "report.html"
    record = ("--num-train", 24, "--num-test", 60, "--width", 5, "--steps", 4)
    assert run("record", "--out", folder, *record) == 0
    shown = ("--label-errors", "--map", "--validation", "held-out")
    asked = ("--num-points", 2, "--outputs", 1, "--seed", 1, "--rule", "adaptive:1e-8")
    assert run("report", folder, "--out", out, *shown, *asked) == 0
    content = embedded(out)
    assert content["overview"]["count"] == 30  # the other half validates
    assert [figure["id"] for figure in content["overview"]["figures"]] == [
        "reliability", "kernel", "spectrum", "far",
    ]  # fmt: skip
    assert content["overview"]["suspects"]
    assert content["overview"]["map"]["axes"] == ["first direction of the plane", "second direction of the plane"]
    shown = ("--validation", "held-out", "--columns", "column 3=-1..1,0", "--others", "1=0.5")
    assert run("report", folder, "--out", tmp_path / "columns.html", *shown, *asked) == 0
    overview = embedded(tmp_path / "columns.html")["overview"]
    assert overview["map"]["axes"] == ["column 3", "column 0"]
    assert overview["map"]["extent"][:2] == [-1, 1]
    assert "Other columns: column 1 0.5, column 2" in overview["map"]["sentence"]
    assert all(point["band"] for point in content["points"])


def test_a_report_that_is_not_certified_ends_with_an_error_and_is_written(recorded, tmp_path, capsys, monkeypatch):
    findings = ["the sum misses the network's output by 1.0"]
    monkeypatch.setattr("epk_gp.kernel_machine.certificate.Certificate.findings", findings)
    out = tmp_path / "report.html"
    said = refused(capsys, "report", recorded, "--out", out, "--num-points", 1, "--outputs", 1, *QUICK)
    assert "the report is not certified: the sum misses the network's output by 1.0" in said
    assert "check the run with epk-gp verify" in said
    assert embedded(out)["certificate"]["certified"] is False


def test_a_fixed_rule_is_not_expected_to_be_certified(recorded, tmp_path, capsys):
    out = tmp_path / "report.html"
    asked = ("--num-points", 1, "--outputs", 1, "--rule", "left-riemann:1")
    assert run("report", recorded, "--out", out, *asked) == 0
    assert "warning" not in capsys.readouterr().err
    assert embedded(out)["certificate"]["certified"] is False

"""`epk-gp record`: runs are written, and go on after an interrupt."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import SMALL, refused, run
from epk_gp.recording.observer import StepObserver
from epk_gp.storage.schema import read_header, read_journal
from stored_runs import CHUNK


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path):
    seeds = {"a": 1, "b": 1, "c": 2}
    for name, seed in seeds.items():
        assert run("record", "--out", tmp_path / name, "--seed", seed, "--batch-size", 7, *SMALL) == 0
    digests = {name: read_journal(tmp_path / name).chunks[-1].digest for name in seeds}
    assert digests["a"] == digests["b"] != digests["c"]
    orders = {name: load_file(tmp_path / name / CHUNK)["batches"].tolist() for name in seeds}
    assert orders["a"] == orders["b"] != orders["c"]  # the seed draws the batches, too


def test_a_factory_s_map_to_the_outputs_is_that_of_the_recording(tmp_path, monkeypatch):
    code = "from torch import nn\ndef make():\n    return nn.Linear(100, 5), lambda returned: returned[:, :3]\n"
    (tmp_path / "factory_with_output.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    network, small = ("--network", "factory_with_output:make"), ("--num-train", 24, "--num-test", 6, "--steps", 4)
    assert run("record", "--out", tmp_path / "run", *network, *small) == 0
    assert read_header(tmp_path / "run")["num_outputs"] == 3
    assert run("verify", tmp_path / "run", *network) == 0


CNN = ("--data", "digits", "--network", "cnn", "--num-train", 8, "--num-test", 2, "--steps", 2)
MIXED = (*SMALL, "--optimizer", "adagrad", "--dtype", "float32", "--zero-final-layer")


@pytest.mark.parametrize("options", [CNN, MIXED], ids=["cnn", "mixed"])
def test_variants_record_and_verify(tmp_path, options):
    assert run("record", "--out", tmp_path / "run", *options) == 0
    assert run("verify", tmp_path / "run") == 0


def test_record_goes_on_after_an_interrupt_as_if_it_had_not_been(tmp_path, monkeypatch, capsys):
    """What describes the run is there before its first step: nothing more is written when it is interrupted."""
    arguments = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.01, *SMALL)
    assert run("record", "--out", tmp_path / "whole", *arguments) == 0
    left, real = [2], StepObserver._before_step

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StepObserver, "_before_step", interrupted)
        assert run("record", "--out", tmp_path / "run", *arguments) == 130
    assert json.loads((tmp_path / "run" / "network.json").read_text())["recorded_with"]["lr"] == 0.01
    assert (tmp_path / "run" / "held_out.safetensors").exists()
    capsys.readouterr()
    assert run("verify", tmp_path / "run") == 0
    said = "2 steps of Adam on 24 points, 523 weights, not finished (record --resume continues it)"
    assert said in capsys.readouterr().out
    assert "already holds something" in refused(capsys, "record", "--out", tmp_path / "run", *arguments)
    assert run("record", "--out", tmp_path / "run", "--resume", *arguments) == 0
    digests = [read_journal(tmp_path / name).chunks[-1].digest for name in ("whole", "run")]
    assert digests[0] == digests[1]
    other = ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.02, *SMALL)
    said = refused(capsys, "record", "--out", tmp_path / "run", "--resume", *other)
    assert "--lr must be the recorded one to resume the run" in said
    assert "it has 0.01, got 0.02." in said


def test_all_held_out_points_of_a_file_are_kept_and_a_named_data_set_says_how_many(tmp_path, capsys):
    X, y = torch.randn(130, 3), torch.arange(130) % 2
    arrays = {"inputs": X[:4], "labels": y[:4], "test_inputs": X[:120], "test_labels": y[:120]}
    save_file({name: value.clone() for name, value in arrays.items()}, tmp_path / "own.safetensors")
    save_file({"inputs": X, "labels": y}, tmp_path / "whole.safetensors")
    own, whole = ("--data", tmp_path / "own.safetensors"), ("--data", tmp_path / "whole.safetensors", "--num-train", 4)
    named = ("--data", "digits", "--num-train", 20)
    for options, kept in ((own, 120), ((*own, "--num-test", 5), 5), (whole, 126), (named, 102)):
        out = tmp_path / f"{kept}"
        assert run("record", "--out", out, *options, "--width", 2, "--steps", 1) == 0
        assert len(load_file(out / "held_out.safetensors")["inputs"]) == kept
        said = capsys.readouterr().out
        assert ("held out: " in said) == (options is named)
    assert "held out: 102 of 360 points (--num-test N keeps N of them)\n" in said


def test_record_refuses_factories_that_make_no_network(user_module, capsys):
    wrong = {"missing": "it raised AttributeError", "broken": "it raised KeyError", "number": "it raised TypeError"}
    wrong |= {"no_module": "must return a torch.nn.Module: got int", "tanh_net": "the network must accept X"}
    for function, message in wrong.items():
        assert message in refused(capsys, "record", "--network", f"{user_module}:{function}")

"""A run shows what it is without reading a state, and every text is printable."""

import shutil

import pytest
import torch
from shown_results import HOSTILE, shown

import epk_gp as epk
from epk_gp.core.show import Entry, Summary, Table, shortened
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.axes import Axis, group_name
from loops import data, mlp, sgd


@pytest.fixture(scope="module")
def run() -> Trajectory:
    torch.manual_seed(0)
    net, (X, y) = mlp(), data()
    return epk.train(net, X, y, optimizer=sgd(net, 0.1, momentum=0.9, weight_decay=0.01), steps=3)


def test_every_text_of_a_summary_is_printable():
    entry, table = Entry(HOSTILE, HOSTILE, HOSTILE), Table((HOSTILE,) * 2, ((HOSTILE,) * 2,), HOSTILE)
    assert all(line.isprintable() for line in str(Summary(HOSTILE, (entry,), table)).split("\n"))


def test_long_names_are_told_apart_in_tables():
    """As of PEFT and transformers, which begin and end alike."""
    names = [f"base_model.model.model.layers.{k}.{p}_proj.lora_A.default.weight" for k in (0, 1) for p in "qk"]
    axes = (Axis("step", torch.arange(1), ("state 0 → state 1",)), Axis("parameter", torch.arange(4), tuple(names)))
    assert [group_name(axes[1:], k) for k in range(4)] == ["0.q_proj", "0.k_proj", "1.q_proj", "1.k_proj"]
    assert (shortened("encoder.layers.0.attention.weight", 16), shortened("short", 5)) == ("encoder…n.weight", "short")
    assert group_name(axes, 2) == "state…tate 1, 1.q_proj"
    assert group_name([Axis("parameter", torch.arange(1), ("a" * 30,))], 0) == "a" * 11 + "…" + "a" * 12


def test_a_run_whose_folder_was_removed_is_shown_with_its_path(tmp_path):
    """No state is read."""
    folder = tmp_path / "<b>run & \x07"
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, folder=folder)
    stored = epk.load_trajectory(folder, mlp())
    shutil.rmtree(folder)
    assert shown(stored)["states"] == [f"3 (in {folder})"]
    assert "<b>run & \\x07" in " ".join(str(stored).split())
    assert repr(stored)
    with pytest.raises(FileNotFoundError):  # the negative control
        _ = stored.dtype


def test_a_run_shows_what_it_is(run):
    cells = {name: cell for name, (cell,) in shown(run).items()}
    assert cells["parameters"] == f"{run.num_weights} weights (float64 on cpu)"
    assert cells["inputs"].startswith(str(tuple(run.inputs.shape)))
    assert cells["targets"] == f"{tuple(run.targets.shape)} (int64 on cpu)"
    assert cells["loss"] == str(run.loss)
    assert cells["update rule"] == run.update_rule
    assert cells["steps"] == f"{run.num_steps} (batches of {run.num_points}, learning rate {run.steps[0].lr:g})"
    assert cells["states"] == f"{len(run.states)} (in memory)"
    assert cells["digest"] == run.digest
    assert "\n" not in repr(run)

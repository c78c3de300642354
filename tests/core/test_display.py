"""A run shows what it is without reading a state, every text is printable, and long calls show their progress."""

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shown_results import HOSTILE, shown
from torch import Tensor

import epk_gp
import epk_gp as epk
from epk_gp.core.show import Entry, SlowCallWarning, Summary, Table, shortened, tracked
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.axes import Axis, group_name
from epk_gp.kernel_machine.retrain import Retraining
from epk_gp.work.run import Advice, SlowCallNotice, progress_bar
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


class Unreadable:
    """States that count how often they are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, state: int) -> Tensor:
        self.asked += 1
        raise FileNotFoundError("the folder is gone")


def test_showing_a_run_reads_no_state(run):
    stored, updates = Unreadable(4), Unreadable(3)
    far = replace(run, states=stored, updates=updates)
    states, weights = torch.zeros(2, run.num_weights), torch.ones(2, run.num_points)
    retraining = Retraining(far, states, weights, max_difference=0.0, difference_ratio=0.0)
    for result in (far, retraining):
        shown(result)
        assert repr(result)
    assert stored.asked == updates.asked == 0
    with pytest.raises(FileNotFoundError, match="gone"):
        _ = far.dtype  # the negative control


def test_a_run_whose_folder_was_removed_is_shown_with_its_path(tmp_path):
    folder = tmp_path / "<b>run & \x07"
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, folder=folder)
    stored = epk.load_trajectory(folder, mlp())
    shutil.rmtree(folder)
    assert shown(stored)["states"] == [f"3 (in {folder})"]
    assert "<b>run & \\x07" in " ".join(str(stored).split())


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


ROOT = Path(epk_gp.__file__).parent


def test_a_bar_counts_the_items_with_rate_and_remaining_time(capsys):
    assert list(tracked(iter("abc"), "parts", total=3, unit="part")) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("parts: 100%", "3/3 [", "part/s]"))
    with progress_bar(10, "steps", initial=7) as bar:
        bar.update(2)
        assert bar.n == 9
    assert "9/10" in capsys.readouterr().err


def test_nothing_is_written_where_progress_is_not_shown_or_there_is_no_error_stream(capsys, monkeypatch):
    assert list(tracked(range(20), "parts", shown=False)) == list(range(20))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr", None)
    assert list(tracked(range(3), "parts")) == [0, 1, 2]


def test_every_bar_of_the_package_is_made_here():
    importing = re.compile(r"^ *(import|from) tqdm\b", re.MULTILINE)
    users = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if importing.search(file.read_text())}
    assert users == {"core/show.py", "work/run.py", "cli/gram.py"}  # the last takes the format of sizes alone


def said_of(total, seconds_each, *, first=0.0, trainings=None):
    """What a call without a bar says, with the number of the item after which it says so."""
    now, said = [0.0], []
    bar = SlowCallNotice(total, "attribution", Advice("do less", trainings), clock=lambda: now[0])
    for done in range(1, total + 1):
        now[0] += seconds_each + (first if done == 1 else 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bar.update()
        said += [(done, warning.category, str(warning.message)) for warning in caught]
    return said


def test_a_quiet_call_that_will_be_long_says_so_once_after_three_seconds():
    for call, place, minutes in (((400, 0.6), 5, 4.0), ((10, 5), 2, 0.8)):
        message = f"the attribution will take about {minutes} minutes: do less."
        assert said_of(*call) == [(place, SlowCallWarning, message)]
    assert said_of(10, 5, first=30)[0][2] == "the attribution will take about 1.3 minutes: do less."


def test_a_long_call_says_how_many_trainings_an_output_costs_and_above_two_also_when_it_is_nearly_done():
    costs = "minutes, {} times a replay of the training for each output: do less."
    for replay, trainings in ((0.5, "480"), (33.0, "7.3"), (480.0, "0.5")):
        ((place, _, message),) = said_of(400, 0.6, trainings=lambda seconds, one=replay: seconds / one)
        assert (place, message) == (5, f"the attribution will take about 4.0 {costs.format(trainings)}")
    for replay, places in ((18.9, [2]), (19.0, []), (40.0, [])):  # 38 seconds, of which 4 are still to come
        said = said_of(3, 4, first=26, trainings=lambda seconds, one=replay: seconds / one)
        assert [place for place, *_ in said] == places
    assert said_of(3, 4, first=2, trainings=lambda _: 9.0) == []


@pytest.mark.parametrize(("total", "seconds_each", "first"), [
    (400, 0.07, 0), (1, 300, 0), (3, 4, 30), (100_000, 2e-5, 0), (100, 0.02, 2.9),
], ids=["28 seconds", "one item, which is done", "nearly done", "many quick items", "a slow start"])  # fmt: skip
def test_a_call_that_is_not_long_or_is_nearly_done_says_nothing(total, seconds_each, first):
    assert said_of(total, seconds_each, first=first) == []


def test_a_call_says_nothing_of_its_length_where_it_shows_a_bar_or_has_no_advice():
    shown = [(False, Advice("do less")), (True, Advice("do less")), (False, None)]
    bars = [progress_bar(9, "attribution", shown=is_shown, advice=advice) for is_shown, advice in shown]
    assert [isinstance(bar, SlowCallNotice) for bar in bars] == [True, False, False]

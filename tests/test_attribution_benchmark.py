"""The attribution benchmark: its truth is that of the recorded run, scores are judged as usual, rows are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from page_code import imported

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "attribution"


@pytest.fixture
def load(monkeypatch):
    yield from imported(monkeypatch, FOLDER.parent, FOLDER)


def tiny(load, name):
    settings = load("settings")
    setting = next(setting for setting in settings.TINY if setting.name == name)
    return settings.Problem(setting, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny MLP", "tiny transformer"])
def test_retraining_with_every_sample_is_the_recorded_run(load, name):
    retraining, problem = load("retraining"), tiny(load, name)
    run = retraining.record(problem)
    again = retraining.retrained(problem, torch.ones(2, problem.setting.num_train))
    # AdamW divides gradients that are rounding by their own size, so single weights may move by a step of size lr
    atol = 2 * problem.setting.lr * run.num_steps * (1e-2 if problem.setting.optimizer == "adamw" else 1e-5)
    for key, value in retraining.weights_at(run, run.num_steps).items():
        for network in again[key]:
            assert_close(network, value, rtol=0, atol=atol)


def test_networks_side_by_side_are_those_trained_alone_and_a_sample_of_weight_zero_does_not_matter(load):
    retraining, problem = load("retraining"), tiny(load, "tiny MLP")
    subsets = torch.cat([torch.ones(1, problem.setting.num_train), problem.subsets(0.5, 2)])
    subsets[1:, 3] = 0
    together = retraining.retrained_outcomes(problem, subsets)
    alone = torch.cat([retraining.retrained_outcomes(problem, subset[None]) for subset in subsets])
    assert_close(together, alone)
    problem.data().X[3] += 1.0  # the data are cached: the same tensor
    try:
        again = retraining.retrained_outcomes(problem, subsets)
    finally:
        problem.data().X[3] -= 1.0
    assert_close(again[1:], together[1:])
    assert float((again[0] - together[0]).abs().max()) > 1e-4


def test_subsets_have_their_size_and_a_tenth_of_the_labels_is_wrong_where_it_is_to_be_found(load):
    problem = tiny(load, "tiny MLP")
    truth, peers = problem.subsets(0.5, 20), problem.subsets(0.5, 20, purpose=5)
    assert truth.sum(1).tolist() == [15.0] * 20
    assert not (truth[:, None] == peers).all(2).any()
    flipped = replace(problem, flipped=True)
    assert torch.equal(flipped.data().y != problem.data().y, flipped.wrong())
    suspected = flipped.suspected()
    assert flipped.wrong()[suspected].tolist() == [True] * 3 + [False] * 27
    assert torch.equal(flipped.data().y_test, flipped.data().y[suspected])


def test_scores_that_add_up_to_the_outcomes_have_a_datamodeling_score_of_one(load):
    agreement = load("agreement")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 10, generator=generator)
    subsets = (torch.rand(30, 10, generator=generator) < 0.5).float()
    outcomes = subsets @ scores.T
    assert agreement.linear_datamodeling_score(scores, subsets, outcomes.exp()) == pytest.approx(1.0)
    assert agreement.linear_datamodeling_score(-scores, subsets, outcomes) == pytest.approx(-1.0)
    assert agreement.linear_datamodeling_score(torch.zeros(4, 10), subsets, outcomes) == 0.0
    positive = torch.tensor([True, False, True, False])
    assert agreement.area_under_roc(torch.tensor([3.0, 1.0, 2.0, 0.0]), positive) == 1.0
    assert agreement.area_under_roc(torch.tensor([0.0, 1.0, 2.0, 2.0]), positive) == 0.375


def test_rows_are_computed_once_if_they_are_asked_for_and_failures_are_not_kept(load, tmp_path):
    rows = load("rows").Rows(tmp_path, "wanted")
    assert rows.get("other", {}, lambda: pytest.fail("not asked for")) is None
    assert rows.get("wanted", {"seed": 0}, lambda: {"failure": "no network"}) == {"failure": "no network"}
    assert rows.get("wanted", {"seed": 0}, lambda: {"value": 1.0}) == {"value": 1.0}
    assert rows.get("wanted", {"seed": 0}, lambda: pytest.fail("saved")) == {"value": 1.0}
    assert rows.saved("wanted", {"seed": 1}) is None


TABLE = [
    {"setting": "S", "seed": seed, "score": score, "LDS 0.5": lds + 0.1 * seed, "seconds": seconds, "retraining": 2.0,
     "retrainings": networks}
    for seed in (0, 1)
    for score, lds, seconds, networks in (("ours", 0.5, 4.0, 0), ("peer", 0.7, 1.0, 10))
] + [{"setting": "S", "seed": 0, "score": "other", "failure": "not on this registry"}]  # fmt: skip


def test_tables_hold_spreads_and_times_as_retrainings_and_say_what_is_missing_and_who_wins(load):
    report = load("report")
    assert report.setting_table(TABLE, "S").splitlines() == [
        "|  | LDS, half | retrainings (seconds) |",
        "| --- | --- | --- |",
        "| ours | 0.55 ± 0.07 | 2 (4) |",
        "| peer | **0.75 ± 0.07** | 10 (21) |",
        "",
        "Left out: other (not on this registry).",
    ]
    waiting = [{"setting": "S", "seed": 2, "score": score, "failure": "not computed yet"} for score in ("ours", "peer")]
    last = report.setting_table([*TABLE, *waiting], "S").splitlines()[-3:]
    assert last == ["Left out: other (not on this registry).", "", "Computed for 2 of 3 seeds."]
    another = "**Another score is better at:** S, LDS, half (peer 0.75, ours 0.55)."
    assert report.winners(TABLE, ["ours", "none"]) == another
    assert report.winners(TABLE, ["ours", "peer"]) == "**Best are ours at:** S, LDS, half (peer)."
    assert report.winners(TABLE, ["none"]) == "Not computed yet: none."


@pytest.mark.slow
def test_a_tiny_benchmark_runs_and_goes_on_where_it_was_stopped(load, tmp_path, monkeypatch):
    benchmark = load("run")
    monkeypatch.setattr(benchmark, "TINY", benchmark.TINY[:1])

    def run(only, rows="rows", out="out"):
        options = {"rows": tmp_path / rows, "out": tmp_path / out, "environments": tmp_path, "only": only}
        benchmark.main(seeds=1, subsets=6, peers=False, tiny=True, **options)
        return json.loads((tmp_path / f"{out}.json").read_text())["results"]["table"]

    def row(table, name):
        return next(row for row in table if row["score"].startswith(name))

    first = run("truth|random|neighbours")
    assert -1 <= row(first, "random")["LDS 0.5"] <= 1
    assert row(first, "first-order")["failure"] == "not computed yet"
    saved = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "rows").iterdir()}
    second = run("Shapley|seconds")
    assert row(second, "random")["LDS 0.5"] == row(first, "random")["LDS 0.5"]
    assert row(second, "first-order")["seconds"] > 0
    assert all((tmp_path / "rows" / name).stat().st_mtime_ns == when for name, when in saved.items())
    again = run("nothing", "none")
    assert [row for row in again if "seconds" in row] == [row for row in second if "seconds" in row] != []
    assert all("seconds" not in row for row in run("nothing", "none", "other"))  # the negative control


@pytest.mark.slow
def test_datamodels_of_classes_and_numbers_rank_subsets_and_go_on_where_they_were_stopped(load, tmp_path, monkeypatch):
    monkeypatch.setattr(load("datamodel_systems"), "NETWORKS", 40)
    benchmark, options = load("datamodels"), {"rows": tmp_path, "subsets": 8, "peers": False, "tiny": True}

    def run(only, out="out"):
        benchmark.main(out=tmp_path / out, only=only, **options)
        table = json.loads((tmp_path / f"{out}.json").read_text())["results"]["table"]
        return {(row["problem"], row["seed"], row["system"]): row for row in table}

    first = run("seed 0: (truth, half|path training$|path.*(six|4)|path ridge|ridge|linearised)")
    for problem in ("digits", "Friedman, SGD"):
        row = first[problem, 0, "path training"]
        assert 0.5 < row["half"][0] <= 1
        assert row["half"][1] < row["half"][0] < row["half"][2]
        assert row["trainings"] == pytest.approx(sum(row["parts"].values()) / row["training"])
        others = {name: first[problem, 0, f"path training, {name}"] for name in ("six checkpoints", "4 halves")}
        assert all(other["half"][0] > 0.5 for other in others.values())
        parts, training = others["six checkpoints"]["parts"], others["six checkpoints"]["training"]
        assert others["six checkpoints"]["trainings"] == pytest.approx(1 + sum(parts.values()) / training)
        assert others["4 halves"]["parts"]["recording"] > row["parts"]["recording"]
    assert {key[2] for key in first if key[0] == "tiny transformer"} == {"linearised training"}
    assert first["tiny transformer", 0, "linearised training"]["half"][0] > 0
    assert first["digits", 0, "ridge datamodel"]["trainings"] > 40
    assert first["digits", 0, "exact derivative"]["failure"] == first["digits", 1, "path ridge"]["failure"]
    assert first["digits", 0, "TRAK-1 (traker)"]["failure"] == "not computed yet"
    again = run("exact|last state")
    assert {name: row for name, row in again.items() if "half" in first[name]} == {
        name: row for name, row in first.items() if "half" in row
    }
    assert {row["option"] for name, row in again.items() if "last state" in name[2] and "seconds" in row} != {""}
    assert "| digits, 0 | path ridge | " in (tmp_path / "out.md").read_text()


def test_an_interval_holds_the_rank_correlation_and_shrinks_with_questions_and_networks(load):
    agreement, generator = load("agreement"), torch.Generator().manual_seed(0)
    true = torch.randn(50, 80, generator=generator)
    predicted = true + torch.randn(50, 80, generator=generator)
    low, high = agreement.bootstrap_interval(predicted, true)
    assert low < agreement.mean_rank_correlation(predicted, true) < high < low + 0.1
    few_low, few_high = agreement.bootstrap_interval(predicted[:5, :20], true[:5, :20])
    assert few_high - few_low > 2 * (high - low)
    assert agreement.bootstrap_interval(true, true) == pytest.approx((1.0, 1.0))


def test_networks_of_fresh_seeds_are_those_trained_alone_with_these_seeds(load):
    retraining, problem = load("retraining"), tiny(load, "tiny MLP")
    problem = replace(
        problem, setting=replace(problem.setting, network="small")
    )  # no dropout: masks are drawn together
    subsets = problem.subsets(0.5, 2)
    together = retraining.retrained_outcomes(problem, subsets, [5, 6])
    alone = [
        retraining.retrained_outcomes(replace(problem, seed=k), W[None]) for k, W in zip((5, 6), subsets, strict=True)
    ]
    assert_close(together, torch.cat(alone))
    assert float((together - retraining.retrained_outcomes(problem, subsets)).abs().max()) > 1e-2


@pytest.mark.slow
def test_scores_of_anybody_are_judged_and_what_does_not_install_is_named(load, tmp_path):
    """The peers do not run; random numbers, contributions and derivatives are judged."""
    judged = load("judged")
    judged.main(out=tmp_path / "judged", rows=tmp_path, peers=False, retrainings=4, tiny=True)
    (run,) = json.loads((tmp_path / "judged.json").read_text())["results"]["runs"]
    rows = {(row["system"], row["fault"]): row for row in run["systems"]}
    assert rows["MAGIC (bergson)", "shuffled"]["failure"] == "not asked for"
    assert rows["exact derivatives", ""]["derivatives"][0] == pytest.approx(1.0)
    assert rows["exact contributions", ""]["sum misses"] < 0.1 < rows["random numbers", ""]["sum misses"]
    assert rows["random numbers", ""]["findings"]
    assert "Not computed: TracInCP (captum), TracIn (dattri), influence" in (tmp_path / "judged.md").read_text()


def test_a_fault_is_in_the_file_that_peers_read(load, tmp_path):
    judged, problem = load("judged"), tiny(load, "tiny transformer")

    class Saved:
        def save_job(self, file):
            y = problem.data().y.clone()
            y[:, -2:] = -100
            torch.save({"X": problem.data().X, "y": y, "y_test": y[:1]}, file)

    jobs = judged.Jobs(Saved(), tmp_path)
    sound, shuffled, padding = (torch.load(jobs.file(fault)) for fault in ("", "shuffled", "padding"))
    assert "fault" not in sound
    assert shuffled["fault"] == "shuffled"
    assert torch.equal(shuffled["y"], sound["y"])
    assert (padding["y"][:, -2:] == 0).all()
    assert torch.equal(padding["y"][:, :-2], sound["y"][:, :-2])


JUDGED = {
    "run": "digits",
    "systems": [
        {"system": "sound", "fault": "", "sum misses": 0.5, "contributions": [0.1, 0.2], "derivatives": [1.0, 1.0],
         "LDS": 0.5, "LDS interval": [0.4, 0.6], "left out": 0.9, "without the top": [-1.0, -2.0], "seconds": 2.0,
         "trainings": 12.3, "findings": []},
        {"system": "sound", "fault": "shuffled", "said": [], "findings": ["Out of order."], "sum misses": 0.5,
         "contributions": [0.0, 0.0], "derivatives": [0.02, 0.0]},
        {"system": "away", "fault": "", "failure": "no such package"},
        {"system": "gone", "fault": "", "failure": "no such package"},
        {"system": "away", "fault": "shuffled", "failure": "no such package"},
    ],
}  # fmt: skip


def test_tables_of_judged_scores_say_who_noticed_what(load):
    report = load("report")
    assert report.judged_table(JUDGED).splitlines()[2:] == [
        "| sound | 50 % | 0.10 | 1.00 | 0.50 (0.40 to 0.60) | 0.90 | 12 (2.0) |",
        "",
        "Not computed: away, gone (no such package).",
    ]
    assert report.faults_table([JUDGED]).splitlines()[2:] == [
        "| shuffled | sound | derivatives 1.00 → 0.02 | nothing | Out of order. |",
        "| shuffled | away | – | fails: no such package | – |",
    ]


def test_the_front_names_what_nothing_cheaper_surpasses(load):
    marks = {"a": (0.2, 1.0), "worse and dearer": (0.1, 2.0), "b": (0.5, 13.4), "as good and dearer": (0.5, 40.0)}
    systems = [{"system": name, "fault": "", "LDS": lds, "trainings": cost} for name, (lds, cost) in marks.items()]
    systems += [{"system": "random numbers", "fault": "", "LDS": 0.9}, JUDGED["systems"][2]]
    found = load("report").judged_front({"systems": systems, "training seconds": 0.1, "recording seconds": 0.2})
    named = "a (0.20 for 1 trainings); b (0.50 for 13 trainings). "
    assert found.startswith(f"**All that is cheaper had a lower LDS than each of these:** {named}")


def test_dattri_is_asked_in_groups_with_the_seeds_of_one_long_run_and_gets_scores_as_it_has_them(
    load, tmp_path, monkeypatch
):
    judges, rows, setting = load("dattri_judges"), load("rows").Rows(tmp_path), load("settings").TINY[0]
    calls = []

    def asked(python, method, job):
        calls.append((method, job["start"], job.get("count"), job["removed"]))
        values = torch.tensor(job["removed"], dtype=torch.float32)[:, None].expand(-1, 3)
        return {"values": values, "indices": values[:, :2].long(), "seconds": 1.0}

    monkeypatch.setattr(judges, "_asked", asked)
    truth = judges._truth(setting, rows, Path("python"), {}, "lds truth", [0, 2], 2)
    assert calls == [("lds truth", 0, 2, [0, 1]), ("lds truth", 2, 2, [2, 3])]
    assert truth["values"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    judges._truth(setting, rows, Path("python"), {}, "lds truth", [0, 2], 2)
    assert len(calls) == 2  # saved

    shapes = []
    monkeypatch.setattr(
        judges, "_asked", lambda python, method, job: shapes.append(job["scores"]["0"].shape) or {"0": torch.ones(3)}
    )
    judges._metrics(Path("python"), "lds", [torch.ones(3, 7)], {})
    assert shapes == [(7, 3)]  # (samples, test samples)


def test_dattri_s_answers_have_the_form_of_the_outside_judges():
    content = json.loads((FOLDER.parent / "outside" / "dattri.json").read_text())
    keys = {"system", "judge", "data", "number", "deviation", "unit", "cost_seconds", "note"}
    assert content["rows"]
    assert all(set(row) == keys for row in content["rows"])
    assert all(-1 <= row["number"] <= 1 for row in content["rows"])

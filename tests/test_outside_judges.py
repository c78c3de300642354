"""The benchmarks of outside judges run in their smallest form; their tables say who is better, also where we lose."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.metrics import roc_auc_score

import page_code

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "outside"
HEAD = {"versions": {"python": "3", "epk_gp": "0"}, "machine": {"threads": 1}, "date": "a day", "repeats": "once"}


@pytest.fixture
def load(monkeypatch):
    yield from page_code.imported(monkeypatch, FOLDER)


def a_row(system, number, unit="AUROC", data="digits", deviation=0.25):
    values = {"number": number, "deviation": deviation, "cost_seconds": 2.0, "note": ""}
    return {"system": system, "judge": "a judge", "data": data, "unit": unit, **values}


def test_a_table_has_the_best_in_bold_and_names_what_we_lose(load):
    rows = [a_row("epk_gp", 0.5), a_row("other", 0.75), a_row("epk_gp", 1.0, "NLL"), a_row("other", 2.0, "NLL")]
    assert load("report").tables({"head": HEAD, "rows": rows}).splitlines() == [
        "| a judge: digits | AUROC | NLL | seconds |",
        "| --- | --- | --- | --- |",
        "| epk_gp | 0.500 ± 0.250 | **1.000 ± 0.250** | 2 |",
        "| other | **0.750 ± 0.250** | 2.000 ± 0.250 | 2 |",
        "",
        "**We lose at** digits, AUROC: other 0.750 ± 0.250, epk_gp 0.500 ± 0.250.",
        "",
        "*once; a day; 1 thread of a shared machine; python 3.*",
    ]


def test_nothing_is_lost_where_ours_is_the_best_or_level_or_alone(load):
    rows = [a_row("epk_gp", 0.75), a_row("other", 0.7501), a_row("third", 0.5), a_row("epk_gp", 0.1, data="alone")]
    rows += [a_row("epk_gp", 0.9, "share within 2 error bars"), a_row("other", 1.0, "share within 2 error bars")]
    assert load("report").lost(rows) == []


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_saved_rows_have_what_the_tables_need(load, file):
    content = json.loads(file.read_text())
    assert {"machine", "versions", "date", "repeats"} <= content["head"].keys()
    keys = {"system", "judge", "data", "number", "unit", "cost_seconds", "note"}
    assert content["rows"]
    assert all(keys <= row.keys() for row in content["rows"])


def test_our_values_are_low_at_wrong_labels(load):
    data = load_iris()
    y, wrong = data.target.copy(), np.arange(0, 150, 10)
    y[wrong] = (y[wrong] + 1) % 3
    values, seconds = load("noisy_labels").our_values(data.data, y, seed=0)
    assert values.keys() == seconds.keys()
    for own in values.values():
        assert roc_auc_score(np.isin(np.arange(150), wrong), -own) > 0.8


def test_known_digits_are_numbered_in_their_order_and_others_kept_apart(load):
    openset = load("openset")
    data = openset.enlarged(openset.digits())
    X, y, unknown = openset.split(data, (2, 4, 5, 9, 8, 3))
    assert torch.equal(
        y,
        torch.tensor([{2: 0, 4: 1, 5: 2, 9: 3, 8: 4, 3: 5}.get(int(c), -1) for c in data.labels])[
            torch.isin(data.labels, torch.tensor([2, 3, 4, 5, 8, 9]))
        ],
    )
    assert len(X) + len(unknown) == len(data)


def test_an_augmented_image_is_one_that_was_moved_or_mirrored(load):
    openset = load("openset")
    torch.manual_seed(0)
    image = torch.full((1, 1, 28, 28), -1.0)
    image[0, 0, 10, 12] = 1
    for moved in openset.augmented(image.expand(50, -1, -1, -1)):
        ((row, column),) = (moved[0] > 0).nonzero().tolist()
        assert abs(row - 10) <= 4
        assert min(abs(column - 12), abs(column - 15)) <= 4


@pytest.mark.mostly_slow
def test_the_open_set_benchmark_runs_in_its_smallest_form(load, tmp_path):
    load("openset").main(out=tmp_path / "rows.json", epochs=1, splits=1, library=False, small=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["system"] for row in rows} == {"epk_gp, out of distribution", "epk_gp, entropy", "LeNet"}
    assert all(0 <= row["number"] <= 1 for row in rows)

"""The gallery's tables of methods: means over trained networks, and the sentence that says who wins."""

from pathlib import Path

import pytest

from page_code import load

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def tables():
    return load(DOCS / "method_tables.py")


def row(method, network, auroc, nll):
    return {"method": method, "network": network, "data": "mnist", "values": [[auroc, 0.01], nll and [nll, 0.01]]}


TABLE = [
    row("softmax", "MLP", 0.8, 0.3), row("softmax", "CNN", 0.9, 0.2),
    row("kNN", "MLP", 0.97, None), row("kNN", "CNN", 0.99, None),
    row("slow", "MLP", 1.0, 0.1),
    row("ours", "MLP", 0.95, 0.2), row("ours", "CNN", 0.97, 0.1),
]  # fmt: skip


def measures(tables):
    saved = {"columns": ["AUROC", "NLL"], "table": TABLE}
    return [
        tables.Measure("AUROC", tables._of_columns(saved, "AUROC", data="mnist")),
        tables.Measure("NLL", tables._of_columns(saved, "NLL"), 2, least=True),
    ]


def test_means_are_over_all_networks_the_best_is_bold_and_a_partial_mean_is_in_brackets(tables):
    assert tables.method_table(TABLE, measures(tables)).splitlines()[2:] == [
        "| softmax | 0.850 | 0.25 |", "| kNN | **0.980** | – |", "| slow | (1.000) | (0.10) |",
        "| ours | 0.960 | **0.15** |",
    ]  # fmt: skip
    saved = {"columns": ["AUROC", "NLL"], "table": TABLE}
    other = tables.Measure("AUROC", tables._of_columns(saved, "AUROC", data="kmnist"))
    assert tables.method_means(TABLE, other) == ({}, set())  # other data sets do not count


def test_where_another_method_wins_is_said_first(tables):
    assert tables.who_wins(TABLE, measures(tables), "ours") == (
        "**Another method is better at:** AUROC (kNN 0.980, ours 0.960). ours is the best, or as good, at: NLL."
    )
    alone = [entry for entry in TABLE if entry["method"] != "kNN"]
    assert tables.who_wins(alone, measures(tables), "ours") == "ours is the best, or as good, at: AUROC; NLL."
    assert "EPK-GP is the best, or as good, at:" in (DOCS / "experiments.md").read_text()

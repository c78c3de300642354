"""The gallery's tables of methods: means over trained networks, and the sentence that says who wins."""

import importlib.util
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[1] / "docs" / "hooks.py"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", HOOKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(method, network, auroc, nll):
    return {"method": method, "network": network, "data": "mnist", "values": [[auroc, 0.01], nll and [nll, 0.01]]}


TABLE = [
    row("softmax", "MLP", 0.8, 0.3), row("softmax", "CNN", 0.9, 0.2),
    row("kNN", "MLP", 0.97, None), row("kNN", "CNN", 0.99, None),
    row("slow", "MLP", 1.0, 0.1),
    row("ours", "MLP", 0.95, 0.2), row("ours", "CNN", 0.97, 0.1),
]  # fmt: skip


def measures(hooks):
    saved = {"columns": ["AUROC", "NLL"], "table": TABLE}
    return [
        hooks.Measure("AUROC", hooks._of_columns(saved, "AUROC", data="mnist")),
        hooks.Measure("NLL", hooks._of_columns(saved, "NLL"), 2, least=True),
    ]


def test_means_are_over_all_networks_the_best_is_bold_and_a_partial_mean_is_in_brackets(hooks):
    assert hooks.method_table(TABLE, measures(hooks)).splitlines()[2:] == [
        "| softmax | 0.850 | 0.25 |",
        "| kNN | **0.980** | – |",
        "| slow | (1.000) | (0.10) |",
        "| ours | 0.960 | **0.15** |",
    ]


def test_where_another_method_wins_is_said_first(hooks):
    sentence = hooks.who_wins(TABLE, measures(hooks), "ours")
    assert sentence == (
        "**Another method is better at:** AUROC (kNN 0.980, ours 0.960). ours is the best, or as good, at: NLL."
    )
    alone = [entry for entry in TABLE if entry["method"] != "kNN"]
    assert hooks.who_wins(alone, measures(hooks), "ours") == "ours is the best, or as good, at: AUROC; NLL."


def test_other_data_sets_do_not_count(hooks):
    saved = {"columns": ["AUROC", "NLL"], "table": TABLE}
    other = hooks.Measure("AUROC", hooks._of_columns(saved, "AUROC", data="kmnist"))
    assert hooks.method_means(TABLE, other) == ({}, set())


def test_every_table_and_sentence_of_the_gallery_is_made_from_its_saved_result(hooks):
    page = hooks.on_page_markdown((HOOKS.parent / "gallery.md").read_text())
    assert "{{" not in page
    assert "EPK-GP is the best, or as good, at:" in page

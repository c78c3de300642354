"""The gallery's tables of methods: means over trained networks, and the sentence that says who wins."""

import json
from pathlib import Path

import pytest

from page_code import load

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def tables():
    return load(DOCS / "method_tables.py")


def saved(name):
    return json.loads((DOCS / "gallery" / f"{name}.json").read_text())["results"]


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
        "| softmax | 0.850 | 0.25 |",
        "| kNN | **0.980** | – |",
        "| slow | (1.000) | (0.10) |",
        "| ours | 0.960 | **0.15** |",
    ]
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


def test_what_the_pages_say_of_converged_networks_is_in_the_saved_result(tables):
    """`deciding.md` and `experiments.md` say it in words: level with an ensemble, no gain with 512 units on MNIST."""
    r = saved("judged_networks")
    means = {
        name: {m.name.partition(":")[0]: tables.method_means(r["table"], m)[0] for m in measures(r)}
        for name, measures in tables.LARGEST.items()
    }
    assert len(means["errors"]) == 6
    for found in means["errors"].values():
        for other in ("ensemble of 5", "NTK-GP, last step"):
            assert found["EPK-GP"] == pytest.approx(found[other], abs=0.01)
    errors, nll, outside = (means[name]["MNIST, MLP 512"] for name in ("errors", "nll", "outside"))
    assert errors["EPK-GP"] < errors["softmax, as trained"] + 0.001
    assert nll["EPK-GP"] > max(nll["softmax, as trained"], nll["softmax, tempered"])
    assert outside["EPK-GP"] > outside["softmax, as trained"] + 0.1


def test_who_wins_on_shifted_images_of_fashion_mnist(tables):
    """`deciding.md` names who does."""
    r = saved("shifted_networks")
    columns = ("noise 0.3, NLL", "blur 1.5, NLL", "noise 0.3, error AUROC")
    chosen = [tables.Measure("", tables._of_columns(r, column, data="fashion-mnist")) for column in columns]
    noise, blur, errors = (tables.method_means(r["table"], measure)[0] for measure in chosen)
    assert noise["ensemble of 5"] < noise["EPK-GP"]
    assert blur["RBF-GP, pixels"] < blur["EPK-GP"]
    assert errors["RBF-GP, pixels"] == pytest.approx(errors["EPK-GP"], abs=0.005)


def test_the_margin_buys_labels_as_well_with_convolutional_networks(tables):
    """`deciding.md` says so, and with an MLP it does not."""
    r = saved("active_learning")
    means = {m.name: tables.method_means(r["table"], m)[0] for m in tables._purchase_measures(r)}
    gains = {name: found["EPK-GP: next_to_label"] - found["margin"] for name, found in means.items()}
    assert {name for name, gain in gains.items() if gain < 0.005} == {"mnist, CNN", "fashion-mnist, CNN"}
    assert min(gains.values()) > -0.005

"""What MkDocs does not do: formulas as MathML, tables from saved results, and a package's modules."""

import html
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from latex2mathml.converter import convert

GALLERY = Path(__file__).parent / "gallery"
ATTRIBUTION = Path(__file__).parents[1] / "benchmarks" / "attribution"
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CODE = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_TABLE = re.compile(r"^\{\{ (\w+) (\w+) \}\}$", re.MULTILINE)
_RESULTS = re.compile(r"^\{\{ results \}\}$", re.MULTILINE)
_MODULES = re.compile(r"^\{\{ modules ([\w.]+) \}\}$", re.MULTILINE)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw themselves.

    Raises:
        ValueError: A formula was not recognised, and its source would be shown.
    """

    def formula(match: re.Match[str]) -> str:
        drawn = convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")
        return f'<div class="formula">{drawn}</div>' if match[1] == "div" else drawn

    content = _FORMULA.sub(formula, content)
    left = re.search(r"\$\$[^<]{0,60}", _CODE.sub("", content))
    if left is not None:
        raise ValueError(f"formulas of a list must be indented by four spaces: {left[0]!r} is not recognised.")
    return content


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace {{ results }} and {{ experiment table }} by saved numbers, {{ modules epk_gp.x }} by a reference."""
    markdown = _RESULTS.sub(lambda _: headline(), markdown)
    markdown = _TABLE.sub(lambda match: TABLES[match[2]](_saved(match[1])), markdown)
    return _MODULES.sub(lambda match: _reference(match[1]), markdown)


def headline() -> str:
    """Return the three results of the index and the README, each with what it is measured beside."""
    r = _saved("fig04_machine")["results"]
    errors = dict(zip(r["rules"], r["max_error"], strict=True))
    adaptive = next(i for i, name in enumerate(r["rules"]) if name.startswith("adaptive"))
    exact = f"network and kernel machine differ by at most **{r['max_error'][adaptive]:.1e}**"
    cost = f"{r['evaluations'][adaptive]:.1f} evaluations per point and step, 300 steps, float64"
    rows = _saved("counterfactual")["results"]["table"]
    problems = len({row["problem"] for row in rows})
    agreement = {
        (name, kind): _range(
            [row["leave-one-out"][0] for row in rows if row["score"] == name and row["problem"].startswith(kind)], 2
        )
        for name in ("influence", "contributions", "TracIn (captum)")
        for kind in ("tanh", "relu", "")
    }
    r = _saved("judged_networks")["results"]
    columns = [method_means(r["table"], measure)[0] for measure in _outside_measures(r)[:4]]
    areas = {name: _range([column[name] for column in columns], 3) for name in columns[0]}
    lines = [
        ["Is it exact?", f"{exact} ({cost})", f"the paper's rule, 100 nodes: {errors['left Riemann 100']:.1e}"],
        [
            "What would change without a training point?",
            f"rank correlation with training again: **{agreement['influence', 'tanh']}** with tanh, "
            f"**{agreement['influence', 'relu']}** with ReLU ({problems} problems on digits)",
            f"TracIn {agreement['TracIn (captum)', '']}; our contributions {agreement['contributions', '']}: exact is "
            "not causal",
        ],
        [
            "Is this input of another kind?",
            f"area under the ROC curve **{areas['EPK-GP']}** (MNIST and Fashion-MNIST, against each other and KMNIST)",
            f"softmax {areas['softmax, as trained']}; nearest training image {areas['kNN, pixels']}; "
            f"NTK at the last step {areas['NTK-GP, last step']}",
        ],
    ]
    return _table(["question", "result", "beside it"], lines)


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def modules_of(package: str) -> list[str]:
    """List the public modules of a package of epk_gp, without importing it."""
    folder = Path(__file__).parents[1].joinpath(*package.split("."))
    if not folder.is_dir():
        raise FileNotFoundError(f"{package} must be a package: there is no folder {folder}.")
    return [f"{package}.{file.stem}" for file in sorted(folder.glob("[!_]*.py"))]


def _reference(package: str) -> str:
    entries = (
        f"## `{name}`\n\n::: {name}\n    options: {{ show_root_heading: false }}" for name in modules_of(package)
    )
    return "\n\n".join(entries)


def _saved(name: str) -> dict:
    file = ATTRIBUTION / "results.json" if name == "attribution" else GALLERY / f"{name}.json"
    return json.loads(file.read_text())


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(pair: list[float], digits: int = 3) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def _rules(saved: dict) -> str:
    r = saved["results"]
    columns = zip(r["rules"], r["evaluations"], r["max_error"], strict=True)
    rows = [[name, f"{count:.1f}", f"{error:.1e}"] for name, count, error in columns]
    return _table(["rule", "evaluations per point and step", "largest error"], rows)


def _numbers(saved: dict) -> str:
    entries = saved["results"]["numbers"]
    head = [key.replace("_", " ") for key in entries[0]]
    rows = [
        [v if isinstance(v, str) else "–" if v is None else f"{v:.3g}" for v in entry.values()] for entry in entries
    ]
    return _table(head, rows)


def _images(saved: dict) -> str:
    head = ["image", "network", "exact kernel machine", "notebook's approximation"]
    rows = [
        [f"a {i['label']}"]
        + [f"{i[f'{name}_prediction']} ({i[f'{name}_confidence']:.3f})" for name in ("network", "exact", "notebook")]
        for i in saved["results"]["images"]
    ]
    return _table(head, rows)


def _scores(saved: dict) -> str:
    keys = {"leave-one-out": "leave-one-out", "half": "LDS, half left out", "most": "LDS, a tenth left out"}
    rows = [
        [row["problem"], row["score"], *(_spread(row[key], 2) for key in keys), f"{row['seconds'][0]:.2g}"]
        for row in saved["results"]["table"]
    ]
    return _table(["problem", "score", *keys.values(), "time, in attributions"], rows)


def _terms(saved: dict) -> str:
    r = saved["results"]
    keys = {
        "initial": "initial",
        "own_class": "images of that class",
        "other_classes": "other images",
        "decay": "decay",
        "statistics": "statistics",
        "unexplained": "unexplained",
        "network": "output",
    }
    rows = [
        [r["names"][test["label"]], r["names"][test["predicted"]]]
        + [f"{test[key]:.3f}" for key in keys]
        + [f"{abs(test['error']):.0e}", f"{test['amplification']:.0f}"]
        for test in r["tests"]
    ]
    return _table(["test image", "predicted", *keys.values(), "sum less output", "amplification"], rows)


def _versions(saved: dict) -> str:
    return ", ".join(f"{name} {number}" for name, number in saved["versions"].items() if name in ("python", "torch"))


def _seconds(saved: dict) -> str:
    return f"*{saved['seconds']['total']:.0f} seconds on one thread of a shared machine; {_versions(saved)}.*"


def _method_seconds(saved: dict) -> str:
    """Add up what the methods took: the result is put together from rows that were computed one by one."""
    total = sum(row["seeds"] * row["seconds"] for row in saved["results"]["table"])
    return (
        f"*The methods took {total:.0f} processor seconds on one thread of a shared machine, without the training of "
        f"the networks that they judge; {_versions(saved)}.*"
    )


@dataclass(frozen=True)
class Measure:
    """One column of a table of methods: the mean over all trained networks of what its rows say.

    Attributes:
        name: Its head.
        values: What a row of the saved table has for it; empty if nothing.
        digits: Digits after the point.
        least: Whether the smallest mean is the best.
    """

    name: str
    values: Callable[[dict], list[float]]
    digits: int = 3
    least: bool = False


def method_means(table: list[dict], measure: Measure) -> tuple[dict[str, float], set[str]]:
    """Return the mean of each method that has any value, and the methods that have as many values as any."""
    found: dict[str, list[float]] = {row["method"]: [] for row in table}
    for row in table:
        found[row["method"]] += measure.values(row)
    found = {method: values for method, values in found.items() if values}
    most = max(map(len, found.values()), default=0)
    means = {method: sum(values) / len(values) for method, values in found.items()}
    return means, {method for method, values in found.items() if len(values) == most}


def method_table(table: list[dict], measures: list[Measure]) -> str:
    """Write a method a line: the best in bold, a mean over some of the networks in brackets."""
    columns = [_column(table, measure) for measure in measures]
    methods = list(dict.fromkeys(row["method"] for row in table))
    rows = [[method, *(column.get(method, "–") for column in columns)] for method in methods]
    return _table(["method", *(measure.name for measure in measures)], rows)


def _column(table: list[dict], measure: Measure) -> dict[str, str]:
    means, whole = method_means(table, measure)
    text = {method: f"{mean:.{measure.digits}f}" for method, mean in means.items()}
    best = text[_best(means, whole, measure)] if whole else ""
    return {
        method: f"({number})" if method not in whole else f"**{number}**" if number == best else number
        for method, number in text.items()
    }


def _best(means: dict[str, float], among: set[str], measure: Measure) -> str:
    return (min if measure.least else max)(among, key=lambda method: means[method])


def who_wins(table: list[dict], measures: list[Measure], ours: str) -> str:
    """Say where another method is better than ours, and after it where ours is the best."""
    lost, won = [], []
    for measure in measures:
        means, whole = method_means(table, measure)
        if ours not in whole:
            continue
        best = _best(means, whole, measure)
        own, other = (f"{means[method]:.{measure.digits}f}" for method in (ours, best))
        if own == other:
            won.append(measure.name)
        else:
            lost.append(f"{measure.name} ({best} {other}, {ours} {own})")
    first = f"**Another method is better at:** {'; '.join(lost)}. " if lost else ""
    return first + (f"{ours} is the best, or as good, at: {'; '.join(won)}." if won else "")


def _of_columns(r: dict, *columns: str, **where: object) -> Callable[[dict], list[float]]:
    places = [r["columns"].index(column) for column in columns]

    def values(row: dict) -> list[float]:
        if any(row[key] != value for key, value in where.items()):
            return []
        return [row["values"][place][0] for place in places if row["values"][place]]

    return values


def _outside_measures(r: dict) -> list[Measure]:
    pairs = [
        ("MNIST → Fashion", "mnist", 0), ("MNIST → KMNIST", "mnist", 1), ("Fashion → MNIST", "fashion-mnist", 0),
        ("Fashion → KMNIST", "fashion-mnist", 1), ("MNIST 0–4 → 5–9", "mnist-low", 0),
        ("Fashion 0–4 → 5–9", "fashion-mnist-low", 0),
    ]  # fmt: skip
    return [Measure(name, _of_columns(r, f"outside {k}: AUROC", data=data)) for name, data, k in pairs]


def _inside_measures(r: dict) -> list[Measure]:
    sets = (("MNIST", "mnist"), ("Fashion", "fashion-mnist"))
    kinds = (("error AUROC", 3, False), ("AURC", 4, True), ("NLL", 3, True), ("ECE", 3, True), ("accuracy", 3, False))
    return [
        Measure(f"{name}, {column}", _of_columns(r, column, data=data), digits, least)
        for name, data in sets
        for column, digits, least in kinds
    ]


def _size_measures(r: dict) -> list[Measure]:
    far = ("outside 0: AUROC", "outside 1: AUROC")
    sizes = sorted({row["num_train"] for row in r["table"]})
    columns = ((far, "other images"), (("error AUROC",), "error AUROC"))
    return [
        Measure(f"{size:,}: {name}", _of_columns(r, *names, num_train=size))
        for size in sizes
        for names, name in columns
    ]


def _shift_measures(r: dict) -> list[Measure]:
    names = [column.removesuffix(", NLL") for column in r["columns"] if column.endswith(", NLL")]
    return [Measure(f"{name}, NLL", _of_columns(r, f"{name}, NLL"), 2, True) for name in names] + [
        Measure(f"{name}, error AUROC", _of_columns(r, f"{name}, error AUROC")) for name in names
    ]


def _attack_measures(r: dict) -> list[Measure]:
    names = [column for column in r["columns"] if column.startswith(("FGSM", "PGD"))]
    return [Measure(column, _of_columns(r, column)) for column in names if "0.03" not in column]


def _noise_measures(r: dict) -> list[Measure]:
    def values(data: str, kind: str, share: float) -> Callable[[dict], list[float]]:
        wanted = (data, kind, share)
        return lambda row: [row["precision"][0]] if (row["data"], row["kind"], row["share"]) == wanted else []

    sets, shares = (("MNIST", "mnist"), ("Fashion", "fashion-mnist")), sorted({row["share"] for row in r["table"]})
    return [
        Measure(f"{name}, {100 * share:g} % {kind}", values(data, kind, share))
        for kind in ("uniform", "confusing")
        for name, data in sets
        for share in shares
    ]


def _purchase_measures(r: dict) -> list[Measure]:
    def values(data: str, network: str) -> Callable[[dict], list[float]]:
        return lambda row: [row["mean"][0]] if (row["data"], row["network"]) == (data, network) else []

    names = dict.fromkeys((row["data"], row["network"]) for row in r["table"])
    return [Measure(", ".join(name), values(*name)) for name in names]


def _methods(measures: Callable[[dict], list[Measure]]) -> Callable[[dict], str]:
    return lambda saved: method_table(saved["results"]["table"], measures(saved["results"]))


def _winners(ours: str, *measures: Callable[[dict], list[Measure]]) -> Callable[[dict], str]:
    def sentence(saved: dict) -> str:
        r = saved["results"]
        return who_wins(r["table"], [measure for group in measures for measure in group(r)], ours)

    return sentence


def _report() -> ModuleType:
    """Import the tables of the attribution benchmark, which need nothing beyond Python."""
    specification = importlib.util.spec_from_file_location("attribution_report", ATTRIBUTION / "report.py")
    if specification is None or specification.loader is None:
        raise FileNotFoundError(f"the attribution benchmark must have its tables in {ATTRIBUTION / 'report.py'}.")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _scored(setting: str) -> Callable[[dict], str]:
    return lambda saved: _report().setting_table(saved["results"]["table"], setting)


def _score_sizes(saved: dict) -> str:
    config = saved["config"]
    explained = "; ".join(f"{name} {count}" for name, count in config["points"].items())
    return (
        f"*Means ± standard deviations over seeds ({config['seeds']}), {config['subsets']} subsets of each size, one "
        f"thread; test samples that are explained: {explained}. {_versions(saved)}.*"
    )


OUR_SCORES = [
    "influence (epk_gp)",
    "smoothed influence (epk_gp)",
    "smoothed influence, weights 0 to 1 (epk_gp)",
    "smoothed influence, 16 runs (epk_gp)",
]
TABLES: dict[str, Callable[[dict], str]] = {
    "scores_mlp": _scored("MNIST, MLP"),
    "scores_logistic": _scored("MNIST, logistic regression"),
    "scores_cnn": _scored("MNIST, CNN"),
    "scores_transformer": _scored("text, transformer"),
    "score_winners": lambda saved: _report().winners(saved["results"]["table"], OUR_SCORES),
    "score_sizes": _score_sizes,
    "outside": _methods(_outside_measures),
    "inside": _methods(_inside_measures),
    "sizes": _methods(_size_measures),
    "shifts": _methods(_shift_measures),
    "attacks": _methods(_attack_measures),
    "noise": _methods(_noise_measures),
    "bought": _methods(_purchase_measures),
    "judged_winners": _winners("EPK-GP", _outside_measures, _inside_measures),
    "shifted_winners": _winners("EPK-GP", _shift_measures, _attack_measures),
    "noise_winners": _winners("EPK-GP with AUM: label_errors", _noise_measures),
    "bought_winners": _winners("EPK-GP: next_to_label", _purchase_measures),
    "rules": _rules,
    "numbers": _numbers,
    "images": _images,
    "scores": _scores,
    "terms": _terms,
    "seconds": _seconds,
    "method_seconds": _method_seconds,
}

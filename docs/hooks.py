"""Three things that MkDocs does not do: formulas as MathML, tables from saved results, and a package's modules."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

from latex2mathml.converter import convert

GALLERY = Path(__file__).parent / "gallery"
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_TABLE = re.compile(r"^\{\{ (\w+) (\w+) \}\}$", re.MULTILINE)
_MODULES = re.compile(r"^\{\{ modules ([\w.]+) \}\}$", re.MULTILINE)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw themselves."""

    def formula(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")

    return _FORMULA.sub(formula, content)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace {{ experiment table }} by saved numbers, and {{ modules epk_gp.x }} by the reference of a package."""
    markdown = _TABLE.sub(lambda match: TABLES[match[2]](_saved(match[1])), markdown)
    return _MODULES.sub(lambda match: _reference(match[1]), markdown)


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
    return json.loads((GALLERY / f"{name}.json").read_text())


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


def _detection(saved: dict) -> str:
    r = saved["results"]
    keys = [f"{other} {measure}" for other in r["outside"] for measure in ("AUROC", "FPR95")]
    rows = [[row["name"], *(_spread(row[key]) for key in keys)] for row in r["detection"]]
    return _table(["score", *keys], rows)


def _calibration(saved: dict) -> str:
    keys = ["accuracy", "ECE", "NLL"]
    rows = [[row["name"], *(_spread(row[key]) for key in keys)] for row in saved["results"]["calibration"]]
    return _table(["model", *keys], rows)


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
    keys = {"leave-one-out": "leave-one-out", "datamodel": "linear datamodeling score", "seconds": "seconds"}
    rows = [[row["optimizer"], row["score"], *(_spread(row[key]) for key in keys)] for row in saved["results"]["table"]]
    return _table(["optimizer", "score", *keys.values()], rows)


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


def _seconds(saved: dict) -> str:
    versions = ", ".join(
        f"{name} {number}" for name, number in saved["versions"].items() if name in ("python", "torch")
    )
    return f"*{saved['seconds']['total']:.0f} seconds on one thread of a shared machine; {versions}.*"


TABLES: dict[str, Callable[[dict], str]] = {
    "rules": _rules,
    "detection": _detection,
    "calibration": _calibration,
    "numbers": _numbers,
    "images": _images,
    "scores": _scores,
    "terms": _terms,
    "seconds": _seconds,
}

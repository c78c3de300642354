"""The tables of outside judges, in Markdown: a system a line, a number a column, and the cost. Needs Python alone."""

from collections import defaultdict
from statistics import mean
from typing import Any

Rows = list[dict[str, Any]]
LEAST_IS_BEST = ("nll", "ece", "brier", "rmse", "difference")  # words of a unit; of others the most is best
NO_BEST = "share within"  # of a unit that has a right value in between
OURS = "epk_gp"


def tables(content: dict[str, Any], judge: str = "") -> str:
    """Return the tables of every judge in a file, or of one, where others are better, and what was measured on what."""
    rows = [row for row in content["rows"] if judge in ("", row["judge"])]
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in rows:
        groups[row["judge"], row["data"]].append(row)
    return "\n\n".join([*map(data_table, groups.values()), *lost(rows), measured(content["head"])])


def data_table(rows: Rows) -> str:
    """Return the table of a judge's numbers on one set of data; the best number of a column is bold."""
    units = list(dict.fromkeys(row["unit"] for row in rows))
    costs: dict[str, list[float]] = defaultdict(list)
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        costs[row["system"]].append(row["cost_seconds"])
        first = best(rows, row)
        is_best = first is not None and rounded(row) == rounded(first)
        cells[row["system"], row["unit"]] = f"**{written(row)}**" if is_best else written(row)
    lines = [
        [system, *(cells.get((system, unit), "–") for unit in units), f"{mean(seconds):.3g}"]
        for system, seconds in costs.items()
    ]
    return markdown_table([f"{rows[0]['judge']}: {rows[0]['data']}", *units, "seconds"], lines)


def peers(rows: Rows, row: dict[str, Any]) -> Rows:
    """Return the rows that a row is compared with, itself included."""
    return [other for other in rows if all(other[key] == row[key] for key in ("judge", "data", "unit"))]


def best(rows: Rows, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the best of the rows that a row is compared with; none where it stands alone or no number is best."""
    found, unit = peers(rows, row), row["unit"].lower()
    sign = -1 if any(word in unit for word in LEAST_IS_BEST) else 1
    return None if len(found) < 2 or NO_BEST in unit else max(found, key=lambda other: sign * other["number"])


def lost(rows: Rows) -> list[str]:
    """Say, in one line, where another system is better than the best of ours."""
    found: dict[str, None] = {}
    for row in rows:
        first = best(rows, row)
        ours = [other for other in peers(rows, row) if OURS in other["system"]]
        own = best(ours, row) or (ours[0] if ours else None)
        if first is not None and own is not None and rounded(own) != rounded(first):
            what = f"{row['data']}, {row['unit']}: {first['system']} {written(first)}, {own['system']} {written(own)}"
            found[what] = None
    return [f"**We lose at** {'; '.join(found)}."] if found else []


def rounded(row: dict[str, Any]) -> float:
    """Return the number with the digits that a table shows: what is equal there is a tie."""
    return round(row["number"], 3) if abs(row["number"]) >= 1e-3 else float(f"{row['number']:.1e}")


def written(row: dict[str, Any]) -> str:
    """Return a number with its deviation over repeats."""
    number, deviation = row["number"], row.get("deviation")
    if number != 0 and abs(number) < 1e-3:
        return f"{number:.1e}"
    return f"{number:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def measured(head: dict[str, Any]) -> str:
    """Return where, when and how often it was measured."""
    versions = {name: head["versions"][name] for name in head["versions"] if name not in UNNAMED}
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    threads = head["machine"]["threads"]
    return f"*{head['repeats']}; {head['date']}; {threads} thread{'s' * (threads != 1)} of a shared machine; {named}.*"


UNNAMED = ("epk_gp", "gpytorch", "linear_operator", "numpy", "safetensors")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Write a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

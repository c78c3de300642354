"""The tables of outside judges, in Markdown: a system a line, a number a column, and the cost. Needs Python alone."""

from collections import defaultdict
from statistics import mean
from typing import Any

Rows = list[dict[str, Any]]
LEAST_IS_BEST = ("NLL", "ECE", "Brier", "RMSE", "error", "difference")  # words of a unit; of others the most is best
OURS = "epk_gp"


def tables(content: dict[str, Any], judge: str = "") -> str:
    """Return the table of every judge in a file, or of one, where others are better, and what was measured on what."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in content["rows"]:
        if judge in ("", row["judge"]):
            groups[row["judge"]].append(row)
    parts = [part for rows in groups.values() for part in (judge_table(rows), *lost(rows))]
    return "\n\n".join([*parts, measured(content["head"])])


def judge_table(rows: Rows) -> str:
    """Return a judge's table; the best number of a column is bold."""
    columns = list(dict.fromkeys((row["data"], row["unit"]) for row in rows))
    costs: dict[str, list[float]] = defaultdict(list)
    cells: dict[tuple[str, str, str], str] = {}
    for row in rows:
        costs[row["system"]].append(row["cost_seconds"])
        is_best = rounded(row) == rounded(best(rows, row)) and len(peers(rows, row)) > 1
        cells[row["system"], row["data"], row["unit"]] = f"**{written(row)}**" if is_best else written(row)
    lines = [
        [system, *(cells.get((system, *column), "–") for column in columns), f"{mean(seconds):.3g}"]
        for system, seconds in costs.items()
    ]
    head = [f"{row['judge']}" for row in rows[:1]]
    return markdown_table([*head, *(f"{data}: {unit}" for data, unit in columns), "seconds"], lines)


def peers(rows: Rows, row: dict[str, Any]) -> Rows:
    """Return the rows that a row is compared with, itself included."""
    return [other for other in rows if (other["data"], other["unit"]) == (row["data"], row["unit"])]


def best(rows: Rows, row: dict[str, Any]) -> dict[str, Any]:
    """Return the best of the rows that a row is compared with."""
    sign = -1 if any(word in row["unit"] for word in LEAST_IS_BEST) else 1
    return max(peers(rows, row), key=lambda other: sign * other["number"])


def lost(rows: Rows) -> list[str]:
    """Say, in one line, where another system is better than the best of ours."""
    found = []
    for data, unit in dict.fromkeys((row["data"], row["unit"]) for row in rows):
        asked = {"data": data, "unit": unit}
        ours = [row for row in peers(rows, asked) if OURS in row["system"]]
        first = best(rows, asked)
        own = best(ours, asked) if ours else first
        if rounded(own) != rounded(first):
            found.append(f"{data}, {unit}: {first['system']} {written(first)}, {own['system']} {written(own)}")
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

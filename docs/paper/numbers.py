"""The table of the paper: every number is read from a saved result, and stands beside the command that saves it."""

from collections.abc import Callable
from typing import Any

WIDTHS = (33, 61, 31)  # of the columns, relative
CAPTION = (
    ": Results, by scripts in `benchmarks` and `experiments` or `make`, on a CPU; float64 unless another library needs "
    "float32. LDS: rank correlation with training on random halves (cost in trainings; *: ours).\\label{results}"
)
OURS = ("datamodel (epk_gp)", "exact derivatives", "smoothed influence (epk_gp)", "exact contributions")
Row = tuple[str, str, str]


def table(saved: Callable[[str], Any], areas: dict[str, str]) -> str:
    """Return the table as Markdown, from saved results by their names and areas under the ROC curve by methods."""
    digits, names = (systems(run) for run in saved("judged")["results"]["runs"])
    rows = [
        exactness(saved("fig04_machine")["results"]),
        layerwise([row for row in saved("paths")["rows"] if row["every"] == 1]),
        algorithm(saved("benchmarks")["attribution"]),
        explaind(saved("benchmarks")["explaind"]),
        language_model(saved("language_models")["cost"]["gpt-64-100-every-5"]),
        agreement("ReLU network", digits),
        agreement("transformer", {name: row for name, row in names.items() if name in OURS}),
        derivatives([digits, names]),
        unnoticed(saved("judged")["results"]["runs"]),
        (
            "Unknown inputs, area under ROC",
            f"{areas['EPK-GP']}; tangent kernel {areas['NTK-GP, last step']}; softmax {areas['softmax, as trained']}",
            "judged_networks.py",
        ),
        planted(saved("faults")),
    ]
    rule = "|".join(":" + "-" * width for width in WIDTHS)
    lines = [f"| {question} | {result} | `{command}` |" for question, result, command in rows]
    return "\n".join(["| question | result | command |", f"|{rule}|", *lines, "", CAPTION])


def systems(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of a run without planted faults, by their systems."""
    return {row["system"]: row for row in run["systems"] if not row["fault"]}


def exactness(r: dict[str, Any]) -> Row:
    """Say how far sums are from the network on the problem of Bell et al."""
    errors = dict(zip(r["rules"], r["max_error"], strict=True))
    counts = dict(zip(r["rules"], r["evaluations"], strict=True))
    adaptive = next(name for name in r["rules"] if name.startswith("adaptive"))
    return (
        "Sums, toy problem of Bell et al.",
        f"{errors[adaptive]:.1e} off with {counts[adaptive]:.1f} evaluations a step; "
        f"{errors['left Riemann 100']:.1e} with their 100 nodes",
        "fig04_machine.py",
    )


def layerwise(rows: list[dict[str, Any]]) -> Row:
    """Say what averages operation by operation cost and change, over networks and optimizers."""
    networks, optimizers = (len({row[key] for row in rows}) for key in ("network", "optimizer"))
    counts, straight, changes = ([row[key] for row in rows] for key in ("evaluations", "straight", "difference"))
    times = [row["straight seconds"] / row["seconds"] for row in rows]
    return (
        f"Without integrals: {networks} networks, {optimizers} optimizers",
        f"{max(row['error'] for row in rows):.0e} off with {max(counts):g} evaluations, not {min(straight):.1f} to "
        f"{max(straight):.1f}; {min(times):.1f} to {max(times):.1f} times faster; contributions differ by "
        f"{min(changes):.0e} to {max(changes):.0e} of their norm",
        "paths.py layerwise",
    )


def algorithm(rows: list[dict[str, Any]]) -> Row:
    """Compare with Algorithm 1 of Bell et al."""
    found = {row["contender"]: row for row in rows}
    ours, theirs, together = (found[name] for name in ("attribute", "algorithm 1", "algorithm 1, points together"))
    return (
        "Contributions beside their Algorithm 1",
        f"{theirs['median'] / ours['median']:.0f} times faster, {together['median'] / ours['median']:.0f} if it shares "
        f"training gradients; {ours['error']:.0e} off, it is {theirs['error']:.0e} off",
        "make bench",
    )


def explaind(rows: list[dict[str, Any]]) -> Row:
    """Compare with ExPLAIND, on our problem and on its own."""
    ours = [row for row in rows if row["contender"] != "explaind"]
    theirs = [row for row in rows if row["contender"] == "explaind"]
    times = [b["median"] / a["median"] for a, b in zip(ours, theirs, strict=True)]
    misses = [f"{a['error']:.0e} off, it is {b['error']:.0e} off" for a, b in zip(ours, theirs, strict=True)]
    return (
        "Beside ExPLAIND; on its example",
        f"{times[0]:.0f} times faster, {misses[0]}; {times[1]:.0f} times faster, {misses[1]}",
        "make bench",
    )


def language_model(r: dict[str, Any]) -> Row:
    """Say what a language model's questions cost."""
    return (
        f"GPT of {r['weights'] / 1e6:.1f} million weights, {r['questions']} questions",
        f"time of {r['trainings']:.1f} trainings, in stretches of {r['every']} steps; {r['error']:.0e} off",
        "language_models.py",
    )


def agreement(name: str, rows: dict[str, dict[str, Any]]) -> Row:
    """Say how well scores predict retraining, and what they cost."""
    shown = {
        **dict(zip(OURS, ("datamodel*", "derivative*", "smoothed*", "contributions*"), strict=True)),
        "TRAK-10 (traker)": "TRAK",
        "influence functions by EK-FAC (kronfluence)": "EK-FAC",
        "TracIn (dattri)": "TracIn",
    }
    found = [
        f"{words} {rows[key]['LDS']:.2f} ({rows[key]['trainings']:.0f})" for key, words in shown.items() if key in rows
    ]
    return f"LDS, {name}", ", ".join(found), "judged.py"


def derivatives(runs: list[dict[str, dict[str, Any]]]) -> Row:
    """Say how far derivatives of other libraries are from ours."""
    worst = max(1 - rows["MAGIC (bergson)"]["derivatives"][0] for rows in runs)
    return (
        "MAGIC's derivatives",
        f"mean cosine with ours at least 1 - {worst:.0e} in both runs",
        "judged.py",
    )


def unnoticed(runs: list[dict[str, Any]]) -> Row:
    """Count the planted faults of which the library whose scores they changed says something."""
    faults = [row for run in runs for row in run["systems"] if row["fault"]]
    return (
        "Faults in libraries' use",
        f"the library notices {sum(bool(row['said']) for row in faults)} of {len(faults)}",
        "judged.py",
    )


def planted(rows: list[dict[str, Any]]) -> Row:
    """Count the odd training programs, without those of the control."""
    odd = [row for row in rows if row["kind"].startswith("odd programs") and "control" not in row["kind"]]
    tried, found, harmless, silent = (sum(row[key] for row in odd) for key in ("tried", "found", "harmless", "silent"))
    return (
        "Faults in training programs",
        f"{tried:,} planted: {found:,} found, {harmless:,} without effect, {silent} silently wrong",
        "make faults",
    )

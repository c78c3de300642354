"""The tables of the attribution benchmark, in Markdown."""

from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

Rows = list[dict[str, Any]]

MEASURES = {  # head and key; of each the largest is the best
    "LDS, half": "LDS 0.5",
    "LDS, 90 %": "LDS 0.9",
    "LDS, half, first images": "LDS 0.5 of few",
    "LDS, 90 %, first images": "LDS 0.9 of few",
    "leave-one-out": "leave-one-out",
    "wrong labels, AUROC": "wrong labels",
    "log p lost": "brittleness",
    "class detection": "class detection",
}


def markdown(table: Rows) -> str:
    """Return a table for every setting, and what was left out."""
    settings = list(dict.fromkeys(row["setting"] for row in table))
    return "\n\n".join(f"### {setting}\n\n{setting_table(table, setting)}" for setting in settings) + "\n"


def setting_table(table: Rows, setting: str) -> str:
    """Return one setting's table: means ± standard deviations over seeds, the best mean in bold."""
    rows = [row for row in table if row["setting"] == setting]
    shown = {head: key for head, key in MEASURES.items() if any(row.get(key) is not None for row in rows)}
    scores = list(dict.fromkeys(row["score"] for row in rows))
    columns = [_column(rows, scores, lambda row, key=key: row.get(key)) for key in shown.values()]
    times = [_times([row for row in rows if row["score"] == score]) for score in scores]
    lines = [
        [score, *(column[number] for column in columns), times[number]]
        for number, score in enumerate(scores)
        if any(row.get("seconds") is not None for row in rows if row["score"] == score)
    ]
    if not lines:
        return "*Not computed yet.*"
    parts = [_table(["", *shown, "retrainings (seconds)"], lines)]
    if reasons := left_out(rows):
        parts.append("Left out: " + "; ".join(reasons) + ".")
    seeds = {row["seed"] for row in rows if row.get("seconds") is not None}
    if len(seeds) < (asked := len({row["seed"] for row in rows})):
        parts.append(f"Computed for {len(seeds)} of {asked} seeds.")
    return "\n\n".join(parts)


def left_out(rows: Rows) -> list[str]:
    """List the scores that are there for no seed, with the reason."""
    reasons: dict[str, list[str]] = {}
    computed = {row["score"] for row in rows if row.get("seconds") is not None}
    for row in rows:
        if "failure" in row and row["score"] not in computed:
            scores = reasons.setdefault(row["failure"], [])
            if row["score"] not in scores:
                scores.append(row["score"])
    return [f"{', '.join(scores)} ({reason})" for reason, scores in reasons.items()]


def means(rows: Rows, key: str) -> dict[str, float]:
    """Return the mean over seeds of every score that has any value."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get(key) is not None:
            found.setdefault(row["score"], []).append(row[key])
    return {score: mean(values) for score, values in found.items()}


def winners(table: Rows, ours: list[str]) -> str:
    """Say where another score is better than ours, and after it where one of ours is the best."""
    lost, won = [], []
    for setting in dict.fromkeys(row["setting"] for row in table):
        rows = [row for row in table if row["setting"] == setting]
        for head, key in MEASURES.items():
            found = means(rows, key)
            own = max((score for score in ours if score in found), key=lambda score: found[score], default=None)
            if own is None:
                continue
            best = max(found, key=lambda score: found[score])
            where = f"{setting}, {head}"
            if best == own:
                won.append(f"{where} ({own})")
            else:
                lost.append(f"{where} ({best} {found[best]:.2f}, {own} {found[own]:.2f})")
    parts = [f"**Another score is better at:** {'; '.join(lost)}."] if lost else []
    if won:
        parts.append(f"**Best are ours at:** {'; '.join(won)}.")
    return " ".join(parts) or f"Not computed yet: {', '.join(ours)}."


def _column(rows: Rows, scores: list[str], value: Callable[[dict[str, Any]], float | None]) -> list[str]:
    found = {
        score: [number for row in rows if row["score"] == score and (number := value(row)) is not None]
        for score in scores
    }
    best = max((mean(values) for values in found.values() if values), default=None)
    return [_cell(found[score], best) for score in scores]


def _cell(values: list[float], best: float | None) -> str:
    if not values:
        return "–"
    text = f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
    return f"**{text}**" if mean(values) == best else text


def _times(rows: Rows) -> str:
    """Write the time as a multiple of one retraining, the networks that the score needs included."""
    measured = [row for row in rows if row.get("seconds") is not None]
    if not measured or any(not row["retraining"] for row in measured):
        return "–"
    ratio = mean(row["seconds"] / row["retraining"] + row["retrainings"] for row in measured)
    seconds = mean(row["seconds"] + row["retrainings"] * row["retraining"] for row in measured)
    return " (".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in (ratio, seconds)) + ")"


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def judged_markdown(runs: Rows) -> str:
    """Return the tables of judged scores: sound ones of each run, then all faults."""
    parts = [f"### {run['run']}\n\n{judged_table(run)}" for run in runs]
    return "\n\n".join([*parts, "### Faults", faults_table(runs)]) + "\n"


def judged_table(run: dict[str, Any]) -> str:
    """Return one run's table: a system a line, then what is exact."""
    numbers = ["sum misses", "contributions", "derivatives", "LDS", "left out", "without the top 10"]
    sound = [row for row in run["systems"] if not row["fault"]]
    shown = [row for row in sound if "sum misses" in row]
    lines = [
        [
            row["system"],
            _percent(row["sum misses"]),
            *(_number(row[kind][0]) if kind in row else "–" for kind in ("contributions", "derivatives")),
            f"{row['LDS']:.2f} ({row['LDS interval'][0]:.2f} to {row['LDS interval'][1]:.2f})" if "LDS" in row else "–",
            _number(row.get("left out")),
            " / ".join(f"{value:.2g}" for value in row["without the top"]) if "without the top" in row else "–",
            f"{_number_of_trainings(row)} ({row['seconds']:.1f})" if "trainings" in row else "–",
        ]
        for row in shown
    ]
    reasons = list(dict.fromkeys(row["failure"] for row in sound if "failure" in row))
    missing = [
        f"{', '.join(row['system'] for row in sound if row.get('failure') == reason)} ({reason})" for reason in reasons
    ]
    return _table(["", *numbers, "trainings (seconds)"], lines) + (
        f"\n\nNot computed: {'; '.join(missing)}." if missing else ""
    )


def judged_front(run: dict[str, Any]) -> str:
    """Name the systems than which no cheaper one has a higher LDS, from the cheapest on."""
    rows = [row for row in run["systems"] if not row["fault"] and "LDS" in row and "trainings" in row]
    front: Rows = []
    for row in sorted(rows, key=lambda row: row["trainings"]):
        if not front or _number(row["LDS"]) > _number(front[-1]["LDS"]):
            front.append(row)
    names = [f"{row['system']} ({row['LDS']:.2f} for {_number_of_trainings(row)} trainings)" for row in front]
    plain, recorded = (f"{run[f'{kind} seconds']:.2g} s" for kind in ("training", "recording"))
    costs = f"A training takes {plain}, and {recorded} recorded: fixed costs of a step weigh."
    return f"**All that is cheaper had a lower LDS than each of these:** {'; '.join(names)}. {costs}"


def _number_of_trainings(row: dict[str, Any]) -> str:
    return f"{row['trainings']:.2g}" if row["trainings"] < 10 else f"{row['trainings']:.0f}"


def faults_table(runs: Rows) -> str:
    """Return what each fault did, what the library says of it, and what check_scores says of the scores."""
    lines = []
    for run in runs:
        sound = {row["system"]: row for row in run["systems"] if not row["fault"]}
        lines += [
            [row["fault"], row["system"], _change(sound[row["system"]], row), _own_words(row), _judgement(row)]
            for row in run["systems"]
            if row["fault"]
        ]
    order = list(dict.fromkeys(line[0] for line in lines))
    head = ["fault", "scores of", "cosine, sound → with the fault", "the library itself", "check_scores"]
    return _table(head, sorted(lines, key=lambda line: order.index(line[0])))


def _change(sound: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the cosine with what the sound scores are nearest to, without and with the fault."""
    kinds = [kind for kind in ("contributions", "derivatives") if kind in sound and kind in row]
    if not kinds:
        return "–"
    kind = max(kinds, key=lambda kind: abs(sound[kind][0]))
    return f"{kind} {_number(sound[kind][0])} → {_number(row[kind][0])}"


def _judgement(row: dict[str, Any]) -> str:
    return "–" if "failure" in row else " ".join(row["findings"]) or "nothing"


def _own_words(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"fails: {row['failure']}"
    return " ".join(row["said"]) or "nothing"


def _percent(share: float) -> str:
    if share < 0.1:
        return f"{100 * share:.2g} %"
    return f"{100 * share:.0f} %" if share < 2 else f"{share:.3g} times" if share < 1000 else "> 1000 times"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


TRUTHS = ("half", "half, first questions", "half, fresh seeds", "90 %", "leave-one-out")


def datamodels_markdown(results: dict[str, Any]) -> str:
    """Return a table for every problem, and one of all seeds."""
    table = results["table"]
    parts = [f"### {sizes['problem']}\n\n{datamodels_table(table, sizes)}" for sizes in results["problems"]]
    return "\n\n".join([*parts, "### Seeds", seeds_table(table)]) + "\n"


def datamodels_table(table: Rows, sizes: dict[str, Any]) -> str:
    """Return one problem's table: means ± standard deviations over seeds, the best mean in bold."""
    own = [row for row in table if row["problem"] == sizes["problem"]]
    rows = [row for row in own if "seconds" in row]
    if not rows:
        return "*Not computed yet.*"
    truths = [kind for kind in TRUTHS if any(kind in row for row in rows)]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    seeds = {row["seed"] for row in own}

    def values(system: str, kind: str) -> list[float]:
        return [row[kind][0] for row in rows if row["system"] == system and kind in row]

    most = {kind: max(mean(found) for name in systems if (found := values(name, kind))) for kind in truths}
    lines = []
    for system in systems:
        mine = [row for row in rows if row["system"] == system]
        questions = "" if mine[0]["questions"] == sizes["questions"] else f", first {mine[0]['questions']}"
        missing = "" if len(mine) in (len(seeds), 1) else f", {len(mine)} of {len(seeds)} seeds"
        cost = mean(row["trainings"] for row in mine)
        seconds = mean(row["trainings"] * row["training"] for row in mine)
        cells = [_cell(values(system, kind), most[kind]) for kind in truths]
        costs = " (".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in (cost, seconds)) + ")"
        lines.append([system + questions + missing, *cells, costs])
    numbers = [
        f"{sizes['samples']:,} samples", f"{sizes['questions']} questions", f"{sizes['steps']:,} steps",
        f"{sizes['weights']:,} weights", f"{len(seeds)} seed{'s' * (len(seeds) > 1)}",
    ]  # fmt: skip
    missing = left_out([{**row, "score": row["system"]} for row in own])
    words = [", ".join(numbers) + ".", _table(["", *truths, "trainings (seconds)"], lines)]
    return "\n\n".join(words + (["Left out: " + "; ".join(missing) + "."] if missing else []))


def seeds_table(table: Rows) -> str:
    """Return a line for every system and seed, with 95 % intervals."""
    rows = [row for row in table if "seconds" in row]
    truths = [kind for kind in TRUTHS if any(kind in row for row in rows)]
    lines = [
        [
            f"{row['problem']}, {row['seed']}",
            row["system"] + (f" ({row['option']})" if row["option"] else ""),
            *("{:.2f} ({:.2f} to {:.2f})".format(*row[kind]) if kind in row else "–" for kind in truths),
            f"{row['trainings']:.2g}" if row["trainings"] < 10 else f"{row['trainings']:.0f}",
        ]
        for row in rows
    ]
    return _table(["problem, seed", "system", *truths, "trainings"], lines)


PROBLEMS = {  # of one table for several problems: its head and their names
    "half": {
        "digits": "digits", "Fashion": "Fashion-MNIST", "KMNIST": "KMNIST", "MNIST, CNN": "MNIST, CNN",
        "KMNIST, CNN": "KMNIST, CNN", "dattri's MLP": "MNIST, MLP", "text": "text, transformer",
    },
    "numbers": {
        name: name for name in ("Friedman, AdamW", "Friedman, SGD", "diabetes, AdamW", "diabetes, SGD")
    },
}  # fmt: skip


def datamodels_of(results: dict[str, Any], kind: str) -> str:
    """Return LDS on halves, a system a line and a problem a column: means over seeds, with costs; the best is bold."""
    table, columns = results["table"], PROBLEMS[kind]
    found = {
        (row["system"], head): [
            other
            for other in table
            if (other["system"], other["problem"]) == (row["system"], problem) and "half" in other
        ]
        for row in table
        for head, problem in columns.items()
    }
    systems = [name for name in dict.fromkeys(row["system"] for row in table) if any(found[name, c] for c in columns)]
    lines = [[name] for name in systems]
    for head in columns:
        values = {name: mean(row["half"][0] for row in found[name, head]) for name in systems if found[name, head]}
        best = max(values.values(), default=None)
        for line, name in zip(lines, systems, strict=True):
            text = f"{values[name]:.2f}" if name in values else "–"
            text = f"**{text}**" if values.get(name, "–") == best else text
            if name in values:
                cost = mean(row["trainings"] for row in found[name, head])
                text += f" ({cost:.1f})" if cost < 9.95 else f" ({cost:,.0f})"
            line.append(text)
    return _table(["", *columns], lines)


def datamodel_winners(results: dict[str, Any]) -> str:
    """Say where something else predicts better than every datamodel, and where one of them is the best."""
    lost, won = [], []
    for problem in dict.fromkeys(row["problem"] for row in results["table"]):
        rows = [{**row, "score": row["system"]} for row in results["table"] if row["problem"] == problem]
        for kind in TRUTHS:
            found = means([{**row, kind: row[kind][0]} for row in rows if kind in row], kind)
            ours = {name: value for name, value in found.items() if is_datamodel(name)}
            if not ours or len(ours) == len(found):
                continue
            own, best = max(ours, key=lambda name: ours[name]), max(found, key=lambda name: found[name])
            if best == own:
                won.append(f"{problem}, {kind} ({own})")
            else:
                lost.append(f"{problem}, {kind} ({best} {found[best]:.2f}, {own} {found[own]:.2f})")
    parts = [f"**Something else is better at:** {'; '.join(lost)}."] if lost else []
    return " ".join(parts + ([f"**A datamodel is best at:** {'; '.join(won)}."] if won else []))


def is_datamodel(system: str) -> bool:
    """Return whether a system is one of `epk_gp.datamodel`."""
    return system.startswith(("path ", "linearised"))

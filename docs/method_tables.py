"""Tables of methods beside each other: their means over trained networks, and sentences that say who wins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion"}
FAR = ("outside 0: AUROC", "outside 1: AUROC")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Write a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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


Measures = Callable[[dict], list[Measure]]  # of a saved result


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
    return markdown_table(["method", *(measure.name for measure in measures)], rows)


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


def outside_measures(r: dict) -> list[Measure]:
    pairs = [
        ("MNIST → Fashion", "mnist", 0), ("MNIST → KMNIST", "mnist", 1), ("Fashion → MNIST", "fashion-mnist", 0),
        ("Fashion → KMNIST", "fashion-mnist", 1), ("MNIST 0–4 → 5–9", "mnist-low", 0),
        ("Fashion 0–4 → 5–9", "fashion-mnist-low", 0),
    ]  # fmt: skip
    return [Measure(name, _of_columns(r, f"outside {k}: AUROC", data=data)) for name, data, k in pairs]


def _inside_measures(r: dict) -> list[Measure]:
    kinds = (("error AUROC", 3, False), ("AURC", 4, True), ("NLL", 3, True), ("ECE", 3, True), ("accuracy", 3, False))
    return [
        Measure(f"{name}, {column}", _of_columns(r, column, data=data), digits, least)
        for data, name in SETS.items()
        for column, digits, least in kinds
    ]


def _largest_measures(name: str, columns: Sequence[str], digits: int = 3, *, least: bool = False) -> Measures:
    """Return the measures of one kind of every network that was trained on the largest training set."""

    def measures(r: dict) -> list[Measure]:
        largest = max(row["num_train"] for row in r["table"])
        found = dict.fromkeys((row["data"], row["network"]) for row in r["table"] if row["num_train"] == largest)
        return [
            Measure(
                f"{SETS[data]}, {network}: {name}",
                _of_columns(r, *columns, data=data, network=network, num_train=largest),
                digits,
                least,
            )
            for data, network in sorted(found, key=lambda pair: list(SETS).index(pair[0]))
        ]

    return measures


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

    shares = sorted({row["share"] for row in r["table"]})
    return [
        Measure(f"{name}, {100 * share:g} % {kind}", values(data, kind, share))
        for kind in ("uniform", "confusing")
        for data, name in SETS.items()
        for share in shares
    ]


def _purchase_measures(r: dict) -> list[Measure]:
    def values(data: str, network: str) -> Callable[[dict], list[float]]:
        return lambda row: [row["mean"][0]] if (row["data"], row["network"]) == (data, network) else []

    names = dict.fromkeys((row["data"], row["network"]) for row in r["table"])
    return [Measure(", ".join(name), values(*name)) for name in names]


def _methods(measures: Measures) -> Callable[[dict], str]:
    return lambda saved: method_table(saved["results"]["table"], measures(saved["results"]))


def _winners(ours: str, *measures: Measures) -> Callable[[dict], str]:
    def sentence(saved: dict) -> str:
        r = saved["results"]
        return who_wins(r["table"], [measure for group in measures for measure in group(r)], ours)

    return sentence


LARGEST = {
    "outside": _largest_measures("other images", FAR, 4),
    "errors": _largest_measures("error AUROC", ["error AUROC"]),
    "nll": _largest_measures("NLL", ["NLL"], least=True),
}
TABLES: dict[str, Callable[[dict], str]] = {
    "outside": _methods(outside_measures),
    "bought": _methods(_purchase_measures),
    "judged_winners": _winners("EPK-GP", outside_measures, _inside_measures),
    "shifted_winners": _winners("EPK-GP", _shift_measures, _attack_measures),
    "noise_winners": _winners("EPK-GP with AUM: label_errors", _noise_measures),
    "bought_winners": _winners("EPK-GP: next_to_label", _purchase_measures),
}

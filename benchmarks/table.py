"""The tables of a benchmark's numbers, in Markdown."""

from collections.abc import Iterable
from typing import Any


def markdown(numbers: dict[str, Any]) -> str:
    """Return all measured parts as Markdown."""
    parts = [_preface(numbers)]
    if "ntk" in numbers:
        parts += ["### One NTK block", *_blocks(numbers["ntk"])]
    if "tangent" in numbers:
        parts += ["### Tangent kernels of five networks", *_tangent(numbers["tangent"])]
    if "epk" in numbers:
        parts += ["### A whole path-kernel block", *_blocks(numbers["epk"])]
    if "attribution" in numbers:
        parts += ["### Contributions of all training points", _attribution(numbers["attribution"])]
    if "explaind" in numbers:
        parts += ["### Contributions beside ExPLAIND's", *_explaind(numbers["explaind"])]
    if "grid" in numbers:
        parts += ["### An uncertainty map", _grid(numbers["grid"])]
    if "growth" in numbers:
        parts += ["### Growth", _growth(numbers["growth"])]
    return "\n\n".join(parts) + "\n"


def _preface(numbers: dict[str, Any]) -> str:
    machine = numbers["machine"]
    peers = "; ".join(f"{name}: {versions}" for name, versions in numbers["peers"].items())
    return (
        f"{machine['cores']} cores, {machine['threads']} threads. Medians (interquartile ranges) over rounds in which "
        "the contenders take turns; runs of less than 1 s come twice in a turn, and the second counts; contenders of "
        "more than 5 s take part in 3 rounds. *Floor*: the products that cannot be avoided, at the rate of a "
        "1500 x 1500 matrix product in the same rounds; fastest against fastest. *Peak*: of the process at its first "
        "run, and before it. *Error*: against torch.func's recipe in the same dtype, "
        f"relative to the largest entry. Peers: {peers}."
    )


def _blocks(rows: list[dict[str, Any]]) -> list[str]:
    parts = []
    for problem in dict.fromkeys((row["problem"], row["dtype"]) for row in rows):
        contenders = [row for row in rows if (row["problem"], row["dtype"]) == problem and row["contender"] != "floor"]
        ours = next(row for row in contenders if row["contender"] == "epk_gp")
        lines = [
            [
                row["contender"],
                _time(row),
                f"{row['median'] / ours['median']:.1f}" if "median" in row else "–",
                f"{row['floors']:.2f}" if "floors" in row else "–",
                f"{row['peak_bytes'] / 2**30:.2f} ({row['bytes_before'] / 2**30:.2f})" if "peak_bytes" in row else "–",
                f"{row['error']:.0e}" if row.get("error") else "–",
            ]
            for row in contenders
        ]
        header = ["", "ms", "x epk_gp", "x floor", "peak GiB (before)", "error"]
        parts.append(f"**{problem[0]}, {problem[1]}**\n\n{_table(header, lines)}")
    return parts


def _tangent(rows: list[dict[str, Any]]) -> list[str]:
    parts = [
        f"float64, the same weights everywhere, {rows[0]['threads']} thread, "
        f"{max(row.get('rounds', 0) for row in rows)} turns that count, on a machine with other work. *First*: seconds "
        "until a first block is there, with what is tried or compiled before; ms: another block. `epk.ntk` tries "
        "its fast derivatives in every call, an `epk.NTKKernel` once. neural-tangents' trace is a mean, here "
        "times the number of outputs. *Predictions*: gradient flow to time 5 and the process's posterior, with "
        "kernels; their error is against neural-tangents. A contender is stopped after 60 s before its first "
        "block, or 20 s of another."
    ]
    for problem, of in dict.fromkeys((row["problem"], row.get("of", "")) for row in rows):
        lines = []
        for row in (row for row in rows if (row["problem"], row.get("of", "")) == (problem, of)):
            has_run, is_kept = "median" in row, row["contender"] not in ("epk.ntk", "torch.func recipe")
            memory = f"{row['peak_bytes'] / 2**30:.2f} ({row['bytes_before'] / 2**30:.2f})" if has_run else "–"
            first = f"{row['first']:.1f}" if has_run and is_kept else "–"
            lines.append(
                [row["contender"], _time(row), first, memory, f"{row['error']:.0e}" if row.get("error") else "–"]
            )
        parts.append(f"**{problem}, {of}**\n\n{_table(['', 'ms', 'first', 'peak GiB (before)', 'error'], lines)}")
    return parts


def _attribution(rows: list[dict[str, Any]]) -> str:
    text = f"{rows[0]['problem']}, float64; Algorithm 1 with dense Jacobians and 100 Riemann nodes."
    return f"{text}\n\n{_contributions(rows)}"


def _explaind(rows: list[dict[str, Any]]) -> list[str]:
    parts = [
        "explaind takes weights in float32 alone; it sums a midpoint rule with 100 nodes a step. Threads: "
        f"{rows[0]['threads']}; turns that count: {max(row.get('rounds', 0) for row in rows)}."
    ]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        contenders = [row for row in rows if row["problem"] == problem]
        dtype = contenders[0]["dtype"]
        parts.append(f"**{problem}** (epk_gp in {dtype})\n\n{_contributions(contenders)}")
    return parts


def _contributions(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["contender"],
            _time(row),
            f"{row['median'] / rows[0]['median']:.1f}" if "median" in row and "median" in rows[0] else "–",
            f"{row['peak_bytes'] / 2**30:.2f} ({row['bytes_before'] / 2**30:.2f})" if "peak_bytes" in row else "–",
            f"{row['error']:.1e}" if "error" in row else "–",
        ]
        for row in rows
    ]
    return _table(["", "ms", "x epk_gp", "peak GiB (before)", "sum against the network"], lines)


def _grid(numbers: dict[str, Any]) -> str:
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in numbers["seconds"].items())
    return (
        f"{numbers['grid_points']} grid points x {numbers['training_points']} training points x "
        f"{numbers['steps']} steps, "
        f"3 outputs ({numbers['outputs']}), {numbers['nodes']} nodes per step: {seconds}; peak memory of the process "
        f"**{numbers['peak_gib']:.2f} GiB**."
    )


def _growth(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        times = ", ".join(f"{entry['value']}: {1e3 * entry['fastest']:.0f}" for entry in row["measured"])
        memory = ", ".join(f"{entry['peak_bytes'] / 2**30:.2f}" for entry in row["measured"])
        lines.append([row["size"], times, f"{row['exponent']:.2f}", memory])
    return (
        "MLP 100-128-128-3, float64, 400 test against 400 training points, 8 steps of 4 nodes, one size varied. The "
        "exponent is the slope of log time.\n\n" + _table(["", "ms", "exponent", "peak GiB"], lines)
    )


def _time(row: dict[str, Any]) -> str:
    if "median" not in row:
        return str(row.get("failure", "–"))
    return f"{1e3 * row['median']:.1f} ({1e3 * row['spread']:.1f})"


def _table(header: list[str], lines: Iterable[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

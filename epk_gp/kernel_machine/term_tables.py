"""The first points of a result as columns of a small table: its terms, and the largest parts of one of them."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.show import NAME_LENGTH, SHOWN_POINTS, Table, columns_note, count, number, shortened
from epk_gp.kernel_machine.axes import Axis

_LARGEST = 3  # parts that are named for a point
Place = tuple[int, int]  # a point, and one of its outputs


def shown_places(outputs: Float[Tensor, "n C"]) -> list[Place]:
    """Return the first points, each with its largest output."""
    if not outputs.shape[1]:
        return []
    return list(enumerate(outputs[:SHOWN_POINTS].argmax(dim=1).tolist()))


def place_table(outputs: Float[Tensor, "n C"], places: list[Place], rows: list[tuple[str, ...]]) -> Table | None:
    """Return a table with a column for each of the places.

    Args:
        outputs: The outputs of all points.
        places: Which of them have a column.
        rows: The name of each row, and an entry for each column.

    Returns:
        The table, or None where there is no point.
    """
    n, C = outputs.shape
    if not places:
        return None
    chosen = [] if C == 1 else [("output", *(str(c) for _, c in places))]
    note = columns_note(len(places), n, outputs="" if C == 1 else f"of the {count(C, 'output')}, each point's largest")
    return Table(("", *(f"point {i}" for i, _ in places)), (*chosen, *rows), note)


def sum_rows(places: list[Place], terms: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return a row for each term, (n, C, ...), summed over all but point and output, and one for the sum of all."""
    sums = {name: [float(term[place].detach().sum()) for place in places] for name, term in terms.items()}
    total = [
        math.fsum(column) if all(map(math.isfinite, column)) else sum(column)
        for column in zip(*sums.values(), strict=True)
    ]
    rows = [(name, *map(number, values)) for name, values in sums.items()]
    return [*rows, ("sum of all terms", *map(number, total))]


def number_row(name: str, places: list[Place], values: Float[Tensor, "n C"]) -> tuple[str, ...]:
    """Return a row of the values at the places."""
    return (name, *(number(float(values[place])) for place in places))


def largest_rows(
    name: str, places: list[Place], values: Tensor, name_of: Callable[[int], str]
) -> list[tuple[str, ...]]:
    """Return rows of the parts, (n, C, ...), that are largest in absolute value, the largest first.

    Args:
        name: Name of the first row.
        places: The columns.
        values: The parts.
        name_of: Maps the number of a part, flattened, to its name.
    """
    columns = []
    for place in places:
        parts = values[place].detach().flatten()
        largest = parts.abs().topk(min(_LARGEST, len(parts))).indices
        named = zip(largest.tolist(), parts[largest].tolist(), strict=True)
        columns.append([f"{name_of(part)}: {value:+.4g}" for part, value in named])
    return [(name if not k else "", *row) for k, row in enumerate(zip(*columns, strict=True))]


def sample_name(index: int) -> str:
    """Return the name of a training sample."""
    return f"#{index}"


def group_namer(axes: tuple[Axis, ...]) -> Callable[[int], str]:
    """Return a function from the number of a group, over all axes, to its name."""
    sizes = [len(axis.names) for axis in axes]
    length = NAME_LENGTH // max(1, len(axes))

    def name_of(part: int) -> str:
        places = np.unravel_index(part, sizes) if sizes else ()
        return ", ".join(
            shortened(f"{'#' if is_each(axis) else ''}{axis.names[int(place)]}", length)
            for axis, place in zip(axes, places, strict=True)
        )

    return name_of


def is_each(axis: Axis) -> bool:
    """Return whether each sample has a group of its own on an axis."""
    num_groups = len(axis.names)
    return axis.kind == "sample" and 0 < num_groups == len(axis.group) and axis.names[-1] == str(num_groups - 1)


def describe_axes(axes: tuple[Axis, ...]) -> str:
    """Return what values are split by, as in "2 groups of samples, 20 groups of steps"."""
    return ", ".join(
        count(len(axis.names), "sample") if is_each(axis) else f"{count(len(axis.names), 'group')} of {axis.kind}s"
        for axis in axes
    )

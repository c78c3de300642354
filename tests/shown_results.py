"""What results show, by the names of the rows."""

from epk_gp.core.show import Displayed

HOSTILE = '<script>alert("x")</script>&\x1b[31m\n\u202e'


def shown(result: Displayed) -> dict[str, list[str]]:
    """Return what a result shows, by the names of the rows: each must stand in its text.

    The rows without a name belong to the one above them.
    """
    text, summary = " ".join(str(result).split()), result._summary()
    rows = [(entry.name, entry.value + (f" ({entry.note})" if entry.note else "")) for entry in summary.entries]
    if summary.table is not None:
        rows += [summary.table.columns, *summary.table.rows]
    named, last = dict[str, list[str]](), ""
    for name, *cells in rows:
        if all(value.isprintable() for value in (name, *cells)):
            assert " ".join(" ".join((name, *cells)).split()) in text
        last = name or last
        named.setdefault(last, []).extend(cells)
    return named

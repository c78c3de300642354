"""What users see of long calls and of results: tables in a terminal and a notebook, progress, warnings.

A quiet call that will take more than half a minute can say so by a warning (`SlowCallNotice`).
"""

import html
import sys
import textwrap
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor
from tqdm.auto import tqdm
from tqdm.std import tqdm as std_tqdm

from epk_gp.core.plans import TensorSpec


class CertificateWarning(UserWarning):
    """A result that its own certificate does not support, or a run that cannot have one."""


def warn_uncertified(message: str) -> None:
    """Emit a `CertificateWarning` at the line outside the package that led to it."""
    warn_caller(message, CertificateWarning)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Emit a warning at the line outside the package that led to it."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while (outer := frame.f_back) is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, outer
    warnings.warn(message, category, stacklevel=level)


SHOWN_ROWS = 10  # of a list
SHOWN_POINTS = 3  # columns of a table: with them a table is narrower than 100 characters
_WIDTH = 88  # characters of a line of text: the column of a page holds them
NAME_LENGTH = 24  # characters of a name in a table

# Colours are those of the page that shows the result, light or dark; lines are half-transparent grey, which is seen on
# both. Notebooks have styles of their own for tables, such as black text, striped rows and cells aligned to the right:
# these override them.
_CELL = "border: none; vertical-align: top; background: transparent; color: inherit;"
_LEFT = f"{_CELL} padding: 0.15em 0.8em 0.15em 0; text-align: left;"
_NAME = f"{_LEFT} font-weight: normal; opacity: 0.75; white-space: nowrap;"
_VALUE = f"{_LEFT} max-width: 45em; white-space: normal; overflow-wrap: anywhere;"
_RIGHT = f"{_CELL} padding: 0.15em 0 0.15em 1.2em; text-align: right;"
_NUMBER = f"{_RIGHT} font-variant-numeric: tabular-nums; white-space: nowrap;"
_RULE = "border-bottom: 1px solid rgba(128, 128, 128, 0.6);"
_ROW = "background: transparent; color: inherit;"
_TABLE = f"{_ROW} border-collapse: collapse; border: none; margin: 0.4em 0; font-size: inherit;"
_FRAME = "color: inherit; font-size: 0.95em; line-height: 1.35; overflow-x: auto; padding: 0.2em 0;"


@dataclass(frozen=True)
class Entry:
    """One thing that a result says about itself.

    Attributes:
        name: What it is.
        value: Its value, in words or as a number.
        note: What to compare the value with, or what it is of; may be empty.
        is_warning: Whether a reader must not miss it; a notebook shows it in bold.
    """

    name: str
    value: str
    note: str = ""
    is_warning: bool = False


@dataclass(frozen=True)
class Table:
    """A small table of numbers.

    Attributes:
        columns: What each column is; its first entry is empty where the first column holds the names of the rows.
        rows: The rows, each as long as `columns`, the name first.
        note: What the table shows, and what it leaves out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """What is shown of a result.

    Attributes:
        title: What it is, and how large.
        entries: What it says about itself, the most important first.
        table: Some of its numbers; None for a result without any.
    """

    title: str
    entries: tuple[Entry, ...]
    table: Table | None = None


class Displayed(ABC):
    """A result that shows itself as text, and as HTML in a notebook.

    A summary reads what the result holds. It does not compute on the run, and reads no file.
    """

    @abstractmethod
    def _summary(self) -> Summary:
        """Return what is shown."""

    def __repr__(self) -> str:
        """Show the result as text."""
        return as_text(_summary_of(self))

    def __str__(self) -> str:
        """Show the result as text."""
        return as_text(_summary_of(self))

    def _repr_html_(self) -> str:
        """Show the result in a notebook."""
        return as_html(_summary_of(self))


def as_text(summary: Summary) -> str:
    """Return a summary as lines of at most 100 characters, where its table and its longest word allow it."""
    names = [printable(entry.name) for entry in summary.entries]
    width = max(map(len, names), default=0)
    lines = [printable(summary.title)]
    for name, entry in zip(names, summary.entries, strict=True):
        value = printable(entry.value) + (f" ({printable(entry.note)})" if entry.note else "")
        first, after = f"  {name:<{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(
            value, _WIDTH, initial_indent=first, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
        ) or [first.rstrip()]
    if summary.table is not None:
        lines += ["", *_text_rows(summary.table)]
        lines += textwrap.wrap(printable(summary.table.note), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def as_html(summary: Summary) -> str:
    """Return a summary as HTML without scripts, style sheets and anything outside of it.

    Every text is escaped. Colours are those of the page, so that it can be read on light and on dark ones.
    """
    rows = "".join(
        f'<tr style="{_ROW}"><th scope="row" style="{_NAME}">{_escaped(entry.name)}</th>'
        f'<td style="{_VALUE}{" font-weight: bold;" if entry.is_warning else ""}">{_escaped(entry.value)}'
        + (f' <span style="opacity: 0.75;">({_escaped(entry.note)})</span>' if entry.note else "")
        + "</td></tr>"
        for entry in summary.entries
    )
    title = f'<div style="font-weight: bold; {_RULE}">{_escaped(summary.title)}</div>'
    table = "" if summary.table is None else _html_table(summary.table)
    return f'<div style="{_FRAME}">{title}<table style="{_TABLE}"><tbody>{rows}</tbody></table>{table}</div>'


def printable(text: str) -> str:
    """Return a text with its control characters and line breaks written out.

    A name in a run may hold what would move the cursor of a terminal, or turn the direction of writing.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(name: str, length: int) -> str:
    """Return a name for a table; of a long one the middle is left out."""
    if len(name) <= length:
        return name
    end = length // 2
    return f"{name[: length - end - 1]}…{name[-end:]}"


def number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:.4g}"


def count(number: int, noun: str) -> str:
    """Return a count with its noun, as in "1 point" and "60,000 points"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def kind_of(tensor: Tensor | TensorSpec) -> str:
    """Return dtype and device of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def certificate_entry(findings: Sequence[str], meaning: str) -> Entry:
    """Return what a certificate says.

    Args:
        findings: Why the result is not certified; empty if it is.
        meaning: What the certificate of a certified result says.
    """
    if findings:
        return Entry("certificate", f"not certified: {'; '.join(findings)}", is_warning=True)
    return Entry("certificate", f"certified: {meaning}")


def columns_note(num_shown: int, num_all: int, noun: str = "point", outputs: str = "") -> str:
    """Return which points a table shows, and which of their outputs; empty if it shows all."""
    shown = "" if num_shown == num_all else f"the first {num_shown} of {count(num_all, noun)}"
    parts = [part for part in (shown, outputs) if part]
    return f"Shown: {'; '.join(parts)}." if parts else ""


def _summary_of(result: Displayed) -> Summary:
    """Return the summary of a result, or why it has none.

    Debuggers, loggers and tracebacks show objects that were put together wrongly, or are not finished yet. What is
    wrong with them must not be hidden by another error.
    """
    try:
        return result._summary()
    except Exception as error:  # whatever a malformed result makes of it
        reason = f"{type(error).__name__}: {error}"
        return Summary(type(result).__name__, (Entry("cannot be shown", reason, is_warning=True),))


def _text_rows(table: Table) -> list[str]:
    cells = [[printable(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = []
    for row in cells:
        first, *others = row
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append(f"  {first:<{widths[0]}}{numbers}".rstrip())
    return lines


def _html_table(table: Table) -> str:
    head = "".join(
        f'<th scope="col" style="{_NUMBER} font-weight: bold; {_RULE}">{_escaped(column)}</th>'
        for column in table.columns
    )
    body = "".join(
        f'<tr style="{_ROW}"><th scope="row" style="{_NAME}">{_escaped(row[0])}</th>'
        + "".join(f'<td style="{_NUMBER}">{_escaped(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    note = f'<div style="opacity: 0.75;">{_escaped(table.note)}</div>' if table.note else ""
    return f'<table style="{_TABLE}"><thead><tr style="{_ROW}">{head}</tr></thead><tbody>{body}</tbody></table>{note}'


def _escaped(text: str) -> str:
    return html.escape(printable(text))


Item = TypeVar("Item")

if TYPE_CHECKING:
    ProgressBar: TypeAlias = std_tqdm[Any]
else:
    ProgressBar = std_tqdm

_MEASURED, _LONG, _REST = 3.0, 30.0, 10.0  # seconds: measured at least, of a long call, and still to come if it says so


def progress_bar(
    total: int, desc: str, *, unit: str = "it", initial: int = 0, shown: bool = True, advice: str | None = None
) -> ProgressBar:
    """Return a progress bar, to be used in a `with` statement and advanced by `update(n)`.

    It is tqdm's, on the standard error stream or in a notebook.

    Args:
        total: Number of items of the whole call.
        desc: What is counted, such as "training".
        unit: Name of an item.
        initial: Number of items that were done before.
        shown: Whether there is any output.
        advice: How the call is made faster: of a call without output, it stands in the warning that it will be long.
    """
    if not shown and advice is not None:
        return SlowCallNotice(total - initial, desc, advice)
    hidden = not shown or sys.stderr is None
    return tqdm(total=total, desc=desc, unit=unit, initial=initial, disable=hidden, dynamic_ncols=True)


def tracked(
    items: Iterable[Item],
    desc: str,
    *,
    total: int | None = None,
    unit: str = "it",
    initial: int = 0,
    shown: bool = True,
) -> Iterator[Item]:
    """Yield items, and show how many are done.

    Args:
        items: What is iterated over.
        desc: What is counted.
        total: Number of items of the whole call; None means the length of `items`.
        unit: Name of an item.
        initial: Number of items that were done before.
        shown: Whether there is any output.
    """
    size = len(items) if total is None else total  # type: ignore[arg-type]
    with progress_bar(size, desc, unit=unit, initial=initial, shown=shown) as bar:
        for item in items:
            yield item
            bar.update()


def write_line(line: str) -> None:
    """Write a line to the standard error stream, above a bar that is shown there."""
    std_tqdm.write(line, file=sys.stderr)


class SlowCallWarning(UserWarning):
    """A call that will take more than half a minute, and shows no progress."""


class SlowCallNotice(ProgressBar):
    """No bar, but one `SlowCallWarning` if the first items show that a call will take more than half a minute.

    Args:
        total: Number of items that are to be done.
        desc: What is counted.
        advice: How the call is made faster.
        clock: Gives the time in seconds.
    """

    def __init__(self, total: int, desc: str, advice: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(disable=True)
        self._size, self._words, self._advice, self._clock = total, desc, advice, clock
        self._begun = clock()
        self._first: tuple[float, float] = (0, 0.0)  # items, and seconds that they took: the first ones may be slower

    def update(self, n: int | float | None = 1) -> bool | None:
        """Count n more items, and warn once if all will take long."""
        self.n += n or 0
        seconds, (items, begun) = self._clock() - self._begun, self._first
        if not items:
            self._first = self.n, seconds
        elif self._advice and seconds >= _MEASURED:
            rest = (self._size - self.n) * (seconds - begun) / (self.n - items)
            if rest >= _REST and seconds + rest > _LONG:
                words = f"the {self._words} will take about {_about(seconds + rest)}: {self._advice}."
                self._advice = ""
                warn_caller(words, SlowCallWarning)
        return None


def _about(seconds: float) -> str:
    """Return a time in a few words, as in "4 minutes"."""
    unit, name = (1, "seconds") if seconds < 90 else (60, "minutes") if seconds < 5400 else (3600, "hours")
    return f"{seconds / unit:.0f} {name}"

"""Texts, progress bars and warnings of long calls and results."""

import copy
import itertools
import math
import sys
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm.std import tqdm as std_tqdm

from epk_gp.core.plans import TensorSpec


class CertificateWarning(UserWarning):
    """A warning that a result's certificate does not support it, or that a run cannot have a certificate."""


def warn_uncertified(message: str) -> None:
    """Emit a `CertificateWarning` that points to the user's line outside the package."""
    warn_caller(message, CertificateWarning)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Emit a warning that points to the user's line outside the package."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while (outer := frame.f_back) is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, outer
    warnings.warn(message, category, stacklevel=level)


SHOWN_ROWS = 10  # rows shown of a list
SHOWN_POINTS = 3  # columns of a table: a table then has fewer than 100 characters per line
_WIDTH = 88  # characters of a line of text: as wide as a page's column
NAME_LENGTH = 24  # characters of a name in a table


@dataclass(frozen=True)
class Entry:
    """One fact that a result shows about itself.

    Attributes:
        name: Name of the fact.
        value: Its value, in words or as a number.
        note: The reference for the value, or its subject; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A small table of numbers.

    Attributes:
        columns: Titles of the columns; the first is empty if the first column holds the names of the rows.
        rows: The rows, each as long as `columns`, starting with the name.
        note: A description of the table, and of the rows or columns that it leaves out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """The displayed form of a result: lines of at most 100 characters if its table and its longest word allow it.

    Attributes:
        title: Kind and size of the result.
        entries: Facts about the result, the most important first.
        table: Some of its numbers; None for a result without numbers.
    """

    title: str
    entries: tuple[Entry, ...]
    table: Table | None = None

    def __str__(self) -> str:
        """Return the text."""
        width = max((len(_printable(entry.name)) for entry in self.entries), default=0)
        lines = [_printable(self.title)]
        for entry in self.entries:
            first = f"  {_printable(entry.name):<{width}}  "
            value = _printable(entry.value + (f" ({entry.note})" if entry.note else ""))
            lines += _wrapped(value, first, " " * (width + 4)) or [first.rstrip()]
        if self.table is not None:
            cells = [list(map(_printable, row)) for row in (self.table.columns, *self.table.rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines.append("")
            for name, *numbers in cells:
                shown = "".join(f"  {cell:>{size}}" for cell, size in zip(numbers, widths[1:], strict=True))
                lines.append(f"  {name:<{widths[0]}}{shown}".rstrip())
            lines += _wrapped(_printable(self.table.note), "  ", "  ")
        return "\n".join(lines)


def _wrapped(text: str, first: str, after: str) -> list[str]:
    indents: dict[str, Any] = {"initial_indent": first, "subsequent_indent": after}
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False, **indents)


def _printable(text: str) -> str:
    """Return a text with its control characters and line breaks written out.

    A name in a run may contain characters that move the cursor of a terminal or reverse the direction of writing.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Displayed(ABC):
    """A result that can show itself as text.

    A summary uses only the result's own data. It does not compute on the run and reads no file.
    """

    @abstractmethod
    def _summary(self) -> Summary:
        """Return the displayed summary."""

    def __str__(self) -> str:
        """Show the result; if it is damaged or unfinished, show the reason that it cannot be shown."""
        try:
            return str(self._summary())
        except Exception as error:  # debuggers and tracebacks call this: a second error would hide the first
            return str(Summary(type(self).__name__, (Entry("cannot be shown", f"{type(error).__name__}: {error}"),)))

    def __repr__(self) -> str:
        """Show the result."""
        return str(self)


T = TypeVar("T", bound="Tabular")  # beartype takes no `Self`


class Tabular(Displayed):
    """A result that can also be a table."""

    _labels: Mapping[str, Any] = {}  # labels of points, outputs and samples, by the name of the axis
    _names_of_values: tuple[str, ...] = ()  # labels that name values, not places along an axis
    _columns: tuple[str, ...] = ()  # attributes that are the columns of a table
    _rows: tuple[str, ...] = ("point", "output")  # names of their axes

    def _frame(self) -> tuple[Any, ...]:
        """Return the data of the table.

        Returns:
            Indices along each axis of the rows, by its name; or a list, whose entries are the labels. Values by name,
            (rows, ...): one column each, or one for each index along the axes of the columns. Name and labels of each
            of these axes; a value may have length 1 there.
        """
        values = {name: getattr(self, name) for name in self._columns}
        sizes = next(iter(values.values())).shape
        return {axis: range(size) for axis, size in zip(self._rows, sizes, strict=False)}, values, ()

    def _summary(self) -> Summary:
        (rows, terms, _), entries = self._frame(), list[Entry]()
        for name, given in terms.items():
            values = torch.as_tensor(given).detach()
            ends = f"{number(float(values.min()))} to {number(float(values.max()))}" if values.numel() else "none"
            entries.append(Entry(name, ends, f"shape {tuple(values.shape)}"))
        places = [" × ".join(own) for own in (map(str, map(len, rows.values())), rows)]
        return Summary(f"{type(self).__name__}, {places[0]} ({places[1]})", tuple(entries))

    def labelled(self: T, **labels: Any) -> T:
        """Return the same result with labels for its table, as in `to_frame`; None for numbers."""
        named = copy.copy(self)
        vars(named)["_labels"] = {**self._labels, **{name: own for name, own in labels.items() if own is not None}}
        return named

    def to_frame(self, **labels: Any) -> Any:
        """Return the result as a `pandas.DataFrame` with named rows and columns.

        Args:
            labels: Labels along an axis, by its name: `point=X.index`, `output=names`, `sample=X_train.index`. For
                suspicious labels, `sample` has one label per training point, including points that were not judged, and
                `output` names the expected classes. If each point has one output (`classes=`), `chosen` has its name
                for each point. Numbers by default.

        Raises:
            ModuleNotFoundError: pandas is not installed.
            ValueError: The table has no such axis, or an axis has another number of labels.
        """
        try:
            pandas: Any = import_module("pandas")
        except ModuleNotFoundError as error:
            advice = "to_frame() needs the package pandas: it is not installed. Run pip install 'epk-gp[tables]'."
            raise ModuleNotFoundError(advice, name=error.name) from error
        labelled = self.labelled(**labels)
        (rows, terms, columns), named = labelled._frame(), labelled._labels
        axes, chosen = [*rows, *(name for name, _ in columns)], ["chosen"] * (len(rows.get("output", ())) == 1)
        if unknown := labels.keys() - set(known := [*axes, *self._names_of_values, *chosen]):
            raise ValueError(f"labels must be those of {', '.join(known)}: got {', '.join(unknown)}.")
        along_axes = [np.arange(len(own)) if isinstance(own, list) else np.asarray(own) for own in rows.values()]
        grid, levels = np.meshgrid(*along_axes, indexing="ij"), list[Any]()
        heads, frames = list[Any](), list[Any]()
        for (name, along), places in zip(rows.items(), grid, strict=True):
            is_chosen = name == "output" and name not in labels and not named.keys().isdisjoint(chosen)
            source, at = ("chosen", np.arange(places.size)) if is_chosen else (name, places.ravel())
            numbers = along if isinstance(along, list) else range(at.max(initial=-1) + 1)
            own = pandas.Index(named.get(source, numbers), tupleize_cols=False)
            require_labels(source, own, int(at.max(initial=-1)) + 1, is_exact=isinstance(along, range | list))
            levels.append(own.take(at).rename(name))
        index = levels[0] if len(levels) == 1 else pandas.MultiIndex.from_arrays(levels)
        for term, values in terms.items():
            array = np.asarray(values.detach().cpu()) if isinstance(values, Tensor) else np.asarray(values)
            head, sizes = [[term]], [*array.shape[len(rows) :], *[1] * (len(axes) - array.ndim)]
            for (name, default), size in zip(columns, sizes, strict=True):
                head.append(named.get(name, default) if size == len(default) else [""])
                require_labels(name, head[-1], size, is_exact=True)
            heads += itertools.product(*head)
            frames.append(pandas.DataFrame(array.reshape(len(index), math.prod(sizes)), index=index))
        distinct = [pandas.Index(own, tupleize_cols=False).factorize() for own in zip(*heads, strict=True)]
        codes, names = zip(*distinct, strict=True)  # not sorted, because tuples and text may be mixed
        heads = pandas.MultiIndex(names, codes, names=["term", *axes[len(rows) :]]) if columns else list(terms)
        return pandas.concat(frames, axis=1).set_axis(heads, axis=1)


def require_labels(name: str, labels: Any, count: int, *, is_exact: bool) -> None:
    """Raise if an axis has too few labels, or, for an exact axis, another number of labels than its length."""
    if len(labels) < count or (is_exact and len(labels) != count):
        wanted = f"{count} label{'' if count == 1 else 's'}, one for each place along the axis"
        raise ValueError(f"{name} must have {'' if is_exact else 'at least '}{wanted}: got {len(labels)}.")


def shortened(name: str, length: int) -> str:
    """Return a name for a table; the middle of a long name is left out."""
    end = length // 2
    return name if len(name) <= length else f"{name[: length - end - 1]}…{name[-end:]}"


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
    """Return the entry for a certificate.

    Args:
        findings: Reasons that the result is not certified; empty if it is.
        meaning: The statement of the certificate for a certified result.
    """
    return Entry("certificate", f"not certified: {'; '.join(findings)}" if findings else f"certified: {meaning}")


def columns_note(num_shown: int, num_all: int, outputs: str = "") -> str:
    """Describe the points and outputs that a table shows; empty if it shows all."""
    shown = "" if num_shown == num_all else f"the first {num_shown} of {count(num_all, 'point')}"
    parts = [part for part in (shown, outputs) if part]
    return f"Shown: {'; '.join(parts)}." if parts else ""


Item = TypeVar("Item")


def tracked(items: Iterable[Item], desc: str, *, shown: bool = True, **options: Any) -> Iterator[Item]:
    """Return items as a bar shows how many are done, with tqdm's options `total`, `unit` and `initial`."""
    return iter(new_bar(items, desc, shown=shown, **options))


def new_bar(items: Iterable[Any] | None, desc: str, *, shown: bool, **options: Any) -> std_tqdm:  # type: ignore[type-arg]
    """Return tqdm's bar, which shows in a terminal and in a notebook; a file or a pipe gets none.

    In a notebook it is a widget, or text where ipywidgets is not installed.
    """
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")  # which is no terminal, but is seen
    is_closed = getattr(sys.stderr, "closed", False)
    shown = shown and not is_closed and (in_notebook or getattr(sys.stderr, "isatty", bool)())
    is_widget = shown and in_notebook and find_spec("ipywidgets") is not None
    kind: Any = import_module("tqdm.notebook").tqdm if is_widget else std_tqdm
    return kind(items, desc, disable=not shown, dynamic_ncols=True, **options)  # type: ignore[no-any-return]


def write_line(line: str) -> None:
    """Write a line to the standard error stream, above any progress bar."""
    std_tqdm.write(line, file=sys.stderr)

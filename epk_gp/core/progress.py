"""Progress of long calls: a bar on a terminal or in a notebook, a line for each tenth in a log, nothing when quiet.

A quiet call that will take more than half a minute can say so by a warning (`SlowCallNotice`).
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from tqdm.auto import tqdm as auto_tqdm
from tqdm.std import tqdm as std_tqdm

from epk_gp.core.show import warn_caller

Item = TypeVar("Item")

if TYPE_CHECKING:
    ProgressBar: TypeAlias = std_tqdm[Any]
else:
    ProgressBar = std_tqdm

_TENTHS = 10
_WIDTH, _HEIGHT = 80, 24  # of a terminal that does not tell its size, as some pseudo-terminals: tqdm would draw nothing
_SHORT = 1.0  # seconds: a call that takes less writes its last line only
_MEASURED, _LONG, _REST = 3.0, 30.0, 10.0  # seconds: measured at least, of a long call, and still to come if it says so


def progress_bar(
    total: int, desc: str, *, unit: str = "it", initial: int = 0, shown: bool = True, advice: str | None = None
) -> ProgressBar:
    """Return a progress bar, to be used in a `with` statement and advanced by `update(n)`.

    On a terminal and in a notebook it is tqdm's bar with rate and remaining time. Where the standard error stream is
    no terminal, as in a log, it is a `LogLines`.

    Args:
        total: Number of items of the whole call.
        desc: What is counted, such as "training".
        unit: Name of an item.
        initial: Number of items that were done before.
        shown: Whether there is any output.
        advice: How the call is made faster: of a call without output, it stands in the warning that it will be long.
    """
    stream = sys.stderr
    if not shown and advice is not None:
        return SlowCallNotice(total - initial, desc, advice)
    if not shown or stream is None:
        return auto_tqdm(total=total, initial=initial, disable=True)
    if _in_notebook():
        return auto_tqdm(total=total, desc=desc, unit=unit, initial=initial)
    if stream.isatty():
        width: dict[str, Any] = {"dynamic_ncols": True} if _has_width(stream) else {"ncols": _WIDTH, "nrows": _HEIGHT}
        return auto_tqdm(total=total, desc=desc, unit=unit, initial=initial, file=stream, **width)
    return LogLines(total, desc, unit=unit, initial=initial, file=stream)


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


@runtime_checkable
class Writable(Protocol):
    """A stream of text."""

    def write(self, text: str, /) -> int:
        """Write text."""
        ...

    def flush(self) -> None:
        """Write what is held back."""
        ...


class LogLines(ProgressBar):
    """Progress as plain lines for a log: one for each tenth, with rate and remaining time.

    A call of less than a second writes its last line only.

    Args:
        total: Number of items of the whole call.
        desc: What is counted.
        unit: Name of an item.
        initial: Number of items that were done before.
        file: Stream that is written to; the standard error stream by default.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        total: int,
        desc: str,
        *,
        unit: str = "it",
        initial: int = 0,
        file: Writable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._begun, self._stream = clock, clock(), sys.stderr if file is None else file
        self._size = max(1, total)
        self._written = _TENTHS * initial // self._size  # tenths
        super().__init__(total=total, desc=desc, unit=unit, initial=initial, file=self._stream)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw nothing: there is no bar."""

    def update(self, n: int | float | None = 1) -> bool | None:
        """Count n more items, and write a line if another tenth is done."""
        if self.disable:
            return None
        self.n += n or 0
        tenth = int(_TENTHS * self.n // self._size)
        seconds = self._clock() - self._begun
        if tenth <= self._written or (seconds < _SHORT and self.n < self._size):
            return None
        self._written = tenth
        self._stream.write(self._line(seconds) + "\n")
        self._stream.flush()
        return True

    def close(self) -> None:
        """Count no more."""
        if not self.disable:
            self.disable = True
            self._decr_instances(self)  # type: ignore[attr-defined]

    def _line(self, seconds: float) -> str:
        done = self.n - self.initial
        rate = done / seconds if seconds > 0 else 0.0
        speed = "" if not rate else f", {rate:.3g} {self.unit}/s" if rate >= 1 else f", {1 / rate:.3g} s/{self.unit}"
        is_last = self.n >= self._size
        left = seconds if is_last else (self._size - self.n) / rate if rate else 0.0
        words = f"took {self.format_interval(left)}" if is_last else f"{self.format_interval(left)} left"
        return f"{self.desc}: {100 * self.n / self._size:.0f} %, {self.n:g} of {self._size}{speed}, {words}"


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


def _has_width(stream: Writable) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


def _in_notebook() -> bool:
    """Return whether tqdm found a notebook that can show its bars."""
    return any(base.__name__ == "tqdm_notebook" for base in auto_tqdm.__mro__)

"""Code of pages: what it prints, beside what the page shows below it."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
QUICKSTART = DOCS / "pictures" / "quickstart.py"


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def pages_tool() -> ModuleType:
    """`docs/expand.py`, which writes what pages show of other files."""
    return load(DOCS / "expand.py")


def sections() -> dict[str, str]:
    """Return the sections of the gallery's pages, by their experiments, without what `docs/expand.py` made."""
    found = [
        pages_tool().written((DOCS / page).read_text()).split("\n## ")[1:] for page in ("figures.md", "experiments.md")
    ]
    return {re.search(r"python experiments/(\w+)\.py", text)[1]: text for texts in found for text in texts}


def imported(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of these folders as their scripts do, the last folder first, and forget all of them afterwards."""
    names = [file.stem for folder in folders for file in folder.glob("*.py")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def same(shown: str, printed: str) -> bool:
    """Whether two texts have the same words, and numbers that agree to 2 %, or are both rounding errors."""
    number = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    shown, printed = shown.replace("\u2212", "-"), printed.replace("\u2212", "-")
    pairs = zip(re.findall(number, shown), re.findall(number, printed), strict=False)
    close = all(float(a) == pytest.approx(float(b), rel=0.02, abs=1e-9) for a, b in pairs)
    return close and re.sub(number, "0", shown).split() == re.sub(number, "0", printed).split()

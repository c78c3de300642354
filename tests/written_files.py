"""docs/files.md: what the page says of the files of each command."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "files.md").read_text()
NUMBER = r"[\d.]+"


@dataclass(frozen=True)
class Described:
    """What the page says of a command: the files, and for each of them the rows of its table."""

    files: list[str]
    tables: dict[str, list[list[str]]]


def described(command: str) -> Described:
    section = PAGE.split(f"\n## epk-gp {command}\n")[1].split("\n## ")[0]
    top, *parts = section.split("\n### ")
    tables = {part.split("`")[1]: rows(part) for part in parts}
    files = [name for row in rows(top) for name in names(row[0])]
    return Described(files or list(tables), tables)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def pattern(name: str) -> str:
    return re.escape(name).replace("NNNNNN", r"\d+").replace("NUMBERS", NUMBER)

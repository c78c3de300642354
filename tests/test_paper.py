"""The paper in docs/paper: its references, its form (that of the Journal of Open Source Software), and its numbers."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from page_code import pages_tool

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "docs" / "paper" / "paper.md"
TEXT = PAPER.read_text()
BIBLIOGRAPHY = PAPER.with_suffix(".bib").read_text()
FRONT, BODY = TEXT.removeprefix("---\n").split("\n---\n", 1)
EXPAND = pages_tool()
SECTIONS = [  # those that the journal requires
    "Summary", "Statement of need", "State of the field", "Software design", "Research impact statement",
    "AI usage disclosure", "Acknowledgements", "References",
]  # fmt: skip


def cited(text: str) -> set[str]:
    return set(re.findall(r"@(\w+)", text))


def entries(bibliography: str) -> dict[str, dict[str, str]]:
    found = {}
    for entry in re.split(r"^@\w+\{", bibliography, flags=re.MULTILINE)[1:]:
        key, _, fields = entry.partition(",")
        assert key not in found
        found[key] = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", fields, re.MULTILINE))
    return found


def numbers_in_prose(body: str) -> list[str]:
    """Numbers that no command stands beside: those outside of the made table, of formulas and of code."""
    prose = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|`[^`]*`|@\w+|\]\([^)]*\)\{[^}]*\}", "", EXPAND.written(body))
    return re.findall(r"\d+[.,]?\d*(?:e-?\d+)?", re.sub(r"float\d\d", "", prose))


def test_every_reference_is_cited_and_every_citation_has_one():
    found = entries(BIBLIOGRAPHY)
    assert cited(BODY) == set(found)
    for key, fields in found.items():
        assert {"title", "author", "year"} <= fields.keys(), key
        assert "booktitle" in fields or "journal" in fields, key
        assert "doi" in fields or {"volume", "pages"} <= fields.keys(), f"{key} cannot be found"
        assert re.fullmatch(r"10\.\d{4,5}/\S+", fields.get("doi", "10.1000/x")), key
        assert fields["year"] in key, key


def test_the_paper_has_the_journal_s_form():
    """Between 750 and 1750 words, as the journal asks; what stands before the first section is read as it reads it."""
    front = yaml.safe_load(FRONT)
    assert front.keys() == {"title", "tags", "authors", "affiliations", "date", "bibliography"}
    assert PAPER.with_name(front["bibliography"]).is_file()
    indices = {place["index"] for place in front["affiliations"]}
    assert all(author["name"] and author["affiliation"] in indices for author in front["authors"])
    assert re.fullmatch(r"\d{1,2} [A-Z][a-z]+ 20\d\d", front["date"])
    assert "Python" in front["tags"]
    assert re.findall(r"^# (.*)$", BODY, flags=re.MULTILINE) == SECTIONS
    assert 750 <= len(EXPAND.written(BODY).split()) <= len(BODY.split()) <= 1750
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert front["title"] == citation["title"]
    assert [author["name"] for author in front["authors"]] == [author["name"] for author in citation["authors"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["repository-code"] == project["urls"]["Homepage"]
    assert citation["license"] == project["license"]


def test_every_number_stands_in_the_table_which_is_made_of_saved_results_beside_its_command():
    assert EXPAND.expanded(TEXT, PAPER) == TEXT, "run `make pages`"
    assert numbers_in_prose(BODY) == []
    rows = re.findall(r"^\| (.+) \| (.+) \| `(.+)` \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) >= 10
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    files = [file for folder in ("benchmarks", "experiments") for file in (ROOT / folder).rglob("*.py")]
    scripts = [file.name for file in files if ".venvs" not in file.parts]
    for question, result, command in rows:
        assert question
        assert any(character.isdigit() for character in result)
        name, *arguments = command.split()
        assert arguments[0] in targets if name == "make" else scripts.count(name) == 1, command
    for file in re.findall(r"`(docs/[^`]*)`", BODY):
        assert (ROOT / file).is_file(), file
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", BODY):
        assert (PAPER.parent / picture).is_file()


@pytest.mark.parametrize("page", ["paper", "bib", "table"])
def test_what_does_not_hold_is_found(page):
    """The negative controls: a citation without an entry, a number without a command, a result that has changed."""
    if page == "bib":
        assert cited(BODY + " [@nobody2026nothing]") != set(entries(BIBLIOGRAPHY))
    elif page == "paper":
        assert numbers_in_prose(f"{BODY}\nIt is 3.7 times faster, in 20 steps.") == ["3.7", "20"]
    else:
        changed = TEXT.replace("8.0e-14", "7.0e-14")
        assert changed != TEXT == EXPAND.expanded(changed, PAPER)

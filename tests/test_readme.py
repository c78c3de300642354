"""The README: its code prints what is shown, and its commands exist; test_docs.py follows its links."""

import re
import shlex
from pathlib import Path

import pytest

from epk_gp.cli import main
from harness import words_in
from page_code import QUICKSTART, load, same

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def exit_status(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
def test_the_quick_starts_print_and_draw_what_is_shown():
    """`docs/pictures/quickstart.py` writes both anew."""
    quickstart = load(QUICKSTART)
    for file, outputs in ((README, 1), (DOCS / "quickstart.md", 7)):
        page = file.read_text()
        names, printed = quickstart.run(page)
        assert quickstart.with_outputs(page, printed).count("```text") == page.count("```text") == outputs
        for (code, shown), text in zip(quickstart.blocks(page), printed, strict=True):
            assert same(shown, text), f"{code}\nprints\n{text}"
    change = f"+{names['raised']:.3f} and −{-names['lowered']:.3f} leave a change of {names['added'].sum():+.3f}"
    assert change in page
    assert names["K"].shape == (len(names["X_test"]), 3, len(names["X"]), 3)
    for name, draw in quickstart.PICTURES.items():
        shown = words_in(DOCS / "pictures" / f"quickstart_{name}.svg")
        assert same("\n".join(shown), "\n".join(quickstart.words_of(draw(names)))), name


@pytest.mark.slow
def test_the_picture_of_a_datamodel_is_that_of_its_page():
    """`docs/pictures/datamodel.py` writes it anew."""
    quickstart = load(QUICKSTART)
    names, _ = quickstart.run((DOCS / "capabilities" / "datamodel.md").read_text())
    drawn = words_in(DOCS / "pictures" / "datamodel.svg")
    assert same("\n".join(drawn), "\n".join(quickstart.words_of(names["figure"])))


def test_the_readme_has_one_quick_start_and_names_both_ways_to_record_before_it():
    before, _, quick_start = README.read_text().partition("\n## Quick start\n")
    assert README.read_text().count("```python") == quick_start.partition("\n## ")[0].count("```python") == 1
    assert all(words in before for words in ("a checkpoint is not enough", "`EPKClassifier`", "`Recorder`"))


def test_command_lines_of_the_pages_are_understood():
    """All options are parsed before --help is answered; the negative control is an option that does not exist."""
    pages = "".join(page.read_text() for page in [README, *DOCS.rglob("*.md")]).replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```$", pages, flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("epk-gp")]
    assert len(commands) >= 15
    for words in commands:
        assert exit_status([*words, "--help"]) == 0
        assert exit_status([*words, "--no-such-option"]) == 1

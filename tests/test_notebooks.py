"""The notebooks of docs/notebooks/: they run and print what is committed, and what is committed is complete."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from page_code import DOCS, load, pages_tool, same

TOOL = load(DOCS / "notebooks.py")
FILES = sorted((DOCS / "notebooks").glob("*.ipynb"))
EXPAND = pages_tool()

LARGEST = 400_000  # bytes of a notebook
MACHINE = re.compile(r"/(?:home|root|tmp|usr|var|work|Users)/|\b[A-Z]:\\")
LINK = re.compile(r"\]\((?P<file>[^)#\s]+)(?:#(?P<anchor>[\w-]+))?\)")


def shown(cell: nbformat.NotebookNode) -> tuple[str, int]:
    """What a cell prints, and the number of its pictures; how the output came in pieces does not matter."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    data = [output.data for output in cell.outputs if output.output_type in ("display_data", "execute_result")]
    return "".join([*streams, *(part["text/plain"] for part in data)]), sum("image/png" in part for part in data)


def differences(committed: nbformat.NotebookNode, run: nbformat.NotebookNode) -> Iterator[str]:
    """The code cells whose outputs differ: words, numbers by more than 2 % (or rounding errors), or pictures."""
    for before, after in zip(committed.cells, run.cells, strict=True):
        if before.cell_type == "code":
            (text, pictures), (new_text, new_pictures) = shown(before), shown(after)
            if pictures != new_pictures or not same(text, new_text):
                yield f"{before.source}\nshows\n{text}\nand now\n{new_text}"


def faults(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """What a reader of the committed notebook would stumble over."""
    install, title, *_, last = notebook.cells
    if not install.source.startswith("%pip install epk_gp") or install.metadata.get("tags") != ["skip-execution"]:
        yield "the first cell must install the package, and have the tag that leaves it out here"
    if not re.match(r"# .+\n", title.source) or "You will learn" not in title.source.replace("\n", " "):
        yield "the second cell must say what a reader will learn"
    if "## What this does not say" not in last.source or "**Next:**" not in last.source:
        yield "the last cell must say what the result does not say, and what to read next"
    code = [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != [*range(1, 1 + len(code))]:
        yield "cells were not run one after the other: `make notebooks`"
    for cell in code:
        text, pictures = shown(cell)
        if any(output.output_type == "error" or output.get("name") == "stderr" for output in cell.outputs):
            yield f"an error or a warning: {cell.outputs}"
        if ("print(" in cell.source and not text) or cell.source.count("plt.show()") != pictures:
            yield f"outputs are missing: {cell.source}"
    if not any("certified: True" in shown(cell)[0] for cell in code):
        yield "no certificate is shown"
    if notebook.metadata != TOOL.METADATA or MACHINE.search(nbformat.writes(notebook)):
        yield "something of the machine that it ran on: `make notebooks`"


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_runs_and_shows_what_is_committed(file):
    run = TOOL.executed(file)
    assert not [*differences(nbformat.read(file, as_version=4), run)]
    assert not [*faults(run)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_notebook_is_complete(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert not [*faults(notebook)]
    assert file.stat().st_size <= LARGEST
    page, pictures = load(DOCS / "hooks.py").notebook_page(file)  # on the site
    assert re.findall(r"\]\((\w+\.png)\)", page) == [*pictures]
    assert all(cell.source in page for cell in notebook.cells)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert all(output.text in page for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_takes_public_names_and_links_to_what_exists(file):
    notebook, public, headings = (
        nbformat.read(file, as_version=4),
        EXPAND.public_names(),
        load(Path(__file__).with_name("test_docs.py")).anchors,
    )
    source = "\n".join(cell.source for cell in notebook.cells)
    imported = re.findall(r"^from (epk_gp[\w.]*) import (.+)$", source, flags=re.MULTILINE)
    names = [(module, name) for module, found in imported for name in found.split(", ")]
    constants = {"SIGNED", "STYLE"}  # of epk_gp.plots; the reference lists classes and functions
    assert [name for _, name in names if name not in {*public, *constants}] == []
    for link in LINK.finditer(re.sub(r"\s+", " ", source)):
        target = (file.parent / link["file"]).resolve()
        assert target.is_file(), link[0]
        assert link["anchor"] is None or link["anchor"] in headings(target), link[0]


def test_a_notebook_that_differs_is_incomplete_or_raises_is_found(tmp_path):
    """The negative controls."""
    committed = nbformat.read(FILES[0], as_version=4)
    places = [i for i, cell in enumerate(committed.cells) if cell.cell_type == "code" and cell.outputs]
    number, picture = (next(i for i in places if shown(committed.cells[i])[1] == n) for n in (0, 1))

    def changed(i: int, **values: object) -> nbformat.NotebookNode:
        notebook = copy.deepcopy(committed)
        notebook.cells[i].update(values)
        return notebook

    assert not [*differences(committed, committed)]
    assert len([*differences(committed, changed(picture, outputs=[]))]) == 1
    other = changed(number)
    other.cells[number].outputs[0].text = re.sub(r"\d+", "99", other.cells[number].outputs[0].text)
    assert len([*differences(committed, other)]) == 1
    assert len([*faults(changed(picture, execution_count=99))]) == 1
    assert len([*faults(changed(picture, outputs=[]))]) == 1
    assert len([*faults(changed(number, source="print('/home/somebody/file')"))]) == 1
    warned = nbformat.v4.new_output("stream", name="stderr", text="a warning\n")
    assert len([*faults(changed(number, outputs=[*committed.cells[number].outputs, warned]))]) == 1

    cells = [nbformat.v4.new_code_cell("%pip install epk_gp", metadata={"tags": ["skip-execution"]})]
    raising = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(raising, tmp_path / "raising.ipynb")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        TOOL.executed(tmp_path / "raising.ipynb")

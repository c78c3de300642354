"""Imports point one way: optimizers, core, storage and recording; autodiff to kernel_machine; kernels, gp; the rest.

That none stands inside a function, where it would hide a circle, is ruff's PLC0415. Files and signatures are short, and
the table of code lines counts what is code.
"""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import epk_gp
from page_code import load

ROOT = Path(epk_gp.__file__).parent
LAYERS = (  # each imports those before it, and itself
    {"optimizers"}, {"core"}, {"storage", "autodiff", "datasets"}, {"provenance", "work", "recording", "quadrature"},
    {"callbacks", "gram"}, {"kernel_machine", "kernels"}, {"trained"}, {"datamodels"}, {"gp"}, {"analysis"},
    {"estimator"}, {"estimators"}, {"plots", "adapters"}, {"report"}, {"cli"},
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in sorted(ROOT.rglob("*.py"))}


def own_files(folder: str) -> list[Path]:
    """List the modules of a folder; `make bench` puts peers' environments into benchmarks/.venvs."""
    files = sorted((ROOT.parent / folder).rglob("*.py"))
    return [file for file in files if ".venvs" not in file.parts]


MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items() if name != "__init__"}


@functools.cache
def nodes_of(file):
    return list(ast.walk(ast.parse(file.read_text())))


@functools.cache
def imported_by(file):
    """Return every module of the package that a file imports, anywhere in the file."""
    modules = set()
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                modules.add(whole if whole.removeprefix("epk_gp.") in MODULES else node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {name.removeprefix("epk_gp.") for name in modules if name.split(".")[0] == "epk_gp"}


def layer(module):
    """Return the folder of a module; `python -m epk_gp` is the command line."""
    return "cli" if module == "__main__" else module.split(".")[0]


def test_imports_point_from_later_layers_to_earlier_ones():
    for name, file in MODULES.items():
        for imported in imported_by(file) - {"epk_gp"}:  # the package itself: its version
            same_folder, earlier = layer(imported) == layer(name), RANK[layer(imported)] < RANK[layer(name)]
            assert same_folder or earlier, f"{name} imports {imported}"
    assert {layer(name) for name in MODULES} <= RANK.keys()
    assert not {layer(name) for name in imported_by(FILES["__init__"])} & {"cli", "plots"}
    others = [file for folder in ("experiments", "benchmarks") for file in own_files(folder)]
    of_commands = [file.name for file in others if re.search(r"epk_gp(\.| import )cli\b", file.read_text())]
    assert of_commands == ["result_bytes.py"]  # it calls the commands, whose results are compared


def pictured_names(page):
    """List the names before the subjects in the picture of docs/design.md."""
    picture = page.partition("## The house and its import order")[2].partition("```\n")[2].partition("\n```")[0]
    return [name for line in picture.splitlines() for name in re.split(r" {2,}", line)[0].split(", ")]


def is_in_order(names):
    """Return whether every layer's names stand there once, and no earlier layer after a later one."""
    ranks = [RANK.get(name, -1) for name in names]
    return sorted(names) == sorted(RANK) and ranks == sorted(ranks)


def test_the_picture_of_the_design_page_has_the_layers_in_their_order():
    """The negative controls: a layer in the wrong place, and one that is missing."""
    names = pictured_names((ROOT.parent / "docs" / "design.md").read_text())
    assert is_in_order(names)
    assert not is_in_order([*names[1:], names[0]])
    assert not is_in_order(names[1:])


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {name: imported_by(file) & MODULES.keys() for name, file in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circle: {error.args[1]}")


def test_no_file_is_longer_than_600_lines():
    for folder in ("epk_gp", "tests", "experiments", "benchmarks"):
        for file in own_files(folder):
            assert len(file.read_text().splitlines()) <= 600, file


def test_public_functions_have_at_most_six_positional_parameters():
    """Keyword-only parameters name themselves where they are passed; those of commands are options."""
    for name, file in MODULES.items():
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and layer(name) != "cli":
                positional = [argument.arg for argument in node.args.posonlyargs + node.args.args]
                bound = positional[:1] in (["self"], ["cls"])
                assert len(positional) - bound <= 6, f"{name}.{node.name}"


def test_the_reader_of_imports_sees_every_form(tmp_path):
    """The negative control."""
    forms = {
        "from epk_gp.gp.models import LogitGP": {"gp.models"}, "from epk_gp.storage import schema": {"storage.schema"},
        "def f():\n    import epk_gp.cli": {"cli"}, "import torch\nfrom torch import Tensor": set(),
        "from epk_gp import __version__": {"epk_gp"},
    }  # fmt: skip
    for number, (source, names) in enumerate(forms.items()):
        file = tmp_path / f"{number}.py"
        file.write_text(source)
        assert imported_by(file) == names


TEXT = '''"""A docstring
of two lines."""

# a comment
import os  # a line with a comment


def f(a,
      b):
    """Another one."""
    return """text
that is data"""
'''


def test_every_file_has_one_capability_and_one_folder_and_code_is_counted():
    size = load(ROOT.parent / "docs" / "size.py")
    assert size.code_lines(TEXT) == 1 + 2 + 2
    folders, capabilities = size.sizes()
    for k in (0, 1):  # code lines, files
        assert sum(found[k] for found in folders.values()) == sum(found[k] for found in capabilities.values()) > 100
    assert [name for name, (_, files) in capabilities.items() if not files] == []
    assert size.capability("cli/report.py") == "the report"  # the longest pattern decides
    assert size.capability("cli/verify.py") == "the command line"


SENTENCES = '''"""How a module begins."""


def f(a, b, c):
    """Return what is found.

    Args:
        a: Of the left points.
        b: The right points.
            Which goes on here.
        c (int): Those that are left.

    Returns:
        What does not count: no argument.
    """


def g(a):
    """Return whether it is so.

    Args:
        a: Whether it was asked for.
    """


def h():
    """Check that it is so."""


class C:
    """Those that are left."""
'''


def test_sentences_that_begin_with_a_relative_word_are_counted_and_refused():
    size = load(ROOT.parent / "docs" / "size.py")
    assert sorted(size.sentence_faults(SENTENCES)) == [
        (1, size.DOCSTRINGS),
        (5, size.DOCSTRINGS),
        (8, size.ARGUMENTS),
        (11, size.ARGUMENTS),
        (31, size.DOCSTRINGS),
    ]
    figures = size.house()
    assert set(size.LIMITS) <= set(figures)
    assert size.above(figures) == []
    assert size.above({**figures, size.DOCSTRINGS: 21}) == [size.DOCSTRINGS]
    assert figures[size.NAMES] == len(epk_gp.__all__)
    assert "ABOVE" in size.shown(size.DOCSTRINGS, 21)
    assert "ABOVE" not in size.shown(size.DOCSTRINGS, 20)

"""The table of code lines counts what is code."""

from pathlib import Path

import pytest

from page_code import load

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


@pytest.fixture(scope="module")
def size():
    return load(Path(__file__).parents[1] / "docs" / "size.py")


@pytest.fixture(scope="module")
def sizes(size):
    return size.sizes()


def test_docstrings_comments_and_blank_lines_are_no_code(size):
    assert size.code_lines(TEXT) == 1 + 2 + 2


def test_every_file_has_one_capability_and_one_folder(sizes):
    folders, capabilities = sizes
    assert sum(files for _, files in folders.values()) == sum(files for _, files in capabilities.values())
    assert sum(lines for lines, _ in folders.values()) == sum(lines for lines, _ in capabilities.values()) > 10_000


def test_no_capability_is_empty(sizes):
    assert [name for name, (_, files) in sizes[1].items() if not files] == []


def test_the_longest_pattern_decides(size):
    assert size.capability("cli/report.py") == "the report"
    assert size.capability("cli/gram.py") == "the command line"

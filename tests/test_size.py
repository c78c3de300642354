"""The table of code lines counts what is code."""

from pathlib import Path

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


def test_every_file_has_one_capability_and_one_folder_and_code_is_counted():
    size = load(Path(__file__).parents[1] / "docs" / "size.py")
    assert size.code_lines(TEXT) == 1 + 2 + 2
    folders, capabilities = size.sizes()
    for k in (0, 1):  # code lines, files
        assert sum(found[k] for found in folders.values()) == sum(found[k] for found in capabilities.values()) > 100
    assert [name for name, (_, files) in capabilities.items() if not files] == []
    assert size.capability("cli/report.py") == "the report"  # the longest pattern decides
    assert size.capability("cli/gram.py") == "the command line"

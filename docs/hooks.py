"""What MkDocs does not do: formulas as MathML, and a package's modules with their docstrings."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CODE = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_MODULES = re.compile(r"^<!-- made: modules [^\n]* -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"^## `([\w.]+)`$", re.MULTILINE)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw themselves.

    Raises:
        ValueError: A formula was not recognised, and its source would be shown.
    """

    def formula(match: re.Match[str]) -> str:
        drawn = convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")
        return f'<div class="formula">{drawn}</div>' if match[1] == "div" else drawn

    content = _FORMULA.sub(formula, content)
    left = re.search(r"\$\$[^<]{0,60}", _CODE.sub("", content))
    if left is not None:
        raise ValueError(f"formulas of a list must be indented by four spaces: {left[0]!r} is not recognised.")
    return content


def on_page_markdown(markdown: str, **_: object) -> str:
    """Show whole docstrings where a page lists the names of modules."""
    return _MODULES.sub(lambda match: "\n\n".join(map(_docstrings, _MODULE.findall(match[1]))), markdown)


def _docstrings(name: str) -> str:
    return f"## `{name}`\n\n::: {name}\n" + "    options: { show_root_heading: false }"

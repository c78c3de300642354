"""What MkDocs does not do: formulas as MathML, and public names with their docstrings."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CODE = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_NAMES = re.compile(r"^<!-- made: names [^\n]* -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(\w+)` \| `([\w.]+)` \|", re.MULTILINE)


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
    """Show whole docstrings where a page lists public names."""
    return _NAMES.sub(
        lambda match: "\n\n".join(f"::: {module}.{name}" for name, module in _ROW.findall(match[1])), markdown
    )

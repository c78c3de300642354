"""What MkDocs does not do: formulas as MathML, public names with their docstrings, and notebooks as pages."""

import base64
import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CODE = re.compile(r"<(code|pre)\b.*?</\1>", re.DOTALL)
_NAMES = re.compile(r"^<!-- made: names [^\n]* -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `(\w+)` \| `[\w.]+` \|", re.MULTILINE)


def _expand() -> Any:
    """Import docs/expand.py, which knows the module that defines each public name."""
    specification = importlib.util.spec_from_file_location("expand", Path(__file__).with_name("expand.py"))
    module = importlib.util.module_from_spec(specification)  # type: ignore[arg-type]  # the file is there
    specification.loader.exec_module(module)  # type: ignore[union-attr]
    return module


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
    """Show whole docstrings where a page lists public names, and link to the pages of notebooks."""
    markdown = markdown.replace(".ipynb)", ".md)")
    if not _NAMES.search(markdown):
        return markdown
    modules = _expand().public_names()
    return _NAMES.sub(
        lambda match: "\n\n".join(f"::: {modules[name]}.{name}" for name in _ROW.findall(match[1])), markdown
    )


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook, and its pictures."""
    from mkdocs.structure.files import File  # noqa: PLC0415  # tests of the other hooks do without MkDocs

    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text, pictures = notebook_page(Path(notebook.abs_src_path))
        files.append(File.generated(config, notebook.src_uri.replace(".ipynb", ".md"), content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, str(Path(notebook.src_uri).with_name(name)), content=content))
    return files


def notebook_page(file: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, with its pictures by their names."""
    parts, pictures = [], dict[str, bytes]()
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                name = f"{file.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![What the cell above draws]({name})")
    return "\n\n".join(parts), pictures

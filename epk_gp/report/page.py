"""One self-contained HTML document from the content of a report: no server, no request, nothing loaded."""

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

POWERS_OF_TEN = tuple(float(f"1e-{digits}") for digits in range(16))
VERSION = 1  # of the content that the scripts read
KEYS = ("title", "quantum", "outputs", "layers", "ranges", "card", "certificate", "samples", "points", "overview")
# The scripts in the order in which they are joined; all are parts of one function.
SCRIPTS = (
    "elements", "numbers", "sums", "state", "inputs", "bars", "terms", "point_list", "steps_chart", "outputs",
    "prediction", "figures", "plane_map", "overview", "run_card", "main",
)  # fmt: skip
STYLES = ("theme", "layout", "tables", "pictures", "print")


def page(content: dict[str, Any]) -> str:
    """Return the document that shows the content.

    The document holds its styles, one script and the content as JSON. Its content security policy allows this script by
    its hash and images that are part of the document, and nothing else, so that a browser loads nothing from anywhere.

    Args:
        content: The numbers and texts of a report, of version 1.

    Returns:
        HTML in UTF-8. The same content gives the same bytes.

    Raises:
        ValueError: If the content is of another version, lacks a part, or has a number that JSON does not have.
    """
    _validate(content)
    script = "(function () {\n'use strict';\n" + _joined(SCRIPTS, "js") + "}());\n"
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_asset("report.html.jinja")).render(
        title=content["title"],
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_joined(STYLES, "css")),  # a file of this package
        script=Markup(script),  # files of this package
        content=Markup(_json(content)),  # escaped for a script element
    )


def _validate(content: dict[str, Any]) -> None:
    """Raise unless the content has the version and the parts that the scripts read."""
    if content.get("version") != VERSION:
        raise ValueError(
            f"content must have version {VERSION}: got {content.get('version')!r}. Write the report again."
        )
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"content must have the parts {', '.join(KEYS)}: {', '.join(missing)} missing.")
    if not content["points"]:
        raise ValueError("content must explain at least one point: got none. Choose points to explain.")
    if content["quantum"] not in POWERS_OF_TEN:
        raise ValueError(f"quantum must be a power of ten from 1e-15 to 1: got {content['quantum']}.")


def _json(content: dict[str, Any]) -> str:
    """Return the content as JSON in which no text ends the script element or begins a comment."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError(
            "numbers of the content must be finite, since JSON has no others: got NaN or infinity. Write None there."
        ) from error
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")


def _joined(names: tuple[str, ...], suffix: str) -> str:
    """Return the assets of these names, one after the other."""
    return "".join(_asset(f"{name}.{suffix}") for name in names)


def _asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (resources.files("epk_gp.report") / "assets" / name).read_text(encoding="utf-8")

"""A report's content as one HTML document."""

import html
import json
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(content: dict[str, Any]) -> str:
    """Return one self-contained HTML document: the certificate in words, and all content as JSON."""
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("</", "\\u003c/").replace("<!--", "\\u003c!--")
    sentences = "".join(f"<p>{html.escape(text)}</p>" for text in content["certificate"]["sentences"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(content["title"])}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"></head><body>'
        f"<h1>{html.escape(content['title'])}</h1>{sentences}"
        f'<script type="application/json" id="content">{data}</script>'
        "</body></html>"
    )

"""What results show, read back from their text and their HTML."""

from collections.abc import Iterator
from xml.etree import ElementTree

from epk_gp.core.show import Displayed

HOSTILE = '<script>alert("x")</script>&\x1b[31m\n\u202e'


def html_rows(html: str, part: str) -> Iterator[list[str]]:
    """Return the cells of all rows in the heads or bodies of tables; HTML is well-formed XML if this does not raise."""
    for body in ElementTree.fromstring(html).iter(part):
        for row in body.iter("tr"):
            yield ["".join(cell.itertext()) for cell in row]


def shown(result: Displayed) -> dict[str, list[str]]:
    """Return what a result shows, by the names of the rows, after a comparison of its text with its HTML.

    The rows without a name belong to the one above them.
    """
    html, text = result._repr_html_(), " ".join(str(result).split())
    rows = list(html_rows(html, "tbody"))
    for row in (*rows, *html_rows(html, "thead")):
        assert " ".join(" ".join(row).split()) in text
    named, last = dict[str, list[str]](), ""
    for name, *cells in rows:
        last = name or last
        named.setdefault(last, []).extend(cells)
    return named

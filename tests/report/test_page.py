"""The document of a report, without a browser: what it embeds, what it allows, and what it refuses."""

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import epk_gp.report
from epk_gp.report.write import SCRIPTS, STYLES, page
from report_cases import report_case, written

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\"'`${7*7}\u2028{{ 7 }}"


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts, styles and the title."""

    def __init__(self, document):
        super().__init__()
        self.elements, self.texts, self.inside = [], {}, None
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = attrs[0][1] if tag == "script" and attrs else tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), *report_case("images"), explained=3, kernel_points=4)


def hostile(content):
    """Return the content with text in every place that tries to become a part of the document."""
    content = copy.deepcopy(content)
    content["title"] = content["outputs"]["classes"][0] = content["layers"][0] = content["points"][0]["name"] = HOSTILE
    content["card"][0]["rows"][0] = [HOSTILE, HOSTILE]
    content["certificate"]["sentences"][0] = HOSTILE
    return content


def test_hostile_texts_stay_texts_and_the_embedded_content_is_the_content(content):
    """The elements of the document are those of the harmless one, and the script is the same."""
    harmless, other = Reader(page(content)), Reader(page(hostile(content)))
    for reader, case in ((harmless, content), (other, hostile(content))):
        assert json.loads(reader.texts["application/json"]) == case
    assert (other.elements, other.texts["script"]) == (harmless.elements, harmless.texts["script"])
    assert other.texts["title"].strip() == HOSTILE


def test_the_policy_allows_the_one_script_and_nothing_else(content):
    reader = Reader(page(content))
    (policy,) = (a["content"] for tag, a in reader.elements if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(reader.texts["script"].encode()).digest()).decode()
    allowed = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:")
    assert tuple(policy.split("; ")[:4]) == allowed
    scripts = [attributes for tag, attributes in reader.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "content"}, {}]
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]


def test_the_document_has_no_address_of_anything_else_and_evaluates_no_text(content):
    document = page(content)
    for namespace in ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"):
        document = document.replace(namespace, "")
    assert not re.findall(r"https?:|//[a-z]+\.|@import|url\((?![\"']?[#$\\])", document.replace("/url\\(/", ""))
    reader = Reader(document)
    addresses = [attributes.get(name, "#") for _, attributes in reader.elements for name in ("src", "href")]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    evaluating = r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|new Function|document\.write|fetch\("
    assert not re.findall(evaluating, reader.texts["script"])


def test_the_same_content_gives_the_same_document_and_the_page_itself_is_small(content):
    document = page(content)
    assert document == page(copy.deepcopy(content)) != page(content | {"title": "another"})
    assert len(document.encode()) - len(json.dumps(content, separators=(",", ":")).encode()) < 120e3


def test_every_asset_is_a_part_of_the_page_and_at_most_400_lines_long():
    assets = Path(epk_gp.report.__file__).parent / "assets"
    parts = {f"{name}.js" for name in SCRIPTS} | {f"{name}.css" for name in STYLES} | {"report.html.jinja"}
    assert {file.name for file in assets.iterdir()} == parts
    assert max(len(file.read_text().splitlines()) for file in assets.iterdir()) <= 400


def test_numbers_that_json_does_not_have_are_refused(content):
    content = copy.deepcopy(content)
    content["points"][0]["scores"][0][1] = float("nan")
    with pytest.raises(ValueError, match="numbers of the content must be finite"):
        page(content)

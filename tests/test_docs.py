"""The pages of docs/: their code runs, their links and pictures exist, and the site has a place for each."""

import importlib.util
import re
from pathlib import Path

import pytest

import epk_gp as epk

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
TUTORIALS = "tutorials/"  # test_tutorials.py runs them
WITH_CODE = [page for page in PAGES if "```python" in (DOCS / page).read_text() and not page.startswith(TUTORIALS)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_page_s_code_runs_as_it_stands(page):
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)
    assert "epk" in names


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert ((DOCS / page).parent / target).is_file(), f"{page}: {target}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)) == PAGES


def test_every_module_has_its_reference():
    named = set(re.findall(r"^::: (\S+)$", "\n".join((DOCS / page).read_text() for page in PAGES), flags=re.MULTILINE))
    for name in named:
        assert importlib.util.find_spec(name) is not None, name
    analysis = {f"epk_gp.analysis.{file.stem}" for file in (ROOT / "epk_gp" / "analysis").glob("[!_]*.py")}
    public = {getattr(epk, name).__module__ for name in epk.__all__}
    assert analysis | public <= named


def test_every_figure_of_the_gallery_has_its_command():
    gallery = (DOCS / "gallery.md").read_text()
    for picture in (DOCS / "gallery").glob("*.png"):
        assert f"gallery/{picture.name}" in gallery
        assert f"python experiments/{picture.stem}.py" in gallery


def test_a_table_that_does_not_exist_is_an_error():
    """The control: pages take their numbers from saved results, and a wrong name must not pass unseen."""
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert "| rule |" in hooks.on_page_markdown("{{ fig04_machine rules }}")
    with pytest.raises(FileNotFoundError):
        hooks.on_page_markdown("{{ fig99 rules }}")
    with pytest.raises(KeyError):
        hooks.on_page_markdown("{{ fig04_machine no_such_table }}")
    page = hooks.on_page_content(r'<p><span class="arithmatex">\(a &lt; b_1\)</span></p>')
    assert "<math" in page
    assert "arithmatex" not in page

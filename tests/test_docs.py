"""The pages of docs/: their code runs, what they and the code refer to exists, and the site has a place for each."""

import pkgutil
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import epk_gp as epk
from page_code import QUICKSTART, load, pages_tool, same

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAPER = DOCS / "paper" / "paper.md"  # no page of the site: test_paper.py
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page != PAPER)
NOTEBOOKS = sorted(file.relative_to(DOCS).with_suffix(".md").as_posix() for file in DOCS.glob("notebooks/*.ipynb"))
TUTORIALS = "tutorials/"  # test_tutorials.py runs them
EXPAND = pages_tool()
WITH_CODE = [  # of their own: what they show of the README runs there
    page
    for page in PAGES
    if "```python" in EXPAND.written((DOCS / page).read_text()) and not page.startswith(TUTORIALS)
]

DOCS_REFERENCE = re.compile(
    r"docs/(?P<page>[\w./-]+\.md)(?:#(?P<anchor>[\w-]+))?(?:,? sections? (?P<numbers>[\d, and]+))?"
)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:)(?P<page>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
SECTION = re.compile(r"[Ss]ections? (?P<numbers>\d+(?:(?:, | and | to )\d+)*)(?!\d|\.\d| of the paper)")
NAME = re.compile(r"\bepk_gp(?:\.\w+)+")
FILE = re.compile(r"`((?:epk_gp/)?(?:\w+/)+\w+\.py)`")


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # other libraries use what torch deprecates
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_page_s_code_runs_as_it_stands_and_prints_what_is_shown(page, tmp_path, monkeypatch, capsys):
    """Where a page shows an output, a block of text below the code, `docs/pictures/quickstart.py` writes it."""
    monkeypatch.chdir(tmp_path)  # pages may write files
    names: dict[str, object] = {}
    text = (DOCS / page).read_text().replace("rounds=6", "rounds=2")
    for code, shown in load(QUICKSTART).blocks(text):
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not shown or same(shown, printed), f"{code}\nprints\n{printed}"
    assert any(
        str(getattr(value, "__module__", "")).startswith("epk_gp") or name == "epk" for name, value in names.items()
    )


def test_outputs_that_differ_are_found():
    """The negative control."""
    assert same("off by 0.132 of 20 points", "off by 0.133 of 20 points")
    assert same("largest \u22122.5e\u221214", "largest -1.9e-14")
    assert not same("off by 0.132", "off by 0.142")
    assert not same("certified True", "certified False")
    assert not same("3 points", "3")


WIDTH = 88  # characters that the site's column holds at 1280 pixels


def wide_lines(text: str) -> list[str]:
    """The lines of a page's code that its column cuts off."""
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if len(line) > WIDTH]


def headings(page: Path) -> list[str]:
    """The headings of a page, without the marks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [heading.replace("`", "") for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings that MkDocs and a forge make alike: a link must lead to one on both."""
    found = set()
    for heading in headings(page):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        on_site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found |= {on_site} & {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")}
    return found


def broken(where: str, page: Path, anchor: str | None, numbers: str | None) -> Iterator[str]:
    """What of one reference does not exist: the page, its anchor, its numbered sections."""
    if not page.is_file():
        yield f"{where}: there is no such file"
        return
    if anchor is not None and anchor not in anchors(page):
        yield f"{where}: {page.name} has no heading #{anchor}"
    known = [heading.partition(" ")[0].rstrip(".") for heading in headings(page)] if numbers else []
    for number in set(re.findall(r"\d+", numbers or "")).difference(known):
        yield f"{where}: {page.name} has no section {number}"


def broken_in_source(source: str) -> list[str]:
    """References of a Python file, in its docstrings, comments or messages, that do not resolve."""
    text = re.sub(r"\s*\n\s*(?:# ?)?", " ", source)
    errors = [error for match in DOCS_REFERENCE.finditer(text) for error in broken(match[0], *cited(match))]
    rest = DOCS_REFERENCE.sub("", text)
    pages = re.findall(r"(?<![\w/.-])[\w-]+\.md\b", rest)
    errors += [f"{page}: cite it with docs/ in front" for page in pages if not (ROOT / page).is_file()]
    errors += [f"{match}: cite it as docs/theory.md" for match in re.findall(r"theory, sections? \d+", rest)]
    for match in re.finditer(r"[Ss]ections? \d+", rest):  # of a publication, or else of nothing that a reader has
        nearby = rest[max(0, match.start() - 60) : match.end() + 60]
        errors += [] if re.search(r"et al\.|\(\d{4}\)", nearby) else [f"{match[0]}: of which page or publication?"]
    return errors


def cited(match: re.Match[str]) -> tuple[Path, str | None, str | None]:
    return DOCS / match["page"], match["anchor"], match["numbers"]


def broken_on_page(text: str, page: Path) -> list[str]:
    """References of a page, by link or in words, that do not resolve."""
    text = re.sub(r"\s+", " ", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    errors = []
    for match in LINK.finditer(text):
        target = page.parent / match["page"] if match["page"] else page
        section = SECTION.search(match["text"]) if target.suffix == ".md" else None
        errors += broken(match[0], target, match["anchor"], section and section["numbers"])
    text = LINK.sub("", text)
    for match in DOCS_REFERENCE.finditer(text):
        errors += broken(match[0], *cited(match))
    for match in SECTION.finditer(DOCS_REFERENCE.sub("", text)):
        errors += broken(match[0], page, None, match["numbers"])
    return errors


def test_references_of_the_code_resolve():
    found = {file.name: broken_in_source(file.read_text()) for file in (ROOT / "epk_gp").rglob("*.py")}
    assert {name: errors for name, errors in found.items() if errors} == {}


WRONG = [
    "see docs/no_such_page.md", "see docs/theory.md,\n    section 99", "see docs/engine.md, sections 6 and 99",
    "see docs/theory.md#no-such-heading", "fitted costs of engine.md", "the adjoint (theory, section 4)",
    "Theorem 3.6 of Bell et al. (2023); theory, section 4", "as section 3 says",
]  # fmt: skip
WRONG_ON_PAGE = ["[theory](theory.md#no-such-heading)", "[theory, section 99](theory.md)", "docs/theory.md, section 99"]


def test_what_does_not_resolve_or_is_cut_off_is_found():
    """The negative controls, beside the same references as they should be."""
    sound = '"""Sums (docs/theory.md, section 4; docs/engine.md, sections 6 and 7; section 4.2, Bell et al. 2023)."""'
    assert not broken_in_source(sound)
    assert [text for text in WRONG if not broken_in_source(text)] == []
    page = DOCS / "design.md"
    assert not broken_on_page("[theory, section 3](theory.md#3-quadrature), section 4.1 of the paper", page)
    assert [text for text in (*WRONG_ON_PAGE, "as in section 99") if not broken_on_page(text, page)] == []
    assert wide_lines(f"```python\n{'x' * WIDTH}\n{'y' * (WIDTH + 1)}\n```") == ["y" * (WIDTH + 1)]
    assert resolves("epk_gp.core.losses.sample_weights")
    assert not resolves("epk_gp.core.losses.no_such_name")
    assert not resolves("epk_gp.no_such_package.losses")


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of the package, which is not imported, or something in one."""
    place = ROOT.joinpath(*name.split("."))
    try:
        return place.is_dir() or place.with_suffix(".py").is_file() or pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_a_page_is_up_to_date_and_what_it_refers_to_exists(page):
    """Code fits into the column. `make pages` writes anew what a page shows of other files."""
    text = (DOCS / page).read_text()
    files = [file for file in FILE.findall(text) if not any((r / file).is_file() for r in (ROOT, ROOT / "epk_gp"))]
    assert wide_lines(text) == broken_on_page(text, DOCS / page) == files == []
    assert [name for name in sorted(set(NAME.findall(text))) if not resolves(name)] == []
    assert EXPAND.expanded(text, DOCS / page) == text, "run `make pages`"
    assert not re.search(r"^:::|^!!!|^\?\?\?|^===[ !+]|\{\{|--8<--", text, flags=re.MULTILINE), "needs a build"


def linked_pages(page: str) -> set[str]:
    """The pages of docs that a page links to, by their paths; a notebook is the page that is made of it."""
    text = (DOCS / page).with_suffix(".ipynb" if page in NOTEBOOKS else ".md").read_text()
    targets = {((DOCS / page).parent / match["page"]).resolve() for match in LINK.finditer(text) if match["page"]}
    return {
        target.with_suffix(".md").relative_to(DOCS).as_posix()
        for target in targets
        if target.suffix in (".md", ".ipynb") and DOCS in target.parents
    }


def test_the_menu_is_short_and_its_pages_lead_to_all_others():
    """A page is in the menu, or under `not_in_nav` of mkdocs.yml, so that a build does not warn of it."""
    outside, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    patterns = outside.partition("\nnot_in_nav: |\n")[2].partition("\nvalidation:")[0].split()
    menu = re.findall(r": (\S+\.md)\b", navigation)
    assert len(menu) == len(set(menu)) <= 45
    assert len(re.findall(r"^  - ", navigation, flags=re.MULTILINE)) == 6
    every = {*PAGES, *NOTEBOOKS}
    hidden = {page for pattern in patterns for page in every if PurePosixPath(f"/{page}").match(pattern)}
    assert every == {*menu, *hidden}
    reached, found = set(), set(menu)
    while new := found - reached:
        reached |= new
        found |= {other for page in new for other in linked_pages(page)} & every
    assert every - reached == set()


def test_every_public_name_is_on_one_page_of_the_reference():
    """With one line, and with its docstring on the site. What pages import is public, and so is the top level."""
    hooks, public = load(DOCS / "hooks.py"), EXPAND.public_names()
    text = "\n".join((DOCS / page).read_text() for page in PAGES)
    listed = re.findall(r"^\| `(\w+)` \| `(epk_gp(?:\.\w+)?)` \|", text, flags=re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(public)
    assert all(
        resolves(f"{home}.{name}") for name, home in listed if home not in ("epk_gp.adapters", "epk_gp.callbacks")
    )
    assert set(epk.__all__) <= public.keys() > {"plan_attribution", "EPKClassifier", "averaged_trajectory"}
    shown = re.findall(r"^::: (\S+)$", hooks.on_page_markdown(text), flags=re.MULTILINE)
    assert sorted(shown) == sorted(f"{module}.{name}" for name, module in public.items())
    # an adapter is imported where its library is there: tests/adapters
    assert all(resolves(name) for name in shown if not name.startswith("epk_gp.adapters."))
    table = (DOCS / "reference" / "top-level.md").read_text().partition("| --- | --- |\n")[2]
    assert set(re.findall(r"`(\w+)`", table)) == set(epk.__all__)


LONG_IMPORT = re.compile(r"\bfrom (epk_gp\.\w+\.[\w.]+) import|\bimport (epk_gp\.\w+\.[\w.]+)")


def test_pages_import_from_the_top_level_or_from_one_folder_of_it():
    """What a page needs has a short public home, `epk_gp` or `epk_gp.x`; how the code is divided into files is ours."""
    assert LONG_IMPORT.search("from epk_gp.core.states import averaged_trajectory")  # the negative control
    pages = [ROOT / "README.md", *(file for kind in ("md", "ipynb", "py") for file in DOCS.rglob(f"*.{kind}"))]
    of_users = [page for page in pages if page.parent.name not in ("docs", "pictures") or page.suffix == ".md"]
    found = {page.name: LONG_IMPORT.findall(page.read_text()) for page in of_users}
    assert not {name: imports for name, imports in found.items() if imports}


MARKED = "<!-- made: {} -->\n{}<!-- end -->"


def test_a_page_that_is_out_of_date_is_found_and_a_source_that_does_not_exist_is_an_error():
    """The negative controls."""
    for kind, shown in (("results", "| Is it exact? |"), ("saved fig04_machine rules", "| rule |")):
        made = EXPAND.expanded(MARKED.format(kind, ""), DOCS / "figures.md")
        assert shown in made
        older = made.replace("8.0e-14", "7.0e-14")
        assert older != made == EXPAND.expanded(older, DOCS / "figures.md")
    assert EXPAND.written(f"a\n{made}\nb") == "a\n\nb"
    for kind, error in (
        ("saved fig99 rules", FileNotFoundError),
        ("saved fig04_machine no_such_table", KeyError),
        ("names epk_gp.no_such_package", FileNotFoundError),
        ("section No such heading", ValueError),
        ("no_such_kind", KeyError),
    ):
        with pytest.raises(error):
            EXPAND.expanded(MARKED.format(kind, ""), DOCS / "index.md")


def test_a_formula_that_is_not_recognised_is_an_error():
    hooks = load(DOCS / "hooks.py")
    page = hooks.on_page_content(r'<p><span class="arithmatex">\(a &lt; b_1\)</span></p>')
    assert "<math" in page
    assert "arithmatex" not in page
    assert hooks.on_page_content("<code>$$</code>") == "<code>$$</code>"
    with pytest.raises(ValueError, match="must be indented by four spaces"):
        hooks.on_page_content("<p>$$a + b$$</p>")

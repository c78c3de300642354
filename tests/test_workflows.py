"""The workflows of the forge ask for what is here: targets of the Makefile, scripts, and Pythons that are promised."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from page_code import load

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not FILES, reason="needs the checkout")


def jobs(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))["jobs"]


def makes(job):
    """The targets that a job makes, where the matrix names them too."""
    targets = [row["target"] for row in job.get("strategy", {}).get("matrix", {}).get("include", ())]
    commands = [step["run"].split() for step in job.get("steps", ()) if "run" in step]
    return {*targets, *(words[1] for words in commands if words[0] == "make")} - {'"$TARGET"'}


def test_every_target_that_a_workflow_makes_is_one_of_the_makefile():
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert makes(jobs("tests")["linux"]) == {"lint", "test", "test-fast"}
    assert (makes(jobs("docs")["build"]), makes(jobs("release")["build"])) == ({"docs"}, {"dist", "check-dist"})
    missing = {target for file in FILES for job in jobs(file.stem).values() for target in makes(job)} - targets
    assert not missing


def test_the_tests_run_with_the_pythons_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project["classifiers"]]
    promised = [match[1] for match in named if match]
    linux, others = (jobs("tests")[name]["strategy"]["matrix"] for name in ("linux", "others"))
    assert [row["python"] for row in linux["include"]] == promised
    assert others["python"] == [promised[0], promised[-1]]
    assert {row["python"] for row in linux["include"] if row["target"] == "test"} == set(others["python"])
    assert project["requires-python"] == f">={promised[0]}"


def test_the_page_of_promises_names_the_versions_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert [f"`{needed}`" in page for needed in project["dependencies"] if needed.startswith("torch")] == [True]
    pythons = [row["python"] for row in jobs("tests")["linux"]["strategy"]["matrix"]["include"]]
    assert f"{pythons[0]} to {pythons[-1]}" in page


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_pins_what_it_uses_has_few_rights_and_names_no_host(file):
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)( # v\d+\.\d+\.\d+)?", text)
    assert used
    pinned = [name for name, version in used if re.fullmatch(r"[\w-]+/[\w.-]+@[0-9a-f]{40}", name) and version]
    assert [name for name, _ in used if not name.startswith("./")] == pinned
    assert yaml.safe_load(text)["permissions"] in ({}, {"contents": "read"})
    assert "://" not in text
    assert all((ROOT / script).exists() for script in re.findall(r"python (\.ci/\S+)", text))


def test_only_the_step_that_publishes_may_sign_and_it_waits_for_tests_and_approval():
    release = jobs("release")
    assert {name: job["permissions"] for name, job in release.items() if "id-token" in job["permissions"]} == {
        "publish": {"id-token": "write"}
    }
    assert release["publish"]["environment"] == "release"
    assert set(release["publish"]["needs"]) == {"tests", "build"}


@pytest.fixture
def release(tmp_path, monkeypatch):
    """.ci/release.py where version 1.2.3 is about to be released."""
    (tmp_path / "epk_gp").mkdir()
    files = {
        "epk_gp/__init__.py": '"""Words."""\n\n__version__ = "1.2.3"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
        "CHANGELOG.md": "## [1.2.3] - 2026-12-01\n\nNew.\n\n- [It](docs/it.md).\n\n## [1.2.2] - 2026-11-01\n\nOld.\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    module = load(ROOT / ".ci" / "release.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_the_notes_of_a_release_are_its_section_of_the_changelog(release):
    assert release.notes("v1.2.3") == f"New.\n\n- [It]({release.FILES}/v1.2.3/docs/it.md)."


@pytest.mark.parametrize(
    ("tag", "file", "before", "after", "message"),
    [
        ("v1.2.4", None, "", "", r"the version, which is 1\.2\.3, and no \.dev one: got v1\.2\.4"),
        ("1.2.3", None, "", "", "the tag must be v and the version"),
        ("v1.2.3.dev0", "epk_gp/__init__.py", "1.2.3", "1.2.3.dev0", r"no \.dev one: got v1\.2\.3\.dev0"),
        ("v1.2.3", "CITATION.cff", "version: 1.2.3", "version: 1.2.2", r"CITATION.cff must have version 1\.2\.3"),
        ("v1.2.3", "CHANGELOG.md", "[1.2.3] - 2026-12-01", "[Unreleased]", "CHANGELOG.md must have a line like"),
        ("v1.2.3", "CHANGELOG.md", " - 2026-12-01", "", "CHANGELOG.md must have a line like"),
    ],
    ids=["another", "no_v", "a_dev_one", "citation", "unreleased", "no_date"],
)
def test_a_tag_that_is_not_the_version_of_all_files_is_not_released(release, tag, file, before, after, message):
    if file:
        path = release.ROOT / file
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(SystemExit, match=message):
        release.notes(tag)

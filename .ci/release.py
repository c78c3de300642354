"""Whether a tag may be released; writes the changelog's section of the version, with links to that tag's files.

    python .ci/release.py v1.2.3

It ends with 1, and says why, unless the tag is the package's version, CITATION.cff has it too, and it has a section.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = "https://github.com/epk-gp/epk_gp/blob"


def notes(tag: str) -> str:
    """The changelog's section of a tag's version; ends the program unless the tag can be released."""
    version = found(r'^__version__ = "(.+)"$', "epk_gp/__init__.py")
    if tag != f"v{version}" or "dev" in version:
        sys.exit(f"the tag must be v and the version, which is {version}, and no .dev one: got {tag}")
    if (cited := found(r"^version: (.+)$", "CITATION.cff")) != version:
        sys.exit(f"CITATION.cff must have version {version}: it has {cited}")
    section = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n+((?:(?!## \[).*\n)+)"
    return re.sub(r"\]\((?!https?:)", f"]({FILES}/{tag}/", found(section, "CHANGELOG.md").strip())


def found(pattern: str, file: str) -> str:
    """The first group of a pattern in a file."""
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else sys.exit(f"{file} must have a line like {pattern}")


if __name__ == "__main__":
    sys.stdout.write(notes(sys.argv[1]) + "\n")

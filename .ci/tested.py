"""Whether the pages' tests ran on what is here: `make test-pages` notes the content that they passed on.

    python .ci/tested.py          # ends with 1 unless the noted content is that of the checkout
    python .ci/tested.py --note   # after the tests passed

The tests run every page, notebook, tutorial, experiment and picture, and reports in a browser. The content is that of
all tracked files which they read or import, so that a change of any of them lets `.ci/run` make these tests.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTE = Path(".ci/tested.txt")
READ = ("README.md", "benchmarks", "constraints.txt", "docs", "epk_gp", "experiments", "pyproject.toml", "tests")


def content() -> str:
    """The digest of the tracked files' names and bytes."""
    listed = subprocess.run(["git", "ls-files", "-z", *READ], cwd=ROOT, capture_output=True, check=True).stdout
    digest = hashlib.sha256()
    for name in sorted(set(listed.decode().split("\0")) - {"", NOTE.as_posix()}):
        file = ROOT / name
        digest.update(f"{name}\0".encode() + (hashlib.sha256(file.read_bytes()).digest() if file.is_file() else b"-"))
    return digest.hexdigest()


def is_tested() -> bool:
    """Whether the note is of what is here; False without a note, and where git cannot say."""
    try:
        return (ROOT / NOTE).read_text().strip() == content()
    except (OSError, subprocess.CalledProcessError):
        return False


if __name__ == "__main__":
    if "--note" in sys.argv:
        (ROOT / NOTE).write_text(content() + "\n")
    else:
        sys.exit(0 if is_tested() else "pages, experiments or what they import changed since their tests passed")

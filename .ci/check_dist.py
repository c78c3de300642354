"""Try what `make dist` built: the wheel in an empty environment, its demo, and tests of the source archive.

    python .ci/check_dist.py --python python3.12          # with the versions of constraints.txt
    python .ci/check_dist.py --resolution lowest-direct   # with the lowest that pyproject.toml allows
    python .ci/check_dist.py --resolution newest --extras dev --tests tests -m "not slow and not pages"

All of it is done in a folder outside the checkout. The tests are copied without the package beside them, so that they
can import the installed one only. By default they are the first quick case of each file that needs no checkout, and no
extra but `tables`. Where packages come from is uv's: UV_FIND_LINKS, UV_INDEX, UV_CACHE_DIR.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESOLUTIONS = {
    "pinned": ["--constraints", str(ROOT / "constraints.txt")],
    "lowest-direct": ["--resolution", "lowest-direct", "--requirements", str(ROOT / "pyproject.toml")],
    "newest": [],
}
NEED_MORE = """*browser.py autodiff/test_language_models.py autodiff/test_uses.py kernel_machine/test_certificate.py
    kernel_machine/test_functions.py recording/test_edits_of_gradients.py recording/test_hugging_face.py
    recording/test_library_optimizers.py test_architecture.py test_benchmarks.py test_interop.py
    test_notebooks.py test_paper.py test_workflows.py""".split()  # noqa: SIM905
TESTS = ["-m", "types", *(f"--ignore-glob=*{name}" for name in NEED_MORE)]
VERSIONS = """
import epk_gp, platform, sys
from importlib.metadata import version
assert epk_gp.__file__.startswith(sys.prefix), f"{epk_gp.__file__} is not the installed package"
names = "epk_gp torch gpytorch linear_operator numpy scipy scikit-learn matplotlib pydantic typer".split()
print(f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names), sep=", ")
"""


def check(folder: Path, options: argparse.Namespace) -> None:
    """Install, print the versions, run the demo and the tests; the first that fails ends it."""
    built = [*(ROOT / "dist").glob("*.whl"), *(ROOT / "dist").glob("*.tar.gz")]
    if len(built) != 2:
        sys.exit(f"dist/ must hold one wheel and one archive: run make dist first; got {[p.name for p in built]}")
    wheel, archive = built
    environment, tests = folder / "environment", folder / "source"
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str | Path, cwd: Path = folder) -> None:
        subprocess.run(words, cwd=cwd, env=clean | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}, check=True)

    uv = sys.executable, "-m", "uv"
    run(*uv, "venv", "--quiet", "--python", options.python, environment)
    install = [*uv, "pip", "install", "--quiet", "--python", environment, *RESOLUTIONS[options.resolution]]
    if options.resolution == "lowest-direct":  # direct to uv are the dependencies of pyproject.toml, not of the wheel
        install += [word for extra in options.extras.split(",") for word in ("--extra", extra)]
    run(*install, f"{wheel}[{options.extras}]", "pytest>=9", "hypothesis>=6.100")
    with tarfile.open(archive) as tar:
        top = archive.name.removesuffix(".tar.gz")
        members = [member for member in tar.getmembers() if not member.name.startswith(f"{top}/epk_gp/")]
        tar.extractall(tests, members, filter="data")
    run(programs / "python", "-c", VERSIONS, cwd=tests / top)
    run(programs / "epk-gp", "demo", *(["--smoke"] if options.smoke else []))
    # Warnings are errors of the pinned versions only: old libraries call what new ones deprecate.
    warnings = [] if options.resolution == "pinned" else ["-W", "default", "--disable-warnings"]
    run(programs / "pytest", "-q", *warnings, *options.tests, cwd=tests / top)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--resolution", choices=RESOLUTIONS, default="pinned")
    parser.add_argument("--extras", default="tables")
    parser.add_argument("--smoke", action="store_true", help="a demo of seconds")
    parser.add_argument("--keep", type=Path, help="a new folder, which is kept")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=TESTS, help="arguments of pytest, last")
    options = parser.parse_args()
    try:
        if options.keep:
            options.keep.mkdir(parents=True)
            check(options.keep.resolve(), options)
        else:
            with tempfile.TemporaryDirectory() as folder:
                check(Path(folder).resolve(), options)
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))

"""Time in which a report opens, and in which it shows another point, in Chromium.

Usage: python benchmarks/report_page.py [--file report.html] [--rounds 7]

Without a file, the tests' report of everything: 60 explained points in 14 classes.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Browser, sync_playwright

TESTS = Path(__file__).resolve().parents[1] / "tests"
# Milliseconds until the prediction is painted, from the beginning of the navigation or from the call.
PAINTED = """
(start) => new Promise((done) => {
  const look = () => {
    if (!document.querySelector('#sum')) return requestAnimationFrame(look);
    return requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
  };
  look();
})
"""
CHANGED = f"""
(point) => {{
  const start = performance.now();
  location.hash = `#point=${{point}}`;
  return ({PAINTED})(start);
}}
"""


def write_report(folder: Path) -> Path:
    """Write the report of everything."""
    sys.path.insert(0, str(TESTS))
    importlib.import_module("report_cases").report_of_everything(folder)
    return folder / "report.html"


def measured(browser: Browser, file: Path, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each opening and of each change to another point."""
    opened, changed = [], []
    for _ in range(rounds):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        opened.append(page.evaluate(PAINTED, 0))
        last = page.locator("#points a").count() - 1
        changed += [page.evaluate(CHANGED, point) for point in range(1, min(last, 10) + 1)]
        page.close()
    return {"opened": opened, "another point": changed}


def main(
    file: Annotated[Path | None, typer.Option(help="A report; else that of everything.")] = None,
    rounds: Annotated[int, typer.Option(help="How often the report is opened.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers only.")] = False,
) -> None:
    """Open a report in Chromium and print how long it takes."""
    executable = os.environ.get("EPK_GP_CHROMIUM") or shutil.which("chromium")
    if executable is None:
        raise typer.BadParameter("Chromium must be installed, or named in EPK_GP_CHROMIUM: found none.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_report(Path(folder)) if file is None else file
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        times, version = measured(browser, file.resolve(), rounds), browser.version
        browser.close()
        size = file.stat().st_size
    if as_json:
        typer.echo(json.dumps({"bytes": size, "chromium": version, "milliseconds": times}))
        return
    typer.echo(f"{size / 1e6:.2f} MB, Chromium {version}")
    for name, values in times.items():
        middle, longest = statistics.median(values), max(values)
        typer.echo(f"{name}: median {middle:.0f} ms, longest {longest:.0f} ms of {len(values)}")


if __name__ == "__main__":
    typer.run(main)

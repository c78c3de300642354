"""Time in which a report opens, and in which it shows another point, in Chromium.

Usage: python benchmarks/report_page.py [--file report.html] [--rounds 7]

Without a file, a report with made-up numbers: 100 explained points of a network with 60,000 training images, of which
5,000 are shown.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser, sync_playwright

from epk_gp.report.write import page as document

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


def large_content() -> dict[str, Any]:
    """Return content with made-up numbers."""
    sys.path.insert(0, str(TESTS))
    made = importlib.import_module("synthetic_content")
    return made.made_content(made.LARGE)


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
    file: Annotated[Path | None, typer.Option(help="A report; else one with made-up numbers.")] = None,
    rounds: Annotated[int, typer.Option(help="How often the report is opened.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers only.")] = False,
) -> None:
    """Open a report in Chromium and print how long it takes."""
    executable = os.environ.get("EPK_GP_CHROMIUM") or shutil.which("chromium")
    if executable is None:
        raise typer.BadParameter("Chromium must be installed, or named in EPK_GP_CHROMIUM: found none.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        if file is None:
            file = Path(folder) / "report.html"
            file.write_text(document(large_content()), encoding="utf-8")
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

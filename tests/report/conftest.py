"""A browser that opens reports from the disk, and fails a test whose report asks for anything or complains."""

import os
import shutil

import pytest

from epk_gp.report.write import page as document
from report_cases import report_of_everything

# Chromium has no sandbox for root, and no graphics card is needed.
ARGUMENTS = ("--no-sandbox", "--disable-gpu")


@pytest.fixture(scope="session")
def content(tmp_path_factory):
    return report_of_everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture(scope="session")
def browser():
    executable = os.environ.get("EPK_GP_CHROMIUM") or shutil.which("chromium")
    if executable is None:
        pytest.skip("needs Chromium: install Debian's package chromium, or name a program in EPK_GP_CHROMIUM")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_file(browser):
    """Open a report.

    Requests, and all that the browser complains of (violations of the policy too), fail the test at its end.
    """
    contexts, faults = [], []

    def open_file(file, fragment="", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: faults.extend(outside(request.url)))
        page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.goto(f"{file.as_uri()}{fragment}")
        return page

    open_file.faults = faults
    yield open_file
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def open_report(open_file, tmp_path):
    def open_report(content, fragment="", *, change=str, **options):
        file = tmp_path / "report.html"
        file.write_text(change(document(content)), encoding="utf-8")
        return open_file(file, fragment, **options)

    open_report.faults = open_file.faults
    return open_report


def outside(address):
    return [] if address.startswith(("file:", "data:")) else [f"request of {address}"]

"""Draw docs/pictures/report.png: the report of a small network on digits, as a browser shows it.

Usage: python docs/pictures/report.py; it needs Playwright, and Chromium or another browser in EPK_GP_CHROMIUM.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import epk_gp as epk
from epk_gp.datasets import digits

HERE = Path(__file__).parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


def write(page: Path) -> None:
    """Train a convolutional network on 600 digits and write its report."""
    data = digits()
    train, test = data[:600], data[1000:1030]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(72, 10),
    ).double()  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = epk.train(net, train.inputs, train.labels, optimizer=optimizer, steps=120, batch_size=60)
    epk.write_report(page, run, test.inputs, test.labels, title="Digits", explained=12)


def photograph(page: Path, picture: Path) -> None:
    """Save what a window of 1280 x 1480 pixels shows, in three quarters of that size."""
    with sync_playwright() as playwright:
        path = os.environ.get("EPK_GP_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 1480}, device_scale_factor=0.75)
        tab.goto(page.as_uri())
        tab.wait_for_selector("h1")
        tab.wait_for_timeout(500)
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "report.html")
        photograph(Path(folder) / "report.html", HERE / "report.png")

"""Take the screenshot of a report for the README.

This needs Chromium on the path, and playwright, which the extra `dev` installs.
"""

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from evals.bench.results import read_results
from stepspec.base.files import package_folder
from stepspec.errors import UsageError
from stepspec.evaluation.report.page import make_page
from stepspec.evaluation.report.source import read_source
from stepspec.evaluation.runs import find_runs

SIZE = {"width": 1280, "height": 1180}
COLORS = 96
"""Number of colors in the palette. A small palette keeps the file small."""


def take_picture(runs: Path, file: Path) -> None:
    """Write a PNG of the first screen of a run's page.

    Args:
        runs: a folder of runs; the first one is shown.
        file: where to write the PNG.

    Raises:
        UsageError: Chromium is not on the path, or there is no finished run.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UsageError("chromium is not on the path. Install it, for example with `make chromium`.")
    from PIL import Image
    from playwright.sync_api import sync_playwright

    source = read_source(find_runs(runs)[0], read_results(runs)[0][1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = Path(folder) / "report.html"
        page_file.write_text(make_page([source]), "utf-8")
        browser: Any = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready]")
        shot = page.screenshot()
        browser.close()
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLORS)
    picture.save(file, optimize=True)


def main() -> None:
    """Replace the screenshot in the documentation."""
    checkout = package_folder().parent
    take_picture(checkout / "evals" / "results" / "gsm-mini", checkout / "docs" / "images" / "report.png")

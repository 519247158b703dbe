"""Takes the picture of a report that the README shows: `python -m stepspec.bench.picture`, in a checkout.

It needs Chromium on the path, and playwright, which the extra `dev` brings along.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepspec.base.files import package_folder
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.report.page import make_page
from stepspec.evaluation.report.readme import read_results
from stepspec.evaluation.report.source import read_source
from stepspec.evaluation.runs import find_runs

SIZE = {"width": 1280, "height": 1180}
COLORS = 96
"""Of the picture's palette, which keeps it small."""


def take_picture(runs: Path, file: Path) -> None:
    """Writes the first screen of a run's page as a PNG.

    Args:
        runs: a folder of runs, of which the first is shown.
        file: the PNG.

    Raises:
        UsageError: there is no Chromium, or no finished run.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UsageError("There is no chromium on the path. Install it, for instance with `make chromium`.")
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


def main() -> int:
    """Takes the picture anew."""
    checkout = package_folder().parent
    try:
        take_picture(checkout / "evals" / "results" / "gsm-mini", checkout / "docs" / "images" / "report.png")
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

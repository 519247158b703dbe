"""Pages of made-up runs, made like those of the command, and a browser to test them with."""

import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from make_runs import MadeRun

from stepspec.evaluation.report.page import make_page, view
from stepspec.evaluation.report.source import read_source
from stepspec.evaluation.run import summarise

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def page_of(folder: Path, *runs: MadeRun, traces: bool = True, figures: bool = True) -> Path:
    """Write runs and their page. One run goes into the folder itself, several go into subfolders.

    Most of the time goes into the figures of the runs; a test that needs none leaves them out.
    """
    places = [folder if len(runs) == 1 else folder / f"run-{number}" for number in range(len(runs))]
    sources = [
        read_source(made.write(place), summarise(made.run, made.rows, made.blocks), traces=traces)
        for made, place in zip(runs, places, strict=True)
    ]
    file = folder / "report.html"
    with ExitStack() as stack:
        if not figures:
            stack.enter_context(mock.patch.object(view, "plot_sections", return_value={}))
        file.write_text(make_page(sources), "utf-8")
    return file


@contextmanager
def chromium() -> Generator["playwright.Browser"]:
    """Start a headless browser and yield it."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Window:
    """A browser window that records its errors and its network requests."""

    def __init__(self, browser: "playwright.Browser", **settings: object) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, file: Path, fragment: str = "") -> None:
        """Open a page from the disk and wait until it has unpacked its data."""
        self.page.goto("about:blank")
        self.page.goto(file.as_uri() + fragment)
        self.page.wait_for_selector("html[data-ready]")

    def role(self, name: str) -> "playwright.Locator":
        """Return the elements with this role in the visible article."""
        return self.page.locator(f'article:not([hidden]) [data-role="{name}"]')

    def listed(self) -> list[str]:
        """Return the ids of the problems in the list."""
        return self.page.locator("article:not([hidden]) .item .id").all_inner_texts()

    def problem(self) -> str:
        """Return the id of the selected problem."""
        return self.page.locator("article:not([hidden]) .detail h3").inner_text()

    def focused(self) -> str:
        """Return the text of the focused element."""
        return self.page.evaluate("document.activeElement.innerText")

    def column(self, side: int) -> "playwright.Locator":
        """Return the column of a policy: 0 for left, 1 for right."""
        return self.page.locator(f'article:not([hidden]) [data-side="{side}"]')

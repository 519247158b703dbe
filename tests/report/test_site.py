"""The documentation site builds without warnings and works offline from the disk, including search."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import chromium, needs_chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in process.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import stepspec

    text = (site / "api.html").read_text("utf-8")
    assert [name for name in stepspec.__all__ if name not in text] == []


@needs_chromium
def test_the_site_and_its_search_work_offline_from_the_disk(site: Path) -> None:
    with chromium() as browser:
        context = browser.new_context(offline=True)
        page, requests = context.new_page(), list[str]()
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("threshold")
        page.wait_for_selector(".md-search-result__item a[href*='policies.html']")
        page.click(".md-search-result__item a[href*='policies.html']")
        page.wait_for_selector("h1:has-text('Policies')")
        page.goto((site / "how-it-works.html").as_uri())
        assert page.eval_on_selector("img[src*='loop.svg']", "image => image.complete && image.naturalWidth > 0")
        context.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []

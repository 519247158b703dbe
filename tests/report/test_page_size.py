"""The page of a large run is small enough to send by email."""

import re
from pathlib import Path

from make_runs import make_run
from pages import page_of


def test_a_page_of_1000_problems_and_six_policies_is_below_6_mb(tmp_path: Path) -> None:
    text = page_of(tmp_path, make_run(1000, words_per_step=70)).read_text("utf-8")
    assert 4_000_000 < len(text.encode()) < 6_000_000
    assert "were left out to keep it small" in text
    without_traces = re.sub(r'data-part="\d+">[^<]*<', "<", text)
    assert len(without_traces.encode()) < 2_000_000

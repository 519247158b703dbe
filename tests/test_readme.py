"""The README: what it shows was measured, what it quotes is there, what it tells one to run runs."""

import re
from pathlib import Path

from stepspec.bench.readme import read_speeds, speeds_block
from stepspec.evaluation.report import read_results, with_block, with_results

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "evals" / "results" / "gsm-mini"


def test_the_table_and_the_headline_are_those_of_the_kept_results():
    assert with_results(README, read_results(RESULTS)) == README


def test_the_engines_table_is_that_of_the_kept_benchmark():
    speeds = read_speeds(RESULTS.parent / "engine" / "mini.json")
    assert with_block(README, "results", "engine", speeds_block(speeds)) == README


def test_every_path_that_the_readme_links_to_exists():
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert links
    assert [target for target in links if not (ROOT / target).exists()] == []

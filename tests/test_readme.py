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


def test_the_tree_names_every_part_of_the_package():
    tree = README.split("```\nstepspec/\n")[1].split("```")[0]
    parts = {
        path.stem for path in (ROOT / "stepspec").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {part for part in parts if not part.startswith("__") and not re.search(rf"\b{part}\b", tree)} == set()

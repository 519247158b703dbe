"""Each interval has its nominal coverage in 2,000 simulated evaluations of every kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evals.bench.coverage import MATCHED, PROMISED, SIMULATIONS, SIZES, SMALL_SIZES, Setting, measure, settings

TABLE = Path(__file__).parents[2] / "evals" / "results" / "coverage.json"
ALL = list(settings())


def in_words(setting: Setting) -> str:
    return f"{setting.num_problems}x{setting.num_repeats} {setting.name}"


def marked(setting: Setting) -> object:
    """Return the setting as a test parameter. Large settings run only in `make soak`."""
    marks = [pytest.mark.soak] if setting.num_problems > min(n for n, _ in SIZES) else []
    return pytest.param(setting, marks=marks, id=in_words(setting))


@pytest.mark.parametrize("setting", [*map(marked, ALL)])
def test_an_interval_of_95_percent_covers_between_93_and_97(setting: Setting) -> None:
    """The seed is fixed. Across seeds, the standard deviation of a coverage is 0.5 points."""
    low, high = PROMISED
    for row in measure(setting):
        assert row.coverage >= low, row
        assert row.coverage <= high or row.figure == MATCHED, row  # promises at least 95%, with no upper bound


def test_a_coverage_is_reproducible() -> None:
    assert measure(ALL[0], simulations=50) == measure(replace(ALL[0]), simulations=50)


def test_the_stored_table_has_every_setting_with_the_promised_coverage() -> None:
    table = json.loads(TABLE.read_text("utf-8"))
    stored = {(row["setting"], row["num_problems"], row["num_repeats"]) for row in table["coverages"]}
    expected = {(each.name, each.num_problems, each.num_repeats) for each in (*ALL, *settings(SMALL_SIZES))}
    assert (stored, table["simulations"]) == (expected, SIMULATIONS)
    promised = [row for row in table["coverages"] if (row["num_problems"], row["num_repeats"]) in SIZES]
    assert all(row["coverage"] >= PROMISED[0] for row in promised)
    assert all(row["coverage"] <= PROMISED[1] for row in promised if row["figure"] != MATCHED)
    assert all(row["coverage"] >= PROMISED[0] for row in table["coverages"] if row["figure"] == "AUC")

"""The bound of the accuracy loss has its nominal coverage when problems differ and repeats are correlated."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from evals.bench.loss_coverage import (
    CORRELATIONS,
    DISTRIBUTIONS,
    LARGE,
    MAX_EXCESS,
    MIN_COVERAGE,
    SIMULATIONS,
    USUAL_CORRELATION,
    Cell,
    LossCoverage,
    cells,
    measure,
)

TABLE = Path(__file__).parents[2] / "evals" / "results" / "loss-coverage.json"


@pytest.mark.parametrize(
    ("cell", "distribution", "correlation"),
    [
        (Cell(30, 16, 0.9, 0.03), "lost in some problems", 0.9),  # Tango's bound alone has a coverage of 68%
        (Cell(100, 4, 0.98, 0.01), "lost in some problems", 0.9),  # and here of 89%
        (Cell(30, 16, 0.9, 0.0), "lost everywhere", 0.5),
        (Cell(100, 4, 0.98, 0.03), "same in all repeats", 0.5),  # Johnson's bound alone has 89%
    ],
)
def test_the_bound_holds_where_other_bounds_fail(cell: Cell, distribution: str, correlation: float) -> None:
    """With a true coverage of 94%, 400 evaluations give less than 90% with probability 0.001. The seed is fixed."""
    assert measure(cell, distribution, correlation, simulations=400).coverage >= 0.9


def test_the_bound_is_hardly_wider_than_with_a_known_variance() -> None:
    found = measure(Cell(300, 4, 0.9, 0.01), "lost everywhere", 0.5, simulations=400)
    assert found.coverage >= 0.9
    assert found.excess_ratio <= MAX_EXCESS


def test_the_stored_table_has_every_cell_with_the_promised_coverage() -> None:
    table = json.loads(TABLE.read_text("utf-8"))
    assert table["simulations"] == SIMULATIONS == 10_000
    rows = [LossCoverage(**row) for row in table["cells"]]
    stored = {
        (each.num_problems, each.num_repeats, each.accuracy, each.loss, each.distribution, each.correlation)
        for each in rows
    }
    assert stored == {
        (*cell.conditions, distribution, each)
        for cell in cells()
        for distribution in DISTRIBUTIONS
        for each in CORRELATIONS
    }
    assert len({tuple(asdict(cell).values()) for cell in cells()}) == 36
    for row in rows:
        assert row.coverage >= MIN_COVERAGE, row
        if row.num_problems >= LARGE and row.correlation <= USUAL_CORRELATION:
            assert row.excess_ratio <= MAX_EXCESS, row

"""Speeds over several runs: the intervals cover problems and runs."""

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evals.bench.__main__ import app
from evals.bench.speeds import Speeds, over_runs, rows_of

RUN = Path(__file__).parents[2] / "evals" / "results" / "gsm-mini" / "t0"
OTHER = RUN.parents[1] / "presets" / "embedded-gsm-mini"


def test_runs_that_agree_have_the_interval_of_their_problems() -> None:
    value, (low, high) = over_runs([(2.0, (1.6, 2.5))] * 3)  # pyright: ignore
    assert (value, low, high) == pytest.approx((2.0, 1.6, 2.5))


def test_runs_that_differ_have_a_wider_one() -> None:
    """By hand: logs of 1.8, 2 and 2.2 have a standard deviation of 0.1004, and t is 4.303."""
    found = over_runs([(value, (value / 1.25, value * 1.25)) for value in (1.8, 2.0, 2.2)])
    assert found is not None
    half = math.hypot(math.log(1.25), 4.3027 * 0.10040 / math.sqrt(3))
    assert math.log(found[1][1] / found[1][0]) / 2 == pytest.approx(half, rel=1e-3)
    assert found[0] == pytest.approx((1.8 * 2.0 * 2.2) ** (1 / 3))


def test_without_an_interval_in_some_run_there_is_none() -> None:
    assert over_runs([(2.0, (1.6, 2.5)), (2.0, None)]) is None


def test_the_table_has_every_policy_of_the_runs(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    result = CliRunner().invoke(app, ["speeds", *[str(RUN)] * 3, "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = Speeds.model_validate_json(file.read_text())
    rows = {row[0]: row for row in rows_of(found)}
    assert rows["target"][2] == rows["token"][3] == "1.00×"
    assert rows["token"][2].startswith("1.48× [1.45, 1.50")


def test_other_problems_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["speeds", str(RUN), str(OTHER)])
    assert result.exit_code != 0
    assert "same problems" in str(result.exception or result.output)

"""The figures of the model card, measured on fewer problems, with bounds that allow for the smaller sample."""

import asyncio
import json

import pytest
import torch

from evals.training.card import with_figures
from evals.training.measure import PARTS, Judged, judging_figures, measure, operating_point, roc_area
from stepspec.mini import WEIGHTS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("right", "wrong", "area"),
    [([2.0, 3.0], [0.0, 1.0], 1.0), ([0.0], [1.0], 0.0), ([1.0], [1.0], 0.5), ([1.0, 3.0], [2.0], 0.5)],
)
def test_the_area_is_the_probability_that_a_right_step_scores_higher(
    right: list[float], wrong: list[float], area: float
) -> None:
    assert roc_area(right, wrong) == area


def test_wrong_steps_are_counted_at_the_threshold_that_accepts_85_percent_of_right_ones() -> None:
    right = [float(score) for score in range(1, 101)]
    point = operating_point(right, [15.5, 16.0, 17.0, 0.0], 0.85)
    assert point == {"threshold": 16.0, "wrong_accepted": 0.5}, "85 of the 100 right steps score 16 or more"
    assert operating_point([1.0], [0.0, 1.0, 2.0, 3.0], 0.98) == {"threshold": 1.0, "wrong_accepted": 0.75}


def test_there_is_no_area_without_steps_of_both_kinds() -> None:
    figures = judging_figures([Judged(True, {"likelihood.min": -1.0})])
    points = dict.fromkeys(("85%", "90%", "95%", "98%"))
    assert figures["scores"] == {"likelihood.min": {"area": None, "right_accepted": points}}
    assert figures["equivalence"] == {"pairs": 0, "same": 0, "area": None}
    assert judging_figures([])["steps"] == 0


@pytest.mark.parametrize("num_problems", [16, pytest.param(100, marks=pytest.mark.soak)])
def test_both_models_solve_the_share_in_the_card_with_steps_of_similar_length(num_problems: int) -> None:
    """The bounds for 100 problems: a pair as good as the card says misses them once in a thousand runs."""
    figures = asyncio.run(measure("solutions", num_problems))
    assert figures["target"]["solved"]["share"] >= 0.85
    assert 0.3 <= figures["draft"]["solved"]["share"] <= 0.85
    assert figures["draft"]["right_steps"]["share"] >= 0.75
    assert figures["draft"]["mean_step_tokens"] == pytest.approx(figures["target"]["mean_step_tokens"], rel=0.15)
    assert 15 <= figures["target"]["mean_step_tokens"] <= 40


@pytest.mark.soak
@pytest.mark.parametrize("num_problems", [16, 60])
def test_the_target_separates_right_draft_steps_from_wrong_ones(num_problems: int) -> None:
    figures = asyncio.run(measure("judging", num_problems))
    scores = {name: each["area"] for name, each in figures["scores"].items()}
    assert min(scores["rating.short"], scores["rating.specreason"]) >= 0.9
    assert max(scores.values()) >= 0.95
    assert min(each["right_accepted"]["85%"]["wrong_accepted"] for each in figures["scores"].values()) <= 0.1
    assert scores["yes_no"] >= 0.9
    assert figures["equivalence"]["area"] >= 0.85
    assert figures["selection"]["share"] >= 0.7


@pytest.mark.parametrize("num_problems", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_draft_tokens_are_accepted_as_often_as_for_real_pairs(num_problems: int) -> None:
    figures = asyncio.run(measure("acceptance", num_problems))
    assert 0.6 <= figures["temperature 0.6, 4 drafted"]["share"] <= 0.85
    assert figures["temperature 0.6, 4 drafted"]["drafted"] > 83 * num_problems


def test_the_card_shows_the_measured_figures() -> None:
    card = (WEIGHTS / "README.md").read_text(encoding="utf-8")
    assert with_figures(card, WEIGHTS) == card, "python -m evals.training.card"
    assert json.loads((WEIGHTS / "figures.json").read_text()).keys() == PARTS.keys() - {"passes"}


def test_passes_are_timed_at_every_size() -> None:
    probes = asyncio.run(measure("probes", 4))
    assert probes["passes"] == {"0": 1, "1": 1, "3": 1}
    assert probes["ms"]["3"] > 0
    times = asyncio.run(measure("passes", 16))["ms"]
    assert len(times) == 16
    assert times["16 x 128"] > times["1 x 1"]

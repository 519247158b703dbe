"""Certificates: how often a policy that loses the limit gets one, and how often one that loses nothing."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from evals.bench.certification import (
    MAX_CERTIFIED,
    POWER_SIZES,
    Population,
    certification_block,
    coverage,
    power,
    several,
    switched,
    tilted,
    with_repeats,
)
from stepspec.errors import UsageError


def population(num_problems: int = 600, repeats: int = 4) -> Population:
    """Three policies that answer 3, 6 and 10% of the requests differently from the target."""
    rng = np.random.default_rng(0)
    target = (rng.random((num_problems, repeats)) < 0.8).astype(float)
    others = [np.where(rng.random(target.shape) < share, 1 - target, target) for share in (0.03, 0.06, 0.1)]
    return Population(target, np.stack(others))


@pytest.mark.parametrize("accuracy", [0.6, 0.98])
def test_weights_give_the_wanted_accuracy_and_losses(accuracy: float) -> None:
    known = population()
    weights = tilted(known, accuracy, np.full(3, 0.01))
    assert weights.sum() == pytest.approx(1)
    assert (weights > 0).all()
    assert weights @ known.target.mean(axis=1) == pytest.approx(accuracy)
    assert known.losses @ weights == pytest.approx(np.full(3, 0.01))


def test_losses_that_no_weights_can_give_are_refused() -> None:
    same = population()
    with pytest.raises(UsageError, match="cannot be weighted"):
        tilted(Population(same.target, same.target[None]), None, np.array([0.01]))


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_path_on_which_every_setting_loses_the_limit_is_rarely_certified(repeats: int) -> None:
    """1,000 calibrations: a share of 5% exceeds 7.1% once in a thousand times."""
    assert coverage(population(), 0.02, 0.9, repeats, 1000).certified <= MAX_CERTIFIED + 0.016


def test_what_switches_is_certified_no_more_often_and_several_certificates_are_wrong_more_often() -> None:
    known = with_repeats(population(), 1)
    assert switched(known, 0.02, 0.6, 1000).certified <= MAX_CERTIFIED + 0.016
    found = several(known, 0.02, 0.6, 1000)
    assert found.num_certificates == 3
    assert coverage(known, 0.02, 0.6, 1, 1000).certified + 0.01 < found.certified <= 3 * 0.05


def test_the_table_shows_every_cell(tmp_path: Path) -> None:
    known = with_repeats(population(), 1)
    rules = [cell(known, 0.02, 0.6, 20) for cell in (switched, several)]
    found = [coverage(known, 0.02, 0.9, 1, 20), *rules, *(power(0.05, size, 20) for size in POWER_SIZES)]
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps({"cells": [asdict(each) for each in found]}))
    first, of_rules, second = certification_block(file).split("\n\n")
    assert [line.split(" | ")[1] for line in of_rules.splitlines()[2:]] == [
        "50% of the requests by token level, at random",
        "3 certificates from the same problems",
    ]
    assert re.fullmatch(r"\| 2 points \| \d+.\d% to \d+.\d% \|", first.splitlines()[2])
    assert second.splitlines()[2].count("%") == 1 + len(POWER_SIZES)


def test_a_policy_without_loss_is_mostly_certified_with_6000_problems() -> None:
    assert power(0.05, 6000, 200).certified >= 0.8
    assert power(0.05, 500, 200).certified < 0.3

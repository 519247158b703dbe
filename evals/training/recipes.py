"""Training recipes of the pair: the shape of each model and its training stages.

The target's recipe records the order in which changes helped (`evals/LOG.md`). Training a new model would not need all
of its stages. The recipe no longer reproduces the weights, because the meaning of content in `content_weight` changed:

- The draft and the target's first twelve stages: digits, names and words of relations are content. From the fourth
  stage on, they weigh thirty times as much as the rest.
- The next two stages: all tokens are content except those that occur in phrasings, at any position.
- The stage after that: all positions are content except those of phrasings.
- Later stages: the current definition.

Drills had no sums before the target's tenth stage, and they had sums of three numbers until its last two stages. The
token where a step goes wrong was not taught before the twelfth stage. Before the last two stages, stories could be out
of order and could ask for totals of three.
"""

from dataclasses import dataclass, replace
from typing import Any

from evals.training.wording import Voice


@dataclass(frozen=True)
class Stage:
    """One stage in the training of a model."""

    layers: int
    steps: int
    rates: tuple[float, float] = (1.0, 1.0)  # learning rates at start and end, relative to the recipe's
    max_level: int = 10
    mixed: float = 0.2  # share of sequences that mix in steps of the other model's voice
    hard: float = 0.0  # share of sequences whose problem is the hardest of four
    drills: int = 0  # branches per sequence that practice rare skills
    guided: bool = False  # whether attention heads are trained with attention targets
    judged: float = 0.0  # share of sequences with judgments
    batch: int = 24
    content_weight: float = 3.0  # loss weight of required content relative to words of optional phrasings
    verdict_weight: float = 1.0  # loss weight of judge answers; early ones have a high loss that would dominate


@dataclass(frozen=True)
class Recipe:
    """Shape and training stages of one model."""

    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    stages: tuple[Stage, ...]
    matrix_lr: float = 0.02
    other_lr: float = 3e-3


PRACTISED: dict[str, Any] = {"mixed": 0.1, "hard": 0.6, "content_weight": 30.0}
JUDGED: dict[str, Any] = {
    "content_weight": 10.0,
    "mixed": 0.3,
    "hard": 0.6,
    "drills": 1,
    "guided": True,
    "judged": 0.7,
    "batch": 16,
}

RECIPES: dict[Voice, Recipe] = {
    "draft": Recipe(
        width=96,
        feed_forward=256,
        heads=4,
        kv_heads=2,
        head_size=32,
        stages=(
            Stage(2, 1500, max_level=4),
            Stage(2, 1000, rates=(1.0, 0.7778)),
            Stage(2, 800, rates=(0.7, 0.0)),
            Stage(2, 1500, rates=(0.6, 0.0)),
            Stage(2, 600, rates=(0.3, 0.0)),
            Stage(2, 400, rates=(0.2, 0.0)),
        ),
    ),
    "target": Recipe(
        width=192,
        feed_forward=512,
        heads=6,
        kv_heads=2,
        head_size=32,
        matrix_lr=0.007,
        other_lr=2.1e-3,
        stages=(
            Stage(3, 800, max_level=4, mixed=0.0, content_weight=10.0),
            Stage(3, 1500, mixed=0.1, content_weight=10.0),
            Stage(6, 750, rates=(0.8, 0.572), mixed=0.1, content_weight=10.0),
            Stage(6, 250, rates=(0.57, 0.49), **PRACTISED),
            Stage(6, 250, rates=(0.6, 0.49), drills=2, **PRACTISED),
            Stage(6, 250, rates=(0.7, 0.6), drills=6, batch=16, **PRACTISED),
            Stage(6, 500, rates=(0.7, 0.6), drills=4, guided=True, batch=16, **PRACTISED),
            Stage(6, 500, rates=(0.7, 0.5), drills=4, guided=True, batch=16, **PRACTISED),
            Stage(10, 150, rates=(0.5, 0.5), verdict_weight=0.05, **JUDGED),
            Stage(10, 250, rates=(0.5, 0.375), **JUDGED),
            Stage(10, 250, rates=(0.5, 0.4167), **JUDGED),
            Stage(10, 250, rates=(0.6, 0.55), verdict_weight=0.1, **JUDGED),
            Stage(10, 500, rates=(0.5, 0.4), verdict_weight=0.3, **JUDGED),
            Stage(10, 1000, rates=(0.4, 0.1333), **JUDGED),
            Stage(10, 700, rates=(0.25, 0.0), **JUDGED),
            Stage(10, 500, rates=(0.25, 0.0), **JUDGED),
            replace(Stage(10, 700, rates=(0.3, 0.0), **JUDGED), drills=2),
            replace(Stage(10, 600, rates=(0.25, 0.0), **JUDGED), drills=4, judged=0.4),
        ),
    ),
}

"""Coverage of the intervals: how often they contain the true value.

Each setting simulates evaluations whose true figures are known. For each figure it counts the evaluations whose 95%
interval contains the true value. Coverage must be 93% to 97% for 200 or more problems. Smaller sizes are reported too.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]
import typer

from evals.bench.simulated import (
    Latencies,
    Steps,
    correct_runs,
    judged_steps,
    latencies,
    paired_runs,
    scored_outcomes,
)
from stepspec.cli.output import JsonOption, write_results
from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.judge_scores import MIN_CLASS, Area, auc
from stepspec.evaluation.stats.matched import MatchedPolicy, corrected_confidence, fastest
from stepspec.evaluation.stats.paired import Paired
from stepspec.evaluation.stats.products import half_widths
from stepspec.evaluation.stats.ratios import median_of_ratios
from stepspec.evaluation.stats.resamples import Resamples
from stepspec.evaluation.stats.runs import Floats
from stepspec.evaluation.stats.shares import Share

SIMULATIONS = 2_000
PROMISED = (0.93, 0.97)
SIZES = ((200, 1), (200, 4), (1000, 1), (1000, 4))  # problems, repeats
SMALL_SIZES = ((20, 1), (20, 4), (50, 1), (50, 4))
SEED = 20
ACCURACIES = (0.3, 0.6, 0.9)
DISCORDANCES = ((0.02, 0.03), (0.05, 0.05), (0.1, 0.05))  # shares of problems lost and won against the target
TARGET_ACCURACY = 0.6
MATCHED = "none of 5 policies that lose 0.011 is accuracy-matched at 0.01"
AREAS, GOOD_OUTCOMES = (0.6, 0.8, 0.95), 300
RATIOS = (  # name, powers of (policy seconds, target seconds, policy tokens, target tokens), true value
    ("speedup", (-1, 1, 0, 0), Latencies.speedup),
    ("length ratio", (0, 0, 1, -1), Latencies.length_ratio),
    ("ratio of tokens/s", (-1, 1, 1, -1), Latencies.speedup * Latencies.length_ratio),
)
_RESAMPLES = 1_000  # a tenth of a report's, to save time; this costs about 0.2% of coverage
_BATCH_SIZE = 250

Holds = Mapping[str, list[bool]]  # by figure: whether the interval of each evaluation contains the true value
Simulate = Callable[[np.random.Generator, int], Holds]


@dataclass(frozen=True)
class Setting:
    """One kind of evaluation, its numbers of problems and repeats, and the function that simulates it."""

    name: str
    num_problems: int
    num_repeats: int
    simulate: Simulate


@dataclass(frozen=True)
class Coverage:
    """The share of evaluations in which the interval of one figure contains the true value."""

    figure: str
    setting: str
    num_problems: int
    num_repeats: int
    coverage: float


def settings(sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Setting]:
    """Yield settings that are typical of evaluations and together cover every interval."""
    for n, repeats in sizes:
        for accuracy in ACCURACIES:
            yield Setting(f"accuracy {accuracy}", n, repeats, _shares(n, repeats, accuracy))
        for lost, won in DISCORDANCES:
            yield Setting(f"{lost} lost, {won} won", n, repeats, _differences(n, repeats, lost, won))
        yield Setting("lognormal latencies", n, repeats, _ratios(n, repeats))
        if repeats == 1:
            yield Setting("about 8 judged steps a problem", n, 1, _judged(n))
    if sizes == SIZES:
        yield Setting("0.031 lost, 0.02 won", 1000, 1, _matched(1000))
        for area in AREAS:
            yield Setting(f"area {area}, {MIN_CLASS} bad outcomes", GOOD_OUTCOMES + MIN_CLASS, 1, _areas(area))


def measure(setting: Setting, simulations: int = SIMULATIONS) -> list[Coverage]:
    """Return the coverage of each figure of a setting. The result is deterministic."""
    held = setting.simulate(np.random.default_rng(SEED), simulations)
    n, repeats = setting.num_problems, setting.num_repeats
    return [Coverage(figure, setting.name, n, repeats, float(np.mean(each))) for figure, each in held.items()]


def _shares(n: int, repeats: int, accuracy: float) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        shares = (Share.of(correct_runs(rng, n, repeats, accuracy)) for _ in range(simulations))
        return {"accuracy": [_holds(each.interval(), accuracy) for each in shares]}

    return simulate


def _differences(n: int, repeats: int, lost: float, won: float) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        runs = [paired_runs(rng, n, repeats, TARGET_ACCURACY, lost, won) for _ in range(simulations)]
        pairs = [Paired.of(own, target) for own, target in runs]
        gains = np.column_stack([(own - target).mean(axis=1) for own, target in runs])
        resamples = Resamples.drawn_by(rng, n, _RESAMPLES)
        return {
            "accuracy difference": [_holds(each.interval(), won - lost) for each in pairs],
            "one-sided bound of the loss": [each.loss_upper() >= lost - won for each in pairs],
            "accuracy difference by bootstrap": _all_hold(resamples, resamples.sums(gains) / n, won - lost),
        }

    return simulate


def _ratios(n: int, repeats: int) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        sampled = latencies(rng, n, repeats, simulations)
        columns = np.stack([sampled.own_s, sampled.target_s, sampled.own_tokens, sampled.target_tokens], axis=1)
        powers = np.array([power for _, power, _ in RATIOS])
        resamples = Resamples.drawn_by(rng, n, _RESAMPLES)
        # Batches limit the memory; all batches share the same resamples to save time.
        parts = [columns[:, :, start : start + _BATCH_SIZE] for start in range(0, simulations, _BATCH_SIZE)]
        halves = np.concatenate([half_widths(resamples, part, powers) for part in parts], axis=1)
        found = powers @ np.log(columns.sum(axis=0))  # [figures, evaluations]
        true = np.log([value for _, _, value in RATIOS])[:, None]
        inside = (np.abs(found - true) <= halves).tolist()
        held = {figure: inside[index] for index, (figure, _, _) in enumerate(RATIOS)}
        if repeats == 1:
            pairs = zip(sampled.target_s.T, sampled.own_s.T, strict=True)
            medians = [median_of_ratios(target, own)[1] for target, own in pairs]
            held["median of ratios"] = [_holds(each, Latencies.median_ratio) for each in medians]
        return held

    return simulate


def _judged(n: int) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        evaluations = [judged_steps(rng, n) for _ in range(simulations)]
        areas = [auc(each.scores, each.good, each.problems) for each in evaluations]
        held = {"step acceptance": [_holds(_acceptance(each).interval(), Steps.share) for each in evaluations]}
        return held | _areas_held(areas, Steps.area)

    return simulate


def _areas(true: float) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        good = np.arange(GOOD_OUTCOMES + MIN_CLASS) < GOOD_OUTCOMES
        scores = (scored_outcomes(rng, good, true) for _ in range(simulations))
        return _areas_held([auc(each, good, np.arange(len(good))) for each in scores], true)

    return simulate


def _areas_held(areas: Sequence[Area], true: float) -> dict[str, list[bool]]:
    """Return whether each known area's interval contains the true area. Return {} if no area is known."""
    given = [area for area in areas if area.value is not None]
    return {"AUC": [_holds(area.interval, true) for area in given]} if given else {}


def _acceptance(steps: Steps) -> Share:
    return Share.pooled(np.bincount(steps.problems, weights=steps.good), np.bincount(steps.problems))


def _matched(n: int) -> Simulate:
    def simulate(rng: np.random.Generator, simulations: int) -> Holds:
        counts = rng.multinomial(n, [0.031, 0.02, 0.949], size=(simulations, 5))
        confidence = corrected_confidence(5)
        bounds = [[Paired(won, lost, n).loss_upper(confidence) for lost, won, _ in each] for each in counts.tolist()]
        families = [[MatchedPolicy("", 2.0, (1.9, 2.1), bound) for bound in each] for each in bounds]
        return {MATCHED: [fastest(family, loss=0.01) is None for family in families]}

    return simulate


def _all_hold(resamples: Resamples, figures: Floats, true: float) -> list[bool]:
    low, high = resamples.bounds(figures)
    return ((low <= true) & (true <= high)).tolist()


def _holds(interval: Interval | None, true: float) -> bool:
    return interval is not None and interval[0] <= true <= interval[1]


def main(
    simulations: Annotated[int, typer.Option(min=1, help="Evaluations for each setting.")] = SIMULATIONS,
    json_file: JsonOption = None,
) -> None:
    """Measure how often each interval contains the true value."""
    rows: list[Coverage] = []
    for setting in (*settings(), *settings(SMALL_SIZES)):
        for row in measure(setting, simulations):
            rows.append(row)
            print(f"{row.num_problems:5} x {row.num_repeats}  {row.coverage:.4f}  {row.figure} ({row.setting})")
    versions = {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}
    found = {"confidence": 0.95, "simulations": simulations, "seed": SEED, "versions": versions}
    write_results({**found, "coverages": [asdict(row) for row in rows]}, json_file)

"""A path of settings from careful to fast, by replays: thresholds of judges and bounds of salvage.

Thresholds come from the scores of recorded steps. Every combination is replayed, and the path holds those that are
faster than token-level speculation alone, which is exact, and than every more careful one. If none is, it holds those
that are faster than the target, or else the fastest one. How careful a setting is says how far what
it keeps of the draft departs from the target.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np

from stepspec.errors import UsageError
from stepspec.evaluation.replay.decisions import scores_of
from stepspec.evaluation.replay.recordings import Recording, Recordings
from stepspec.evaluation.replay.totals import Replayed, departures, replay, replayable
from stepspec.loop.judge import Judge, ThresholdJudge
from stepspec.loop.policy import Policy, with_threshold

ACCEPTED = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
"""Shares of the recorded steps that the tried thresholds accept."""
MIN_LOGPROBS = (-1.0, -2.0, -3.0, -4.0, -5.0, -7.0)
"""Tried bounds of salvage, besides the policy's own."""
WORTH_A_TEST = 1.03
"""How many times as fast as the setting before it a setting of the path must be."""
MAX_LENGTH = 6
"""Most settings on the path."""
LOWEST = (-1e6, -1.0, 0.0)
"""Thresholds to try for a judge that accepts every step."""


@dataclass(frozen=True)
class Setting:
    """One setting of the path, and what it would have cost on the recorded steps."""

    name: str
    policy: Policy
    thresholds: Mapping[str, float]
    min_logprob: float | None
    replayed: Replayed


def make_path(
    name: str,
    policy: Policy,
    recordings: Recordings,
    seed: int = 0,
    show: Callable[[None, int, int], None] = lambda row, done, total: None,
) -> list[Setting]:
    """Return the settings of a policy to test, the most careful first. Must not be called from an event loop.

    `show` is called with the number of replayed settings and of all.

    Raises:
        UsageError: the policy has no threshold, or no recorded step has a score.
    """
    tried = thresholds_of(name, policy, replayable(name, policy, recordings), ACCEPTED)
    settings: dict[str, tuple[Policy, Mapping[str, float], float | None]] = {}
    for (place, thresholds), min_logprob in product(enumerate(tried), _min_logprobs(policy)):
        try:
            changed = policy.with_thresholds(thresholds, min_logprob)
        except ValueError:  # a threshold below its judge's reject_below
            continue
        settings[f"{place}/{min_logprob}"] = changed, thresholds, min_logprob
    if not settings:
        raise UsageError("No threshold above reject_below accepts a recorded step. Remove reject_below, or lower it.")
    found = replay({name: each[0] for name, each in settings.items()}, recordings, seed=seed, show=show)
    order = {each.name: (departure, each.wall_s) for each, departure in zip(found, departures(found), strict=True)}
    ordered = sorted(found, key=lambda each: order[each.name])
    chosen: list[Replayed] = []
    for each in worth_testing(ordered):
        if not chosen or chosen[-1].wall_s >= WORTH_A_TEST * each.wall_s:
            chosen.append(each)
    return [Setting(f"setting-{number}", *settings[each.name], each) for number, each in enumerate(_thinned(chosen), 1)]


def bold(policy: Policy) -> Policy:
    """Return a policy whose judges accept every step that they score."""
    judges = tuple(_lowest(each) if isinstance(each, ThresholdJudge) else each for each in policy.judges)
    return policy.model_copy(update={"judges": judges})


def _lowest(judge: ThresholdJudge) -> ThresholdJudge:
    plain = judge.model_copy(update={"reject_below": None})
    for threshold in LOWEST:
        try:
            return cast(ThresholdJudge, with_threshold(plain, threshold))
        except ValueError:
            continue
    return judge


def worth_testing(settings: Sequence[Replayed]) -> Sequence[Replayed]:
    """Return the settings that neither token-level speculation nor the target beats; if there is none, those that the
    target does not beat, or else the fastest one."""
    return (
        [each for each in settings if min(each.speedup, each.speedup_vs_token or 0.0) >= 1]
        or [each for each in settings if each.speedup >= 1]
        or [min(settings, key=lambda each: each.wall_s)]
    )


def _thinned(path: Sequence[Replayed]) -> Sequence[Replayed]:
    """Return at most `MAX_LENGTH` settings, with both ends."""
    if len(path) <= MAX_LENGTH:
        return path
    return [path[int(place)] for place in np.linspace(0, len(path) - 1, MAX_LENGTH).round()]


def _min_logprobs(policy: Policy) -> list[float | None]:
    if policy.salvage is None:
        return [None]
    return [*sorted({policy.salvage.min_logprob, *MIN_LOGPROBS}, reverse=True)]


def thresholds_of(
    name: str, policy: Policy, recordings: Sequence[Recording], shares: Sequence[float]
) -> Sequence[Mapping[str, float]]:
    """Return for each share the thresholds with which the judges of a policy accept that share of the recorded steps.
    Must not be called from an event loop.

    Raises:
        UsageError: the policy has no threshold, or no recorded step has a score.
    """
    judges = [judge for judge in policy.judges if isinstance(judge, ThresholdJudge)]
    if not judges:
        raise UsageError(f"{name!r} has no judge with a threshold, so it has no other settings.")
    scores = asyncio.run(_scores(judges, recordings))
    for judge in judges:
        if not scores[judge.name]:
            raise UsageError(
                f"No recorded step has a score of the judge {judge.name} of {name!r}. The draft proposes none that is "
                "judged."
            )
    return [{judge.name: _quantile(scores[judge.name], 1 - share) for judge in judges} for share in shares]


def _quantile(scores: Sequence[float], share: float) -> float:
    quantile = float(np.quantile(scores, share, method="lower"))
    return math.floor(quantile * 1e4) / 1e4  # down, so that a score equal to the quantile is accepted


async def _scores(judges: Sequence[Judge], recordings: Sequence[Recording]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {judge.name: [] for judge in judges}
    for recording in recordings:
        for request in recording.requests.values():
            for scores in await scores_of(judges, request.trace, recording.policy):
                for name, score in scores.items():
                    if score is not None:
                        found[name].append(score)
    return found

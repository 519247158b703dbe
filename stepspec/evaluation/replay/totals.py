"""Adds up what a policy would have cost on the recorded steps of a run, and counts where its text is the same."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, JudgedStepRecord, ResultRow
from stepspec.evaluation.replay.costs import HardwareCosts
from stepspec.evaluation.replay.decisions import (
    SETTINGS_OF_DECISIONS,
    Decided,
    Scores,
    check_replayable,
    decide,
    scores_of,
)
from stepspec.evaluation.replay.recordings import Key, RecordedRequest, Recording, Recordings
from stepspec.evaluation.stats import Interval, pareto_front, ratio_of_sums
from stepspec.loop.policy import Policy

ENOUGH_WRITTEN = 200
"""Tokens that the target must have written in rejected steps to time a token by them."""


@dataclass(frozen=True)
class Replayed:
    """What a policy would have cost. Seconds and tokens are sums over all requests."""

    name: str
    recording: str
    """The recorded policy whose steps were used."""
    num_requests: int
    on_policy: float
    """Share of the requests whose text would have been the same."""
    wall_s: float
    speedup: float
    """The target's seconds over the policy's."""
    speedup_ci: Interval | None
    speedup_vs_token: float | None
    """The same for the fastest exact token-level policy of the run; None without one."""
    step_acceptance: float | None
    """Accepted steps over judged ones; None if none was judged."""
    likely_correct: float
    """A guess of the share of right answers, to choose settings that are worth a test, see `_likely_correct`. Real runs
    can be far from it, so do not show it."""
    departure: float | None
    """Mean over requests of the negative log-probabilities, under the target and in nats, of the draft's tokens that
    are kept although the target would have chosen others. It measures how far a policy departs from the target; None if
    they were not recorded."""
    extrapolated: float
    """Share of the target's judging passes that are wider than any measured one; 0 with the run's own times."""


def replay(
    policies: Mapping[str, Policy],
    recordings: Recordings,
    costs: HardwareCosts | None = None,
    seed: int = 0,
    show: Callable[[None, int, int], None] = lambda row, done, total: None,
) -> list[Replayed]:
    """Replay policies over the recorded steps of a run. Must not be called from an event loop.

    Each policy uses the recording in which its text stays the same in most requests.

    Args:
        policies: the policies by name.
        recordings: the run.
        costs: the measured costs of other hardware; None for the times of the run.
        seed: random seed of the intervals.
        show: is called with the number of replayed policies and of all.

    Raises:
        UsageError: recorded steps cannot say what a policy does.
    """
    known, replayed = _Scores(), list[Replayed]()
    for name, policy in policies.items():
        show(None, len(replayed), len(policies))
        replayed.append(_replay(name, policy, recordings, costs, seed, known))
    show(None, len(replayed), len(policies))
    return replayed


class _Scores:
    """Scores of judges on recordings. They do not depend on thresholds, so that a sweep computes them once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Mapping[Key, Scores]] = {}

    def of(self, policy: Policy, recording: Recording) -> Mapping[Key, Scores]:
        """Return the scores of a policy's judges by request."""
        judges = [each.model_dump(exclude=set(SETTINGS_OF_DECISIONS)) for each in policy.judges]
        key = recording.name, repr(judges)
        if key not in self._found:
            self._found[key] = asyncio.run(_all_scores(policy, recording))
        return self._found[key]


@dataclass(frozen=True)
class _ReplayOutcome:
    """What a policy would have done with one request."""

    wall_s: float
    num_judged: int
    num_accepted: int
    num_wide: int
    """Judging passes beyond the measured widths."""
    departure: float | None
    """See `Replayed.departure`."""
    first_change: JudgedStepRecord | None
    """The first step that it decides otherwise."""


def _replay(
    name: str, policy: Policy, all_of: Recordings, costs: HardwareCosts | None, seed: int, known: _Scores
) -> Replayed:
    usable = replayable(name, policy, all_of)
    outcomes = {each.name: _outcomes(policy, each, known.of(policy, each), costs) for each in usable}

    def num_same(recording: Recording) -> int:
        return sum(each.first_change is None for each in outcomes[recording.name].values())

    recording = max(usable, key=num_same)
    found = outcomes[recording.name]
    keys = all_of.keys
    wall = np.array([found[key].wall_s for key in keys])
    baselines = {
        each: np.array([_baseline_s(rows[key], costs, drafts=all_of.drafts(each)) for key in keys])
        for each, rows in all_of.baselines.items()
    }
    speedup, interval = ratio_of_sums(baselines[BASELINE], wall, np.random.default_rng(seed))
    token_s = min((float(each.sum()) for label, each in baselines.items() if label != BASELINE), default=None)
    num_judged = sum(each.num_judged for each in found.values())
    return Replayed(
        name=name,
        recording=recording.name,
        num_requests=len(keys),
        on_policy=num_same(recording) / len(keys),
        wall_s=float(wall.sum()),
        speedup=speedup,
        speedup_ci=interval,
        speedup_vs_token=None if token_s is None else token_s / float(wall.sum()),
        step_acceptance=sum(each.num_accepted for each in found.values()) / num_judged if num_judged else None,
        likely_correct=_likely_correct(found, recording, all_of.baselines[BASELINE]),
        departure=_mean([found[key].departure for key in keys]),
        extrapolated=sum(each.num_wide for each in found.values()) / max(1, num_judged) if costs else 0.0,
    )


def replayable(name: str, policy: Policy, all_of: Recordings) -> list[Recording]:
    """Return the recordings that can say what a policy does.

    Raises:
        UsageError: there is none; the message says why the first one cannot.
    """
    found: list[Recording] = []
    for recording in all_of.recordings:
        with suppress(UsageError):
            check_replayable(name, policy, recording.name, recording.policy)
            found.append(recording)
    if not found:
        first = all_of.recordings[0]
        check_replayable(name, policy, first.name, first.policy)
    return found


def _outcomes(
    policy: Policy, recording: Recording, scores: Mapping[Key, Scores], costs: HardwareCosts | None
) -> Mapping[Key, _ReplayOutcome]:
    requests = recording.requests
    pricing = _Pricing.of(recording, costs)
    return {key: _outcome(policy, request, scores[key], pricing) for key, request in requests.items()}


async def _all_scores(policy: Policy, recording: Recording) -> Mapping[Key, Scores]:
    return {
        key: await scores_of(policy.judges, request.trace, recording.policy)
        for key, request in recording.requests.items()
    }


@dataclass(frozen=True)
class _Pricing:
    """Seconds of a request's parts, by the run's own times or by costs of other hardware."""

    token_s: float
    """Mean seconds for a token that the target writes, with the policy's token-level speculation."""
    costs: HardwareCosts | None
    drafts: bool
    """Whether the draft model drafts tokens."""

    @classmethod
    def of(cls, recording: Recording, costs: HardwareCosts | None) -> "_Pricing":
        requests = recording.requests.values()
        num_written = max(1, sum(_num_written(each.row) for each in requests))
        if costs is not None:
            seconds = sum(costs.request_s(each.row, _num_passes(each), recording.drafts) for each in requests)
            return cls(seconds / num_written, costs, recording.drafts)
        rejected = [(step, each) for each in requests for step in each.trace.judged_steps if not step.accepted]
        num_rewritten = sum(_num_rewritten(step, each) for step, each in rejected)
        if num_rewritten >= ENOUGH_WRITTEN:
            return cls(sum(step.write_s for step, _ in rejected) / num_rewritten, None, recording.drafts)
        return cls(sum(each.row.time_s.target for each in requests) / num_written, None, recording.drafts)

    def rest_s(self, request: RecordedRequest) -> float:
        """Return the seconds of a recorded request without its judged steps."""
        steps = request.trace.judged_steps
        if self.costs is None:
            return request.row.wall_s - sum(step.draft_s + step.judge_s + step.write_s for step in steps)
        num_rest = _num_written(request.row) - sum(_num_rewritten(step, request) for step in steps)
        return self._token_s(request) * max(0, num_rest)

    def step_s(self, step: JudgedStepRecord, decided: Decided, request: RecordedRequest) -> float:
        """Return the seconds in which a step is drafted, judged and, if rejected, written by the target."""
        if self.costs is None:
            seconds = step.draft_s + (step.judge_s if decided.asks_target else 0.0)
        else:
            judging_s = self.costs.pass_over(step.num_tokens) if decided.asks_target else 0.0
            seconds = step.num_tokens * self.costs.draft_token_s + judging_s
        if decided.accepted:
            return seconds
        if self.costs is None and decided.same_text(step):
            return seconds + step.write_s
        if _was_continued(step, request):  # what it keeps less, the draft writes again
            draft_s = step.draft_s if self.costs is None else step.num_tokens * self.costs.draft_token_s
            return seconds + (step.num_salvaged - decided.num_kept) * draft_s / max(1, step.num_tokens)
        if step.accepted:  # it takes the target about as many tokens as it took the draft
            return seconds + (step.num_tokens - decided.num_kept) * self._token_s(request)
        num_rewritten = _num_rewritten(step, request)
        num_now = max(0, num_rewritten + step.num_salvaged - decided.num_kept)
        if self.costs is None and num_rewritten:
            return seconds + step.write_s * num_now / num_rewritten
        return seconds + num_now * self._token_s(request)

    def _token_s(self, request: RecordedRequest) -> float:
        row = request.row
        if self.costs is None or not _num_written(row):
            return self.token_s
        return self.costs.request_s(row, _num_passes(request), self.drafts) / _num_written(row)


def _outcome(policy: Policy, request: RecordedRequest, scores: Scores, pricing: _Pricing) -> _ReplayOutcome:
    steps = request.trace.judged_steps
    decided = list(_decisions(policy, steps, scores))
    asked = [(step, each) for step, each in decided if step.asked]
    widest = pricing.costs.widest if pricing.costs else math.inf
    return _ReplayOutcome(
        wall_s=pricing.rest_s(request) + sum(pricing.step_s(step, each, request) for step, each in decided),
        num_judged=len(asked),
        num_accepted=sum(each.accepted for _, each in asked),
        num_wide=sum(each.asks_target and step.num_tokens > widest for step, each in asked),
        departure=_sum(_surprise(step, each.num_kept) for step, each in decided),
        first_change=next((step for step, each in decided if not each.same_text(step)), None),
    )


def _decisions(
    policy: Policy, steps: Sequence[JudgedStepRecord], scores: Scores
) -> Iterator[tuple[JudgedStepRecord, Decided]]:
    """Yield a policy's decisions. What was drafted behind the kept part of a step that it accepts would not exist."""
    accepted = -1
    for step, known in zip(steps, scores, strict=True):
        if step.index != accepted:
            decided = decide(policy, step, known)
            accepted = step.index if decided.accepted else accepted
            yield step, decided


def _num_written(row: ResultRow) -> int:
    """Return how many tokens of a request the target wrote."""
    return row.tokens.regenerated + row.tokens.forced


def _num_rewritten(step: JudgedStepRecord, request: RecordedRequest) -> int:
    """Return how many tokens the target wrote of a rejected step in a call of its own."""
    steps = request.trace.steps
    if step.accepted or step.index >= len(steps) or _was_continued(step, request):
        return 0
    num_redrafted = sum(each.index == step.index for each in request.trace.judged_steps) - 1
    whole = steps[step.index]
    return max(0, whole.num_tokens - whole.num_from_draft - num_redrafted)


def _was_continued(step: JudgedStepRecord, request: RecordedRequest) -> bool:
    """Whether the draft has written on behind the kept part of a rejected step, see `redraft`."""
    return step is not next(each for each in reversed(request.trace.judged_steps) if each.index == step.index)


def _surprise(step: JudgedStepRecord, num_kept: int) -> float | None:
    if step.target_logprobs is None or step.own_choices is None:
        return None if num_kept else 0.0
    kept = zip(step.target_logprobs[:num_kept], step.own_choices[:num_kept], strict=True)
    return -sum(logprob for logprob, own_choice in kept if not own_choice)


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is unknown."""
    known = list(values)
    return None if None in known else sum(filter(None, known))


def _mean(values: Sequence[float | None]) -> float | None:
    total = _sum(values)
    return None if total is None else total / len(values)


def _num_passes(request: RecordedRequest) -> int:
    """Return the number of passes of the target over proposed steps."""
    return sum(step.target_logprobs is not None for step in request.trace.judged_steps)


def _baseline_s(row: ResultRow, costs: HardwareCosts | None, *, drafts: bool) -> float:
    return row.wall_s if costs is None else costs.request_s(row, 0, drafts)


def _likely_correct(
    outcomes: Mapping[Key, _ReplayOutcome], recording: Recording, target: Mapping[Key, ResultRow]
) -> float:
    """Return a guess of the accuracy. A text that first differs where the target writes a step instead of the draft is
    taken to end as the target's own; one that first differs where the draft's step is accepted counts half."""
    total = 0.0
    for key, outcome in outcomes.items():
        change = outcome.first_change
        if change is None:
            total += recording.requests[key].correct
        else:
            total += target[key].status == "correct" if change.accepted else 0.5
    return total / len(outcomes)


def departures(replayed: Sequence[Replayed]) -> list[float]:
    """Return how far each policy departs from the target, in one unit: nats, or accepted steps if one has no nats."""
    known = [each.departure for each in replayed if each.departure is not None]
    return known if len(known) == len(replayed) else [each.step_acceptance or 0.0 for each in replayed]


def front(replayed: Sequence[Replayed]) -> list[str]:
    """Return the names of the policies of which no other one is as fast and as close to the target."""

    points = [(each.speedup, -departure) for each, departure in zip(replayed, departures(replayed), strict=True)]
    best = pareto_front(points)
    return [each.name for each, point in zip(replayed, points, strict=True) if point in best]

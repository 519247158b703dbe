"""Chooses the advised policy and gives the reasons if it is the target alone. Pure functions of the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.evaluation.advise import formula
from stepspec.evaluation.advise.distance import step_costs
from stepspec.evaluation.advise.findings import Candidate, LoadFindings, Memory, Reason, Trial
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.cells import joined, percent, seconds, times
from stepspec.evaluation.stats import MatchedPolicy as Claim
from stepspec.evaluation.stats import fastest

MAX_LOST = 0.01
"""Upper bound of the accuracy or agreement that may be lost: one point."""
WORTH_FIXING = 1.1
"""How many times as fast as "auto" a fixed number of tokens must be, because "auto" adapts to other loads and texts."""

WORTH_IT = 1.1
"""Predicted speedup below which the draft counts as too slow or too weak."""
MOSTLY = 0.5
"""Share of the target's time for reading prompts above which there is little to speed up."""
WIDE, FULL = 8, 4.0
"""If a pass over `WIDE` tokens takes as long as `FULL` passes over one, passes have no room for drafted tokens."""


@dataclass(frozen=True)
class PolicyChoice:
    """The policy to run. `unproven` is a faster policy that is not known to preserve answers."""

    policy: str
    unproven: str | None


def choose(load: LoadFindings) -> PolicyChoice:
    """Return the fastest candidate that pays and preserves answers, by the rule of reports, or else the target."""
    concurrency = load.costs.concurrency
    claims = {each.name: _claim(each, concurrency) for each in load.candidates if each.name != BASELINE}
    paying = [each for each in load.candidates if each.name in claims and claims[each.name].pays()]
    winner = fastest(list(claims.values()), MAX_LOST)
    best = _prefer_auto(load.named(winner.name) if winner else None, paying)
    best_speedup = 1.0 if best is None else _speedup(best)
    faster = [each for each in paying if may_keep_answers(each) and _speedup(each) > best_speedup]
    unproven = max(faster, key=_speedup, default=None)
    return PolicyChoice(best.name if best else BASELINE, unproven.name if unproven else None)


def _claim(candidate: Candidate, concurrency: int) -> Claim:
    return Claim(
        candidate.name,
        candidate.speedup,
        candidate.speedup_ci,
        loss_upper=candidate.loss_upper,
        exact=candidate.exact,
        why_no_speed=candidate.no_speed,
        # Without concurrency, throughput repeats the speedup with different noise.
        throughput=candidate.throughput if concurrency > 1 else None,
    )


def pays(candidate: Candidate, concurrency: int) -> bool:
    """Return whether a policy is known to be faster than the target alone and does not reduce throughput."""
    return _claim(candidate, concurrency).pays()


def keeps_answers(candidate: Candidate) -> bool:
    """Return whether a policy is exact, or known to lose at most one point."""
    return _claim(candidate, 1).keeps(MAX_LOST)


def may_keep_answers(candidate: Candidate) -> bool:
    """Return whether the prompts are too few to say either that a policy preserves answers or that it does not."""
    if keeps_answers(candidate):
        return False
    return candidate.accuracy_delta_ci is None or candidate.accuracy_delta_ci[1] >= -MAX_LOST


def _speedup(candidate: Candidate) -> float:
    return candidate.speedup or 0.0


def _prefer_auto(best: Candidate | None, paying: Sequence[Candidate]) -> Candidate | None:
    """Return the same drafter with "auto" if a fixed number of tokens is hardly faster."""
    if best is None or best.kind != "token" or best.num_tokens == "auto":
        return best
    same = (each for each in paying if each.kind == "token" and each.drafter == best.drafter)
    auto = next((each for each in same if each.num_tokens == "auto"), None)
    return auto if auto is not None and _speedup(best) < WORTH_FIXING * _speedup(auto) else best


def reasons(load: LoadFindings, trials: Sequence[Trial], memory: Memory) -> list[Reason]:
    """Return the reasons why the target alone is advised, the clearest first."""
    known = [
        *_about_drafting(load, trials),
        *_about_length(load),
        *_about_passes(load),
        *_about_memory(memory),
    ]
    # The way to the draft says nothing about policies without one.
    return [*_about_distance(load), *(known or [_not_shown(load)])]


def _about_distance(load: LoadFindings) -> list[Reason]:
    costs = step_costs(load)
    if costs is None or not 0 < costs.max_way_s < costs.way_s:
        return []
    sentence = (
        f"The draft is too far away: its server takes {seconds(costs.way_s)} for the smallest request, and steps pay "
        f"up to about {seconds(costs.max_way_s)}."
    )
    return [Reason(kind="distant draft", sentence=sentence)]


def _about_drafting(load: LoadFindings, trials: Sequence[Trial]) -> list[Reason]:
    tried = next((trial for trial in trials if trial.drafter == "draft-model"), None)
    if tried is None:
        tried = max(trials, key=lambda trial: trial.predicted, default=None)
    if tried is None or tried.predicted >= WORTH_IT:
        return []
    drafter = "the draft" if tried.drafter == "draft-model" else tried.drafter
    if tried.ideal < WORTH_IT:
        return [Reason(kind="slow draft", sentence=_too_slow(tried))]
    costs = formula.RelativeCosts(tried.cost, load.costs.target.pass_over_one)
    needed = formula.needed_acceptance(costs, WORTH_IT, tried.coverage)
    if needed is None:
        return [Reason(kind="few drafts", sentence=_too_seldom(drafter, tried))]
    sentence = (
        f"Too few of the tokens from {drafter} are right: {percent(tried.acceptance)} of those that are checked are "
        f"accepted; at this drafting cost, a gain of 10% would need {needed:.0%}."
    )
    return [Reason(kind="low acceptance", sentence=sentence)]


def _too_slow(tried: Trial) -> str:
    drafter = "The draft" if tried.drafter == "draft-model" else f"Drafting by {tried.drafter}"
    return (
        f"{drafter} is too slow: a drafted token takes {tried.cost:.2f} times as long as one that the target writes, "
        f"so even if every one were accepted, the speed would be {times(tried.ideal)[0]} the target's."
    )


def _too_seldom(drafter: str, tried: Trial) -> str:
    return (
        f"Too few rounds have drafts: {drafter} has tokens to propose in {percent(tried.coverage)} of the rounds, "
        "which would not gain 10% even if every token were accepted."
    )


def _about_length(load: LoadFindings) -> list[Reason]:
    if load.reading_share is None or load.reading_share < MOSTLY:
        return []
    sentence = (
        f"The answers are short compared with the prompts: {load.reading_share:.0%} of the target's time goes into "
        "reading prompts, which speculation does not make faster."
    )
    return [Reason(kind="short answers", sentence=sentence)]


def _about_passes(load: LoadFindings) -> list[Reason]:
    wide = load.costs.target.pass_over_one.get(WIDE)
    if wide is None or wide < FULL:
        return []
    concurrency = load.costs.concurrency
    one_at_a_time = "a single token keeps this hardware busy"
    cause = f"{concurrency} concurrent requests fill one" if concurrency > 1 else one_at_a_time
    sentence = (
        f"The target's passes have no room for drafted tokens: a pass over {WIDE} tokens takes as long as {wide:.1f} "
        f"passes over one, because {cause} already."
    )
    return [Reason(kind="full passes", sentence=sentence)]


def _about_memory(memory: Memory) -> list[Reason]:
    overhead = memory.draft_overhead
    if overhead is None or overhead < 1:
        return []
    return [Reason(kind="memory", sentence=f"The draft needs {overhead:.1f} times as much memory as the target.")]


def _not_shown(load: LoadFindings) -> Reason:
    exact = [each for each in load.candidates if each.name != BASELINE and each.exact and each.speedup is not None]
    best = max(exact, key=_speedup, default=None)
    if best is None:
        return Reason(kind="not shown", sentence="No other exact policy could be run on these prompts.")
    speed = joined(times(best.speedup, best.speedup_ci))
    lack = _why_it_does_not_pay(best, load.costs.concurrency)
    return Reason(
        kind="not shown", sentence=f"The fastest exact policy, {best.name}, has {speed} the target's speed, {lack}."
    )


def _why_it_does_not_pay(candidate: Candidate, concurrency: int) -> str:
    """Return why a policy does not pay, as a clause that ends a sentence."""
    if candidate.no_speed is not None:
        return f"which does not count: {candidate.no_speed}"
    if _speedup(candidate) <= 1:
        return "which is no gain"
    if concurrency > 1 and candidate.throughput is not None and candidate.throughput < 1:
        return f"but of all requests together it gets less done in a second ({times(candidate.throughput)[0]})"
    if candidate.speedup_ci is None:
        return "but the prompts are too few to show that this is a gain"
    return "so it may also be no faster; more prompts would narrow the interval"

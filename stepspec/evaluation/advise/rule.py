"""The rule by which a policy is advised, and the reasons for advising none; pure functions of what was found."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.evaluation.advise import formula
from stepspec.evaluation.advise.findings import Candidate, Load, Memory, Reason, Trial
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.cells import joined, percent, times
from stepspec.evaluation.stats import Candidate as Claim
from stepspec.evaluation.stats import fastest

MOST_LOST = 0.01
"""Accuracy, or agreement, that may be lost for all that is known: a point."""
WORTH_FIXING = 1.1
"""How many times as fast as "auto" a fixed number of tokens has to be: "auto" adapts to other loads and texts."""

WORTH_IT = 1.1
"""The speedup below which a draft is called too slow or too weak."""
MOSTLY = 0.5
"""Of the target's time: with more spent on reading prompts there is little to speed up."""
WIDE, FULL = 8, 4.0
"""Where a pass over eight tokens takes as long as four over one, passes have no room for drafted tokens."""


@dataclass(frozen=True)
class Choice:
    """What to run. `unproven` is faster still, but not known to keep the answers."""

    policy: str
    unproven: str | None


def choose(load: Load) -> Choice:
    """The fastest candidate that pays and keeps the answers, by the rule of reports, or else the target alone."""
    at_once = load.costs.concurrency
    claims = {each.name: _claim(each, at_once) for each in load.candidates if each.name != BASELINE}
    paying = [each for each in load.candidates if each.name in claims and claims[each.name].pays()]
    found = fastest(list(claims.values()), MOST_LOST)
    best = _unless_auto_does(load.named(found.name) if found else None, paying)
    beyond = 1.0 if best is None else _speedup(best)
    unproven = [each for each in paying if may_keep_answers(each) and _speedup(each) > beyond]
    beside = max(unproven, key=_speedup, default=None)
    return Choice(best.name if best else BASELINE, beside.name if beside else None)


def _claim(candidate: Candidate, concurrency: int) -> Claim:
    return Claim(
        candidate.name,
        candidate.speedup,
        candidate.speedup_ci,
        loss_upper=candidate.loss_upper,
        exact=candidate.exact,
        why_no_speed=candidate.no_speed,
        # One at a time, that is the speedup over again with other noise.
        throughput=candidate.throughput if concurrency > 1 else None,
    )


def pays(candidate: Candidate, concurrency: int) -> bool:
    """Whether it is faster than the target alone for all that is known, and does not do less in all."""
    return _claim(candidate, concurrency).pays()


def keeps_answers(candidate: Candidate) -> bool:
    """Whether it is exact, or known not to lose more than a point."""
    return _claim(candidate, 1).keeps(MOST_LOST)


def may_keep_answers(candidate: Candidate) -> bool:
    """Whether these prompts are too few to say that it keeps the answers, and too few to say that it does not."""
    if keeps_answers(candidate):
        return False
    return candidate.accuracy_delta_ci is None or candidate.accuracy_delta_ci[1] >= -MOST_LOST


def _speedup(candidate: Candidate) -> float:
    return candidate.speedup or 0.0


def _unless_auto_does(best: Candidate | None, paying: Sequence[Candidate]) -> Candidate | None:
    """The same drafter with "auto", where a fixed number of tokens is hardly faster."""
    if best is None or best.kind != "token" or best.num_tokens == "auto":
        return best
    same = (each for each in paying if each.kind == "token" and each.drafter == best.drafter)
    auto = next((each for each in same if each.num_tokens == "auto"), None)
    return auto if auto is not None and _speedup(best) < WORTH_FIXING * _speedup(auto) else best


def reasons(load: Load, trials: Sequence[Trial], memory: Memory) -> list[Reason]:
    """Why the target alone is advised, the plainest reason first."""
    found = [
        *_about_drafting(load, trials),
        *_about_length(load),
        *_about_passes(load),
        *_about_memory(memory),
    ]
    return found or [_not_shown(load)]


def _about_drafting(load: Load, trials: Sequence[Trial]) -> list[Reason]:
    tried = next((trial for trial in trials if trial.drafter == "draft-model"), None)
    if tried is None:
        tried = max(trials, key=lambda trial: trial.predicted, default=None)
    if tried is None or tried.predicted >= WORTH_IT:
        return []
    its = "the draft" if tried.drafter == "draft-model" else tried.drafter
    if tried.ideal < WORTH_IT:
        return [Reason(kind="slow draft", sentence=_too_slow(tried))]
    costs = formula.Costs(tried.cost, load.costs.target.pass_over_one)
    needed = formula.needed_acceptance(costs, WORTH_IT, tried.coverage)
    if needed is None:
        return [Reason(kind="few drafts", sentence=_too_seldom(its, tried))]
    told = (
        f"Too few of the tokens that come from {its} are right: {percent(tried.acceptance)} of those that are looked "
        f"at are accepted; at what drafting costs, a gain of a tenth would take {needed:.0%}."
    )
    return [Reason(kind="low acceptance", sentence=told)]


def _too_slow(tried: Trial) -> str:
    its = "The draft" if tried.drafter == "draft-model" else f"Drafting by {tried.drafter}"
    return (
        f"{its} is too slow: a drafted token takes {tried.cost:.2f} times as long as one that the target writes, so "
        f"even if every one were accepted, the speed would be {times(tried.ideal)[0]} the target's."
    )


def _too_seldom(its: str, tried: Trial) -> str:
    return (
        f"There is too seldom anything to draft: {its} has tokens to propose in {percent(tried.coverage)} of the "
        "rounds, which would not gain a tenth even if every one were accepted."
    )


def _about_length(load: Load) -> list[Reason]:
    if load.reading_share is None or load.reading_share < MOSTLY:
        return []
    told = (
        f"The answers are short compared with the prompts: {load.reading_share:.0%} of the target's time goes into "
        "reading prompts, which speculation does not make faster."
    )
    return [Reason(kind="short answers", sentence=told)]


def _about_passes(load: Load) -> list[Reason]:
    wide = load.costs.target.pass_over_one.get(WIDE)
    if wide is None or wide < FULL:
        return []
    at_once = load.costs.concurrency
    cause = f"{at_once} requests at once fill one" if at_once > 1 else "a single token keeps this hardware busy"
    told = (
        f"The target's passes have no room for drafted tokens: a pass over {WIDE} tokens takes as long as {wide:.1f} "
        f"passes over one, because {cause} already."
    )
    return [Reason(kind="full passes", sentence=told)]


def _about_memory(memory: Memory) -> list[Reason]:
    overhead = memory.draft_overhead
    if overhead is None or overhead < 1:
        return []
    return [Reason(kind="memory", sentence=f"The draft needs {overhead:.1f} times as much memory as the target.")]


def _not_shown(load: Load) -> Reason:
    exact = [each for each in load.candidates if each.name != BASELINE and each.exact and each.speedup is not None]
    fastest = max(exact, key=_speedup, default=None)
    if fastest is None:
        return Reason(kind="not shown", sentence="No other exact policy could be run on these prompts.")
    speed = joined(times(fastest.speedup, fastest.speedup_ci))
    lack = _short_of(fastest, load.costs.concurrency)
    return Reason(
        kind="not shown", sentence=f"The fastest exact policy, {fastest.name}, has {speed} the target's speed, {lack}."
    )


def _short_of(candidate: Candidate, concurrency: int) -> str:
    """What a policy lacks that does not pay."""
    if candidate.no_speed is not None:
        return f"which does not count: {candidate.no_speed}"
    if _speedup(candidate) <= 1:
        return "which is no gain"
    if concurrency > 1 and candidate.throughput is not None and candidate.throughput < 1:
        return f"but of all requests together it gets less done in a second ({times(candidate.throughput)[0]})"
    if candidate.speedup_ci is None:
        return "and so few prompts cannot tell that from none"
    return "so it may also be no faster; more prompts would tell"

"""Describes the findings in plain sentences."""

import math
from collections.abc import Iterable, Sequence

from stepspec.evaluation.advise.distance import step_costs
from stepspec.evaluation.advise.findings import Advice, Candidate, LoadFindings, Memory, PromptCounts, Trial
from stepspec.evaluation.advise.rule import MOSTLY, choose, keeps_answers
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.cells import count, joined, percent, percent_with_interval, seconds, significant, times
from stepspec.evaluation.stats import MIN_FOR_BOOTSTRAP

MAX_ROUNDS = 0.9
"""Share of rounds below which the sentences report how often a drafter proposes tokens."""


def sentences(
    advice: Advice,
    loads: Sequence[LoadFindings],
    trials: Sequence[Trial],
    memory: Memory,
    asked: PromptCounts,
    *,
    rereads: bool = False,
) -> list[str]:
    """Return the sentences of the advice: first the advice, then its evidence, then its limits.

    `rereads`: see `Measured`.
    """
    first = loads[0]
    chosen = first.named(advice.policy)
    assert chosen is not None, advice.policy
    return [
        *(_against(advice) if advice.policy == BASELINE else _for(advice, chosen, first, asked)),
        *_unproven(advice, first, asked),
        *_drafting(trials, first),
        *_steps(first, advice, asked),
        *_distance(first),
        *_lengths(first),
        *(_rereading(first) if rereads else ()),
        *_memory(memory, first),
        *_loads(advice, loads),
        *_limits(advice, first, asked),
    ]


def _for(advice: Advice, chosen: Candidate, load: LoadFindings, asked: PromptCounts) -> Iterable[str]:
    speed = joined(times(advice.speedup, advice.speedup_ci))
    yield (
        f"Speculation pays here: with {advice.policy} an answer comes {speed} as fast as from the target alone, on "
        f"{load.num_prompts:,} of your prompts."
    )
    if chosen.exact:
        yield "It is exact, in bfloat16 up to rounding: answers have the target's own distribution and need no check."
    else:
        yield (
            f"It is not exact, but with 95% confidence its {_share_name(asked)} is at most "
            f"{_points(chosen.loss_upper)} lower."
        )


def _against(advice: Advice) -> Iterable[str]:
    what = "exact speculation" if advice.unproven else "speculation"
    if any(reason.kind == "not shown" for reason in advice.reasons):
        yield f"These prompts do not show that {what} pays here. Use the target alone, or try more prompts (--limit)."
    else:
        yield f"Here {what} does not pay: use the target alone."
    for reason in advice.reasons:
        yield reason.sentence


def _unproven(advice: Advice, load: LoadFindings, asked: PromptCounts) -> Iterable[str]:
    candidate = load.named(advice.unproven or "")
    if candidate is None:
        return
    speed = joined(times(candidate.speedup, candidate.speedup_ci))
    still = "" if advice.policy == BASELINE else " still"
    if candidate.loss_upper is None:
        known, needed = "too many answers were cut short to measure their quality", ""
    else:
        lower, wanted = _points(candidate.loss_upper), candidate.num_to_know
        known = f"by these prompts, its {_share_name(asked)} may be up to {lower} lower"
        needed = f"; about {count(wanted, 'prompt')} would show it to within a point" if wanted else ""
    yield f"{candidate.name} is faster{still}, {speed}, but not exact, and {known}{needed}."


def _points(share: float | None) -> str:
    return "an unknown amount" if share is None else f"{100 * max(share, 0):.1f} points"


def _share_name(asked: PromptCounts) -> str:
    return "accuracy" if asked.graded else "agreement with the target's own answers"


def _drafting(trials: Sequence[Trial], load: LoadFindings) -> Iterable[str]:
    """Yield the speedup by the formula and the measured one."""
    tried = next((trial for trial in trials if trial.drafter == "draft-model"), None)
    tried = tried or max(trials, key=lambda trial: trial.predicted, default=None)
    if tried is None:
        return
    best = (
        f"{count(tried.best_num_tokens, 'token')} a round would be best, at {times(tried.predicted)[0]}"
        if tried.best_num_tokens
        else "no number of drafted tokens pays"
    )
    seldom = f"; it has tokens to propose in {tried.coverage:.0%} of the rounds" if tried.coverage < MAX_ROUNDS else ""
    yield (
        f"With {tried.drafter} a drafted token takes {tried.cost:.2f} times as long as one that the target writes, and "
        f"{percent(tried.acceptance)} of those that are checked are accepted{seldom}; by the formula "
        f"(arXiv:2211.17192), {best}{_reached(load, tried.drafter)}."
    )


def _reached(load: LoadFindings, drafter: str) -> str:
    same = [each for each in load.candidates if each.kind == "token" and each.drafter == drafter]
    measured = [
        ('"auto"' if each.num_tokens == "auto" else count(each.num_tokens, "token"))
        + f" gave {joined(times(each.speedup, each.speedup_ci))}"
        for each in same
    ]
    return f"; measured, {' and '.join(measured)}" if measured else ""


def _steps(load: LoadFindings, advice: Advice, asked: PromptCounts) -> Iterable[str]:
    for each in load.candidates:
        if each.kind != "step" or each.step_acceptance is None or each.name == advice.unproven:
            continue
        differs = ""
        if not keeps_answers(each) and each.accuracy_delta is not None:
            delta = joined(percent_with_interval(each.accuracy_delta, each.accuracy_delta_ci, sign="+"))
            differs = f", at a difference of {delta} in {_share_name(asked)}"
        yield (
            f"With {each.name} {each.step_acceptance:.0%} of the draft's steps are accepted, for "
            f"{joined(times(each.speedup, each.speedup_ci))} the target's speed{differs}."
        )


def _distance(load: LoadFindings) -> Iterable[str]:
    """Yield what the way to a distant draft costs, and up to which one its steps pay."""
    costs = step_costs(load)
    if costs is None:
        return
    yield (
        f"The draft is {seconds(costs.way_s)} away. A step of {costs.num_tokens:.0f} tokens takes it "
        f"{seconds(costs.way_s + costs.draft_s)} with the way; the target takes {seconds(costs.pass_s)} to read the "
        f"step and {seconds(costs.write_s)} to write it itself."
    )
    share = f"As {costs.accepted:.0%} of the steps are accepted under {costs.policy}, "
    if costs.max_way_s <= 0:
        yield f"{share}steps would not pay by these costs without the way either."
    elif costs.max_way_s < costs.way_s:
        yield (
            f"{share}steps do not pay by these costs. Put the draft nearer than about {seconds(costs.max_way_s)}, or "
            "use a policy without one."
        )
    else:
        yield f"{share}steps pay by these costs up to about {seconds(costs.max_way_s)}."


def _lengths(load: LoadFindings) -> Iterable[str]:
    costs = load.costs.target
    num_output, num_prompt = load.output_tokens.p50, load.prompt_tokens.p50
    medians = f"The median answer has {num_output:,.0f} tokens, the median prompt {num_prompt:,.0f}"
    if costs.read_s is None or load.reading_share is None:
        yield f"{medians}; the cost of reading a prompt is unknown, because the engine had cached them all."
        return
    shortest = short_answer(load)
    yield (
        f"{medians}; the target takes {seconds(costs.write_s)} to write a token and {seconds(costs.read_s)} to read "
        f"one, so {load.reading_share:.0%} of its time goes into reading"
        + (
            f". For answers below about {count(shortest, 'token')} reading takes over half, and little is left to gain."
            if shortest
            else "."
        )
    )


def _rereading(load: LoadFindings) -> Iterable[str]:
    """Yield what it costs that the target reads the whole text again to score a step."""
    read_s, length = load.costs.target.read_s, load.prompt_tokens.p50 + load.output_tokens.p50 / 2
    cost = "" if read_s is None else f", which takes {seconds(read_s * length)} in the middle of the median answer"
    yield (
        f"To judge a step by its likelihood, the target's server reads the whole text again{cost}, and longer as the "
        "text grows. Judges that ask for one token, such as yes-no, do not need that, nor does the torch engine."
    )


def short_answer(load: LoadFindings) -> int | None:
    """Return the answer length in tokens below which reading the median prompt takes over half of the target's time."""
    costs = load.costs
    if costs.target.read_s is None:
        return None
    reading_s = costs.concurrency * costs.target.read_s * load.prompt_tokens.p50
    return math.ceil(reading_s * (1 - MOSTLY) / MOSTLY / costs.target.write_s)


def _memory(memory: Memory, load: LoadFindings) -> Iterable[str]:
    if memory.target_bytes is None:
        if load.costs.draft is not None:
            yield "How much memory the draft takes is unknown, because the engine does not report it."
    elif memory.draft_bytes is not None:
        yield (
            f"Weights and caches of the draft take {_mib(memory.draft_bytes)} beside {_mib(memory.target_bytes)} of "
            f"the target's, {memory.draft_overhead:.0%} more. Where there is no room for that, only drafters without a "
            "model are left."
        )


def _mib(size: int) -> str:
    return f"{significant(size / 2**30)} GiB" if size >= 2**30 else f"{significant(size / 2**20)} MiB"


def _loads(advice: Advice, loads: Sequence[LoadFindings]) -> Iterable[str]:
    if len(loads) == 1 and loads[0].costs.concurrency == 1:
        if advice.policy != BASELINE:
            yield (
                "This is for one request at a time. Large batches leave less room for drafted tokens; measure yours "
                "with --concurrency 1,4,16."
            )
        return
    if len(loads) == 1:
        return
    if advice.policy == BASELINE:
        better = [load for load in loads[1:] if choose(load).policy != BASELINE]
        if better:
            at = " or ".join(str(load.costs.concurrency) for load in better)
            yield f"With {at} concurrent requests speculation pays; ask for that load alone with --concurrency."
        return
    ratios = [(load.costs.concurrency, load.named(advice.policy)) for load in loads]
    by_load = ", ".join(f"{at} concurrent {times(each.throughput)[0]}" for at, each in ratios if each is not None)
    most = loads[-1].costs.concurrency
    beyond = (
        f"; it pays at all of them, up to {most}"
        if advice.pays_up_to == most
        else f"; above a concurrency of {advice.pays_up_to} it is not known to pay: use the target alone there"
    )
    yield f"Requests finished in a second, over the target's: {by_load}{beyond}."


def _limits(advice: Advice, load: LoadFindings, asked: PromptCounts) -> Iterable[str]:
    """Yield the limits of the advice."""
    if load.num_prompts < MIN_FOR_BOOTSTRAP:
        yield (
            f"{count(load.num_prompts, 'prompt')} {_are(load.num_prompts)} too few for intervals, so this is a "
            f"first guess; give at least {MIN_FOR_BOOTSTRAP}."
        )
    if not asked.graded and any(not each.exact for each in load.candidates):
        yield (
            f"{asked.why_not_graded} So answers of policies that are not exact were compared with another answer of "
            "the target's own: by the last box or number, or else by the whole text. Exact ones need no such check."
        )
    cut = {each.name: each.num_cut_short for each in load.candidates if each.num_cut_short}
    if cut:
        worst = max(cut, key=lambda name: cut[name])
        most = f" and {cut[worst]:,} under {worst}" if cut[worst] > cut.get(BASELINE, 0) else ""
        yield (
            f"--max-tokens cut short {count(cut.get(BASELINE, 0), 'answer')} of the target alone{most}. Raise it, as "
            "what is cut short counts as wrong."
        )
    for each in load.candidates:
        if each.no_speed is not None:
            yield f"The speed of {each.name} does not count: {each.no_speed}."
    if load.num_failed:
        yield f"{count(load.num_failed, 'request')} ended in an error and count as wrong."
    if asked.num_too_long:
        yield f"{count(asked.num_too_long, 'prompt')} did not fit the models' context; the others were asked."
    if asked.num_shortened:
        yield f"Of {count(asked.num_shortened, 'conversation')} only the user's last message was asked."
    num_tried = len(load.candidates) - 1
    if num_tried > 1 and advice.policy != BASELINE:
        yield (
            f"As {advice.policy} is the fastest of {num_tried} that were tried, its speedup is slightly overestimated; "
            "expect a little less on other prompts."
        )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"

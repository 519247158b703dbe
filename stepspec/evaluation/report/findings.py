"""Findings of a run in sentences: the fastest policy that keeps the accuracy, exactness, and warnings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepspec.evaluation.records import BASELINE, VARIANT, PolicySummary, RunRecord, Summary
from stepspec.evaluation.report.cells import UNKNOWN, count, joined, percent, percent_with_interval, times
from stepspec.evaluation.report.figures import num_rows
from stepspec.evaluation.stats import MatchedPolicy, pareto_front
from stepspec.loop.result import NotProposed

FEW_PROBLEMS = 100
HARDLY = 0.02
"""Share of drafted tokens in the target's tokens below which token-level speculation was practically off."""
REFERENCES = ("draft", "always")
"""Policies without a judge, which every table shows beside those with one."""
WITH_TOKENS = {"specreason": "specreason-decode"}
"""Published methods without token-level speculation, and the same with it."""
FEW_PROPOSED = 0.1
"""Share of the steps below which the draft proposed hardly any."""
WHY_LEFT: Sequence[NotProposed] = ("the draft was too slow", "the draft failed", "too much was wasted")
"""Reasons for which a request goes on without its draft."""
MUCH_TROUBLE = 0.05
"""Share of rows from which a problem affects the meaning of the other figures."""


@dataclass(frozen=True)
class ReportFindings:
    """The sentences at the top of a report."""

    headline: str
    details: Sequence[str]
    exactness: str
    warnings: Sequence[str]


def findings(run: RunRecord, summary: Summary) -> ReportFindings:
    """Return the findings of a run, which come before its first table."""
    named = f"{count(summary.n, 'problem')} of {summary.benchmark}"
    details = [
        f"{count(len(summary.policies), 'policy').replace('policys', 'policies')} on {named}, paired by problem.",
        *_accuracies(summary),
        *_faster_ones(summary),
        *variants_on_front(summary),
        *draft_alone(run, summary),
    ]
    return ReportFindings(_headline(summary), details, _exactness(run, summary), list(_warnings(run, summary)))


def chosen_policy(summary: Summary) -> str | None:
    """Return the policy of the headline, or None if the run has no baseline."""
    return summary.matched.policy if summary.matched is not None else None


def front(summary: Summary) -> list[str]:
    """Return the policies that no other one matches or beats in accuracy and speed; none if only one has a speed."""
    points = {
        name: (policy.speedup_vs_target, policy.accuracy)
        for name, policy in summary.policies.items()
        if policy.speedup_vs_target is not None and policy.no_speed is None
    }
    best = pareto_front(points.values())
    return [name for name, point in points.items() if point in best] if len(points) > 1 else []


def variants_on_front(summary: Summary) -> list[str]:
    """Return a sentence on the front, if the run has variants of policies."""
    names = front(summary)
    if not names or not any(map(VARIANT.match, summary.policies)):
        return []
    return [f"On the front of accuracy and speed, by the measured values alone: {_list(names)}."]


def not_run(run: RunRecord) -> list[str]:
    """Return the policies that a table has to show beside those of a run, and that did not run."""
    wanted = [*REFERENCES, *(other for name, other in WITH_TOKENS.items() if name in run.policies)]
    return [name for name in wanted if name not in run.policies] if run.engines.get("draft") else []


def draft_alone(run: RunRecord, summary: Summary) -> Iterable[str]:
    """Yield what the draft alone loses, and that it is the answer if it keeps the accuracy by the rule of `Matched`."""
    for name, policy in summary.policies.items():
        if run.kind_of(name) != "draft" or policy.accuracy_delta_ci is None or policy.accuracy_loss_upper95 is None:
            continue
        gain = joined(percent_with_interval(policy.accuracy_delta, policy.accuracy_delta_ci, sign="+"))
        found = f"The draft alone {lost_and_won(policy, summary)}, a difference of {gain}"
        if policy.accuracy_kept == "within a point":
            yield f"{found}: it keeps the target's accuracy to within a point, so the draft is the answer here."
        elif policy.accuracy_delta_ci[1] < 0:
            yield f"{found}: it is less accurate than the target."
        else:
            yield (
                f"{found}: no loss is known, and at 95% it is at most {percent(policy.accuracy_loss_upper95)}. If that "
                "is acceptable, the draft is the answer here, without any speculation."
            )


def lost_and_won(policy: PolicySummary, summary: Summary) -> str:
    """Return the problems that a policy lost and won against the target, after its name."""
    lost, won = (UNKNOWN if number is None else f"{number:g}" for number in (policy.lost, policy.won))
    compared = summary.n if policy.num_compared is None else policy.num_compared
    return f"lost {lost} and won {won} of {count(compared, 'problem')}"


def unproven(summary: Summary) -> Mapping[str, PolicySummary]:
    """Return the policies that are faster than the headline's, and not known to keep the accuracy."""
    chosen = summary.policies.get(chosen_policy(summary) or "")
    return {
        name: policy
        for name, policy in summary.policies.items()
        if policy.accuracy_delta is not None and _pays(name, policy, summary)
        if chosen is None or (policy.speedup_vs_target or 0) > (chosen.speedup_vs_target or 0)
    }


def speeds_that_do_not_count(summary: Summary) -> list[str]:
    """Return a sentence for each policy whose speed does not count. Tables show a dash for it."""
    return [
        f"The speed of {name} does not count: {policy.no_speed}."
        for name, policy in summary.policies.items()
        if policy.no_speed is not None
    ]


def steps_not_proposed(summary: Summary) -> list[str]:
    """Return a sentence for each policy whose draft proposed hardly any steps, or was often left in the middle."""
    found: list[str] = []
    for name, policy in summary.policies.items():
        rows, why = num_rows(policy), policy.not_proposed
        if policy.steps_proposed is None or "the policy proposes none" in why:
            continue
        left = sum(number for reason, number in why.items() if reason in WHY_LEFT)
        if policy.steps_proposed < FEW_PROPOSED * (policy.steps or 0) or left > MUCH_TROUBLE * rows:
            reasons = _list(f"{reason} in {number:,}" for reason, number in why.items()) or "none is known"
            proposed = (
                f"the draft proposed {count(policy.steps_proposed, 'step')}; the texts have {policy.steps or 0:,}"
            )
            found.append(f"{name}: {proposed}. Why no more, in {count(rows, 'request')}: {reasons}.")
    return found


def _headline(summary: Summary) -> str:
    if not any(map(_num_answered, summary.policies.values())):
        return "No policy answered anything: every text was cut off or has no answer in it, or the request failed."
    if summary.matched is None:
        return f"Results of {_list(summary.policies)} on {summary.benchmark}."
    if not _num_answered(summary.policies[BASELINE]):
        return "The target alone answered nothing, so there is no speed to compare with."
    keeps = f"keeps the target's {summary.named('accuracy')} to within {points(summary.matched.loss)}"
    name = summary.matched.policy
    if name == BASELINE:
        return f"No policy that {keeps} is known to be faster than the target alone."
    speed = joined(times(summary.policies[name].speedup_vs_target, summary.policies[name].speedup_vs_target_ci))
    return f"The fastest policy that {keeps} is {name}: {speed} as fast as the target alone."


def _num_answered(policy: PolicySummary) -> int:
    return num_rows(policy) + policy.failed - policy.unanswered


def _accuracies(summary: Summary) -> Iterable[str]:
    name = chosen_policy(summary)
    policy, target = summary.policies.get(name or ""), summary.policies.get(BASELINE)
    if policy is None or target is None or policy is target:
        return
    if policy.accuracy_delta is not None:
        yield _accuracy_gain(name or "", policy, target, summary)
    if policy.speedup_vs_token is not None and policy.speedup_vs_token_ci is not None:
        speed = joined(times(policy.speedup_vs_token, policy.speedup_vs_token_ci))
        if name != summary.token_baseline and policy.speedup_vs_token != 1:
            yield f"It is {speed} as fast as token-level speculation."
    if policy.length_ratio is not None and abs(policy.length_ratio - 1) >= 0.05:
        more = "more" if policy.length_ratio > 1 else "fewer"
        change = f"{percent(abs(policy.length_ratio - 1))} {more} tokens than the target"
        yield f"It writes {change}; its speedup includes that."


def _accuracy_gain(name: str, policy: PolicySummary, target: PolicySummary, summary: Summary) -> str:
    gain = joined(percent_with_interval(policy.accuracy_delta, policy.accuracy_delta_ci, sign="+"))
    # Each accuracy covers all rows of its policy, so their difference equals the gain only if no rows are missing.
    if any(num_rows(each) != summary.n * summary.num_repeats for each in (policy, target)):
        return (
            f"The accuracy of {name} minus the target's is {gain} on the problems that have ended, with an answer or "
            "an error, under every policy in the tables. The accuracies in the tables are over all problems that have "
            "ended under each policy."
        )
    own, other = (joined(percent_with_interval(each.accuracy, each.accuracy_ci)) for each in (policy, target))
    return f"{name} answers {own} correctly and the target {other}, a difference of {gain} on the same problems."


def _faster_ones(summary: Summary) -> Iterable[str]:
    faster = [
        f"{name} ({times(policy.speedup_vs_target)[0]}, accuracy "
        f"{joined(percent_with_interval(policy.accuracy_delta, policy.accuracy_delta_ci, sign='+'))}, "
        f"{lost_and_won(policy, summary)})"
        for name, policy in unproven(summary).items()
    ]
    if faster:
        yield f"Faster, but not known to keep the accuracy: {_list(faster)}."


def _pays(name: str, policy: PolicySummary, summary: Summary) -> bool:
    """Return whether a policy is faster than the target by the rule of the headline."""
    together = policy.throughput if summary.concurrency > 1 else None
    return MatchedPolicy(
        name,
        policy.speedup_vs_target,
        policy.speedup_vs_target_ci,
        why_no_speed=policy.no_speed,
        throughput=together and together.speedup_vs_target,
    ).pays()


def _exactness(run: RunRecord, summary: Summary) -> str:
    exact = [name for name in summary.policies if run.is_exact(name) and name != BASELINE]
    others = [name for name in summary.policies if not run.is_exact(name)]
    sentences: list[str] = []
    if exact:
        rounding = "." if run.exact_in_words == "exact" else ", except that near ties can resolve differently."
        sentences.append(f"{_list(exact)}: {run.exact_in_words}. The output has the target's distribution{rounding}")
    if others:
        sentences.append(f"{_list(others)}: not exact. Answers can differ, and the measured accuracy includes this.")
    return " ".join(sentences)


def _warnings(run: RunRecord, summary: Summary) -> Iterable[str]:
    yield from speeds_that_do_not_count(summary)
    yield from steps_not_proposed(summary)
    if summary.busy:
        yield summary.busy
    yield from _failures(run, summary)
    yield from (f"{name}: {note}" for name, policy in run.policies.items() for note in policy.notes)
    if summary.n < run.num_problems:
        yield f"{summary.n:,} of {count(run.num_problems, 'problem')} are finished under every policy in the tables."
    yield from _too_few(summary)
    if not any(run.kind_of(name) == "token" for name in summary.policies):
        yield "No policy with token-level speculation alone was run, so it is unknown whether steps beat tokens."
    if missing := [name for name in not_run(run) if name in REFERENCES]:
        yield f"Not run: {_list(missing)}. So it is unknown whether the draft needs a judge, or the target."
    for name, policy in summary.policies.items():
        yield from _troubles(name, policy)
    if summary.concurrency > 1:
        yield (
            "Concurrent requests depend on each other, so the interval of the speedup may be too narrow. Use the "
            "interval of the throughput, which is over blocks."
        )
    if run.commit is not None and run.commit.endswith("-dirty"):
        yield "The code had uncommitted changes."


def _failures(run: RunRecord, summary: Summary) -> Iterable[str]:
    failed = {name: policy.failed for name, policy in summary.policies.items()} | summary.failed
    for name in sorted(filter(failed.get, failed), key=[*run.policies, *failed].index):
        policy = summary.policies.get(name)
        if policy is None:
            ended = f"{count(failed[name], 'request')} ended in an error and none was finished"
            yield f"{name}: {ended}. The tables omit it."
            continue
        of_all = f"{failed[name]:,} of {count(failed[name] + num_rows(policy), 'request')}"
        others = joined(percent_with_interval(policy.accuracy_without_failed, policy.accuracy_without_failed_ci))
        yield f"{name}: {of_all} ended in an error and count as not correct; of the others {others} are correct."
    yield from failures_in_words(summary)


def failures_in_words(summary: Summary) -> list[str]:
    """Return a sentence on the requests that ended in an error, if there are any."""
    if (first := summary.first_failure) is None:
        return []
    failed = f"{count(sum(summary.failed.values()), 'request')} failed and count as not correct. "
    reason = f"{first.policy} on {first.problem}: {first.error.removesuffix('.')}. All errors are in failures.jsonl."
    return [failed + reason + ("" if first.too_long else " 'stepspec eval --retry-errors' repeats them.")]


def _too_few(summary: Summary) -> Iterable[str]:
    if summary.n >= FEW_PROBLEMS:
        return
    needed = [policy.n_for_one_point for policy in summary.policies.values() if policy.n_for_one_point is not None]
    advice = f" To know accuracies to within a point, run {count(max(needed), 'problem')}." if needed else ""
    yield f"With only {count(summary.n, 'problem')} the intervals are wide.{advice}"
    if any(
        each.speedup_vs_target is not None and each.speedup_vs_target_ci is None for each in summary.policies.values()
    ):
        yield "Ratios have no intervals, because too few problems were run to estimate their spread."


def _troubles(name: str, policy: PolicySummary) -> Iterable[str]:
    rows, strict = num_rows(policy), policy.strict_accuracy
    if policy.truncated > MUCH_TROUBLE * rows:
        yield f"{name}: {percent(policy.truncated / rows)} of the answers were cut off by the token limit."
    if strict is not None and policy.accuracy - strict > MUCH_TROUBLE * policy.accuracy:
        yield f"{name}: {percent(1 - strict / policy.accuracy)} of the accuracy is by the last number of a text alone."
    unread = policy.parse_errors + policy.timeouts
    if unread > MUCH_TROUBLE * rows:
        yield f"{name}: {count(unread, 'answer')} could not be read and count as not correct."
    written = policy.tokens.regenerated + policy.tokens.forced
    if policy.token_drafted and policy.token_drafted < HARDLY * written:
        yield (
            f"{name}: hardly any tokens were drafted ({policy.token_drafted:,}, with {written:,} written), because "
            "drafting did not pay in the measurements at the start of the run. It may pay on an idle machine."
        )
    if not policy.token_level_exact:
        yield f"{name}: drafted tokens are accepted by a relaxed rule, so the text is not as the target would write it."


def differing_conditions(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about differences that make runs hard to compare."""
    fields = {
        "hardware": "different hardware",
        "versions": "different versions of the libraries",
        "commit": "different commits",
        "pair": "different models",
        "data_sha256": "different data",
        "prompt_version": "different prompts",
    }
    different = [words for field, words in fields.items() if len({repr(getattr(run, field)) for run in runs}) > 1]
    return [f"These runs have {_list(different)}: compare them carefully."] if different else []


def points(share: float) -> str:
    """Return a share in percentage points."""
    return "a point" if share == 0.01 else f"{100 * share:g} points"


def _list(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    listed = list(names)
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)

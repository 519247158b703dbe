"""Computes the results at one load from the rows and the summary of a run."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from stepspec.errors import StepSpecError
from stepspec.evaluation.advise.findings import Candidate, LoadFindings, PairCosts
from stepspec.evaluation.records import BASELINE, PolicySummary, ResultRow, RunRecord, Summary
from stepspec.evaluation.run.tally import percentiles_of
from stepspec.evaluation.stats import Paired, corrected_confidence
from stepspec.loop.policy import Policy

MANY_CUT_SHORT = 0.2
"""Share of the target's answers that are cut short, above which agreement between policies says little."""


def make_load(
    costs: PairCosts, run: RunRecord, policies: Mapping[str, Policy], summary: Summary, rows: Iterable[ResultRow]
) -> LoadFindings:
    """Return the results at one load.

    Raises:
        StepSpecError: the target finished no prompt, so there is no baseline.
    """
    by_policy: dict[str, dict[str, ResultRow]] = {name: {} for name in run.policies}
    lengths: dict[str, list[int]] = {name: [] for name in run.policies}
    for row in rows:
        lengths[row.policy] += [step.num_tokens for step in row.steps if step.origin == "draft"]
        by_policy[row.policy][row.problem] = row.without_steps()
    target = list(by_policy[BASELINE].values())
    if not target:
        raise StepSpecError(
            f"The target finished none of the prompts at concurrency {costs.concurrency}, so there is no baseline. See "
            "failures.jsonl in the run's folder for the reason. Fix it, and give another folder with --output."
        )
    many_cut_short = summary.policies[BASELINE].truncated > MANY_CUT_SHORT * len(target)
    losses = {} if many_cut_short else _losses(run, by_policy)
    return LoadFindings(
        costs=costs,
        num_prompts=summary.n,
        num_failed=sum(summary.failed.values()),
        prompt_tokens=percentiles_of([row.num_prompt_tokens for row in target]),
        output_tokens=percentiles_of([row.tokens.committed for row in target]),
        reading_share=_reading_share(costs, target),
        candidates=[
            _candidate(name, run, policies[name], each, losses.get(name), lengths[name])
            for name, each in summary.policies.items()
        ],
    )


def _candidate(
    name: str, run: RunRecord, policy: Policy, summary: PolicySummary, loss: float | None, lengths: Sequence[int]
) -> Candidate:
    record = run.policies[name]
    assert record.kind is not None
    return Candidate(
        name=name,
        kind=record.kind,
        exact=record.exact,
        drafter=policy.token.drafting.drafter,
        num_tokens=policy.token.num_tokens,
        speedup=summary.speedup_vs_target,
        speedup_ci=summary.speedup_vs_target_ci,
        throughput=summary.throughput and summary.throughput.speedup_vs_target,
        accuracy=summary.accuracy,
        accuracy_ci=summary.accuracy_ci,
        accuracy_delta=summary.accuracy_delta,
        accuracy_delta_ci=summary.accuracy_delta_ci,
        loss_upper=loss,
        num_to_know=summary.n_for_one_point,
        token_acceptance=summary.token_acceptance,
        step_acceptance=summary.step_acceptance,
        step_tokens=fmean(lengths) if lengths else None,
        length_ratio=summary.length_ratio,
        num_cut_short=summary.truncated,
        no_speed=summary.no_speed,
        time_s=summary.time_s,
    )


def _losses(run: RunRecord, by_policy: Mapping[str, Mapping[str, ResultRow]]) -> dict[str, float]:
    """Return upper bounds of the inexact policies' accuracy losses that hold jointly (Bonferroni)."""
    inexact = [name for name, record in run.policies.items() if not record.exact]
    # A prompt without a row ended in an error and counts as not correct.
    ids = sorted(set[str]().union(*by_policy.values()))
    confidence = corrected_confidence(len(inexact))
    return {
        name: Paired.of(_scores(by_policy[name], ids), _scores(by_policy[BASELINE], ids)).loss_upper(confidence)
        for name in inexact
    }


def _scores(rows: Mapping[str, ResultRow], ids: Sequence[str]) -> list[list[float]]:
    return [[float(id in rows and rows[id].status == "correct")] for id in ids]


def _reading_share(costs: PairCosts, rows: Sequence[ResultRow]) -> float | None:
    """Return the share of the target's time spent on reading prompts; None if unknown.

    Computed from the costs per token, because an engine reads a cached prompt in no time.
    """
    if costs.target.read_s is None or not rows:
        return None
    # Concurrent prompts share the engine, so each takes `concurrency` times as long. Tokens are generated in one batch.
    reading = costs.concurrency * costs.target.read_s * sum(row.num_prompt_tokens for row in rows)
    writing = costs.target.write_s * sum(row.tokens.committed for row in rows)
    return reading / (reading + writing) if reading + writing else None

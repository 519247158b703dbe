"""Summarizes rows: accuracies with intervals, speedups over the same problems, rates and sums.

A policy's own figures cover all its rows. Paired figures cover the (problem, repeat) pairs that are finished under
every policy with any row, summed per problem. Pairs that ran on different machines count for no time. Accuracies count
requests that ended in an error as not correct. The target's accuracy is not compared with itself, so those fields are
null.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stepspec.evaluation.records import (
    BASELINE,
    Block,
    Estimate,
    Failure,
    Node,
    PolicySummary,
    ResultRow,
    RunRecord,
    Summary,
)
from stepspec.evaluation.repeats import at_k
from stepspec.evaluation.run.groups import groups
from stepspec.evaluation.run.pairs import MATCHED_LOSS, Pairs
from stepspec.evaluation.run.tally import Table, Tally, percentiles
from stepspec.evaluation.run.throughput import throughputs
from stepspec.evaluation.runs import iter_blocks, iter_failures, iter_rows

BUSY = 0.1
"""Share of the processors that other programs may use without a warning."""
WANTED_ACCURACY_WIDTH = 0.01
"""Half-width of the interval of the accuracy difference that `n_for_one_point` plans for."""


def summarise(
    run: RunRecord, rows: Iterable[ResultRow], blocks: Iterable[Block] = (), failures: Iterable[Failure] = ()
) -> Summary:
    """Return the summary of a run, complete or not, without policies that have no row."""
    table, all_blocks = Table(run.policies, rows, failures), list(blocks)
    pairs = Pairs(run, table)
    rates, parts = throughputs(all_blocks, list(table.begun), run.seed), groups(table, pairs)
    # Without concurrency, throughput repeats the request speedup with different noise.
    throughput = {name: rate.speedup_vs_target for name, rate in rates.items()} if run.concurrency > 1 else {}
    candidates = pairs.candidates(throughput)
    kept = {each.name: "within a point" if each.keeps(MATCHED_LOSS) else "not known" for each in candidates}
    kept |= {each.name: run.exact_in_words for each in candidates if each.exact}
    lacking = [each for each in candidates if each.why_no_speed is not None]
    kept |= {each.name: "not known" for each in lacking if not each.exact or table.answered(each.name).only_target}
    policies = {
        policy: _summarise_policy(policy, tally, pairs).model_copy(
            update={
                **_answers(policy, table),
                **(_strict_accuracy(tally) if run.reading != "strict" else {}),
                "accuracy_kept": kept.get(policy),
                "token_level_exact": run.policies[policy].token_level_exact,
                "throughput": rates.get(policy),
                "groups": parts.get(policy, {}),
                **_processors([block for block in all_blocks if block.policy == policy]),
            }
        )
        for policy, tally in table.begun.items()
    }
    return Summary(
        benchmark=run.benchmark,
        n=table.num_finished,
        temperature=run.temperature,
        concurrency=run.concurrency,
        pair=run.pair,
        policies=policies,
        num_rows=sum(len(tally.figures) for tally in table.tallies.values()),
        failed={policy: len(tally.failed) for policy, tally in table.tallies.items() if tally.failed},
        first_failure=table.first_failure,
        token_baseline=pairs.token_baseline,
        matched=pairs.matched(candidates),
        num_repeats=run.num_repeats,
        reading=run.reading,
        nodes=_nodes(all_blocks, run),
        num_apart=len(table.apart),
        busy=_busy(
            {policy: each.others_share for policy, each in policies.items() if each.others_share is not None}, run
        ),
    )


def summary_of(run: RunRecord, folder: Path) -> Summary:
    """Return the summary of what is stored in the folder of a run.

    Raises:
        UsageError: a file is damaged.
        StepSpecError: a file cannot be read.
    """
    return summarise(run, iter_rows(folder), iter_blocks(folder), iter_failures(folder))


def _processors(blocks: Sequence[Block]) -> Mapping[str, float]:
    """Return the processor seconds of a policy's blocks, and the mean share of the processors that others used."""
    own = [block.cpu_s for block in blocks if block.cpu_s is not None]
    others = [(block.others_share, block.wall_s) for block in blocks if block.others_share is not None]
    found = {"cpu_s": sum(own)} if own else {}
    if others:
        found["others_share"] = sum(share * wall_s for share, wall_s in others) / sum(wall_s for _, wall_s in others)
    return found


def _busy(others: Mapping[str, float], run: RunRecord) -> str | None:
    """Return a warning if other programs kept the machine busy. A server of a model may be one of them."""
    found = ", ".join(f"{share:.0%} under {policy}" for policy, share in others.items() if share > BUSY)
    if not found or any(engine is not None and engine.is_server for engine in run.engines.values()):
        return None
    return (
        f"Other programs used the machine's processors ({found}), so times are too long. Run it again when it is idle."
    )


def _nodes(blocks: Sequence[Block], run: RunRecord) -> list[Node]:
    """Return the machines of a run on several, each as it was when it had the most workers."""
    found: dict[str, Node] = {}
    if not any(block.node for block in blocks):
        return []
    first = Node(name=f"machine {run.machine or 'of the start'}", hardware=run.hardware)
    for node in (block.node or first for block in blocks):
        if node.name not in found or found[node.name].num_workers < node.num_workers:
            found[node.name] = node
    return [found[name] for name in sorted(found)]


def _strict_accuracy(tally: Tally) -> Mapping[str, object]:
    share = tally.accuracy(strict=True)
    return {"strict_accuracy": share.value, "strict_accuracy_ci": share.interval()}


def _answers(policy: str, table: Table) -> Mapping[str, object]:
    """Return the counts of requests that the policy left unanswered, alone and compared with the target."""
    tally = table.begun[policy]
    unanswered = {"failed": len(tally.failed), "unanswered": len(tally.ended - tally.answered)}
    if BASELINE not in table.begun:
        return unanswered
    answered = table.answered(policy)
    compared = {"answers_lost": answered.only_target, "answers_gained": answered.only_policy}
    return unanswered | compared | {"no_speed": table.why_no_speed(policy)}


def _summarise_policy(policy: str, tally: Tally, pairs: Pairs) -> PolicySummary:
    accuracy, finished = tally.accuracy(), tally.accuracy(without_failed=True)
    tokens, time_s, counts = tally.tokens, tally.time_s, tally.counts
    timed = tally.timed
    wall_s = sum(figures.wall_s for figures in timed)
    delta, steps = pairs.accuracy(policy), tally.step_acceptance
    speedup, speedup_ci = pairs.ratio("speedup", policy)
    vs_token, vs_token_ci = pairs.ratio("speedup vs token", policy)
    length, length_ci = pairs.ratio("length", policy)
    rate, rate_ci = pairs.ratio("rate", policy)
    median, median_ci = pairs.median_speedup(policy)
    return PolicySummary(
        n=accuracy.num_problems,
        accuracy=accuracy.value,
        accuracy_ci=accuracy.interval(),
        at_k={name: Estimate(value=share.value, ci=share.interval()) for name, share in at_k(tally.samples).items()},
        accuracy_without_failed=finished.value,
        accuracy_without_failed_ci=finished.interval(),
        accuracy_delta=delta and delta.difference,
        accuracy_delta_ci=delta and delta.interval(),
        accuracy_loss_upper95=delta and delta.loss_upper(),
        num_compared=delta and round(delta.n),
        lost=delta and delta.only_second,
        won=delta and delta.only_first,
        accuracy_p=delta and delta.p_value(pairs.rng()),
        wall_s=wall_s,
        speedup_vs_target=speedup,
        speedup_vs_target_ci=speedup_ci,
        speedup_vs_token=vs_token,
        speedup_vs_token_ci=vs_token_ci,
        speedup_median=median,
        speedup_median_ci=median_ci,
        length_ratio=length,
        length_ratio_ci=length_ci,
        tokens_per_s_ratio=rate,
        tokens_per_s_ratio_ci=rate_ci,
        steps=counts["steps"],
        steps_proposed=tally.steps_proposed,
        not_proposed=dict(tally.not_proposed.most_common()),
        step_acceptance=steps and steps.value,
        step_acceptance_ci=steps and steps.interval(),
        token_acceptance=_share(counts["token_accepted"], counts["token_drafted"]),
        token_drafted=counts["token_drafted"],
        relaxed_share=_share(counts["relaxed_tokens"], counts["committed"]),
        tokens_per_target_pass=_share(counts["committed"], counts["target_passes"]),
        judge_controller_share=(time_s.judge + time_s.controller) / wall_s if wall_s else 0.0,
        tokens=tokens,
        time_s=time_s,
        truncated=counts["truncated"],
        no_answer=counts["no_answer"],
        num_rows=len(tally.figures),
        parse_errors=counts["parse_error"],
        timeouts=counts["timeout"],
        latency_s=percentiles(figures.wall_s for figures in timed),
        first_step_s=percentiles(figures.first_step_s for figures in timed),
        first_answer_s=percentiles(figures.first_answer_s for figures in timed),
        longest_gap_s=percentiles(figures.longest_gap_s for figures in timed),
        n_for_one_point=delta and delta.n_for_half_width(WANTED_ACCURACY_WIDTH),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

"""Blocks of README and docs that are generated from runs: tables with their conditions, and a headline."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from evals.bench import lab
from evals.bench.results import Results, runs_in_words
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, RunRecord, Summary
from stepspec.evaluation.report.cells import count, joined, times
from stepspec.evaluation.report.conditions import hardware_in_words, pair_in_words
from stepspec.evaluation.report.figures import (
    ACCURACY,
    ACCURACY_GAIN,
    ACCURACY_KEPT,
    LOSS_BOUND,
    LOST_AND_WON,
    SPEEDUP,
    SPEEDUP_VS_TOKEN,
    STEPS_ACCEPTED,
    TOKENS_RELAXED,
    TRUNCATED,
)
from stepspec.evaluation.report.findings import (
    draft_alone,
    lost_and_won,
    points,
    speeds_that_do_not_count,
    unproven,
)
from stepspec.evaluation.report.tables import markdown_table, not_run_rows, written

GAINS_TEMPERATURE = 0.6
GAINS_COSTS = (((0.26, 0.065), "speed on two CPU cores"), ((0.1, 0.0), "speed where a drafted token costs 0.1 passes"))
OVERVIEW = (ACCURACY, ACCURACY_GAIN, LOST_AND_WON, ACCURACY_KEPT, SPEEDUP, SPEEDUP_VS_TOKEN, STEPS_ACCEPTED)
"""The columns of an overview of several benchmarks."""
ACCURACIES = (ACCURACY, ACCURACY_GAIN, LOST_AND_WON, LOSS_BOUND, TOKENS_RELAXED, TRUNCATED)

Drafts = Mapping[tuple[str, float], str]
"""The accuracy of the draft alone in another run, by benchmark and temperature."""


def _draft(run: RunRecord, drafts: Drafts) -> str:
    return drafts.get((run.benchmark, run.temperature), "")


def overview_block(results: Results, drafts: Drafts = MappingProxyType({})) -> str:
    """Return one table of several benchmarks and temperatures: main columns, and a sentence for each benchmark."""
    rows: list[list[str]] = []
    notes: list[str] = []
    for run, summary in results:
        ran = [[name, *(written(column, each) for column in OVERVIEW)] for name, each in summary.policies.items()]
        ran += not_run_rows(run, len(OVERVIEW), _draft(run, drafts))
        rows += [[f"{run.benchmark}, {run.temperature:g}", *row] for row in ran]
        notes += [
            f"{run.benchmark}: {count(summary.n, 'problem')}, at most {run.max_tokens:,} tokens each, "
            f"concurrency {run.concurrency}, {hardware_in_words(run.hardware)}.",
            *([f"{run.benchmark}: accuracy in the {summary.reading} reading."] if summary.reading else []),
            *speeds_that_do_not_count(summary),
        ]
    table = markdown_table(["benchmark, temperature", "policy", *(column.title for column in OVERVIEW)], rows)
    return f"{table}\n\n{' '.join(dict.fromkeys(notes))} Intervals are 95%."


def accuracy_block(results: Results) -> str:
    """Return one table of the accuracies of several runs, of any concurrency."""
    rows = [
        [f"{run.benchmark}, {run.temperature:g}", f"{summary.n:,}", name, *(written(each, of) for each in ACCURACIES)]
        for run, summary in results
        for name, of in summary.policies.items()
    ]
    heads = ("benchmark, temperature", "problems", "policy", *(column.title for column in ACCURACIES))
    return "\n\n".join(
        [
            markdown_table(heads, rows),
            "Intervals are 95%.",
            "\n".join(dict.fromkeys(f"- {runs_in_words([run])}" for run, _ in results)),
        ]
    )


def gains_block(file: Path) -> str:
    """Return a table of the rules of the lab at temperature 0.6, from what `python -m evals.bench lab --json` wrote."""
    found = lab.Findings.model_validate_json(file.read_text("utf-8"))
    shown = [each for each in found.figures if each.temperature == GAINS_TEMPERATURE]
    places = [found.costs.index(cost) for cost, _ in GAINS_COSTS]
    heads = ("acceptance rule", "right answers", "gain, points", "relaxed tokens", *(words for _, words in GAINS_COSTS))
    rows = [
        [
            each.setting,
            f"{each.correct:.1%} of {each.problems}",
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * share for share in (each.difference, *each.interval))),
            f"{each.relaxed:.1%}",
            *(f"{each.speeds[place][0]:.2f}×" for place in places),
        ]
        for each in sorted(shown, key=lambda each: (each.setting != BASELINE, each.setting != "exact", each.setting))
    ]
    about = (
        f"GSM8K with the pair `{found.pair}` at temperature {GAINS_TEMPERATURE:g}, at most 448 tokens; 95% intervals."
    )
    speeds = "Speeds are times the target alone, computed from these texts and the measured costs of passes."
    return f"{markdown_table(heads, rows)}\n\n{about} {speeds}"


def headline(results: Results, draft: Results = ()) -> str:
    """Return the headline of a README: what the report of each run finds, with conditions.

    A policy that is not known to keep the accuracy is named with the problems that it lost and won, without its speed.

    Args:
        results: the runs.
        draft: runs of the same benchmark with the draft alone, if these have none.

    Raises:
        UsageError: a run lacks the target, or the runs differ in problems, concurrency or hardware.
    """
    run, summary = results[0]
    summaries = [each for _, each in results]
    shared = [(each.data_sha256, each.concurrency, each.hardware, other.n) for each, other in results]
    if any(each != shared[0] for each in shared):
        raise UsageError("A headline of several runs needs the same problems, concurrency and hardware in all of them.")
    alone = [
        f"{sentence} (Temperature {each.temperature:g}{', another run' if other not in summaries else ''}.)"
        for each, other in (*results, *draft)
        for sentence in draft_alone(each, other)
    ]
    conditions = f"concurrency {run.concurrency}, {hardware_in_words(run.hardware)}, 95% intervals"
    about = f"{count(summary.n, 'problem')} of {run.benchmark} with {pair_in_words(run.engines)} ({conditions}):"
    return " ".join([about, *(_at_temperature(*each) for each in results), *alone])


def _at_temperature(run: RunRecord, summary: Summary) -> str:
    if summary.matched is None:
        raise UsageError("The headline needs a run of the policy target.")
    name, at = summary.matched.policy, f"at temperature {run.temperature:g}"
    keeps = f"keeps the target's {summary.named('accuracy')} to within {points(summary.matched.loss)}"
    if name == BASELINE:
        found = f"No policy that {keeps} is known to be faster than the target alone {at}."
    else:
        policy = summary.policies[name]
        speed = joined(times(policy.speedup_vs_target, policy.speedup_vs_target_ci))
        found = (
            f"The fastest policy that {keeps} {at} is `{name}`, {speed} as fast as the target alone "
            f"({policy.accuracy_kept}; {lost_and_won(policy, summary)})."
        )
    others = [f"`{name}` {lost_and_won(policy, summary)}" for name, policy in unproven(summary).items()]
    return f"{found} Faster, but not known to keep it: {'; '.join(others)}." if others else found

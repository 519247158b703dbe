"""Speeds of policies over several runs of the same problems, such as at other hours and in another order.

    python -m evals.bench speeds RUNS/1 RUNS/2 RUNS/3 --json evals/results/speeds/qwen.json

An interval covers both what other problems and what other runs would give. Its half width is, on a log scale, the root
of the summed squares of two: the mean half width of the runs' own intervals, which resample problems, and that of
Student's t for the mean of the runs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal

import typer

from evals.bench.results import read_results
from evals.bench.speed import UNKNOWN, cells_table
from stepspec.cli.output import JsonOption, finish
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, Conditions, EngineRecord, PolicySummary, Record
from stepspec.evaluation.report.cells import joined, times
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.stats.untyped import scipy_stats

HEADS = ("policy", "runs", "speed over target", "speed over token", "CPU ms a token", "first step", "longest gap")
Estimate = tuple[float, tuple[float, float]]


class PolicySpeed(Record):
    """A policy over all runs. Ratios have 95% intervals; times are medians over problems, and means over runs."""

    name: str
    over_target: Estimate | None
    over_token: Estimate | None
    cpu_ms: float | None
    """Processor time of a committed token, in milliseconds."""
    first_step_s: float | None
    longest_gap_s: float | None


class Speeds(Conditions):
    """The file that `--json` writes."""

    version: Literal[1] = 1
    benchmark: str
    num_problems: int
    temperature: float
    max_tokens: int
    runs: list[str]
    """When they began."""
    engines: dict[str, EngineRecord | None]
    policies: list[PolicySpeed]


def over_runs(estimates: Sequence[tuple[float, tuple[float, float] | None]]) -> Estimate | None:
    """Return the mean of ratios over runs with its interval; None if a run has no interval, or there is only one."""
    if len(estimates) < 2 or any(interval is None for _, interval in estimates):
        return None
    logs = [math.log(value) for value, _ in estimates]
    of_problems = fmean(math.log(high / low) / 2 for _, (low, high) in estimates)  # pyright: ignore
    number = len(logs)
    of_runs = float(scipy_stats.t.ppf(0.975, number - 1)) * stdev(logs) / math.sqrt(number)
    half, mean = math.hypot(of_problems, of_runs), fmean(logs)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def speed_of(name: str, found: Sequence[PolicySummary]) -> PolicySpeed:
    """Return the speeds of a policy from its summaries in all runs."""

    def ratio(of: str) -> Estimate | None:
        values = [(getattr(each, f"speedup_vs_{of}"), getattr(each, f"speedup_vs_{of}_ci")) for each in found]
        return None if any(value is None for value, _ in values) else over_runs(values)

    def median(of: str) -> float | None:
        values = [getattr(each, of) for each in found]
        return fmean(each.p50 for each in values) if all(values) else None

    cpu = [1000 * each.cpu_s / each.tokens.committed for each in found if each.cpu_s and each.tokens.committed]
    return PolicySpeed(
        name=name,
        over_target=ratio("target"),
        over_token=ratio("token"),
        cpu_ms=fmean(cpu) if cpu else None,
        first_step_s=median("first_step_s"),
        longest_gap_s=median("longest_gap_s"),
    )


def rows_of(found: Speeds) -> list[list[str]]:
    """Return the rows of the table."""

    def ratio(value: Estimate | None) -> str:
        return joined(times(None) if value is None else times(*value))

    def number(value: float | None, unit: str = "") -> str:
        return UNKNOWN if value is None else f"{value:.3g}{unit}"

    return [
        [
            *(each.name, str(len(found.runs)), "1.00×" if each.name == BASELINE else ratio(each.over_target)),
            *("1.00×" if each.name == "token" else ratio(each.over_token), number(each.cpu_ms)),
            *(number(each.first_step_s, " s"), number(each.longest_gap_s, " s")),
        ]
        for each in found.policies
    ]


def in_words(found: Speeds) -> str:
    """Return what was measured."""
    return (
        f"{found.benchmark}, the same {found.num_problems} problems in {len(found.runs)} runs under policies in turn; "
        f"temperature {found.temperature:g}, at most {found.max_tokens:,} tokens a problem, concurrency 1; "
        f"{models_in_words(found.engines)}"
    )


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of the same problems under the same policies.")],
    json_file: JsonOption = None,
) -> None:
    """Join the speeds of several runs, with intervals that cover the run."""
    results = [each for folder in runs for each in read_results(folder)]
    first = results[0][0]
    if any(name not in summary.policies for run, summary in results for name in run.policies):
        raise UsageError("A run has a policy without a finished problem. Finish it first.")
    for run, _ in results:
        if (run.benchmark, run.temperature, run.num_problems, run.max_tokens, run.concurrency, *run.policies) != (
            *(first.benchmark, first.temperature, first.num_problems, first.max_tokens, 1),
            *first.policies,
        ):
            raise UsageError("The runs must be of the same problems under the same policies, at concurrency 1.")
    found = Speeds(
        **{name: getattr(first, name) for name in Conditions.model_fields},
        benchmark=first.benchmark,
        num_problems=first.num_problems,
        temperature=first.temperature,
        max_tokens=first.max_tokens,
        runs=[run.started for run, _ in results],
        engines=first.engines,
        policies=[speed_of(name, [summary.policies[name] for _, summary in results]) for name in first.policies],
    )
    finish([cells_table("Speeds over several runs", HEADS, rows_of(found)), in_words(found)], found, json_file)

"""Throughput of policies under load, over that of token-level speculation.

stepspec eval gsm-mini --concurrency 4,16,64 --limit 512 --policy target --policy token --policy two-level --output RUNS
python -m evals.bench loads RUNS evals/results/loads/embedded.json
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from evals.bench.results import runs_in_words
from evals.bench.speed import with_interval
from stepspec.errors import UsageError
from stepspec.evaluation.records import Block, Record, RunRecord
from stepspec.evaluation.report.tables import markdown_table
from stepspec.evaluation.runs import find_runs, iter_blocks, read_run
from stepspec.evaluation.stats.ratios import ratio_of_rates

REFERENCE = "token"


class AtLoad(Record):
    """A policy at a number of concurrent requests."""

    policy: str
    concurrency: int
    problems: int
    tokens_per_s: float
    ratio: float
    """Tokens per second over those of token-level speculation, over the same blocks of problems."""
    ratio_ci: tuple[float, float] | None
    """Its 95% interval over blocks; None if they are too few."""


class Loads(Record):
    """The file that this command writes."""

    version: Literal[2] = 2
    runs: list[RunRecord]
    results: list[AtLoad]


def compare(folder: Path) -> Loads:
    """Compare the throughput of the policies in runs.

    Raises:
        UsageError: there is no run, or one lacks the policy `REFERENCE`.
    """
    runs, results = list[RunRecord](), list[AtLoad]()
    for each in find_runs(folder):
        runs.append(read_run(each))
        blocks: dict[str, dict[frozenset[tuple[str, int]], Block]] = {}
        for block in iter_blocks(each):
            blocks.setdefault(block.policy, {})[frozenset(block.jobs)] = block
        if REFERENCE not in blocks:
            raise UsageError(f"{each} has no block under the policy {REFERENCE!r}.")
        for name in runs[-1].policies:
            shared = [jobs for jobs in blocks[REFERENCE] if jobs in blocks.get(name, {})]
            if not shared:
                raise UsageError(f"{each} has no block that ran under both {name!r} and {REFERENCE!r}.")
            of_both = [[blocks[policy][jobs] for jobs in shared] for policy in (name, REFERENCE)]
            own, reference = (
                ([block.committed_tokens for block in found], [block.wall_s for block in found]) for found in of_both
            )
            ratio, interval = ratio_of_rates(own, reference, np.random.default_rng(0))
            results.append(
                AtLoad(
                    policy=name,
                    concurrency=runs[-1].concurrency,
                    problems=sum(len(jobs) for jobs in shared),
                    tokens_per_s=sum(own[0]) / sum(own[1]),
                    ratio=ratio,
                    ratio_ci=interval,
                )
            )
    return Loads(runs=runs, results=results)


def loads_block(file: Path) -> str:
    """Return a Markdown table of a file: tokens per second, and over token-level speculation."""
    found = Loads.model_validate_json(file.read_text("utf-8"))
    rows = [
        [
            str(each.concurrency),
            each.policy,
            f"{each.problems:,}",
            f"{each.tokens_per_s:,.0f}",
            with_interval(each.ratio, each.ratio_ci),
        ]
        for each in found.results
    ]
    table = markdown_table(["concurrency", "policy", "problems", "tokens/s", "over token"], rows)
    return f"{table}\n\n{runs_in_words(found.runs)} Intervals are 95%."


def main(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Compare the throughput of the policies in runs, and print the table."""
    file.write_text(compare(runs).model_dump_json(indent=1) + "\n", "utf-8")
    print(loads_block(file))

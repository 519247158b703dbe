"""Measure how well a certificate notices other kinds of problems: the share of prompts that are below its bound.

The bound is that of a calibration on the first problems of `--known`. All problems are asked in the same wording, so
that only the problems differ.

    python -m evals.bench kinds --pair qwen --known train.jsonl test=test.jsonl typed=typed.jsonl --json FILE
"""

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from evals.bench.speed import cells_table
from stepspec.api.models import close_now, load_pair
from stepspec.cli.options import PairOption
from stepspec.cli.output import JsonOption, finish
from stepspec.errors import UsageError
from stepspec.evaluation.calibrate.task import NUM_READ
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, EngineRecord, Record
from stepspec.evaluation.report.cells import count, percent
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run import EvalProblem, load_benchmark
from stepspec.evaluation.run.conditions import engine_records, prompt_logprobs
from stepspec.evaluation.run.data import read_rows
from stepspec.loop.certificate import least_logprob

HEADS = ("problems", "number", "called another kind", "lowest", "median", "highest")


class Kind(Record):
    """The prompts of one file: their mean log-probabilities under the target, and how many are below the bound."""

    name: str
    num_problems: int
    below: float
    """Share of the prompts below the bound. One request with such a prompt is called another kind of problems."""
    quantiles: tuple[float, float, float]
    """The lowest value, the median and the highest."""


class Kinds(Conditions):
    """The file that `--json` writes."""

    version: Literal[1] = 1
    benchmark: str
    num_known: int
    """Problems that set the bound."""
    bound: float
    engines: dict[str, EngineRecord | None]
    kinds: tuple[Kind, ...]


def kind_of(name: str, values: Sequence[float], bound: float) -> Kind:
    """Return what is said of the prompts of one file."""
    ordered = sorted(values)
    quantiles = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    below = sum(value < bound for value in values) / len(values)
    return Kind(name=name, num_problems=len(values), below=below, quantiles=quantiles)


def rows_of(found: Kinds) -> list[list[str]]:
    """Return the rows of the table, by `HEADS`."""
    return [
        [each.name, f"{each.num_problems:,}", percent(each.below), *(f"{value:.2f}" for value in each.quantiles)]
        for each in found.kinds
    ]


def in_words(found: Kinds) -> str:
    """Return what set the bound, without a period at the end."""
    known = count(found.num_known, "problem")
    return (
        f"{known} of {found.benchmark} set the bound, {found.bound:.2f} nats a token; {models_in_words(found.engines)}"
    )


def read_problems(file: Path, limit: int) -> list[EvalProblem]:
    """Return the first problems of a file with a "question" on each line; their answers do not matter.

    Raises:
        UsageError: the file cannot be read, or a line has no question.
    """
    problems: list[EvalProblem] = []
    for row in islice(read_rows(file), limit):
        question = row.fields.get("question")
        if not isinstance(question, str) or not question.strip():
            raise UsageError(f'{row.where} has no "question".')
        problems.append(EvalProblem(str(len(problems)), question, gold=""))
    return problems


def main(
    files: Annotated[list[str], typer.Argument(metavar="NAME=FILE ...", help="Files of problems, with their names.")],
    known: Annotated[Path, typer.Option(metavar="FILE", help="Problems that set the bound.")],
    benchmark: Annotated[str, typer.Option(help="A benchmark, for the wording.")] = "gsm8k",
    pair: PairOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Most problems of each file.")] = 400,
    json_file: JsonOption = None,
) -> None:
    """Measure which problems a certificate calls another kind."""
    wording, about = load_benchmark(benchmark)[1], conditions()
    named = [each.partition("=") for each in files]
    if wrong := [name for name, _, file in named if not (name and file)]:
        raise UsageError(f"Problems are NAME=FILE, got {wrong[0]}.")
    problems = {name: read_problems(Path(file), limit) for name, _, file in named}
    to_know = read_problems(known, NUM_READ)
    models = load_pair(pair=pair, notes=False)
    try:

        async def read() -> tuple[list[float], dict[str, list[float]]]:
            own = await prompt_logprobs(wording, to_know, NUM_READ, models)
            return own, {name: await prompt_logprobs(wording, each, limit, models) for name, each in problems.items()}

        own, values = asyncio.run(read())
        bound = least_logprob(own)
        if bound is None:
            raise UsageError(f"{known} has too few problems for a bound: {len(own)}.")
        found = Kinds(
            **about,
            benchmark=benchmark,
            num_known=len(own),
            bound=bound,
            engines=engine_records(models),
            kinds=tuple(kind_of(name, each, bound) for name, each in values.items()),
        )
    finally:
        close_now(models)
    finish([cells_table("Problems of another kind", HEADS, rows_of(found)), in_words(found)], found, json_file)

"""Speed and acceptance by the length of the context: many small problems asked in one conversation.

A conversation goes on for thousands of tokens, with the reference answers as its earlier replies, so that all policies
answer each question after the same text. It shows what the length of a context costs, not how difficult long reasoning
is: no question depends on an earlier one.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from evals.bench.problems import BENCHMARK
from evals.bench.speed import cells_table, with_interval
from evals.training.gsm_mini import load_split
from stepspec.api.models import load_pair
from stepspec.api.session import StepSpec
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, EngineRecord, Record
from stepspec.evaluation.report.cells import count
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run.conditions import engine_records
from stepspec.evaluation.stats.ratios import ratio_of_rates

EDGES = (500, 1000, 2000, 4000)
"""Upper edges of the ranges of context lengths, in tokens. The last range is open."""
MAX_TOKENS = 640
REPLY = "The answer is \\boxed{{{}}}."


class AtContext(Record):
    """A policy on all questions whose context has a length in one range."""

    policy: str
    up_to: int | None
    """Upper edge of the range in tokens; None for the last range."""
    questions: int
    tokens_per_s: float
    speedup: float
    """Tokens per second over those of the first policy, on the same questions."""
    speedup_ci: tuple[float, float] | None
    """Its 95% interval over conversations; None if they are too few."""
    steps_accepted: float | None
    """Share of accepted steps among the judged ones; None if none was judged."""
    from_draft: float
    """Share of the tokens that are the draft's."""
    ms_per_token: float
    correct: float


class Conversations(Conditions):
    """The file that `python -m evals.bench conversation --json` writes."""

    version: Literal[1] = 1
    benchmark: str
    temperature: float
    conversations: int
    context: int
    """Tokens after which a conversation ends."""
    engines: dict[str, EngineRecord | None]
    results: list[AtContext]


Turn = tuple[int, int]
"""Number of a conversation, and index of a range of context lengths."""
Sums = NDArray[np.float64]
Figures = Mapping[Turn, Sums]
"""By turn, sums of: seconds, tokens, tokens of the draft, judged steps, accepted steps, right answers, questions."""


async def converse(
    specs: Mapping[str, StepSpec],
    problems: Iterator[tuple[str, str]],
    conversations: int,
    context: int,
    temperature: float,
    correct: Callable[[str, str], bool],
    progress: Callable[[None, int, int], None],
) -> list[AtContext]:
    """Ask problems in conversations, each of them under every policy in turn.

    Args:
        specs: the session of each policy; the first one is the baseline.
        problems: questions and answers, without an end.
        conversations: number of conversations.
        context: tokens after which a conversation ends.
        temperature: sampling temperature.
        correct: whether a text gives the answer.
        progress: called with None, and the numbers of finished and of all conversations.
    """
    sums: dict[str, dict[Turn, Sums]] = {name: defaultdict(lambda: np.zeros(7)) for name in specs}
    names = [*specs]
    for number in range(conversations):
        history: list[Mapping[str, str]] = []
        length, turn = 0, 0
        for spec in specs.values():
            await spec.forget()
        while length < context:
            question, answer = next(problems)
            asked = [*history, {"role": "user", "content": question}]
            first = turn % len(names)  # it alone reads the question; the others find it in the prefix cache
            for name in (*names[first:], *names[:first]):
                since = time.perf_counter()
                sampling = Sampling(temperature, seed=number * 1000 + turn)
                found = await specs[name].generate(asked, max_tokens=MAX_TOKENS, sampling=sampling)
                seconds, counts = time.perf_counter() - since, found.counts
                length = found.num_prompt_tokens
                figures = (seconds, counts.committed, counts.accepted, counts.steps_judged, counts.steps_accepted)
                sums[name][number, at_context(length)] += (*figures, correct(found.answer, answer), 1)
            history = [*asked, {"role": "assistant", "content": REPLY.format(answer)}]
            turn += 1
        progress(None, number + 1, conversations)
    return [
        _at(name, index, sums[name], sums[names[0]], conversations)
        for index in range(len(EDGES) + 1)
        for name in names
        if any(place == index for _, place in sums[name])
    ]


def at_context(length: int) -> int:
    """Return the index of the range that a context length is in."""
    return sum(length > edge for edge in EDGES)


def _at(name: str, index: int, own: Figures, baseline: Figures, conversations: int) -> AtContext:
    own_rows, base_rows = (
        np.array([figures.get((number, index), np.zeros(7)) for number in range(conversations)])
        for figures in (own, baseline)
    )
    rows = own_rows[:, 6] > 0
    own_rows, base_rows = own_rows[rows], base_rows[rows]
    own_rate, base_rate = ((each[:, 1], each[:, 0]) for each in (own_rows, base_rows))
    ratio, interval = ratio_of_rates(own_rate, base_rate, np.random.default_rng(0))
    seconds, tokens, drafted, judged, accepted, correct, questions = own_rows.sum(axis=0)
    return AtContext(
        policy=name,
        up_to=EDGES[index] if index < len(EDGES) else None,
        questions=int(questions),
        tokens_per_s=tokens / seconds,
        speedup=ratio,
        speedup_ci=interval,
        steps_accepted=accepted / judged if judged else None,
        from_draft=drafted / tokens,
        ms_per_token=1000 * seconds / tokens,
        correct=correct / questions,
    )


def range_in_words(up_to: int | None) -> str:
    """Return a range of context lengths by its upper edge; None for the last range."""
    return f"up to {up_to:,}" if up_to else f"beyond {EDGES[-1]:,}"


HEADS = ("context", "policy", "questions", "ms a token", "speedup", "steps accepted", "from the draft", "correct")


def rows_of(found: Conversations) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            range_in_words(each.up_to),
            each.policy,
            str(each.questions),
            f"{each.ms_per_token:.2f}",
            with_interval(each.speedup, each.speedup_ci),
            "–" if each.steps_accepted is None else f"{each.steps_accepted:.1%}",
            f"{each.from_draft:.0%}",
            f"{each.correct:.0%}",
        ]
        for each in found.results
    ]


def in_words(found: Conversations) -> str:
    """Return what was measured."""
    talks = f"{count(found.conversations, 'conversation')} of {found.context:,} tokens"
    return f"{found.benchmark}, {talks}, temperature {found.temperature:g}; {models_in_words(found.engines)}"


def conversations_table(found: Conversations) -> Table:
    """Return a terminal table by context length."""
    return cells_table(f"{found.conversations} conversations, by tokens before the answer", HEADS, rows_of(found))


def main(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeat it for several. Default: target, token and two-level.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 10,
    context: Annotated[int, typer.Option(min=1, help="Tokens after which a conversation ends.")] = 4000,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Compare policies over long conversations of small problems, by the length of the context."""
    asked = cycle((each.question, str(each.answer)) for each in load_split("test"))
    about, models = conditions(), load_pair(target, draft, pair=pair, notes=False)
    longest = min(engine.max_context for engine in (models.target, models.draft) if engine is not None)
    if context >= longest:
        raise UsageError(f"--context {context:,} leaves no room in the models' context of {longest:,} tokens.")
    with asyncio.Runner() as runner, make_meter() as meter, Grading("number") as grading:
        specs = {
            Path(each).stem: StepSpec(policy=each, pair=models) for each in policy or ("target", "token", "two-level")
        }
        meter.begin("conversations")

        def correct(text: str, answer: str) -> bool:
            return grading.grade(text, answer).status == "correct"

        results = runner.run(converse(specs, asked, conversations, context, temperature, correct, meter.show))
        engines = engine_records(models)
        runner.run(models.aclose())
    found = Conversations.model_validate(
        {
            **about,
            "benchmark": BENCHMARK,
            "temperature": temperature,
            "conversations": conversations,
            "context": context,
            "engines": engines,
            "results": results,
        }
    )
    finish([conversations_table(found)], found, json_file)

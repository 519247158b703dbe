"""What servers can do, as found by asking them, and what a judgment costs after short and long texts."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from evals.bench.speed import cells_table
from evals.training.gsm_mini import load_split
from stepspec.api.models import load_pair
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.protocol import Engine, TokenBuffer, Verify
from stepspec.errors import UsageError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, Record

CONTEXTS = (1_000, 8_000)
"""Tokens before a step."""
STEP_TOKENS = 32
TURNS = 3
"""Judgments of which the median counts, after a first one that reads the text."""


class Judging(Record):
    """The seconds of a judgment of a step of `STEP_TOKENS`, medians of `TURNS`, after a text that was read before."""

    context: int
    scored_s: float | None
    """With the log-probabilities of the step's tokens; None if the server returns none."""
    asked_s: float
    """With the next token alone."""


class ServerRow(Record):
    """One model on a server, or on an engine in this process.

    Attributes:
        name: name and version of the server, or where the engine runs.
        model: name of the model, without the folder that it is in.
        takes_ids: whether prompts may be token ids.
        gives_ids: whether it returns token ids.
        num_logprobs: number of top tokens with log-probabilities.
        written_logprobs: whether it returns the log-probabilities of what it writes.
        scores: the route by which it scores a step; None if it does not.
        cached: whether it scores from its prefix cache.
        schema: the field for a JSON schema; None if there is none.
        several_prompts: whether one call can have several prompts.
        takes_salt: whether its cache can be cleared for a measurement.
        speculation: its own speculation; None if unknown.
        judging: what judgments cost.
    """

    name: str
    model: str
    takes_ids: bool
    gives_ids: bool
    num_logprobs: int
    written_logprobs: bool
    scores: str | None
    cached: bool
    schema_field: str | None
    several_prompts: bool
    takes_salt: bool
    speculation: str | None
    judging: list[Judging]


class Servers(Conditions):
    """The file that `python -m evals.bench servers --json` writes."""

    version: Literal[1] = 1
    results: list[ServerRow]


async def server_row(engine: Engine, title: str | None = None) -> ServerRow:
    """Return what is known of a loaded engine, and measure its judgments. `title` is a name for the row."""
    server: Any = getattr(engine, "server", None)
    abilities, judging = engine.abilities, [await _judging(engine, count) for count in CONTEXTS if _fits(engine, count)]
    return ServerRow(
        name=title or (server.kind if server is not None else "in this process"),
        model=engine.name.rstrip("/").rpartition("/")[2],
        takes_ids=server is None or server.takes_ids,
        gives_ids=server is None or server.gives_ids,
        num_logprobs=server.num_logprobs if server is not None else engine.tokenizer.num_ids or 0,
        written_logprobs="logprobs" in abilities,
        scores=(server.scores if server is not None else "in process") if "scores" in abilities else None,
        cached="cached scores" in abilities,
        schema_field=server.schema_field if server is not None else "in process",
        several_prompts=server is None or server.several_prompts,
        takes_salt="forget" in abilities,
        speculation=engine.own_speculation,
        judging=judging,
    )


def _fits(engine: Engine, count: int) -> bool:
    return engine.max_context > count + 2 * STEP_TOKENS


async def _judging(engine: Engine, count: int) -> Judging:
    """Measure judgments after a text of `count` tokens."""
    texts = (engine.tokenizer.encode_text(problem.question) for problem in load_split("test"))
    ids = [*islice(chain.from_iterable(texts), count + STEP_TOKENS)]
    buffer, rng = TokenBuffer(ids[:count]), random.Random(0)
    asked, scored = ([rng.sample(ids[count:], STEP_TOKENS) for _ in range(TURNS + 1)] for _ in range(2))
    asked_s = await _seconds(engine, buffer, asked, scores=False)
    scored_s = await _seconds(engine, buffer, scored, scores=True) if "scores" in engine.abilities else None
    return Judging(context=count, scored_s=scored_s, asked_s=asked_s)


async def _seconds(engine: Engine, buffer: TokenBuffer, steps: Sequence[Sequence[int]], *, scores: bool) -> float:
    """Return the median seconds of a pass over a step. The first one reads the text and does not count."""
    found: list[float] = []
    for step in steps:
        since = time.perf_counter()
        await engine.verify(Verify(buffer, step, scores=scores))
        found.append(time.perf_counter() - since)
    return statistics.median(found[1:])


HEADS = (
    *(
        "server",
        "model",
        "ids in",
        "ids out",
        "log-probs",
        "of its text",
        "scores",
        "schema",
        "several prompts",
        "cache salt",
    ),
    *(f"{kind}, {count:,}" for count in CONTEXTS for kind in ("scored", "asked")),
)


def rows_of(found: Servers) -> list[list[str]]:
    """Return the rows of the table, with seconds of judgments after each number of tokens."""
    return [
        [
            each.name,
            each.model,
            *map(_yes, (each.takes_ids, each.gives_ids)),
            f"{each.num_logprobs:,}" if each.num_logprobs else "–",
            _yes(each.written_logprobs),
            f"{each.scores}, cached" if each.scores and each.cached else each.scores or "–",
            each.schema_field or "–",
            *map(_yes, (each.several_prompts, each.takes_salt)),
            *_seconds_of(each.judging),
        ]
        for each in found.results
    ]


def _seconds_of(judging: Sequence[Judging]) -> Sequence[str]:
    by_context = {each.context: each for each in judging}
    cells: list[str] = []
    for count in CONTEXTS:
        each = by_context.get(count)
        cells += ["–" if each is None or each.scored_s is None else f"{each.scored_s:.3f} s"]
        cells += ["–" if each is None else f"{each.asked_s:.3f} s"]
    return cells


def _yes(holds: bool) -> str:
    return "yes" if holds else "–"


def in_words(found: Servers) -> str:
    """Return what was measured."""
    return f"A step of {STEP_TOKENS} tokens after 1,000 and 8,000 tokens, median of {TURNS}"


def servers_table(found: Servers) -> Table:
    """Return the table for a terminal."""
    return cells_table("What servers can do", HEADS, rows_of(found))


def main(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Servers as http://HOST:PORT/v1#NAME, or torch:FOLDER.")
    ],
    title: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Names of the rows, in order, for servers that tell none.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask servers what they can do, and measure what a judgment costs after short and long texts."""
    if title and len(title) != len(models):
        raise UsageError(f"There are {len(models)} models, but {len(title)} times --title. Give one for each, or none.")
    about, rows = conditions(), list[ServerRow]()
    with asyncio.Runner() as runner:
        for model, name in zip(models, title or [None] * len(models), strict=True):
            pair = load_pair(model, needs_draft=False, notes=False)
            try:
                rows.append(runner.run(server_row(pair.target, name)))
            finally:
                runner.run(pair.aclose())
    found = Servers.model_validate({**about, "results": rows})
    finish([servers_table(found)], found, json_file)

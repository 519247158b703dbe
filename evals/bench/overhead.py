"""What speculation on steps costs with a draft that is of no use: the time of a policy over that of its own target.

The baseline is the target with the policy's own token-level speculation, which a useless draft of steps does not
change. Blocks of problems run both ways, one after the other and in alternating order.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
import typer
from rich.table import Table

from evals.bench.problems import BENCHMARK, questions
from evals.bench.speed import cells_table
from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import Engine, Generate, Sampling, TokenChunk
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, EngineRecord, Record
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run.conditions import engine_records
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.loop.breaker import Breaker
from stepspec.loop.policy import Policy, load_policy

Kind = Literal["random", "wrong", "slow", "stalling"]
KINDS: Sequence[Kind] = get_args(Kind)
LIMIT = 1.05
"""Most seconds that a policy may take for a second of its own target."""
MAX_TOKENS = 640


class HostileDraft:
    """A draft whose steps are of no use.

    Args:
        draft: the draft that writes them.
        kind: `random` replaces every token but the last two, which end the step, by a random one. `wrong` replaces
            every digit by a random one. `slow` takes as long for a token as the target. `stalling` never answers.
        words: ids to choose random tokens from.
        token_s: seconds that the target takes for a token.
    """

    def __init__(self, draft: Engine, kind: Kind, words: Sequence[int], token_s: float) -> None:
        self._draft, self._kind, self._words, self._token_s = draft, kind, words, token_s
        self._rng = random.Random(0)
        self._digits = [draft.tokenizer.encode_text(digit)[-1] for digit in "0123456789"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`."""
        if self._kind == "stalling":
            await asyncio.Event().wait()
        since = time.perf_counter()
        async for chunk in self._draft.generate(call):
            if self._kind == "slow":
                await asyncio.sleep(len(chunk.ids) * self._token_s - (time.perf_counter() - since))
            yield replace(chunk, ids=tuple(self._changed(chunk.ids)))
            since = time.perf_counter()

    def _changed(self, ids: Sequence[int]) -> list[int]:
        if self._kind == "wrong":
            return [self._rng.choice(self._digits) if id in self._digits else id for id in ids]
        if self._kind == "random":
            return [*(self._rng.choice(self._words) for _ in ids[:-2]), *ids[-2:]]
        return [*ids]


class Overhead(Record):
    """What a policy takes with one kind of draft, over what its own target takes."""

    kind: Kind
    concurrency: int
    num_problems: int
    ratio: float
    """Seconds over those of the target, all requests together, the first one included."""
    ratio_ci: tuple[float, float] | None
    """Its 95% interval over blocks of problems; None if they are too few."""
    token_ratio: float
    """The same for the seconds a committed token."""
    from_draft: float
    """Share of the committed tokens that are the draft's."""


class Overheads(Conditions):
    """The overheads of a policy."""

    policy: str
    benchmark: str
    temperature: float
    limit: float = LIMIT
    engines: dict[str, EngineRecord | None]
    results: list[Overhead]

    @property
    def holds(self) -> bool:
        """Whether no draft makes the policy slower than the limit."""
        return all(each.ratio <= self.limit for each in self.results)


Progress = Callable[[None, int, int], None]


def own_target(policy: Policy) -> Policy:
    """Return the policy of a policy's target alone, with its token-level speculation."""
    return Policy(version=1, summary="the target alone", family="target", token=policy.token)


async def overhead(
    pair: Pair,
    policies: tuple[Policy, Policy],
    kind: Kind,
    questions: Sequence[str],
    concurrency: int,
    temperature: float,
    progress: Progress,
) -> Overhead:
    """Run questions under a policy with a hostile draft and under its own target.

    Args:
        pair: target and draft.
        policies: the policy, and the one for its target alone.
        kind: what the draft does.
        questions: the questions, each used once.
        concurrency: requests beside each other. A block has five times as many problems.
        temperature: sampling temperature.
        progress: called with None, and the numbers of finished and of all questions.
    """
    assert pair.draft is not None
    own = StepSpec(policy=policies[1], pair=pair)
    first = await own.generate(questions[0], max_tokens=MAX_TOKENS)  # the first request allocates
    token_s = first.times.wall / first.counts.committed
    words = [id for question in questions for id in pair.target.tokenizer.encode_text(question)]
    draft = cast("Engine", HostileDraft(pair.draft, kind, words, token_s))
    ways = StepSpec(policy=policies[0], pair=replace(pair, draft=draft, breaker=Breaker())), own

    async def run(spec: StepSpec, block: Sequence[tuple[int, str]]) -> tuple[float, int, int]:
        free = asyncio.Semaphore(concurrency)

        async def one(seed: int, question: str) -> tuple[int, int]:
            async with free:
                sampling = Sampling(temperature, seed=seed)
                counts = (await spec.generate(question, max_tokens=MAX_TOKENS, sampling=sampling)).counts
            return counts.committed, counts.accepted

        await pair.forget()  # the other way has left prompts in the prefix cache
        since = time.perf_counter()
        found = await asyncio.gather(*(one(*each) for each in block))
        seconds = time.perf_counter() - since
        return seconds, sum(committed for committed, _ in found), sum(accepted for _, accepted in found)

    # At both ends of a block few requests run, but in a long one the machine and the target's drafting change too much.
    size = 1 if concurrency == 1 else 5 * concurrency
    numbered = [*enumerate(questions)]
    blocks = [numbered[start : start + size] for start in range(0, len(numbered), size)]
    measured = np.zeros((len(blocks), 2, 3))
    for number, block in enumerate(blocks):
        for way in (0, 1) if number % 2 else (1, 0):
            measured[number, way] = await run(ways[way], block)
        progress(None, min(len(questions), (number + 1) * size), len(questions))
    (seconds, tokens, accepted), (own_s, own_tokens, _) = measured.sum(axis=0)
    ratio, interval = ratio_of_sums(measured[:, 0, 0], measured[:, 1, 0], np.random.default_rng(0))
    return Overhead(
        kind=kind,
        concurrency=concurrency,
        num_problems=len(questions),
        ratio=ratio,
        ratio_ci=interval,
        token_ratio=seconds / tokens / (own_s / own_tokens),
        from_draft=accepted / tokens,
    )


HEADS = ("draft", "concurrency", "problems", "seconds", "seconds a token", "from the draft")


def rows_of(found: Overheads) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.kind,
            str(each.concurrency),
            str(each.num_problems),
            f"{each.ratio:.3f}" + ("" if each.ratio_ci is None else " [{:.3f}, {:.3f}]".format(*each.ratio_ci)),
            f"{each.token_ratio:.3f}",
            f"{each.from_draft:.0%}",
        ]
        for each in found.results
    ]


def in_words(found: Overheads) -> str:
    """Return what was measured."""
    about = f"{found.policy} on {found.benchmark}, temperature {found.temperature:g}"
    return f"{about}; {models_in_words(found.engines)}"


def overheads_table(found: Overheads) -> Table:
    """Return a terminal table of overheads."""
    title = f"seconds of {found.policy} over those of its own target, at most {found.limit:g}"
    return cells_table(title, HEADS, rows_of(found))


def main(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: Annotated[str, typer.Option(help="A step-level policy.")] = "two-level",
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What the draft does; repeat it for several. Default: all."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1 and 16.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what a policy costs with a draft that is of no use."""
    for name in kind or ():
        if name not in KINDS:
            raise UsageError(unknown_name("draft", name, KINDS))
    kinds: Sequence[Kind] = [each for each in KINDS if not kind or each in kind]
    loaded = load_policy(policy)[0]
    if not loaded.settings.judged:
        raise UsageError(f"{policy!r} does not speculate on steps. Name a policy that does, such as two-level.")
    asked, about, results = questions(limit), conditions(), list[Overhead]()
    models = load_pair(target, draft, pair=pair, notes=False)
    ways = loaded, own_target(loaded)
    with asyncio.Runner() as runner, make_meter() as meter:
        for number, name in product(concurrency or (1, 16), kinds):
            meter.begin(f"{name}, concurrency {number}")
            results.append(runner.run(overhead(models, ways, name, asked, number, temperature, meter.show)))
        engines = engine_records(models)
        runner.run(models.aclose())
    about |= {"policy": policy, "benchmark": BENCHMARK, "temperature": temperature, "engines": engines}
    found = Overheads.model_validate({**about, "results": results})
    finish([overheads_table(found)], found, json_file)
    if not found.holds:
        raise typer.Exit(1)

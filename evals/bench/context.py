"""Cost of a step that is judged, rejected and regenerated, by the length of the context."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated

import typer

from evals.bench.engine import Subject, load_subject, measured
from evals.bench.hooks import blind_engine
from evals.bench.speed import ContextCosts, costs_table
from stepspec.cli.options import TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.evaluation.machine import conditions

STEP_LENGTH = 24
"""Tokens in the steps that measure costs at different context lengths."""


async def by_context(subject: Subject, lengths: Sequence[int], turns: int) -> list[dict[str, float]]:
    """Measure one step at each context length. The target judges, rejects and regenerates the step.

    Returns:
        One entry for each length: `context` in tokens; `ms`, milliseconds of a step; `rest_ms`, milliseconds of the
        same steps with a model without attention; `read_again`, token ids that the target reads again for a step.

    Raises:
        ContextError: a length exceeds the model's context.
    """
    engine, found = subject.engine, list[dict[str, float]]()
    async with aclosing(blind_engine(engine)) as blind:
        for each in (engine, blind):
            each.capture()
        for length in lengths:
            rng = random.Random(length)
            ids = [rng.randrange(subject.network.config.vocab_size) for _ in range(length + turns * STEP_LENGTH)]
            texts = {each: TokenBuffer(ids[:length]) for each in (engine, blind)}
            for each, text in texts.items():
                await each.verify(Verify(text, ids[:STEP_LENGTH]))  # reads the context
            milliseconds: dict[TorchEngine, list[float]] = {engine: [], blind: []}
            before = engine.metrics()
            for turn in range(turns):
                proposed = ids[length + turn * STEP_LENGTH :][:STEP_LENGTH]
                for each, text in texts.items():
                    started = time.perf_counter()
                    await each.verify(Verify(text, proposed))
                    chunk = await collect(each.generate(Generate(text, Sampling(), Stop(STEP_LENGTH))))
                    milliseconds[each].append((time.perf_counter() - started) * 1000)
                    text.append(chunk.ids)
            done = engine.metrics() - before
            again = (done.prompt_tokens - done.cached_tokens) / turns
            full_ms, rest_ms = (statistics.median(milliseconds[each]) for each in (engine, blind))
            found.append({"context": length, "ms": full_ms, "rest_ms": rest_ms, "read_again": again})
    return found


def main(
    target: TargetOption = None,
    shape: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Use a random model of this shape, for example mini.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of context. Default: 100, 1000 and 8000.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Number of steps at each length.")] = 20,
    json_file: JsonOption = None,
) -> None:
    """Time a step that is judged, rejected and regenerated, at several lengths of context."""
    if target is None and shape is None:
        shape = "mini"  # the context of the embedded pair is too short
    subject = load_subject(target, None, None, shape, None)
    about = conditions()
    measurement = by_context(subject, length or (100, 1000, 8000), turns)
    results, _ = asyncio.run(measured(subject.engine, measurement))
    described = {"engine": subject.engine.describe(), "synthetic": subject.synthetic, "turns": turns}
    costs = ContextCosts.model_validate({**about, **described, "results": results})
    finish([costs_table(costs)], costs, json_file)

"""Whether two ways of serving a pair write the same texts, and how long they take.

    python -m evals.bench same_texts ask torch.json --target torch:FOLDER --draft torch:FOLDER
    python -m evals.bench same_texts ask served.json --target http://HOST:PORT/v1 --draft http://HOST:PORT/v1
    python -m evals.bench same_texts compare torch.json served.json --target torch:FOLDER --draft torch:FOLDER \\
        --json FILE

Two programs round differently, so texts may part where two tokens are nearly equally likely, or where a judge's score
is next to its threshold. `compare` looks at the place where two texts part. It needs no packages of evaluations, so
that `ask` runs in an environment of vLLM's own. On a vLLM that drafts tokens itself, ask with `--policy engine`; its
texts are compared with those of `token`.
"""

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from evals.bench.problems import questions
from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.chat.prompts import encode_request
from stepspec.cli.options import DraftOption, TargetOption
from stepspec.cli.output import JsonOption, write_results
from stepspec.engines.protocol import Engine, TokenBuffer, Verify
from stepspec.errors import UsageError

main = typer.Typer(help="Compare the texts of two ways of serving a pair.", rich_markup_mode=None)
POLICIES = ("target", "token", "specreason", "two-level")
TIE = 0.02
"""Largest difference of log-probabilities, or from a judge's threshold, that rounding may decide, in nats."""
THINK_END = "</think>"
"""The tag of the embedded pair."""
Texts = dict[str, Any]
T = TypeVar("T")


async def ask(pair: Pair, policies: Sequence[str], questions: Sequence[str]) -> Texts:
    """Ask questions one after the other under each policy. Return texts, steps and seconds by policy."""
    found: Texts = {"questions": [*questions]}
    for policy in policies:
        async with StepSpec(policy=policy, pair=pair) as spec:
            await spec.generate(questions[0], max_tokens=16)  # the first request compiles and allocates
            results = [await spec.generate(question, max_tokens=640) for question in questions]
        found[Path(policy).stem] = [
            {
                "text": f"{result.reasoning}{THINK_END}{result.answer}" if result.thinks else result.answer,
                "steps": [[step.text, dict(step.scores)] for step in result.steps],
                "seconds": result.times.wall,
            }
            for result in results
        ]
    return found


class Compared(NamedTuple):
    """How the texts of two ways compare under one policy."""

    texts: int
    differ: int
    untied: int
    """Texts that differ, and not from a near tie on."""
    seconds: float
    other_seconds: float
    """Median seconds of a request, the first and the second way."""
    ratio: float
    """Median ratio of the second way's seconds to the first's."""


async def compare(
    models: Sequence[Engine], first: Texts, second: Texts, thresholds: Mapping[str, float]
) -> dict[str, Compared]:
    """Compare the texts and times of two ways, by policy.

    Args:
        models: target and draft, whose choices may be close. One of them is enough for a tie.
        first, second: what `ask` returned.
        thresholds: thresholds of the policies' judges by policy.

    Raises:
        UsageError: the questions differ.
    """
    if "engine" in second:  # on vLLM and servers, the engine itself does what `token` does
        second = {"token": second["engine"], **second}
    if first["questions"] != second["questions"]:
        raise UsageError("The two files have different questions. Ask both with the same --problems.")
    found: dict[str, Compared] = {}
    for policy in (name for name in first if name != "questions" and name in second):
        pairs = list(zip(first["questions"], first[policy], second[policy], strict=True))
        parted = [each for each in pairs if each[1]["text"] != each[2]["text"]]
        untied = [each for each in parted if not await _tied(models, *each, thresholds.get(policy))]
        seconds = [[each["seconds"] for each in texts[policy]] for texts in (first, second)]
        found[policy] = Compared(
            len(pairs),
            len(parted),
            len(untied),
            statistics.median(seconds[0]),
            statistics.median(seconds[1]),
            statistics.median(other / one for one, other in zip(*seconds, strict=True)),
        )
    return found


async def _tied(models: Sequence[Engine], question: str, one: Texts, other: Texts, threshold: float | None) -> bool:
    """Return whether two texts part at a near tie of tokens, or of a judge's score with its threshold."""
    for (text, scores), (other_text, other_scores) in zip(one["steps"], other["steps"], strict=False):
        if text != other_text:
            found = [score for each in (scores, other_scores) for score in each.values() if score is not None]
            if threshold is not None and any(abs(score - threshold) <= TIE for score in found):
                return True
            break
    _, differences = await parting(models, question, one["text"], other["text"])
    return any(difference <= TIE for difference in differences)


async def parting(models: Sequence[Engine], question: str, one: str, other: str) -> tuple[list[int], list[float]]:
    """Return the ids that two texts have in common, and by how much the next ones differ under each model.

    The differences are those of log-probabilities, in nats; nan for a model that returns none.
    """
    tokenizer = models[0].tokenizer
    ids, others = (tokenizer.encode(text) for text in (one, other))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
    end, differences = min(tokenizer.end_ids), list[float]()
    for model in models:
        prompt = TokenBuffer([*encode_request(tokenizer, question), *ids[:same]])
        found = [
            await model.verify(Verify(prompt, [each[same] if same < len(each) else end])) for each in (ids, others)
        ]
        first, second = (each.logprobs[0] if each.logprobs else math.nan for each in found)
        differences.append(abs(first - second))
    return ids[:same], differences


@main.command("ask")
def write_texts(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; repeat it for several.")] = None,
    number: Annotated[int, typer.Option("--problems", min=1, help="Number of problems.")] = 100,
) -> None:
    """Write the texts of a pair."""
    asked = questions(number)
    found = asyncio.run(_with(target, draft, lambda pair: ask(pair, policy or POLICIES, asked)))
    write_results(found, file)


@main.command("compare")
def compare_texts(
    one: Annotated[Path, typer.Argument(help="File of the first way.")],
    other: Annotated[Path, typer.Argument(help="File of the second way.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    threshold: Annotated[list[str] | None, typer.Option(metavar="POLICY=NUMBER", help="Threshold of a judge.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare the texts of two files."""
    named = (each.partition("=") for each in threshold or ())
    thresholds = {name: float(value) for name, _, value in named}
    first, second = (json.loads(file.read_text("utf-8")) for file in (one, other))
    compared = asyncio.run(
        _with(target, draft, lambda pair: compare([pair.target, pair.draft], first, second, thresholds))
    )
    figures = {policy: each._asdict() for policy, each in compared.items()}
    print(json.dumps(figures, indent=1))
    write_results(figures, json_file)


async def _with(target: str | None, draft: str | None, work: Callable[[Any], Awaitable[T]]) -> T:
    pair = load_pair(target, draft, notes=False)
    try:
        return await work(pair)
    finally:
        await pair.aclose()

"""`stepspec models`: what a model is to stepspec, as target and as draft."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from stepspec.api.model_facts import ModelFacts, PairFacts, Thinking, pair_facts
from stepspec.api.models import Pair, load_pair
from stepspec.base.printable import printable
from stepspec.cli.options import MODEL_HELP, DraftOption, PairOption
from stepspec.cli.output import JsonOption, write_results
from stepspec.engines.protocol import Distant
from stepspec.errors import UsageError
from stepspec.evaluation.advise.findings import ModelCosts
from stepspec.evaluation.advise.measurements import model_costs

WIDTHS = (1, 8, 32, 64)
"""Numbers of tokens of the timed passes."""
PROMPTS = ("How many clips did Natalia sell altogether in April and May?",)
NUM_TURNS, NUM_WRITTEN = 3, 9
"""Timed turns, and tokens written in each."""


def main(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"The model, as the target of a pair, {MODEL_HELP}")
    ] = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    json_file: JsonOption = None,
) -> None:
    """Print how models think, how fast they are here, whether a draft fits, and which policies run with them.

    Models in this process write a few tokens, which are timed. `stepspec advise` measures whether speculation pays.
    """
    if pair is not None and (target or draft):
        raise UsageError("--pair names both models. Leave out the model and --draft, or --pair.")
    loaded = load_pair(target, draft, pair=pair, needs_draft=False, notes=False)
    try:
        facts, costs = pair_facts(loaded), asyncio.run(_costs(loaded))
    finally:
        asyncio.run(loaded.aclose())
    print("\n".join(map(printable, lines_of(facts, costs))))
    pass_s = {role: _pass_s(each) for role, each in costs.items()}
    write_results(asdict(facts) | {"pass_s": pass_s}, json_file)


async def _costs(pair: Pair) -> Mapping[str, ModelCosts]:
    """Return the costs of the models in this process, by role."""
    engines = {"target": pair.target, "draft": pair.draft}
    return {
        role: await model_costs(engine, PROMPTS, 1, WIDTHS, NUM_TURNS, NUM_WRITTEN)
        for role, engine in engines.items()
        if engine is not None and not isinstance(engine, Distant)
    }


def _pass_s(costs: ModelCosts) -> Mapping[int, float]:
    """Return the seconds of a pass by the number of tokens that it reads; over one token, it writes one."""
    return {width: ratio * costs.write_s for width, ratio in costs.pass_over_one.items()}


def lines_of(facts: PairFacts, costs: Mapping[str, ModelCosts]) -> Iterator[str]:
    """Return the lines that the command prints. `costs` are those of the models in this process, by role."""
    yield from _about("Target", facts.target, costs.get("target"))
    if facts.draft is not None:
        yield ""
        yield from _about("Draft", facts.draft, costs.get("draft"))
        yield ""
        yield "Together"
        yield from _rows(_together(facts))
    yield ""
    yield "Policies"
    for name, problem in facts.policies.items():
        note = facts.notes.get(name)
        yield f"  {name:22}{problem or (f'runs. {note}' if note else 'runs')}"


def _about(role: str, model: ModelFacts, costs: ModelCosts | None) -> Iterator[str]:
    yield f"{role}: {model.name}"
    memory = {use: num_bytes for use, num_bytes in model.memory_bytes.items() if num_bytes}
    yield from _rows(
        {
            "engine": ", ".join(filter(None, (model.engine, model.dtype))) or "unknown",
            "memory": ", ".join(f"{use} {num_bytes / 1e6:,.1f} MB" for use, num_bytes in memory.items()) or "unknown",
            "speed": "unknown" if costs is None else _speed(costs),
            "context": f"{model.context:,} tokens",
            "vocabulary": "unknown" if model.vocabulary is None else f"{model.vocabulary:,} tokens",
            "thinking": _thinking(model),
            "tool calls": "; ".join(model.tool_calls) or "none",
            "sampling": ", ".join(f"{name} {value:g}" for name, value in model.sampling.items()) or "greedy",
            "returns": ", ".join(model.abilities) or "text only",
            "drafters": ", ".join(model.drafters) or "none",
            "speculates": "unknown" if model.own_speculation is None else f"by itself: {model.own_speculation}",
        }
    )


def _speed(costs: ModelCosts) -> str:
    passes = ", ".join(f"{1000 * seconds:,.1f} ms over {width}" for width, seconds in _pass_s(costs).items())
    return f"{1 / costs.write_s:,.1f} tokens/s; a pass takes {passes} tokens"


def _thinking(model: ModelFacts) -> str:
    if not model.has_template:
        return "unknown: without a chat template, it cannot answer questions"
    if model.thinking is None:
        return "not marked: its steps are the answer"
    return "; ".join(_parts(model.thinking))


def _parts(thinking: Thinking) -> Iterator[str]:
    where = "by its chat template" if thinking.opened_by == "template" else "by stepspec"
    yield f"format {thinking.format}"
    opened = f"opened with {thinking.opening!r} {where}" if thinking.opening else "open from the first token"
    yield opened if thinking.starts_open else "closed by its chat template"
    yield f"ended by {thinking.ending!r}"
    if thinking.implicit_ends:
        yield f"with tools also by {', '.join(map(repr, thinking.implicit_ends))}"
    if thinking.on:
        yield f"turned on with {_arguments(thinking.on)}"
    if thinking.off:
        yield f"off with {_arguments(thinking.off)}"


def _arguments(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items())


def _together(facts: PairFacts) -> Mapping[str, str]:
    assert facts.draft is not None
    ours, theirs = (each.thinking and each.thinking.format for each in (facts.target, facts.draft))
    passing = f"{ours or 'unmarked'} and {theirs or 'unmarked'}; steps pass as text"
    return {
        "vocabulary": (
            "the same: the draft proposes steps, and drafts tokens where the target's engine has 'draft-model'"
            if facts.one_vocabulary
            else "different: what the draft writes is encoded again with the target's tokenizer"
        ),
        "thinking": "the same format" if ours == theirs else passing,
        "context": (
            "the draft's is as long as the target's"
            if facts.draft.context >= facts.target.context
            else f"beyond {facts.draft.context:,} tokens, the target continues alone"
        ),
    }


def _rows(table: Mapping[str, str]) -> Iterator[str]:
    for name, value in table.items():
        yield f"  {name:12}{value}"

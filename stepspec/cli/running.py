"""`stepspec run`: answer one question and print each committed step in the color of the model that wrote it."""

import asyncio
import json
import reprlib
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stepspec.base.strict_json import read_json
from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.cli.completing import one_of
from stepspec.cli.options import (
    DraftOption,
    JudgeOption,
    MaxTokensOption,
    PairOption,
    PolicyOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    judge_specs,
)
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import load_policy
from stepspec.loop.step import Done, Event, Origin, Result, StepCommitted

WORDINGS = ("bare", "boxed", "steps")
COLOURS: Mapping[Origin, str] = {"draft": "green", "salvaged": "yellow", "target": "blue"}

# Control characters in a model's text could move the cursor or rename the window, so a terminal gets U+FFFD instead.
_CONTROLS = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def answer_question(
    question: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "stepspec",
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the fewest tokens with this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Exclude tokens less likely than this share of the most likely one.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Values above 1 make tokens of the text less likely.")
    ] = 1.0,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    max_thinking_tokens: Annotated[
        int | None, typer.Option(help="Limit for the thinking before the answer, in tokens; 0 disables thinking.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Limit for the thinking, in seconds.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat it for several.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends the answer; repeat it for several.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with a JSON schema that the answer follows.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with a JSON list of tools that the target may call, as in the API."),
    ] = None,
    tool_choice: Annotated[
        str, typer.Option(metavar="CHOICE", help="auto, none, required, or the name of the tool to call.")
    ] = "auto",
    parallel_tool_calls: Annotated[bool, typer.Option(help="Allow several tool calls in one answer.")] = True,
    prompt: Annotated[
        str,
        typer.Option(help="The wording of the prompt: bare, boxed or steps.", autocompletion=one_of(WORDINGS)),
    ] = "bare",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Answer one question, step by step."""
    text = _read_question(question)
    options = RequestOptions(
        prompt=prompt,
        sampling=Sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed=seed),
        max_tokens=max_tokens,
        max_thinking_tokens=max_thinking_tokens,
        deadline_s=deadline_s,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        json_schema=None if json_schema is None else _read_json("--json-schema", json_schema, dict),
        tools=() if tools is None else _read_json("--tools", tools, list),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
    )
    from stepspec.api.session import StepSpec

    judges = judge_specs(judge, load_policy(policy)[0].judge_models)

    async def answer() -> None:
        async with StepSpec(target, draft, policy, pair=pair, judges=judges) as spec:
            events = spec.stream(text, options)
            if as_json:
                print(json.dumps((await _last(events)).to_dict(), ensure_ascii=False))
            else:
                await _show(events, _Printer(), thinks=spec.thinks)

    asyncio.run(answer())


def _read_json(option: str, path: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """Return the JSON value in a file.

    Raises:
        UsageError: the file cannot be read, is not valid JSON, or holds a value of another type.
    """
    try:
        value: Any = read_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{option}: cannot read {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{option}: {str(path)!r} is not valid JSON: {error}.") from error
    if type(value) is not kind:
        expected = "an object" if kind is dict else "a list"
        raise UsageError(f"{option}: {str(path)!r} must hold {expected}, got {reprlib.repr(value)}.")
    return value


def _read_question(question: str) -> str:
    try:
        text = sys.stdin.buffer.read().decode() if question == "-" else question
        text.encode()
    except UnicodeError as error:
        raise UsageError("The question is not valid UTF-8.") from error
    if not text.strip():
        raise UsageError("The question is empty.")
    return text.strip()


async def _last(events: AsyncIterator[Event]) -> Result:
    async for event in events:
        if isinstance(event, Done):
            return event.result
    raise AssertionError("a request ends with Done or an error")


class _Printer:
    """Writes to stdout, in color if stdout is a terminal with colors."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.coloured = self._console.color_system is not None and not self._console.no_color

    def write(self, text: str, colour: str = "") -> None:
        if self._console.is_terminal:
            text = text.translate(_CONTROLS)
        if self.coloured:
            self._console.print(Text(text, style=colour), end="")
        else:
            sys.stdout.write(text)
        sys.stdout.flush()


async def _show(events: AsyncIterator[Event], printer: _Printer, *, thinks: bool) -> None:
    shown = ""
    async for event in events:
        if isinstance(event, StepCommitted):
            shown = event.step.text
            printer.write(shown, COLOURS[event.step.origin])
        elif isinstance(event, AnswerDelta) and thinks:
            if shown:
                printer.write(_gap_after(shown))
                shown = ""
            printer.write(event.text)
        elif isinstance(event, ToolCalled):
            printer.write(f"\n{event.call.name}({event.call.arguments})")
        elif isinstance(event, Done):
            printer.write(f"\n\n{figures(event.result)}")
            _write_legend(printer)
            if event.result.note is not None:
                printer.write(f"{event.result.note}\n", "yellow")


def _gap_after(step: str) -> str:
    """Return the newlines that a step needs to end with a blank line."""
    return "\n" * (2 - min(2, len(step) - len(step.rstrip("\n"))))


def _write_legend(printer: _Printer) -> None:
    if printer.coloured:
        printer.write(" · steps:")
        for origin, colour in COLOURS.items():
            printer.write(f" {origin}", colour)
    printer.write("\n")


def figures(result: Result) -> str:
    """Return one line with the time and tokens of a request and the share of the draft's work that was accepted."""
    counts = result.counts
    parts = [f"{result.times.wall:.2f} s", f"{counts.committed:,} tokens"]
    if counts.steps_judged:
        parts.append(f"{counts.steps_accepted}/{counts.steps_judged} steps accepted")
    if counts.token_drafted:
        exact = "" if result.token_level_exact else " (not exact)"
        parts.append(f"{counts.token_accepted / counts.token_drafted:.0%} of drafted tokens accepted{exact}")
    if counts.target_passes:
        parts.append(f"{counts.committed / counts.target_passes:.2f} tokens per target pass")
    if result.finish_reason == "length":
        parts.append("cut short by the token limit")
    if counts.wasted:
        parts.append(f"{counts.wasted:,} tokens wasted")
    return " · ".join(parts)

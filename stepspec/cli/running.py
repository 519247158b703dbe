"""`stepspec run`: answer one question and print each committed step in the color of the model that wrote it."""

import asyncio
import json
import reprlib
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from stepspec.base.printable import printable
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
    judge_specs,
)
from stepspec.cli.output import Console
from stepspec.errors import UsageError
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import load_policy
from stepspec.loop.step import Done, Event, Noted, Origin, Result, StepCommitted

WORDINGS = ("bare", "boxed", "steps")
COLOURS: Mapping[Origin, str] = {"draft": "green", "salvaged": "yellow", "target": "blue"}


def answer_question(
    question: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "stepspec",
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; 0 is greedy. By default, this and the options below are the model's own."
        ),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the fewest tokens with this total probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most likely tokens; 0 is off.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Exclude tokens less likely than this share of the most likely one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Values above 1 make tokens of the text less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Values above 0 make tokens of the output less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Values above 0 make tokens less likely each time that the output has them.")
    ] = None,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    max_thinking_tokens: Annotated[
        int | None, typer.Option(help="Limit for the thinking before the answer, in tokens; 0 disables thinking.")
    ] = None,
    max_thinking_s: Annotated[float | None, typer.Option(help="Limit for the thinking, in seconds.")] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Limit for the whole request, in seconds; it returns what exists.")
    ] = None,
    enable_thinking: Annotated[
        bool | None, typer.Option(help="Think before the answer, or answer directly. The default is to think.")
    ] = None,
    reasoning_effort: Annotated[
        str | None,
        typer.Option(metavar="EFFORT", help="How much to think, in the words of the model's template, such as low."),
    ] = None,
    chat_template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Variables of the chat templates, as a JSON object.")
    ] = "{}",
    draft_chat_template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Further variables of the draft's chat template.")
    ] = "{}",
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
    logprobs: Annotated[bool, typer.Option(help="With --json, list the log-probability of every token.")] = False,
    top_logprobs: Annotated[int, typer.Option(help="Number of most likely tokens to list beside each.")] = 0,
    session_id: Annotated[
        str | None, typer.Option(help="Id of the conversation, by which routers find a replica that knows it.")
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(help="The wording of the prompt: bare, boxed or steps.", autocompletion=one_of(WORDINGS)),
    ] = "bare",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Answer one question, step by step."""
    text = _read_question(question)
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    options = RequestOptions(
        prompt=prompt,
        sampling={name: value for name, value in sampling.items() if value is not None},
        max_tokens=max_tokens,
        max_thinking_tokens=max_thinking_tokens,
        max_thinking_s=max_thinking_s,
        deadline_s=deadline_s,
        enable_thinking=enable_thinking,
        reasoning_effort=reasoning_effort,
        chat_template_kwargs=_variables("--chat-template-kwargs", chat_template_kwargs),
        draft_chat_template_kwargs=_variables("--draft-chat-template-kwargs", draft_chat_template_kwargs),
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        json_schema=None if json_schema is None else _read_json("--json-schema", json_schema, dict),
        tools=() if tools is None else _read_json("--tools", tools, list),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        session_id=session_id,
    )
    if logprobs and not as_json:
        raise UsageError("--logprobs is only for --json. Add --json.")
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


def _variables(option: str, text: str) -> Any:
    """Return the variables in the JSON text of an option.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        value: Any = read_json(text)
    except ValueError as error:
        raise UsageError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, got {reprlib.repr(value)}.")
    return cast("dict[str, Any]", value)


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
        _refuse_unknown(event)
        if isinstance(event, Done):
            return event.result
    raise AssertionError("a request ends with Done or an error")


def _refuse_unknown(event: Event) -> None:
    """Stop before the answer to a question that is unlike the training data of the pair.

    Raises:
        UsageError: it is.
    """
    if isinstance(event, Noted):
        raise UsageError(event.text)


class _Printer:
    """Writes to stdout, in color if stdout is a terminal with colors."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.coloured = self._console.color_system is not None and not self._console.no_color

    def write(self, text: str, colour: str = "") -> None:
        if self._console.is_terminal:
            text = printable(text, keep="\n\t")
        if self.coloured:
            self._console.print(Text(text, style=colour), end="")
        else:
            sys.stdout.write(text)
        sys.stdout.flush()


async def _show(events: AsyncIterator[Event], printer: _Printer, *, thinks: bool) -> None:
    shown = ""
    async for event in events:
        _refuse_unknown(event)
        if isinstance(event, StepCommitted):
            shown = event.step.text
            printer.write(shown, COLOURS[event.step.origin])
        elif isinstance(event, AnswerDelta) and thinks:
            if shown:
                printer.write(_gap_after(shown))
                shown = ""
            printer.write(event.text)
        elif isinstance(event, ToolCalled) and event.call.problem is None:
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
    if result.not_proposed != "the policy proposes none":
        why = f" ({result.not_proposed})" if result.not_proposed else ""
        parts.append(f"{counts.steps_proposed:,} step{'s' * (counts.steps_proposed != 1)} proposed{why}")
    if counts.steps_judged:
        parts.append(f"{counts.steps_accepted}/{counts.steps_judged} steps accepted")
    if counts.token_drafted:
        exact = "" if result.token_level_exact else " (not exact)"
        parts.append(f"{counts.token_accepted / counts.token_drafted:.0%} of drafted tokens accepted{exact}")
    if counts.target_passes:
        parts.append(f"{counts.committed / counts.target_passes:.2f} tokens per target pass")
    if result.finish_reason == "length":
        parts.append(f"cut short by {result.limit}")
    if counts.wasted:
        parts.append(f"{counts.wasted:,} tokens wasted")
    return " · ".join(parts)

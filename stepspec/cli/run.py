"""`stepspec run`: answer one question, and show each committed step with the model that wrote it."""

import asyncio
import logging
import reprlib
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.text import Text

from stepspec.api.session import StepSpec
from stepspec.base.printable import printable
from stepspec.base.strict_json import read_json
from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.cli.completion import one_of
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
from stepspec.cli.output import Console, JsonOption, write_results
from stepspec.errors import UsageError
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import load_policy
from stepspec.loop.result import Done, Event, Result, figures
from stepspec.loop.step import Noted, Origin, Step, StepCommitted

WORDINGS = ("bare", "boxed", "steps")
COLOURS: Mapping[Origin, str] = {"draft": "green", "salvaged": "yellow", "target": "blue"}


def main(
    question: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "two-level",
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
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer alone.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Answer one question: the answer on standard output, its steps and figures on stderr."""
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
    if logprobs and json_file is None:
        raise UsageError("--logprobs is only for --json. Add --json FILE.")
    judges = judge_specs(judge, load_policy(policy)[0].judge_models)

    if quiet:
        logging.getLogger("stepspec").setLevel(logging.ERROR)

    async def answer() -> None:
        async with StepSpec(target, draft, policy, pair=pair, judges=judges) as spec:
            rest = _Printer(None if quiet else sys.stderr)
            async with aclosing(spec.stream(text, options)) as events:  # also where the output is closed
                result = await _show(events, _Printer(sys.stdout), rest, thinks=spec.thinks)
            write_results(result.to_dict(), json_file)

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


class _Printer:
    """Writes text of a model, in color if the stream is a terminal with colors.

    Args:
        stream: standard output or stderr; None to write nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self.coloured = self._console.color_system is not None and not self._console.no_color
        self.is_terminal = stream is not None and self._console.is_terminal
        self._at_line_start = True

    def write(self, text: str, colour: str = "") -> None:
        if self._stream is None or not text:
            return
        if self.is_terminal:
            text = printable(text, keep="\n\t")
        if self.coloured:
            self._console.print(Text(text, style=colour), end="")
        else:
            self._stream.write(text)
        self._stream.flush()
        self._at_line_start = text.endswith("\n")

    def write_step(self, step: Step) -> None:
        """Write a step in the color of its author; without colors, after the author's name."""
        if not self.coloured:
            self.write("" if self._at_line_start else "\n")
            self.write(f"[{step.origin}] ")
        self.write(step.text, COLOURS[step.origin])


async def _show(events: AsyncIterator[Event], answer: _Printer, rest: _Printer, *, thinks: bool) -> Result:
    """Write the answer, and beside it the steps, figures and notes. Return the result.

    The steps of a model that does not separate its thinking are the answer, which a terminal shows once.
    """
    steps_are_answer = answer.is_terminal and not thinks
    gap = ""
    async for event in events:
        if isinstance(event, Noted):  # a question that is unlike the training data of the pair
            raise UsageError(event.text)
        if isinstance(event, StepCommitted):
            (answer if steps_are_answer else rest).write_step(event.step)
            gap = _gap_after(event.step.text)
        elif isinstance(event, AnswerDelta) and not steps_are_answer:
            rest.write(gap if thinks else "")
            gap = ""
            answer.write(event.text)
        elif isinstance(event, ToolCalled) and event.call.problem is None:
            answer.write(f"\n{event.call.name}({event.call.arguments})")
        elif isinstance(event, Done):
            answer.write("\n")
            rest.write(f"\n{figures(event.result)}")
            _write_legend(rest)
            if event.result.note is not None:
                rest.write(f"{event.result.note}\n", "yellow")
            return event.result
    raise AssertionError("a request ends with Done or an error")


def _gap_after(step: str) -> str:
    """Return the newlines that a step needs to end with a blank line."""
    return "\n" * (2 - min(2, len(step) - len(step.rstrip("\n"))))


def _write_legend(printer: _Printer) -> None:
    if printer.coloured:
        printer.write(" · steps:")
        for origin, colour in COLOURS.items():
            printer.write(f" {origin}", colour)
    printer.write("\n")

"""The exact texts that models are asked with: how a problem is put, and how the target is asked about a step.

Each text has an id and a version (the hash of its content), which results carry, so that figures obtained with
another wording are never mixed up.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from stepspec.base.strict_json import read_json
from stepspec.chat.tools import Tool, call_format, in_plain_turns, with_arguments_as_text
from stepspec.engines.protocol import THINK_END, THINK_OPEN, Tokenizer
from stepspec.errors import ContextError, UsageError, unknown_name

Message = Mapping[str, Any]
"""A turn of a conversation: `role`, `content`, and what else the model's chat template knows."""

ROLES = ("system", "user", "assistant", "tool")


PROBLEM_PROMPTS: Mapping[str, str] = {
    "bare": "{question}",
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "steps": (
        "{question}\n\nSolve this problem in small logical steps, and leave a blank line after each step. "
        "Put your final answer within \\boxed{{}}."
    ),
    "newlines": (
        "Solve this math problem clearly and without detours. Reason step by step, with two newline characters "
        "between logical steps, and put the final answer within \\boxed{{}}.\n\nProblem: {question}"
    ),
    # Of few-shot prompts (arXiv:2201.11903, appendix): each solved example goes on behind the colon.
    "qa": "Q: {question}\nA:",
    "aime": (
        "{question}\n\nThe answer is a whole number from 0 to 999. Please reason step by step, and put your final "
        "answer within \\boxed{{}}."
    ),
}


@dataclass(frozen=True)
class JudgePrompt:
    """A user turn that asks about a step, and the words that the answer is made to begin with."""

    user: str
    prefill: str


RATING_PROMPTS: Mapping[str, JudgePrompt] = {
    "short": JudgePrompt("Rate the last step from 0 to 9.", "Rating: "),
    # Word for word the prompt of SpecReason (arXiv:2504.07891, released code), which the emulation needs.
    "specreason": JudgePrompt(
        "Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore style, "
        "phrasing, or overall usefulness\u2014only judge whether the step is objectively correct and logically follows "
        "from prior steps. Assign a score from 0 to 9.",
        "<think>I think the quality score is: ",
    ),
}


YES_NO_PROMPT = JudgePrompt("Is the last step correct? Answer yes or no.", "Answer:")
EQUIVALENCE_PROMPT = JudgePrompt(
    "Do these two steps say the same?\nFirst: {first}\nSecond: {second}\nAnswer yes or no.", "Answer:"
)
SELECTION_PROMPT = JudgePrompt("Which is the best next step, or is none correct?\n{candidates}", "Best:")
SELECTION_NAMES = ("A", "B", "C", "D")
SELECTION_NONE = "none"


def selection_line(name: str, step: str) -> str:
    """How a candidate stands in `SELECTION_PROMPT`, a line each."""
    return f"{name}: {step}"


def problem_prompt(id: str) -> str:
    """The wording of that id, with a ``{question}`` slot.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if id not in PROBLEM_PROMPTS:
        raise UsageError(unknown_name("problem prompt", id, PROBLEM_PROMPTS))
    return PROBLEM_PROMPTS[id]


def rating_prompt(id: str) -> JudgePrompt:
    """The rating prompt of that id.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if id not in RATING_PROMPTS:
        raise UsageError(unknown_name("rating prompt", id, RATING_PROMPTS))
    return RATING_PROMPTS[id]


def prompt_version(text: str) -> str:
    """Short content hash that goes with a prompt's id into results."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def think_end_id(tokenizer: Tokenizer) -> int | None:
    """The token that ends the thinking; None for a model that does not think between tags."""
    ids = tokenizer.encode(THINK_END)
    return ids[0] if len(ids) == 1 else None


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """The turns of a conversation as chat templates take them: their text in one piece, and what an assistant thought
    apart from what it said, so that a template keeps or drops earlier thinking as its model wants.

    Raises:
        UsageError: there is nothing to answer, or a turn holds something other than text.
    """
    if not messages:
        raise UsageError("The conversation is empty; it needs at least one turn to answer.")
    turns = [_checked_turn(place, message) for place, message in enumerate(messages, 1)]
    if turns[-1]["role"] == "assistant":
        raise UsageError("The last turn is the assistant's own. End the conversation with a turn that wants an answer.")
    if turns[-1]["role"] != "tool" and not turns[-1]["content"].strip():
        raise UsageError("The question is empty." if len(turns) == 1 else "The last turn is empty.")
    return turns


def _checked_turn(place: int, message: Message) -> Message:
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"Turn {place} is no mapping. Write {{'role': 'user', 'content': 'How many?'}}.")
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role  # OpenAI's newer name
    if role not in ROLES:
        raise UsageError(f"Turn {place}: {unknown_name('role', str(role), ROLES)}")
    text = _text_of(content)
    if text is None:
        raise UsageError(f"Turn {place} holds something else than text, which is all that the models take.")
    turn = {**message, "role": role, "content": text}
    try:
        json.dumps(turn, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"Turn {place} holds what is no JSON or no Unicode, such as NaN or half of a character."
        ) from None
    if role == "assistant" and THINK_END in text:
        thought, _, said = text.partition(THINK_END)
        turn |= {"reasoning_content": thought.replace(THINK_OPEN, "", 1).strip(), "content": said.strip()}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise UsageError(f"Turn {place}: tool_calls is no list.")
        turn["tool_calls"] = [_checked_call(place, call) for call in cast("Sequence[Any]", calls)]
    return turn


def _checked_call(place: int, call: Any) -> Mapping[str, Any]:
    """A call of an earlier turn, with its arguments as templates want them: no longer written out."""
    try:
        function = dict(call["function"])
        arguments = function["arguments"]
        _ = function["name"]
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"Turn {place} has a call that is none. Write {{'type': 'function', 'id': '...', 'function': {{'name': "
            "'add', 'arguments': '{}'}}."
        ) from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # a model may have written what is no JSON, and is shown it again
            function["arguments"] = read_json(arguments)
    return {**call, "function": function}


def _text_of(content: object) -> str | None:
    """The text of a turn, in one string or in content blocks; None if some of it is something else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = [_text_of_block(block) for block in cast("list[Any]", content)]
    return None if None in texts else "".join(cast("list[str]", texts))


def _text_of_block(block: Any) -> str | None:
    """The text of a block as OpenAI's API and LangChain write it; None if it is another kind of block."""
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", block) if isinstance(block, Mapping) else {}
    text: object = parts.get("text") if parts.get("type") == "text" else None
    return text if isinstance(text, str) else None


def encode_request(tokenizer: Tokenizer, question: str) -> list[int]:
    """The ids that the first step of an answer to a single question follows; see `encode_messages`."""
    return encode_messages(tokenizer, [{"role": "user", "content": question}])


@dataclass(frozen=True)
class Room:
    """What a prompt has to fit in: the context of a model."""

    num_tokens: int
    model: str

    def check(self, num_tokens: int, *, at_least: bool = False) -> None:
        """Checks that so many tokens leave room for one more; `at_least`: whether there may be more of them.

        Raises:
            ContextError: they do not.
        """
        if num_tokens >= self.num_tokens:
            raise ContextError(
                f"The prompt has {'at least ' * at_least}{num_tokens} tokens, but {self.model} has a context of "
                f"{self.num_tokens}. Shorten the question or choose a model with a longer context."
            )


def encode_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), room: Room | None = None
) -> list[int]:
    """The ids that the first step follows: the chat template's, with the thinking opened if it does not do so.

    A special token written out in a turn stays plain text: nobody ends a turn or the thinking by asking.

    Args:
        tokenizer: the model's.
        messages: turns as `checked_messages` gives them.
        tools: what the model may call.
        room: what the ids have to fit in. A prompt that cannot fit by its length in bytes is not encoded at all.

    Raises:
        UsageError: the model has no chat template, or it refuses the conversation.
        ContextError: the prompt does not fit.
    """
    if room is not None:
        _check_length(tokenizer, messages, tools, room)
    key, texts = secrets.token_hex(8), list[str]()

    def safe(text: str) -> str:
        """The text, or a stand-in for one in which special tokens are written out."""
        if not tokenizer.writes_special(text):
            return text
        texts.append(text)
        return f"{key}-{len(texts) - 1}-"

    def safe_turn(message: Message) -> Message:
        return {name: value if name == "role" else _mapped(value, safe) for name, value in message.items()}

    turns = [safe_turn(message) for message in messages]
    rendered = _render_request(tokenizer, turns, [_mapped(tool, safe) for tool in tools])
    parts = re.split(f"{key}-(\\d+)-", rendered)
    parts[1::2] = [texts[int(index)] for index in parts[1::2]]
    ids: list[int] = []
    for index, part in enumerate(parts):
        ids += tokenizer.encode_text(part) if index % 2 else tokenizer.encode(part)
    if room is not None:
        room.check(len(ids))
    return ids


def _check_length(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], room: Room) -> None:
    """Refuses a prompt that cannot fit, by its number of turns and by its bytes, before any of it is encoded."""
    room.check(len(messages), at_least=True)  # each turn takes a token
    most = tokenizer.max_token_bytes
    if most is None or _num_characters(messages) + _num_characters(tools) < room.num_tokens * most / UTF8_BYTES:
        return
    # Templates leave out some of what turns hold, so only what they render counts.
    rendered = _render_request(tokenizer, messages, tools)
    room.check(-(-len(rendered.encode()) // most), at_least=True)


UTF8_BYTES = 4
"""Most bytes of a character."""


def _num_characters(value: Any) -> int:
    """Characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        return sum(map(len, parts)) + sum(map(_num_characters, parts.values()))
    return sum(map(_num_characters, cast("Sequence[Any]", value))) if isinstance(value, list | tuple) else 0


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(each, change) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in cast("list[Any]", value)]
    return value


def _render_request(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    with_calls = any(turn.get("tool_calls") or turn["role"] == "tool" for turn in messages)
    if (tools or with_calls) and call_format(tokenizer) is None:
        messages, tools, with_calls = in_plain_turns(messages, tools), (), False
    try:
        text = tokenizer.render(messages, add_generation_prompt=True, tools=tools)
    except UsageError:
        if not with_calls:
            raise
        text = tokenizer.render(with_arguments_as_text(messages), add_generation_prompt=True, tools=tools)
    if think_end_id(tokenizer) is None or text.rstrip().endswith(THINK_OPEN):
        return text
    return f"{text}{THINK_OPEN}\n"


def render_probe(tokenizer: Tokenizer, rating: JudgePrompt) -> str:
    """What stands between unfinished reasoning and the digit: the end of that turn, the question, the prefill.

    The reasoning is left without its end tag, since templates drop what was thought in earlier turns.

    Raises:
        UsageError: the model's template does not show all turns, so it cannot be asked that way.
    """
    reasoning, digit = "(the reasoning so far)", "(the digit)"
    messages = [
        {"role": "user", "content": "(the problem)"},
        {"role": "assistant", "content": reasoning},
        {"role": "user", "content": rating.user},
        {"role": "assistant", "content": rating.prefill + digit},
    ]
    text = tokenizer.render(messages, add_generation_prompt=False)
    _, _, after = text.partition(reasoning)
    probe, found, _ = after.partition(digit)
    if not found:
        raise UsageError("The model's chat template drops turns, so it cannot be asked for a rating of steps.")
    return probe

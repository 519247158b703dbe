"""The exact prompts sent to models: prompts around a problem, and prompts that ask the target about a step.

Each prompt has an id and a version, the hash of its text. Results store both, so that results obtained with different
wordings are never mixed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from stepspec.base.strict_json import read_json
from stepspec.chat.tools import Tool, call_format, in_plain_turns, variants_with_calls
from stepspec.engines.marked import Marks
from stepspec.engines.protocol import MAX_TOKEN_ID, Tokenizer, check_range
from stepspec.engines.thinking import FORMATS
from stepspec.errors import ContextError, ModelError, UsageError, unknown_name

Message = Mapping[str, Any]
"""A turn of a conversation: `role`, `content`, and any other fields that the model's chat template uses."""

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
    # The format of few-shot prompts (arXiv:2201.11903, appendix): in solved examples, the answer follows the colon.
    "qa": "Q: {question}\nA:",
    # For models that end their reasoning with such a line if they are asked to: the thinking format `answer-line`.
    "answer-line": (
        "{question}\n\nThink step by step, without LaTeX and without code. Write your reply in this form:\n\n"
        "Reasoning: (the steps, one paragraph each)\n\nAnswer: (the number alone)"
    ),
    "aime": (
        "{question}\n\nThe answer is a whole number from 0 to 999. Please reason step by step, and put your final "
        "answer within \\boxed{{}}."
    ),
}


@dataclass(frozen=True)
class JudgePrompt:
    """A user turn that asks about a step, and the prefill with which the answer begins."""

    user: str
    prefill: str


# The verbatim prompt of SpecReason (arXiv:2504.07891, released code).
RATING_PROMPT = JudgePrompt(
    "Evaluate the last reasoning step solely based on factual correctness and logical validity. Ignore style, "
    "phrasing, or overall usefulness\u2014only judge whether the step is objectively correct and logically follows "
    "from prior steps. Assign a score from 0 to 9.",
    "<think>I think the quality score is: ",
)
YES_NO_PROMPT = JudgePrompt("Is the last step correct? Answer yes or no.", "Answer:")
EQUIVALENCE_PROMPT = JudgePrompt(
    "Do these two steps say the same?\nFirst: {first}\nSecond: {second}\nAnswer yes or no.", "Answer:"
)


def problem_prompt(id: str) -> str:
    """Return the problem prompt with this id, which has a ``{question}`` slot.

    Raises:
        UsageError: the id is unknown; the message lists the known ones.
    """
    if id not in PROBLEM_PROMPTS:
        raise UsageError(unknown_name("problem prompt", id, PROBLEM_PROMPTS))
    return PROBLEM_PROMPTS[id]


def prompt_version(text: str) -> str:
    """Return a short content hash, which results store with the prompt's id."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Validate a conversation and convert it for chat templates.

    The content of each turn becomes one string. `reasoning` is another name of `reasoning_content`.

    Raises:
        UsageError: the conversation has no turn to answer, or a turn is invalid or not text.
    """
    if not messages:
        raise UsageError("The conversation is empty. It needs at least one turn to answer.")
    turns = [_checked_turn(number, message) for number, message in enumerate(messages, 1)]
    if turns[-1]["role"] == "assistant":
        raise UsageError("The last turn is the assistant's own. End the conversation with a user or tool turn.")
    if turns[-1]["role"] != "tool" and not turns[-1]["content"].strip():
        raise UsageError("The question is empty." if len(turns) == 1 else "The last turn is empty.")
    return turns


def _checked_turn(number: int, message: Message) -> Message:
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"Turn {number} must be a mapping. Write {{'role': 'user', 'content': 'How many?'}}.")
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role  # OpenAI's newer name
    if role not in ROLES:
        raise UsageError(f"Turn {number}: {unknown_name('role', str(role), ROLES)}")
    text = _text_of(content)
    if text is None:
        raise UsageError(f"Turn {number} has content that is not text. Only text is supported.")
    turn = {**message, "role": role, "content": text}
    try:
        json.dumps(turn, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"Turn {number} is not valid JSON: it contains a value such as NaN or half of a surrogate pair."
        ) from None
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning and not isinstance(reasoning, str):
        raise UsageError(f"Turn {number} has reasoning that is not text. Only text is supported.")
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise UsageError(f"Turn {number}: tool_calls must be a list.")
        turn["tool_calls"] = [_checked_call(number, call) for call in cast("Sequence[Any]", calls)]
    return turn


def _without_thinking(turn: Message) -> Message:
    """Return a turn in which the thinking that begins an assistant's content is `reasoning_content`.

    So the template can keep or drop it. The tags may be those of another model, which has taken part in the
    conversation. Tags inside the text are text, and so is all content if the reasoning is given apart.
    """
    if turn["role"] != "assistant" or turn.get("reasoning_content"):
        return turn
    text = turn["content"].lstrip()
    for form in FORMATS.values():
        opening = form.opening.strip()
        thinking, ended, answer = text.removeprefix(opening).partition(form.ending)
        if opening and text.startswith(opening) and ended:
            return {**turn, "reasoning_content": thinking.strip(), "content": answer.strip()}
    return turn


def _checked_call(number: int, call: Any) -> Mapping[str, Any]:
    """Return a tool call of an earlier turn with parsed arguments, which templates expect."""
    try:
        function = dict(call["function"])
        arguments = function["arguments"]
        _ = function["name"]
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"Turn {number} has an invalid tool call. Write {{'type': 'function', 'id': '...', 'function': {{'name': "
            "'add', 'arguments': '{}'}}."
        ) from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # a model may have written invalid JSON, which stays as it is
            function["arguments"] = read_json(arguments)
    return {**call, "function": function}


def _text_of(content: object) -> str | None:
    """Return the text of a turn's content, a string or a list of blocks; None if any of it is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = [_text_of_block(block) for block in cast("list[Any]", content)]
    return None if None in texts else "".join(cast("list[str]", texts))


def _text_of_block(block: Any) -> str | None:
    """Return the text of a content block of OpenAI's API or LangChain; None for other kinds of blocks."""
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", block) if isinstance(block, Mapping) else {}
    text: object = parts.get("text") if parts.get("type") == "text" else None
    return text if isinstance(text, str) else None


def encode_request(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return the prompt ids for a single question, see `encode_messages`."""
    return encode_messages(tokenizer, [{"role": "user", "content": question}])


@dataclass(frozen=True)
class ContextBudget:
    """The context of a model, in which a prompt must fit."""

    num_tokens: int
    model: str

    def check(self, num_tokens: int, *, at_least: bool = False) -> None:
        """Check that a prompt of `num_tokens` leaves room for at least one more token.

        Args:
            num_tokens: length of the prompt.
            at_least: whether `num_tokens` is only a lower bound.

        Raises:
            ContextError: the prompt leaves no room.
        """
        if num_tokens >= self.num_tokens:
            raise ContextError(
                f"The prompt has {'at least ' if at_least else ''}{num_tokens} tokens, but {self.model} has a context "
                f"of {self.num_tokens}. Shorten the question or choose a model with a longer context."
            )


def encode_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), room: ContextBudget | None = None
) -> list[int]:
    """Return the prompt ids of a conversation. Arguments and errors are those of `encode_prompt`."""
    return encode_prompt(tokenizer, messages, tools, room).ids


@dataclass(frozen=True)
class RawPrompt:
    """A prompt without a chat template: a text, in which special tokens are recognized, or the ids of the target.

    Attributes:
        content: the text or the ids.
        add_special_tokens: whether a text gets the tokens that begin every text of the model.
    """

    content: str | Sequence[int]
    add_special_tokens: bool = True

    def encoded(self, tokenizer: Tokenizer, room: ContextBudget | None = None) -> tuple[list[int], str]:
        """Return the ids and the text of the prompt.

        Raises:
            UsageError: the prompt is empty, or an id is not in the vocabulary.
            ContextError: it does not fit the room. A text with too many bytes is rejected without encoding it.
        """
        if not self.content:
            raise UsageError("The prompt is empty; a model needs at least one token to continue.")
        if not isinstance(self.content, str):
            ids = list(self.content)
            if room is not None:
                room.check(len(ids))
            check_range(ids, tokenizer.num_ids or MAX_TOKEN_ID + 1, room.model if room is not None else "the model")
            return ids, tokenizer.decode(ids)
        try:
            size = len(self.content.encode())
        except UnicodeEncodeError:
            raise UsageError("The prompt is not valid text: it contains half of a surrogate pair.") from None
        if room is not None and tokenizer.max_token_bytes is not None:
            room.check(size // tokenizer.max_token_bytes, at_least=True)
        ids, start = tokenizer.encode(self.content), list(tokenizer.start_ids)
        if self.add_special_tokens and start and ids[: len(start)] != start:
            ids = start + ids
        if room is not None:
            room.check(len(ids))
        return ids, self.content


@dataclass(frozen=True)
class Prompt:
    """The ids of a conversation, up to where the model goes on."""

    ids: list[int]
    thinks: bool
    """Whether the model thinks first. False if its chat template has closed the thinking for this conversation."""


def encode_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    room: ContextBudget | None = None,
    arguments: Mapping[str, Any] = {},
) -> Prompt:
    """Return the prompt of a conversation, with the thinking opened if the chat template does not open it.

    Special tokens inside message text are treated as plain text.

    Args:
        tokenizer: the model's tokenizer.
        messages: turns from `checked_messages`.
        tools: tools that the model may call.
        room: the context in which the prompt must fit. A prompt with too many bytes is rejected without encoding it.
        arguments: further variables of the chat template. They count before those that turn the thinking on.

    Raises:
        UsageError: the model has no chat template, or its template rejects the conversation.
        ContextError: the prompt does not fit.
    """
    if tokenizer.thinking is not None:
        messages = [_without_thinking(message) for message in messages]
    if room is not None:
        _check_length(tokenizer, messages, tools, room, arguments)
    marks = Marks(tokenizer)
    turns = [{name: each if name == "role" else marks.put(each) for name, each in turn.items()} for turn in messages]
    variables = {name: marks.put(value) for name, value in arguments.items()}
    rendered, thinks = _render_request(tokenizer, turns, [*map(marks.put, tools)], variables)
    ids = marks.encode(rendered)
    if room is not None:
        room.check(len(ids))
    return Prompt(ids, thinks)


def _check_length(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    room: ContextBudget,
    arguments: Mapping[str, Any],
) -> None:
    """Reject a prompt that cannot fit, by its number of turns and bytes, before encoding it."""
    room.check(len(messages), at_least=True)  # each turn takes at least one token
    most = tokenizer.max_token_bytes
    num_characters = sum(map(_num_characters, (messages, tools, arguments)))
    if most is None or num_characters < room.num_tokens * most / UTF8_BYTES:
        return
    # Templates may leave out parts of the turns, so only the rendered text counts.
    rendered, _ = _render_request(tokenizer, messages, tools, arguments)
    room.check(-(-len(rendered.encode()) // most), at_least=True)


UTF8_BYTES = 4
"""Maximum number of bytes of a character in UTF-8."""


def _num_characters(value: Any) -> int:
    """Return the number of characters of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        return sum(map(len, parts)) + sum(map(_num_characters, parts.values()))
    return sum(map(_num_characters, cast("Sequence[Any]", value))) if isinstance(value, list | tuple) else 0


def _render_request(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return the text of a conversation, and whether the model thinks after it."""
    tags = tokenizer.thinking
    with_calls = any(turn.get("tool_calls") or turn["role"] == "tool" for turn in messages)
    if (tools or with_calls) and call_format(tokenizer) is None:
        messages, tools, with_calls = in_plain_turns(messages, tools), (), False
    arguments = {**(tags.format.on if tags else {}), **arguments}
    render = partial(tokenizer.render, add_generation_prompt=True, tools=tools, arguments=arguments)
    text = _first_rendered(render, variants_with_calls(messages) if with_calls else [messages])
    if tags is None or tags.is_open_in(text):
        return text, True
    return (text, False) if tags.is_closed_in(text) else (text + tags.format.opening, True)


def _first_rendered(render: Callable[[Sequence[Message]], str], variants: Iterable[Sequence[Message]]) -> str:
    """Return the text of the first variant that the template takes, or raise its error for the first one."""
    errors: list[UsageError] = []
    for turns in variants:
        try:
            return render(turns)
        except UsageError as error:
            errors.append(error)
    raise errors[0]


def yes_no_labels(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the last tokens of " yes" and " no", the answers to a judge prompt.

    Raises:
        ModelError: both end with the same token.
    """
    yes, no = (tokenizer.encode(f" {answer}")[-1] for answer in ("yes", "no"))
    if yes == no:
        raise ModelError("The target's tokenizer ends yes and no with the same token, so it cannot answer.")
    return yes, no


def render_probe(tokenizer: Tokenizer, rating: JudgePrompt) -> str:
    """Return the text between unfinished reasoning and the digit: the end of the turn, the question and the prefill.

    The reasoning has no end tag, because templates drop the thinking of earlier turns.

    Raises:
        UsageError: the chat template drops turns, so the model cannot rate steps.
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
        raise UsageError(
            "The model's chat template drops turns, so it cannot rate steps. Choose a policy without a rating judge."
        )
    return probe

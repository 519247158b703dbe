"""Thinking formats: how model families mark their thinking, and which format a model has.

The formats are those of the vendors' chat templates and of vLLM's reasoning parsers (`vllm.reasoning`, `vllm.parser`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, model_validator

from stepspec.base.file_model import FileModel, load_toml
from stepspec.errors import ModelError, UsageError, unknown_name

NONE = "none"
"""Name in an address for a model that does not mark its thinking."""


ANSWER_LINE = "answer-line"
"""Name of the format of models that end their reasoning with a line that begins with `Answer:`."""


class ThinkingFormat(FileModel):
    """How a model family marks its thinking. A TOML file may describe another one, with these keys."""

    name: str
    """Its name in addresses, as in `torch:FOLDER?thinking=NAME`."""
    opening: str
    """Text that begins the thinking. The prompt ends with it: if the chat template does not write it, stepspec does.
    It may be empty in a format with `as_text`: the prompt then asks for the ending, and each answer to a conversation
    without tools and schema begins with thinking."""
    ending: str = Field(min_length=1)
    """Text that ends the thinking and begins the answer. Its first token has no other use, or it is found as text."""
    as_text: bool = False
    """Whether a model may write the ending as text. It is then found across token borders, like a stop string."""
    answer_opening: str = ""
    """Text around the answer that is not a part of it, such as `<answer>`."""
    answer_ending: str = ""
    """Text after the answer. It ends the text."""
    implicit_ends: Sequence[str] = ()
    """Tokens that end the thinking without its ending and belong to the answer, such as one that opens a tool call."""
    header_end: str = ""
    """Token that ends the header of a message, if thinking and answers are messages. `ending` then ends with a header.
    """
    thinking_header: str = ""
    """Text that only the headers of thinking have. After such a header, the thinking goes on."""
    on: Mapping[str, str | bool] = {}
    """Arguments of the chat template that turn the thinking on."""
    off: Mapping[str, str | bool] = {}
    """Arguments of the chat template that turn it off."""
    sign: str = ""
    """Text of the family's chat templates, to tell formats with the same tags apart."""

    @model_validator(mode="after")
    def _check(self) -> "ThinkingFormat":
        if not (self.opening or self.as_text):
            raise ValueError("opening is empty, so the prompt does not show where the thinking begins")
        if self.as_text and self.header_end:
            raise ValueError("as_text is set, but the header of a message follows a token")
        return self

    def fitted(self, template: str) -> "ThinkingFormat":
        """Return the format with only those arguments that a template uses."""
        used = {
            key: {name: value for name, value in getattr(self, key).items() if re.search(rf"\b{name}\b", template)}
            for key in ("on", "off")
        }
        return self.model_copy(update=used)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template has the tags of this format."""
        return self.sign in template and any(tag.strip() in template for tag in (self.opening, self.ending) if tag)


SWITCH: Mapping[str, Any] = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
TAGS: Mapping[str, Any] = {
    "opening": "<think>\n",
    "ending": "</think>",
    "implicit_ends": ("<tool_call>", "<tool_calls>", "<｜tool▁calls▁begin｜>"),
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
}

BROKEN_TAGS: Mapping[str, Any] = {**TAGS, "opening": "\n<think>"}

FORMATS: Mapping[str, ThinkingFormat] = {
    each.name: each
    for each in (
        ThinkingFormat(  # gpt-oss
            name="harmony",
            opening="<|channel|>analysis<|message|>",
            ending="<|end|><|start|>assistant<|channel|>final<|message|>",
            header_end="<|message|>",
            thinking_header="<|channel|>analysis",
        ),
        ThinkingFormat(  # Magistral from 2507 on, and Mistral's later models
            name="mistral", opening="[THINK]", ending="[/THINK]", implicit_ends=("[TOOL_CALLS]",)
        ),
        ThinkingFormat(
            name="gemma", opening="<|channel>thought\n", ending="<channel|>", implicit_ends=("<|tool_call>",), **SWITCH
        ),
        ThinkingFormat(
            name="seed", opening="<seed:think>", ending="</seed:think>", implicit_ends=("<seed:tool_call>",)
        ),
        ThinkingFormat(
            name="cohere",
            opening="<|START_THINKING|>",
            ending="<|END_THINKING|>",
            implicit_ends=("<|START_RESPONSE|>", "<|START_ACTION|>"),
            on={"reasoning": True},
            off={"reasoning": False},
        ),
        ThinkingFormat(name="kimi", opening="◁think▷", ending="◁/think▷"),
        # GLM writes a line break before the tag. Other models with these tags write it after the tag.
        ThinkingFormat(name="glm", sign="[gMASK]", **BROKEN_TAGS),
        # Hunyuan-A13B also has tags around its answer. All of them are text.
        ThinkingFormat(
            name="hunyuan",
            sign="<answer>",
            as_text=True,
            answer_opening="<answer>\n",
            answer_ending="\n</answer>",
            **TAGS,
        ),
        # Qwen, DeepSeek, QwQ, Nemotron and many others. For OLMo-3 and Llama-Nemotron Super, the tags are text.
        ThinkingFormat(name="think", as_text=True, **TAGS),
        # For instruct models that are asked for it, as by the problem prompt `answer-line`. No template has it.
        ThinkingFormat(name=ANSWER_LINE, opening="", ending="\nAnswer:", as_text=True, sign="\0"),
    )
}
"""The known formats by name, in the order in which they are looked for."""


class Codec(Protocol):
    """Encodes texts with special tokens in them, and decodes ids."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


THINKS = re.compile(
    r"\b(?:enable_thinking|reasoning_content|reasoning_effort|thinking_effort|thinking_budget)\b|<\W*think|\[THINK"
)
"""Matches in a chat template of a model that thinks, in any format."""


EFFORTS = ("reasoning_effort", "thinking_effort")
"""Variables of chat templates that say how much to think."""


@dataclass(frozen=True)
class ThinkingTags:
    """A thinking format in the token ids of one model.

    Attributes:
        format: the format.
        opening: ids of its opening.
        ending: ids of its ending. The first of them ends the thinking, unless `text` does.
        text: the ending if it is text to the model; else empty. The model may write it with other ids.
        implicit_ends: ids of its implicit ends, as far as the model has them as single tokens.
        header_end: id of the token that ends a header; None if there are no headers.
        effort: variable of the chat template for how much to think; None if there is none.
    """

    format: ThinkingFormat
    opening: tuple[int, ...]
    ending: tuple[int, ...]
    text: str = ""
    implicit_ends: frozenset[int] = frozenset()
    header_end: int | None = None
    effort: str | None = None

    @property
    def end(self) -> int | None:
        """The token that ends the thinking; None if a text does."""
        return None if self.text else self.ending[0]

    @property
    def all_ids(self) -> frozenset[int]:
        """All tokens of the format."""
        return self.implicit_ends if self.text else self.implicit_ends | {*self.opening, *self.ending}

    @cached_property
    def ends(self) -> frozenset[int]:
        """All tokens that end the thinking."""
        return self.implicit_ends if self.text else self.implicit_ends | {self.ending[0]}

    @property
    def is_asked_for(self) -> bool:
        """Whether the model thinks only because a prompt asks for it, so that nothing opens the thinking."""
        return not self.format.opening

    def is_open_in(self, text: str) -> bool:
        """Return whether a rendered prompt ends with the opening."""
        return not self.is_asked_for and text.rstrip().endswith(self.format.opening.strip())

    def is_closed_in(self, text: str) -> bool:
        """Return whether a rendered prompt ends with the ending, so that the model answers directly."""
        return text.rstrip().endswith(self.format.ending.strip())


def find_tags(tokenizer: Codec, template: str | None, wanted: str | None = None) -> ThinkingTags | None:
    """Return the thinking tags of a model; None if it does not mark its thinking.

    Args:
        tokenizer: the model's tokenizer.
        template: the model's chat template.
        wanted: name of a format, path of a TOML file with one, or "none"; None finds the format in the template.

    Raises:
        UsageError: there is no such format or file.
        ModelError: the model does not have the tags of the wanted format, or its template has tags of no known format.
    """
    if wanted == NONE:
        return None
    if wanted is not None:
        form = _named(wanted)
        if (tags := _tags_of(form, tokenizer)) is None:
            raise ModelError(
                f"thinking={wanted}: the model does not have {form.ending.strip()!r} as a token of its own. "
                f"Choose another format, or {NONE} for a model that does not mark its thinking."
            )
        return _fitted(tags, template)
    for form in FORMATS.values():
        if template and form.is_of(template) and (tags := _tags_of(form, tokenizer)) is not None:
            return _fitted(tags, template)
    if template and (found := THINKS.search(template)):
        raise ModelError(
            f"The chat template has {found[0]!r}, so the model thinks, but its format is not known. Add thinking=NAME "
            f"to the options of its address, with one of {', '.join(FORMATS)}, the path of a TOML file that describes "
            f"the format, or {NONE} to take the thinking as a part of the answer."
        )
    return None


def _fitted(tags: ThinkingTags, template: str | None) -> ThinkingTags:
    """Return the tags with the variables that a chat template has."""
    if not template:
        return tags
    efforts = (name for name in EFFORTS if re.search(rf"\b{name}\b", template))
    return replace(tags, format=tags.format.fitted(template), effort=next(efforts, None))


def _named(wanted: str) -> ThinkingFormat:
    if wanted.endswith(".toml"):
        return load_toml(Path(wanted), ThinkingFormat)[0]
    if wanted not in FORMATS:
        raise UsageError(unknown_name("thinking format", wanted, [*FORMATS, NONE]))
    return FORMATS[wanted]


def _tags_of(form: ThinkingFormat, tokenizer: Codec) -> ThinkingTags | None:
    """Return a format in a model's ids; None if the model does not have its tags as tokens, and they are not text."""
    ending, opening = tuple(tokenizer.encode(form.ending)), tuple(tokenizer.encode(form.opening))
    header_end = _id_of(form.header_end, tokenizer) if form.header_end else None
    (tag,) = re.findall(r"^(?:<[^>]*>|[^<]*)", form.ending)
    is_token = _id_of(tag, tokenizer) is not None
    if not (is_token or form.as_text) or (form.header_end and header_end is None):
        return None
    implicit = frozenset(id for each in form.implicit_ends if (id := _id_of(each, tokenizer)) is not None)
    return ThinkingTags(form, opening, ending, "" if is_token else form.ending, implicit, header_end)


def _id_of(tag: str, tokenizer: Codec) -> int | None:
    """Return the id of a text that is a token of its own; None if it is not."""
    ids = tokenizer.encode(tag)
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids) == tag else None  # else it is the unknown token

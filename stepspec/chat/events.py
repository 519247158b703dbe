"""Events of the answer: its text and its tool calls, while the target writes them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AnswerDelta:
    """The next chunk of the answer. The target writes it."""

    text: str
    type: Literal["answer.delta"] = "answer.delta"


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the target."""

    id: str
    name: str
    arguments: str
    """A JSON object; for an invalid call, the text that the model wrote."""
    problem: str | None = None
    """A sentence that says why the call is invalid, or None. The text of an invalid call is part of the answer."""


@dataclass(frozen=True)
class ToolCalled:
    """A tool call is complete, valid or not. Half a call is never emitted."""

    index: int
    """Position of the call in the answer, starting at 0."""
    call: ToolCall
    type: Literal["tool.called"] = "tool.called"


AnswerEvent = AnswerDelta | ToolCalled
"""An event of the answer."""

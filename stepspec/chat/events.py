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
    """JSON as the model wrote it."""
    problem: str | None = None
    """A sentence that says why the call is invalid, or None. An invalid call keeps the text that the model wrote."""


@dataclass(frozen=True)
class ToolCallDelta:
    """The next chunk of a tool call. The chunks' arguments, joined, are the arguments of the call."""

    index: int
    """Position of the call in the answer, starting at 0."""
    arguments: str
    id: str | None = None
    """Set in the first chunk of a call, like `name`; None in later chunks."""
    name: str | None = None
    type: Literal["tool.delta"] = "tool.delta"


@dataclass(frozen=True)
class ToolCalled:
    """A tool call has ended, valid or not. Its text is not part of the answer."""

    index: int
    call: ToolCall
    type: Literal["tool.called"] = "tool.called"


AnswerEvent = AnswerDelta | ToolCallDelta | ToolCalled
"""An event of the answer."""

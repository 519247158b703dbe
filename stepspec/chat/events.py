"""Events of the answer: its text and its tool calls while they are written, as frozen values."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AnswerDelta:
    """A further piece of the answer, which is the target's."""

    text: str
    type: Literal["answer.delta"] = "answer.delta"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, written by the target."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    problem: str | None = None
    """Why it cannot be made: a sentence. Arguments and name are then whatever the model wrote."""


@dataclass(frozen=True)
class ToolCallDelta:
    """A further piece of a call, which the target is writing. The pieces' arguments make up the call's."""

    index: int
    """Which of the answer's calls, from 0 on."""
    arguments: str
    id: str | None = None
    """With the first piece of a call; then None, and so is `name`."""
    name: str | None = None
    type: Literal["tool.delta"] = "tool.delta"


@dataclass(frozen=True)
class ToolCalled:
    """A call is whole, or will never be. Its text is no part of the answer."""

    index: int
    call: ToolCall
    type: Literal["tool.called"] = "tool.called"


AnswerEvent = AnswerDelta | ToolCallDelta | ToolCalled
"""An event of the answer."""

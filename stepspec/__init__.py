"""Speculative reasoning: a draft model proposes tokens and whole steps; the target model verifies and judges them."""

from typing import TYPE_CHECKING, Any

from stepspec.api.models import Pair, load_pair
from stepspec.api.session import PreparedRequest, StepSpec
from stepspec.api.sync import SyncStepSpec
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.chat.prompts import RawPrompt
from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, TargetError, UsageError
from stepspec.loop.counts import Counts, Times
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.result import Done, Event, Result, Usage
from stepspec.loop.step import Noted, Step, StepCommitted, StepDelta, StepJudged, StepProposed

__version__ = "0.2.0"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "ToolCallDelta":
            raise AttributeError("stepspec has no ToolCallDelta: a tool call comes when it is complete, as ToolCalled.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AnswerDelta",
    "ContextError",
    "Counts",
    "Done",
    "EngineError",
    "Event",
    "ModelError",
    "Noted",
    "Pair",
    "Policy",
    "PreparedRequest",
    "RawPrompt",
    "RequestOptions",
    "Result",
    "Sampling",
    "Step",
    "StepCommitted",
    "StepDelta",
    "StepJudged",
    "StepProposed",
    "StepSpec",
    "StepSpecError",
    "SyncStepSpec",
    "TargetError",
    "Times",
    "ToolCall",
    "ToolCalled",
    "Usage",
    "UsageError",
    "load_pair",
    "load_policy",
]

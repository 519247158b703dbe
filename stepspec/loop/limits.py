"""The limits of a request: its tokens, its thinking, its time and its answer's form."""

import asyncio
import re
from dataclasses import dataclass

from stepspec.loop.ledger import Ledger
from stepspec.loop.step import Limit
from stepspec.loop.transcript import Transcript


@dataclass(frozen=True)
class Demands:
    """Constraints and limits of a request.

    Attributes:
        json_schema: JSON schema of the answer, see `Engine.generate`.
        call_opener: matches the beginning of a tool call, for a model that does not separate its thinking.
        max_thinking_tokens: after this many tokens, the thinking ends and the answer begins.
        deadline_s: after this many seconds, the thinking ends and the answer begins. If the model does not separate
            its thinking, the text ends.
        stop_token_ids: tokens that end the answer, like the model's own end tokens.
    """

    json_schema: str | None = None
    call_opener: re.Pattern[str] | None = None
    max_thinking_tokens: int | None = None
    deadline_s: float | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def separate_answer(self) -> bool:
        """Whether the answer needs a separate call after the thinking."""
        limited = self.max_thinking_tokens is not None or self.deadline_s is not None
        return self.json_schema is not None or limited or bool(self.stop_token_ids)

    def opens_call(self, text: str) -> bool:
        """Whether a tool call begins in the text of a step."""
        return self.call_opener is not None and self.call_opener.search(text) is not None


class Limits:
    """What is left of a request's tokens and time.

    Attributes:
        deadline: in the event loop's time; None without one, and before the start.
        reached: the limit that ended the text or its thinking.
    """

    def __init__(self, demands: Demands, ledger: Ledger, transcript: Transcript) -> None:
        self._demands, self._ledger, self._transcript = demands, ledger, transcript
        self.deadline: float | None = None
        self.reached: Limit | None = None

    def start(self) -> None:
        """Set the deadline. The request's time begins now."""
        if self._demands.deadline_s is not None:
            self.deadline = asyncio.get_running_loop().time() + self._demands.deadline_s

    @property
    def room(self) -> int:
        """Tokens left in the budget; during the thinking also bounded by `max_thinking_tokens`."""
        most = self._demands.max_thinking_tokens
        if most is None or not self._transcript.thinking:
            return self._ledger.remaining
        return min(self._ledger.remaining, most - self._transcript.num_thought - len(self._transcript.open_ids))

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline

    def allow_thinking(self) -> bool:
        """Whether tokens and time are left for more thinking. Sets `reached` if not.

        Always true once the thinking has ended, because no deadline cuts off a separate answer.
        """
        if not self._transcript.thinking:
            return True
        if self.expired:
            self.reached = "deadline"
        elif self.room <= 0 < self._ledger.remaining:
            self.reached = "max_thinking_tokens"
        return self.room > 0 and self.reached is None

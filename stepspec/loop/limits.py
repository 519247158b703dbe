"""The limits of a request: its tokens, its thinking, its time and its answer's form."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from stepspec.chat.answer import AnswerReader
from stepspec.chat.tools import BARE
from stepspec.errors import UsageError
from stepspec.loop.ledger import Ledger
from stepspec.loop.options import RequestOptions
from stepspec.loop.result import Limit
from stepspec.loop.transcript import Transcript


class Limits:
    """What is left of a request's tokens and time, and the form of its answer.

    Attributes:
        options: the request's options.
        json_schema: JSON schema of the answer, of `options` or of tool calls, see `Engine.generate`.
        call_opener: matches the mark of a tool call, for a model that does not separate its thinking.
        end: the request's deadline in the event loop's time; None without one, and before the start.
        reached: the limit that ended the text or its thinking.
    """

    def __init__(
        self,
        options: RequestOptions,
        ledger: Ledger,
        transcript: Transcript,
        json_schema: str | None = None,
        call_opener: re.Pattern[str] | None = None,
    ) -> None:
        self.options, self.json_schema, self.call_opener = options, json_schema, call_opener
        self._ledger, self._transcript = ledger, transcript
        self.end: float | None = None
        self._thinking_end: float | None = None
        self.reached: Limit | None = None

    @property
    def separate_answer(self) -> bool:
        """Whether the answer needs a separate call after the thinking."""
        return self.json_schema is not None or self.options.separates_answer

    def opens_call(self, text: str, before: str) -> bool:
        """Whether a tool call begins in the text of a step after one with the text `before`.

        Only the beginning of the answer may be a call without a mark.
        """
        if self.call_opener is None:
            return False
        return self.call_opener.search(text) is not None or (not before.strip() and BARE.match(text) is not None)

    def step_opens_call(self, index: int) -> bool:
        """Whether a tool call begins in a committed step."""
        steps = self._transcript.steps
        return self.opens_call(steps[index].text, steps[index - 1].text if index else "")

    def check_json(self, answer: AnswerReader, name: str) -> None:
        """Check that an answer under a schema is valid JSON, since an engine's grammar may give up midway.

        Answers that a limit, a stop or a tool call ended are not checked. `name`: the model's, for the error.

        Raises:
            UsageError: the answer is not valid JSON.
        """
        cut = not self._transcript.ended or answer.stopped or self.options.stop_token_ids
        if self.json_schema is None or cut or answer.calls or not answer.text:
            return
        try:
            json.loads(answer.text)
        except ValueError as error:
            raise UsageError(
                f"The JSON schema cannot be followed: {name} ended its answer before it was valid JSON. Simplify it."
            ) from error

    def start(self) -> None:
        """Set the limits of time. They count from the request's acceptance, and so its time in a queue, too."""
        self._thinking_end = end_of(self.options.max_thinking_s, self._ledger.age_s)
        self.end = end_of(self.options.deadline_s, self._ledger.age_s)

    @property
    def deadline(self) -> float | None:
        """When calls are cut off, in the event loop's time: at the end of the request or, before that, of its
        thinking. None without a limit."""
        thinks = self._transcript.thinking or self._transcript.in_header
        ends = (self.end, self._thinking_end if thinks else None)
        return min((end for end in ends if end is not None), default=None)

    @property
    def room(self) -> int:
        """Tokens left in the budget; during the thinking also bounded by `max_thinking_tokens`."""
        most = self.options.max_thinking_tokens
        if most is None or not self._transcript.thinking:
            return self._ledger.remaining
        return min(self._ledger.remaining, most - self._transcript.num_thought - len(self._transcript.open_ids))

    @property
    def expired(self) -> bool:
        """Whether calls are cut off now."""
        return has_passed(self.deadline)

    def cut(self) -> None:
        """Note which limit has cut the text, in place of one that ended its thinking."""
        if has_passed(self.end):
            self.reached = "deadline"
        elif self._ledger.remaining <= 0:
            self.reached = "max_tokens"
        else:
            self.reached = "max_thinking_s" if self.expired else "context"

    def allow_more(self) -> bool:
        """Whether tokens and time are left for more thinking or, after it, for more of the answer. Sets `reached` if
        the thinking has to end."""
        if not self._transcript.thinking:
            return self.room > 0 and not self.expired
        if self.expired:
            self.reached = "max_thinking_s"
        elif self.room <= 0 < self._ledger.remaining:
            self.reached = "max_thinking_tokens"
        return self.room > 0 and self.reached is None


@asynccontextmanager
async def cut_off(end: float | None) -> AsyncGenerator[asyncio.Timeout]:
    """Cancel the block at a moment in the event loop's time, and go on after it. None never does.

    Yields what says whether it was cancelled.
    """
    limit = asyncio.timeout_at(end)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise


def end_of(seconds: float | None, spent_s: float = 0.0) -> float | None:
    """Return when a limit ends of which some seconds have passed, in the event loop's time; None without one."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds - spent_s


def has_passed(moment: float | None) -> bool:
    """Whether a moment in the event loop's time has passed. None never does."""
    return moment is not None and asyncio.get_running_loop().time() >= moment

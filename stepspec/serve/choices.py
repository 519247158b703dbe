"""Answers that are one of several texts: the engine generates a JSON string, and the client receives its text."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from stepspec.chat.events import AnswerDelta
from stepspec.loop.result import Done, Event


async def unquoted(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Pass on the events, with the answer in one chunk and without JSON quotes."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AnswerDelta):
                continue
            if isinstance(event, Done) and event.result.answer:
                answer = _unquoted(event.result.answer)
                yield AnswerDelta(answer)
                event = Done(replace(event.result, answer=answer))
            yield event


def _unquoted(answer: str) -> str:
    """Return the text of a JSON string, or the text so far if the string is incomplete."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer.strip().removeprefix('"')

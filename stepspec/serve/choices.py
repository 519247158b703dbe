"""An answer that is one of several texts: the engine writes it as a JSON string, and the client gets the text."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from stepspec.chat.events import AnswerDelta
from stepspec.loop.step import Done, Event


async def unquoted(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The events, with the answer in one chunk and without its quotes."""
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
    """The string that a JSON text holds, as far as it was written."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer.strip().removeprefix('"')

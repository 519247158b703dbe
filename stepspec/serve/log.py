"""One line in the log for each request: method, path, status, seconds; for a chat also its tokens, its
policy and the names of ignored fields."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepspec.loop.step import Done, Event

logger = logging.getLogger("stepspec.serve")

KEY = "stepspec.log"
"""Key of a request's scope under which details of the chat are stored for the line."""

MAX_PATH = 200


class RequestLog:
    """Middleware that writes the line when a response has gone out, or cannot."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, whole, start = 500, False, time.monotonic()
        about: dict[str, Any] = scope.setdefault(KEY, {})

        async def noting(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            whole |= message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, noting)
        finally:
            # The path as it was sent, in which there is no line break.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:MAX_PATH]
            chat = f" {about['tokens']} tokens" if "tokens" in about else ""
            chat += f" policy {about['policy']}" if "policy" in about else ""
            if ignored := about.get("ignored"):
                chat += f" ignored {', '.join(map(repr, ignored))}"
            if about.get("noted"):
                chat += " (unlike what the models have learned)"
            left = "" if whole else " (not sent to its end)"
            seconds = time.monotonic() - start
            logger.info("%s %s %d %.3f s%s%s", scope["method"], path, status, seconds, chat, left)


async def noted(
    events: AsyncGenerator[Event, None], scope: Scope, policy: str, ignored: Sequence[str]
) -> AsyncGenerator[Event, None]:
    """Passes on the events of a chat, and notes for its line the tokens, the policy and the ignored fields."""
    about = scope.setdefault(KEY, {})
    about["policy"] = policy
    about["ignored"] = ignored
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Done):
                about["tokens"] = event.result.counts.committed
                about["noted"] = event.result.note is not None
            yield event

"""Logs one line for each request: method, path, status, seconds; for chats also tokens, policy and ignored fields."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepspec.loop.step import Done, Event

logger = logging.getLogger("stepspec.serve")

KEY = "stepspec.log"
"""Key in a request's ASGI scope for the chat details of its log line."""

MAX_PATH = 200


class RequestLog:
    """Middleware that logs the line when a response has been sent or has failed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._noted = False  # whether the note on questions unlike the training data was logged, which is done once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, complete, start = 500, False, time.monotonic()
        about: dict[str, Any] = scope.setdefault(KEY, {})

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete |= message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            # The raw path is still percent-encoded, so it cannot contain line breaks.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:MAX_PATH]
            chat = f" {about['tokens']} tokens" if "tokens" in about else ""
            chat += f" policy {about['policy']}" if "policy" in about else ""
            if ignored := about.get("ignored"):
                chat += f" ignored {', '.join(map(repr, ignored))}"
            if note := about.get("note"):
                chat += " (with a note)"
                if not self._noted:
                    self._noted = True
                    logger.warning("%s", note)
            cut_off = "" if complete else " (response incomplete)"
            seconds = time.monotonic() - start
            logger.info("%s %s %d %.3f s%s%s", scope["method"], path, status, seconds, chat, cut_off)


def note_chat(scope: Scope, policy: str, ignored: Sequence[str]) -> None:
    """Store the policy of a chat and its ignored fields for the log line."""
    scope.setdefault(KEY, {}).update(policy=policy, ignored=ignored)


async def noted(events: AsyncGenerator[Event, None], scope: Scope) -> AsyncGenerator[Event, None]:
    """Pass on the events of a chat. Store its tokens for the log line."""
    about = scope.setdefault(KEY, {})
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Done):
                about["tokens"] = event.result.counts.committed
                about["note"] = event.result.note
            yield event

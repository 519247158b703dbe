"""Reads request bodies up to limits of size and time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from stepspec.base.workers import off_the_loop
from stepspec.serve.errors import RefusedError, TooLargeError, TooSlowError

T = TypeVar("T")

ARRIVAL_S = 30.0
"""Seconds in which a body must arrive."""


async def read_body(request: Request, max_bytes: int, parse: Callable[[bytes], T]) -> T:
    """Read and parse a JSON body.

    Raises:
        TooLargeError: the body exceeds the limit. The server reads and drops the rest of the body.
        TooSlowError: the body did not arrive in time. The server closes the connection.
        RefusedError: the body is not a valid request.
        ClientDisconnect: the client has disconnected.
    """
    kind = request.headers.get("content-type", "")
    media = kind.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):  # web pages may send other types across origins
        raise RefusedError(None, f"Content-Type must be application/json, got {kind[:80]!r}.")
    body = await arrived(request, max_bytes)
    return await off_the_loop(body, lambda: parse(body))


async def arrived(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request. Errors are those of `read_body`."""
    try:
        async with asyncio.timeout(ARRIVAL_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise TooSlowError(ARRIVAL_S) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    if int(request.headers.get("content-length", 0)) > max_bytes:  # the server has checked that it is a number
        raise TooLargeError(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise TooLargeError(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)

"""Reads the bodies of requests, no further than their limit."""

from fastapi import Request

from stepspec.base.workers import off_the_loop
from stepspec.serve.requests import ChatRequest, RefusedError


class TooLargeError(RefusedError):
    """A body is over its limit."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(None, f"The body has more than {max_bytes} bytes, which is the most that this service takes.")


async def read_chat(request: Request, max_bytes: int) -> ChatRequest:
    """The request of a client.

    Raises:
        TooLargeError: its body is over the limit. What the client goes on to send is read by the server and dropped.
        RefusedError: the body is no request.
        ClientDisconnect: the client has left.
    """
    kind = request.headers.get("content-type", "")
    media = kind.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):  # also what a web page may send anywhere unasked
        raise RefusedError(None, f"The Content-Type is {kind[:80]!r}; send application/json.")
    body = await _read(request, max_bytes)
    return await off_the_loop(body, lambda: ChatRequest.parsed(body))


async def _read(request: Request, max_bytes: int) -> bytes:
    if int(request.headers.get("content-length", 0)) > max_bytes:  # a server checks that it is a number
        raise TooLargeError(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise TooLargeError(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)

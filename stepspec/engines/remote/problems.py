"""Exceptions for failures of a server. Each message has the server's address and what to do."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx

from stepspec.base.printable import printable
from stepspec.engines.remote.address import KEYS, Address
from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError

CONTEXT_WORDS = (
    "context length",
    "context window",
    "maximum model length",
    "max_model_len",
    "exceeds the available context",
)
MAX_QUOTED = 200
MAX_READ = 65_536
"""Maximum number of bytes of an error response in which to search for its message."""


class RejectedError(EngineError):
    """The server rejected the request as invalid."""


class OverloadedError(EngineError):
    """The server works, but does not take the request now."""


def unreachable(address: Address, error: Exception) -> EngineError:
    """Create the exception for an error of the connection."""
    where, reason = address.base, str(error) or type(error).__name__
    if "CERTIFICATE" in reason.upper() or "SSL" in reason.upper():
        message = f"No TLS connection to {where}: {reason}. Set SSL_CERT_FILE to its certificates, or use http://."
    elif isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        message = f"Nothing answers at {where} ({reason}). Check that the server is running, and its host and port."
    else:
        message = f"{where} closed the connection during a response ({reason}). See the server's log."
    return EngineError(message)


def too_slow(address: Address, seconds: float, *, first: bool) -> EngineError:
    """Create the exception for a response that did not start or continue in time."""
    option = "first_token_timeout" if first and address.first_token_timeout is not None else "timeout"
    return EngineError(
        f"{address.base} sent no token for {seconds:g} s (keep-alives do not count). If the server is slow, raise "
        f"{option}=SECONDS in its address."
    )


def refused(address: Address, status: int, body: bytes | str) -> StepSpecError:
    """Create the exception for an error status. `body` is the response body, or the message from `message_in`."""
    where, message = address.base, body if isinstance(body, str) else _message(body)
    if status in (401, 403):
        name = address.key_env or " or ".join(KEYS)
        return EngineError(f"{where} rejected the API key ({status}: {message}). Set the right key in {name}.")
    if status == 404:
        return EngineError(
            f"{where} does not have this model or path (404: {message}). The address must end in /v1, followed by '#' "
            "and the model's name."
        )
    if status in (400, 413, 422) and any(words in message.lower() for words in CONTEXT_WORDS):
        return ContextError(f"The prompt does not fit the context of the model at {where}: {message}")
    if status in (429, 503):
        return OverloadedError(f"{where} is overloaded ({status}: {message}). Send fewer requests at a time.")
    if status >= 500:
        return EngineError(f"{where} failed ({status}: {message}). See the server's log.")
    return RejectedError(f"{where} rejected the request ({status}: {message}).")


def not_json(address: Address, content_type: str, body: bytes) -> EngineError:
    """Create the exception for a response that is not JSON."""
    start = body[:60].decode("utf-8", "replace")
    if "html" in content_type.lower() or start.lstrip().startswith("<"):
        return EngineError(f"{address.base} answered with a web page. Check the address: it usually ends in /v1.")
    return EngineError(
        f"{address.base} answered with JSON that cannot be read (it starts with {start!r}). See the server's log."
    )


def nonsense(address: Address, what: str) -> EngineError:
    """Create the exception for a response that is not valid; `what` describes the response."""
    what = _quoted(what)  # it may quote text from the server
    return EngineError(
        f"{address.base} answered with {what}. Check that it is an OpenAI-compatible server, and see its log."
    )


@contextmanager
def tokenizer_hint() -> Generator[None, None, None]:
    """Add to errors of a tokenizer how to set another one."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error} Set another tokenizer in the address: http://...?tokenizer=NAME.") from error


def _message(body: bytes) -> str:
    """Return the message in an error response, in any of the usual formats, as one line of printable text."""
    body = body[:MAX_READ]
    try:
        message = message_in(json.loads(body))
    except (ValueError, RecursionError):
        message = ""
    return message or _quoted(body.decode("utf-8", "replace")) or "no reason given"


def message_in(found: Any) -> str:
    """Return the error message in decoded JSON; "" if there is none."""
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail")))
    return _quoted(found) if isinstance(found, str) else ""


def _quoted(text: str) -> str:
    """Return the start of a text on one line, with control characters escaped."""
    text = printable(" ".join(text[: 2 * MAX_QUOTED].split()))
    return text.rstrip(".") if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."

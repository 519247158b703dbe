"""What goes wrong between us and a server, as sentences that name the server and say what to do."""

import json
from typing import Any

import httpx

from stepspec.engines.remote.address import KEYS, Address
from stepspec.errors import ContextError, EngineError, StepSpecError

CONTEXT_WORDS = (
    "context length",
    "context window",
    "maximum model length",
    "max_model_len",
    "exceeds the available context",
)
MAX_QUOTED = 200
MAX_READ = 65_536
"""Bytes of an error's body in which its message is looked for."""


class RejectedError(EngineError):
    """The server says that the call is wrong."""


def unreachable(address: Address, error: Exception) -> EngineError:
    """Of an error below HTTP."""
    where, reason = address.base, str(error) or type(error).__name__
    if "CERTIFICATE" in reason.upper() or "SSL" in reason.upper():
        said = f"No TLS connection to {where}: {reason}. Name its certificates in SSL_CERT_FILE, or use http://."
    elif isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        said = f"Nothing answers at {where} ({reason}). Is the server running, and are host and port right?"
    else:
        said = f"{where} broke off the connection in the middle of an answer ({reason}). See its log."
    return EngineError(said)


def too_slow(address: Address, seconds: float, *, first: bool) -> EngineError:
    """Of an answer that did not come, or did not go on, in time."""
    option = "first_token_timeout" if first and address.first_token_timeout is not None else "timeout"
    return EngineError(
        f"{address.base} sent no token for {seconds:g} s (keep-alives are none). Raise {option}=SECONDS in its "
        "address if it is slow."
    )


def refused(address: Address, status: int, body: bytes | str) -> StepSpecError:
    """Of an answer with an error status; its body, or what `message_in` found in it."""
    where, said = address.base, body if isinstance(body, str) else _message(body)
    if status in (401, 403):
        name = address.key_env or " or ".join(KEYS)
        return EngineError(f"{where} refuses the key ({status}: {said}). Put the right one into {name}.")
    if status == 404:
        return EngineError(
            f"{where} does not have this model or path (404: {said}). The address ends in /v1, and the model's name "
            "follows after '#'."
        )
    if status in (400, 413, 422) and any(words in said.lower() for words in CONTEXT_WORDS):
        return ContextError(f"The prompt does not fit the context of the model at {where}: {said}")
    if status == 429 or status >= 500:
        return EngineError(f"{where} failed or is overloaded ({status}: {said}). See its log.")
    return RejectedError(f"{where} refused the call ({status}: {said}).")


def not_json(address: Address, content_type: str, body: bytes) -> EngineError:
    """Of an answer that should be JSON and is not."""
    start = body[:60].decode("utf-8", "replace")
    if "html" in content_type.lower() or start.lstrip().startswith("<"):
        return EngineError(
            f"{address.base} answered with a web page. Is the address right? That of an API mostly ends in /v1."
        )
    return EngineError(f"{address.base} answered with JSON that cannot be read (it begins {start!r}). See its log.")


def nonsense(address: Address, what: str) -> EngineError:
    """Of an answer that is JSON and still makes no sense."""
    what = _quoted(what)  # which may quote what the server wrote
    return EngineError(f"{address.base} answered with {what}. Is it an OpenAI-compatible server? See its log.")


def _message(body: bytes) -> str:
    """What the server says, in any of the usual forms; one line of printable text."""
    body = body[:MAX_READ]
    try:
        message = message_in(json.loads(body))
    except (ValueError, RecursionError):
        message = ""
    return message or _quoted(body.decode("utf-8", "replace")) or "no reason given"


def message_in(found: Any) -> str:
    """The message of an error in decoded JSON; empty if there is none."""
    while isinstance(found, dict):
        found = found.get("error", found.get("message", found.get("detail")))
    return _quoted(found) if isinstance(found, str) else ""


def _quoted(text: str) -> str:
    """The beginning of a text, without line ends and what else would move a terminal's cursor."""
    text = " ".join(text[: 2 * MAX_QUOTED].split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text.rstrip(".") if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."

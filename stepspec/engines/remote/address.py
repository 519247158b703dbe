"""Server addresses with options: `http://HOST:PORT/v1?OPTION=VALUE&OPTION=VALUE#MODEL`."""

import base64
import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from stepspec.engines.remote.routers import ROUTERS, Router
from stepspec.errors import UsageError, unknown_name

KEYS = ("STEPSPEC_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold the API key, in this order, unless `key_env` names another one."""


@dataclass(frozen=True)
class Address:
    """One model on one server.

    Raises:
        UsageError: an option is out of range. From `parsed`: an option is unknown or not a number, or the variable in
            `key_env` is not set.
    """

    base: str
    """Base URL, including `/v1`."""
    model: str | None = None
    """Name of the model; None uses the only model of the server."""
    tokenizer: str | None = None
    """Hub name or folder of the model's tokenizer; None uses the one that the server reports."""
    thinking: str | None = None
    """Format of the model's thinking, see `stepspec.engines.thinking.find_tags`."""
    context: int | None = None
    """Context length in tokens; None uses the one that the server reports."""
    timeout: float = 60.0
    """Maximum seconds from one token to the next; keep-alives do not count as tokens.

    If a response is not streamed, the maximum seconds from its first byte to its last.
    """
    first_token_timeout: float | None = None
    """Maximum seconds to the first token, or to the start of a response that is not streamed; None uses `timeout`."""
    max_response_mb: float = 64.0
    """Maximum size of a response, in units of 1,048,576 bytes."""
    retries: int = 4
    """Retries after a failed connection, a disconnect before the response, or status 408, 409, 429 or 5xx."""
    router: str | None = None
    """The router in front of the servers, by its name in `ROUTERS`."""
    session_header: str | None = None
    """Request header with the id of the conversation, by which a router finds its replica; None uses the router's."""
    replay_headers: str | None = None
    """Response headers to send back with the next call of the request, separated by commas; None uses the router's."""
    key_env: str | None = None
    """Name of the environment variable with the API key."""
    user: str | None = field(default=None, repr=False)
    """User and password, `NAME:PASSWORD`, for servers that want them instead of a key. Never show it."""

    def __post_init__(self) -> None:
        for name in ("context", "timeout", "first_token_timeout", "max_response_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} of an address must be a number above 0, got {value:g}.")
        if self.router is not None and self.router not in ROUTERS:
            raise UsageError(unknown_name("router", self.router, ROUTERS))
        if self.retries < 0:
            raise UsageError(f"retries of an address must be at least 0, got {self.retries}.")

    @classmethod
    def parsed(cls, spec: str) -> "Address":
        """Parse the address of a server with its options."""
        try:
            parts = urlsplit(spec)
            named = bool(parts.hostname) and parts.port != 0  # urlsplit checks the port only when `port` is read
        except ValueError as error:
            raise UsageError(f"{spec!r} is not a valid address: {error}. Write http://HOST:PORT/v1#MODEL.") from None
        if not named or parts.scheme not in ("http", "https"):
            raise UsageError(f"{spec!r} names no host or port. Write http://HOST:PORT/v1#MODEL.")
        user, _, host = parts.netloc.rpartition("@")
        base = urlunsplit((parts.scheme, host, parts.path.rstrip("/") or "/v1", "", ""))
        kinds = {"tokenizer": str, "thinking": str, "context": int, "timeout": float, "first_token_timeout": float}
        kinds |= {"max_response_mb": float, "retries": int, "key_env": str}
        kinds |= {"router": str, "session_header": str, "replay_headers": str}
        options: dict[str, object] = {}
        for name, value in parse_qsl(parts.query):
            if name not in kinds:
                raise UsageError(unknown_name("option of an address", name, kinds))
            try:
                options[name] = kinds[name](value)
            except ValueError:
                raise UsageError(f"The option {name}={value!r} of an address is not a number.") from None
        address = cls(base, parts.fragment or None, user=unquote(user) or None, **options)  # type: ignore[arg-type]
        address.key()
        return address

    @cached_property
    def routing(self) -> Router:
        """What the router in front of the servers reads."""
        known = ROUTERS[self.router] if self.router is not None else Router()
        given: dict[str, Any] = {"header": self.session_header} if self.session_header is not None else {}
        if self.replay_headers is not None:
            given["replayed"] = [name.strip() for name in self.replay_headers.split(",") if name.strip()]
        return replace(known, **given)

    @property
    def first_token_s(self) -> float:
        """Maximum wait for the first token, in seconds."""
        return self.timeout if self.first_token_timeout is None else self.first_token_timeout

    @property
    def max_response_bytes(self) -> int:
        """Maximum size of a response, in bytes."""
        return int(self.max_response_mb * (1 << 20))

    @property
    def uses_tls(self) -> bool:
        """Whether the address uses TLS. If not, the client skips loading certificates, which is slow."""
        return self.base.startswith("https:")

    @property
    def root(self) -> str:
        """Base URL without `/v1`, for paths outside the OpenAI API."""
        return self.base.removesuffix("/v1")

    def key(self) -> str | None:
        """Return the API key from the environment; None if there is none. Never show it.

        Raises:
            UsageError: the variable in `key_env` is not set.
        """
        if self.key_env is None:
            return next((key for name in KEYS if (key := os.environ.get(name))), None)
        if self.key_env not in os.environ:
            raise UsageError(f"The environment variable {self.key_env} is not set. Set it to the server's API key.")
        return os.environ[self.key_env]

    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        if self.user is not None:
            return {"Authorization": f"Basic {base64.b64encode(self.user.encode()).decode()}"}
        key = self.key()
        return {"Authorization": f"Bearer {key}"} if key else {}

"""Where a server is and how it is to be asked: `http://HOST:PORT/v1?OPTION=VALUE&OPTION=VALUE#MODEL`."""

import math
import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from stepspec.errors import UsageError, unknown_name

KEYS = ("STEPSPEC_API_KEY", "OPENAI_API_KEY")
"""Environment variables that are looked into for a key, unless `key_env` names another."""


@dataclass(frozen=True)
class Address:
    """One model on one server.

    Raises:
        UsageError: (`parsed`) an option is unknown or has no such value, or the key's variable is not set.
    """

    base: str
    """Up to and with `/v1`."""
    model: str | None = None
    """None: the only one that the server has."""
    tokenizer: str | None = None
    """Hub name or folder of the model's tokenizer, where the server does not tell."""
    context: int | None = None
    """Tokens, where the server does not tell."""
    timeout: float = 60.0
    """Seconds from one token to the next after which a call fails; keep-alives do not count. Where an answer comes in
    one piece, the seconds from its beginning to its end."""
    first_token_timeout: float | None = None
    """Seconds to the first token, or to the beginning of an answer in one piece; None: as `timeout`."""
    max_response_mb: float = 64.0
    """Largest response, in MB of 1,048,576 bytes."""
    retries: int = 4
    """Of a call that could not be connected, was cut off before its answer began, or met status 408, 409, 429, 5xx."""
    session_header: str = "X-Session-ID"
    """Carries the same value in all calls of a request, so that a router keeps them on one replica."""
    replay_headers: str = "x-session-token,x-session-id"
    """Of an answer, sent back with the next call of the request; names with commas between them."""
    key_env: str | None = None
    """The environment variable that holds the key."""

    def __post_init__(self) -> None:
        for name in ("context", "timeout", "first_token_timeout", "max_response_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} of an address must be a number above 0, got {value:g}.")
        if self.retries < 0:
            raise UsageError(f"retries of an address must be at least 0, got {self.retries}.")

    @classmethod
    def parsed(cls, spec: str) -> "Address":
        """An address as users write it."""
        try:
            parts = urlsplit(spec)
            named = bool(parts.hostname) and parts.port != 0  # `port` is only looked at when it is asked for
        except ValueError as error:
            raise UsageError(f"{spec!r} is no address: {error}. Write http://HOST:PORT/v1#MODEL.") from None
        if not named:
            raise UsageError(f"{spec!r} names no host or port. Write http://HOST:PORT/v1#MODEL.")
        base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        kinds = {"tokenizer": str, "context": int, "timeout": float, "first_token_timeout": float}
        kinds |= {"max_response_mb": float, "retries": int, "session_header": str, "replay_headers": str}
        kinds["key_env"] = str
        options: dict[str, object] = {}
        for name, value in parse_qsl(parts.query):
            if name not in kinds:
                raise UsageError(unknown_name("option of an address", name, kinds))
            try:
                options[name] = kinds[name](value)
            except ValueError:
                raise UsageError(f"The option {name}={value!r} of an address is not a number.") from None
        address = cls(base, parts.fragment or None, **options)  # type: ignore[arg-type]
        address.key()
        return address

    @property
    def first_token_s(self) -> float:
        """Longest wait for the first token, in seconds."""
        return self.timeout if self.first_token_timeout is None else self.first_token_timeout

    @property
    def max_response_bytes(self) -> int:
        """Size of the largest response."""
        return int(self.max_response_mb * (1 << 20))

    @property
    def uses_tls(self) -> bool:
        """Whether certificates are needed, which take a while to read."""
        return self.base.startswith("https:")

    @property
    def root(self) -> str:
        """The server without `/v1`, where some have further paths."""
        return self.base.removesuffix("/v1")

    def key(self) -> str | None:
        """The key, from the environment; it is never shown."""
        if self.key_env is None:
            return next((key for name in KEYS if (key := os.environ.get(name))), None)
        if self.key_env not in os.environ:
            raise UsageError(f"The environment variable {self.key_env}, which is to hold the server's key, is not set.")
        return os.environ[self.key_env]

    def headers(self) -> dict[str, str]:
        """What every call carries."""
        key = self.key()
        return {"Authorization": f"Bearer {key}"} if key else {}

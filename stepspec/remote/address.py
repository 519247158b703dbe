"""Where a server is and how it is to be asked: `http://HOST:PORT/v1?OPTION=VALUE&OPTION=VALUE#MODEL`."""

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
    """Seconds without a sign of life after which a call fails."""
    retries: int = 4
    """Of a call that could not be connected, was cut off before its answer began, or met status 408, 409, 429, 5xx."""
    session_header: str = "X-Session-ID"
    """Carries the same value in all calls of a request, so that a router keeps them on one replica."""
    replay_headers: str = "x-session-token,x-session-id"
    """Of an answer, sent back with the next call of the request; names with commas between them."""
    key_env: str | None = None
    """The environment variable that holds the key."""

    @classmethod
    def parsed(cls, spec: str) -> "Address":
        """An address as users write it."""
        parts = urlsplit(spec)
        if not parts.hostname:
            raise UsageError(f"{spec!r} names no host. Write http://HOST:PORT/v1#MODEL.")
        base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        kinds = {"tokenizer": str, "context": int, "timeout": float, "retries": int}
        kinds |= {"session_header": str, "replay_headers": str, "key_env": str}
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

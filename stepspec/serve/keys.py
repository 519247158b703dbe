"""API keys: who may use the service, with which limits. Only hashes of keys are stored and compared."""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from stepspec.base.file_model import FileModel, Version, load_toml
from stepspec.errors import UsageError
from stepspec.serve.errors import NoKeyError, RateError

logger = logging.getLogger("stepspec.serve")

ENVIRONMENT = "STEPSPEC_API_KEYS"
"""Environment variable with keys, separated by commas."""

ANONYMOUS = "anonymous"
"""Name of all clients of a service without keys."""

MAX_NAME = 64
"""Most characters of the name of a key."""
WINDOW_S = 60.0
MIN_CHARACTERS = 16
"""Fewest characters of a key. SHA-256 without a salt is safe only for keys that cannot be guessed."""


class KeyTable(FileModel):
    """A key in a file of keys."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    """Name of the client in logs."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the key, in hexadecimal."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Limit for prompt and committed tokens together."""
    priority: int = 0
    """Lowest priority number that its requests may have; requests with lower numbers run first."""
    group: str | None = Field(default=None, min_length=1, max_length=MAX_NAME)
    """Keys of one group reuse each other's cached prompts. By default, a key shares with no other."""


class KeyFile(FileModel):
    """A TOML file of keys."""

    version: Version
    keys: Sequence[KeyTable] = Field(min_length=1)


@dataclass(frozen=True)
class Client:
    """A client of the service, known by its key."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    group: str | None = None
    """What its requests share with, see `TokenBuffer`."""


def authorization_of(header: Callable[[str], str | None]) -> str | None:
    """Return the Authorization header of a request, or one with the key in `x-api-key`, as clients of Anthropic's API
    send it. `header` returns a header by its name."""
    found, key = header("authorization"), header("x-api-key")
    return found if key is None or (found or "").lower().startswith("bearer ") else f"Bearer {key}"


@dataclass
class Keys:
    """The keys of a service. Without any, everybody may use it.

    Args:
        file: a TOML file of keys, see `KeyFile`.
        environment: the variables in which `ENVIRONMENT` may be.

    Raises:
        UsageError: the file cannot be read or is invalid, two keys are the same, or one is too short.
    """

    file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._changed = self._time()  # before the file is read, so that no later change is missed
        self._clients = self._read()

    @property
    def are_needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._clients)

    def client(self, authorization: str | None) -> Client:
        """Return the client with the key in an Authorization header.

        Raises:
            NoKeyError: there is no key, or it is unknown.
        """
        if not self._clients:
            return Client(ANONYMOUS)
        scheme, _, key = (authorization or "").partition(" ")
        given = key_hash(key.strip())
        found = [client for digest, client in self._clients.items() if hmac.compare_digest(digest, given)]
        if scheme.lower() != "bearer" or not found:
            raise NoKeyError()
        return found[0]

    def reload(self, done: str = "Reloaded") -> None:
        """Read the file again. If that fails, the keys stay as they are, and the log says why; else that it is done."""
        self._changed = self._time()
        try:
            self._clients = self._read()
        except UsageError as error:
            logger.error("The API keys were not reloaded, the old ones stay: %s", error)
        else:
            sources = [str(each) for each in (self.file, self.environment.get(ENVIRONMENT) and ENVIRONMENT) if each]
            number = f"{len(self._clients)} API key{'s' * (len(self._clients) != 1)}"
            logger.info("%s %s from %s.", done, number, " and ".join(sources) or "no file")

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._time() not in (None, self._changed):
            self.reload()

    def _time(self) -> int | None:
        """Return when the file was changed; None if there is none."""
        with suppress(OSError):
            return self.file and self.file.stat().st_mtime_ns
        return None

    def _read(self) -> dict[str, Client]:
        clients: dict[str, Client] = {}
        for number, key in enumerate(filter(None, self.environment.get(ENVIRONMENT, "").split(",")), 1):
            if not key.isascii():
                raise UsageError(f"Key {number} in {ENVIRONMENT} must have only ASCII characters, as HTTP headers do.")
            if len(key.strip()) < MIN_CHARACTERS:
                raise UsageError(f"Key {number} in {ENVIRONMENT} must have at least {MIN_CHARACTERS} characters.")
            digest = key_hash(key.strip())
            if digest in clients:
                raise UsageError(f"Two API keys are the same: {clients[digest].name!r} and key {number} of it.")
            clients[digest] = Client(f"{ENVIRONMENT} {number}", group=digest)
        if self.file is None:
            return clients
        limits: dict[str, tuple[int | None, int | None]] = {}
        for table in load_toml(self.file, KeyFile)[0].keys:
            own = table.requests_per_minute, table.tokens_per_minute
            if limits.setdefault(table.name, own) != own:
                raise UsageError(
                    f"Two API keys have the name {table.name!r} and different limits. Keys of one name share their "
                    "limits, so give both the same ones, or two names."
                )
            if table.sha256 in clients:
                raise UsageError(f"Two API keys are the same: {clients[table.sha256].name!r} and {table.name!r}.")
            group = table.sha256 if table.group is None else f"group {table.group}"  # which is no hash of a key
            clients[table.sha256] = Client(**table.model_dump(exclude={"sha256", "group"}), group=group)
        return clients


def key_hash(key: str) -> str:
    """Return the hash of a key as a file of keys has it."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def new_key() -> str:
    """Return a new random key."""
    return f"sk-{secrets.token_urlsafe(32)}"


class Rates:
    """Counts requests and tokens of clients against the limits of their keys, in windows of a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}
        """By client and `requests` or `tokens`: when the window ends, and what was used in it."""
        self.elsewhere: Mapping[tuple[str, str], int] = {}
        """What clients have used at other replicas of the service, as their `counts` say."""

    def check(self, client: Client) -> None:
        """Count a request.

        Raises:
            RateError: the client has used up one of its limits.
        """
        for what, most in (("requests", client.requests_per_minute), ("tokens", client.tokens_per_minute)):
            key = client.name, what
            end, used = self._window(key)
            if most is not None and used + self.elsewhere.get(key, 0) >= most:
                wait_s = end - self._clock()
                raise RateError(f"The key {client.name!r} is limited to {most} {what} a minute.", wait_s)
        if client.requests_per_minute is not None:
            self._use((client.name, "requests"), 1)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return what clients with limits have used in their windows: by name, `requests` and `tokens`."""
        return {key: self._window(key)[1] for key in self._windows}

    def used(self, client: Client, num_tokens: int) -> None:
        """Count tokens of a prompt or of a text. They count even where they exceed the limit."""
        if client.tokens_per_minute is not None and num_tokens:
            self._use((client.name, "tokens"), num_tokens)

    def _window(self, key: tuple[str, str]) -> tuple[float, int]:
        """Return the end of the current window and what was used in it. A new one begins with its first use."""
        end, used = self._windows.get(key, (0.0, 0))
        now = self._clock()
        return (end, used) if now < end else (now + WINDOW_S, 0)

    def _use(self, key: tuple[str, str], count: int) -> None:
        end, used = self._window(key)
        self._windows[key] = end, used + count

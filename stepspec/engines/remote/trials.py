"""Test requests to a server, before an engine is loaded."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from stepspec.base.loop_thread import LoopThread
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerModel, ServerModels, validated
from stepspec.engines.remote.client import CONNECT_S
from stepspec.engines.remote.limits import BoundedTransport, read_json, read_whole
from stepspec.engines.remote.problems import nonsense, refused, unreachable
from stepspec.errors import EngineError, ModelError, StepSpecError, unknown_name

FIRST_CALLS_S = 120.0
"""Minimum timeout of the test requests, in seconds. A server may compile code at its first requests."""

TRIAL_IDS = [5, 6, 7]
TRIAL_TEXT = "1 2 3"
MAX_NAMED = 20
"""Maximum number of models that an error message lists."""
A = TypeVar("A", bound=BaseModel)
T = TypeVar("T")


class Reply(NamedTuple):
    """A response with its body."""

    response: httpx.Response
    body: bytes


@dataclass
class Trials:
    """Sends test requests to one server."""

    address: Address
    client: httpx.AsyncClient

    async def model_card(self) -> ServerModel:
        """Return the server's description of the model.

        Raises:
            ModelError: the server has no such model, or it has several and the address names none.
            EngineError: the server rejects the request, or responds in another format.
        """
        reply = await self.get(f"{self.address.base}/models")
        status = reply.response.status_code
        if not reply.response.is_success:
            if self.address.model is not None and status not in (401, 403):
                return ServerModel(id=self.address.model)  # some servers do not list their models
            raise refused(self.address, status, reply.body)
        by_id = {
            card.id: card for card in validated(ServerModels, self.address, self.json(reply), "list of models").data
        }
        wanted = self.address.model
        if wanted is None and len(by_id) == 1:
            return next(iter(by_id.values()))
        if wanted is None:
            names = ", ".join([*islice(by_id, MAX_NAMED), *(["..."] if len(by_id) > MAX_NAMED else [])])
            raise ModelError(f"{self.address.base} has {len(by_id)} models; add one after '#': {names}")
        if wanted not in by_id:
            raise ModelError(f"At {self.address.base}: {unknown_name('model', wanted, by_id)}")
        return by_id[wanted]

    async def kind(self, card: ServerModel) -> str:
        """Return the server's name, and its version if it reports it."""
        try:
            reply = await self.get(f"{self.address.root}/{card.server.version_path}")
            version = _ServerVersion.model_validate_json(reply.body).version if reply.response.is_success else ""
        except (ValidationError, EngineError):
            version = ""
        return f"{card.server.title} {version}".strip()

    async def try_post(self, kind: type[A], url: str, fields: Mapping[str, Any]) -> A | None:
        """Return the response to a call; None if the server rejects it or responds in another format."""
        try:
            reply = await self.post(url, fields)
            return kind.model_validate(self.json(reply)) if reply.response.is_success else None
        except (ValidationError, EngineError):
            return None

    async def get(self, url: str) -> Reply:
        """Send a GET request."""
        return await self._read(self.client.stream("GET", url))

    async def post(self, url: str, fields: Mapping[str, Any]) -> Reply:
        """Send a POST request with JSON."""
        return await self._read(self.client.stream("POST", url, json=fields))

    async def _read(self, request: AbstractAsyncContextManager[httpx.Response]) -> Reply:
        async with request as response:
            return Reply(response, await read_whole(self.address, response))

    def json(self, reply: Reply) -> Any:
        """Return the JSON object of a response.

        Raises:
            EngineError: the response is not a JSON object.
        """
        found = read_json(self.address, *reply)
        if not isinstance(found, dict):
            raise nonsense(self.address, "JSON that is not an object")
        return found


class _ServerVersion(BaseModel):
    version: Annotated[str, Field(max_length=100, validation_alias=AliasChoices("version", "build_info"))] = ""


def detected(address: Address, detect: Callable[[Address, httpx.AsyncClient], Awaitable[T]]) -> T:
    """Return what test requests find at an address. Blocks, in a thread with its own event loop.

    Raises:
        ModelError: a test request failed.
    """
    thread = LoopThread("asks a server")
    try:
        return thread.run(_detected(address, detect))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelError(str(unreachable(address, error))) from error
    except StepSpecError as error:
        raise error if isinstance(error, ModelError) else ModelError(str(error)) from error
    finally:
        thread.close()


async def _detected(address: Address, detect: Callable[[Address, httpx.AsyncClient], Awaitable[T]]) -> T:
    if address.first_token_timeout is None:
        address = replace(address, first_token_timeout=max(address.timeout, FIRST_CALLS_S))
    no_reuse = httpx.Limits(max_keepalive_connections=0)  # some servers close a connection after an error
    connections = httpx.AsyncHTTPTransport(verify=address.uses_tls, limits=no_reuse)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    bounded = BoundedTransport(connections, address)
    async with httpx.AsyncClient(transport=bounded, timeout=timeout, headers=address.headers()) as client:
        return await detect(address, client)

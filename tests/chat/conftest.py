"""Fixtures of the chat tests: by default, chat models use scripted engines."""

from collections.abc import Iterator

import pytest
from by_name import name_engines
from following import following_pair
from service import serving

from stepspec import Pair
from stepspec.langchain import shared_models


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the engine kind `following` and clear the cache of loaded pairs."""
    name_engines("following", monkeypatch)
    monkeypatch.setattr(shared_models, "_pairs", {})


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def agent_pair() -> Pair:
    """Scripted engines for the tests of agents' clients."""
    return following_pair()


@pytest.fixture(scope="module")
def agent_address(agent_pair: Pair) -> Iterator[str]:
    """The address of a service with them."""
    with serving(agent_pair, "specreason") as address:
        yield address

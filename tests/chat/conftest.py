"""Fixtures of the chat tests: by default, chat models use scripted engines."""

import pytest
from by_name import name_engines

from stepspec.langchain import shared_models


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the engine kind `following` and clear the cache of loaded pairs."""
    name_engines("following", monkeypatch)
    monkeypatch.setattr(shared_models, "_pairs", {})


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"

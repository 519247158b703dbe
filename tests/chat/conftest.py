"""Chat models of these tests have scripted engines unless a test says otherwise."""

import pytest
from by_name import name_engines

from stepspec.langchain import sharing


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `following:` a kind of engine, and forgets the pairs that were loaded."""
    name_engines("following", monkeypatch)
    monkeypatch.setattr(sharing, "_pairs", {})


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"

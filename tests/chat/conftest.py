"""Scripted engines by spec string, as chat models name them."""

import sys
from types import ModuleType
from typing import Any

import pytest
from following import FollowingEngine, following_pair

from stepspec import session
from stepspec.langchain import sharing

MODULE = "following_by_name"


class ByName:
    """Loads `following:NAME`; engines of one pair share a tokenizer."""

    PAIR = following_pair()

    @classmethod
    def load(cls, name: str, title: str | None = None) -> FollowingEngine:
        """An engine of that name."""
        return FollowingEngine(cls.PAIR.target.tokenizer, name)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `following:` a kind of engine, and forgets the pairs that were loaded."""
    module: Any = ModuleType(MODULE)
    module.ByName = ByName
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(session, "ENGINES", {**session.ENGINES, "following": (MODULE, "ByName", "none")})
    monkeypatch.setattr(sharing, "_pairs", {})


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"

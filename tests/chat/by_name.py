"""Scripted engines by spec string, as chat models name them."""

import sys
from types import ModuleType
from typing import Any

import pytest
from following import FollowingEngine, following_pair

from stepspec.api import session

MODULE = "following_by_name"


class ByName:
    """Loads `following:NAME`; engines of one pair share a tokenizer."""

    PAIR = following_pair()

    @classmethod
    def load(cls, name: str, title: str | None = None) -> FollowingEngine:
        """An engine of that name."""
        return FollowingEngine(cls.PAIR.target.tokenizer, name)  # type: ignore[arg-type]


def name_engines(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes that kind of engine a scripted one."""
    module: Any = ModuleType(MODULE)
    module.ByName = ByName
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(session, "ENGINES", {**session.ENGINES, kind: (MODULE, "ByName", "none")})

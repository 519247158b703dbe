"""Scripted engines that chat models load by spec string."""

import sys
from types import ModuleType
from typing import Any

import pytest
from following import FollowingEngine, following_pair

from stepspec.api import models

MODULE = "following_by_name"


class ByName:
    """Loads `following:NAME`. All engines share one tokenizer."""

    PAIR = following_pair()

    @staticmethod
    def check_options(name: str) -> None:
        """Every name is valid."""

    @classmethod
    def load(cls, name: str, title: str | None = None) -> FollowingEngine:
        """Return a scripted engine with the given name."""
        return FollowingEngine(cls.PAIR.target.tokenizer, name)  # type: ignore[arg-type]


def name_engines(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the scripted engine under the engine kind `kind`."""
    module: Any = ModuleType(MODULE)
    module.ByName = ByName
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(models, "ENGINES", {**models.ENGINES, kind: (MODULE, "ByName", "none")})

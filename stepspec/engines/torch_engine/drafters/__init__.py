"""Drafters by the names that policies and calls use."""

from importlib import import_module

from stepspec.engines.protocol import CALL_DRAFTERS, DrafterName
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.errors import UsageError

__all__ = ["Draft", "Drafter", "Drafters", "Parts"]


class Drafters:
    """The drafters of one target. Each is created on first use."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._made: dict[DrafterName, Drafter] = {}

    def check(self, name: DrafterName) -> None:
        """Check that the engine can use a drafter.

        Raises:
            UsageError: the drafter needs a draft model that is missing, or the target is quantized to int4.
        """
        if name in CALL_DRAFTERS and (missing := self._missing(name)) is not None:
            raise UsageError(missing)

    def available(self) -> list[DrafterName]:
        """Return the names of the drafters that pass `check`."""
        return [name for name in CALL_DRAFTERS if self._missing(name) is None]

    def _missing(self, name: DrafterName) -> str | None:
        """Return why a drafter cannot be used; None if it can."""
        target = self._parts.target
        if target.quantize == "int4":
            return (
                f"{target.name} has quantize=int4, which is for drafts: passes over more than a few tokens round "
                "differently, so drafting would change its text. Load it with quantize=int8."
            )
        return _drafter(name).missing(self._parts)

    def get(self, name: DrafterName) -> Drafter | None:
        """Return the drafter of that name; None for `none`."""
        if name != "none" and name not in self._made:
            self._made[name] = _drafter(name).made(self._parts)
        return self._made.get(name)

    def release(self, row: BatchRow) -> None:
        """Release what the row's drafter holds for it, after the row has ended."""
        drafter = self._made.get(row.drafting.drafter)
        if drafter is not None:
            drafter.release(row)

    def forget(self) -> None:
        """Drop what the drafters keep of rows that have ended."""
        for drafter in self._made.values():
            drafter.forget()


def _drafter(name: DrafterName) -> type[Drafter]:
    module, _, kind = CALL_DRAFTERS[name].rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), kind)

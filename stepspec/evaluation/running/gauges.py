"""Readings before and after a block of rows: energy drawn, and tokens that the engines read and wrote."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import Engine
from stepspec.evaluation.energy import EnergyMeter
from stepspec.evaluation.records import Usage


@dataclass(frozen=True)
class Reading:
    """The values of all gauges at one time."""

    joules: Mapping[str, float]
    work: Mapping[str, Metrics]


class Gauges:
    """The energy counters of this machine, and the engines by role."""

    def __init__(self, engines: Mapping[str, Engine] | None = None, energy: EnergyMeter | None = None) -> None:
        self._engines = engines or {}
        self._energy = energy if energy is not None else EnergyMeter([])

    def read(self) -> Reading:
        """Return the current values."""
        return Reading(self._energy.read(), {role: engine.metrics() for role, engine in self._engines.items()})

    def joules_since(self, before: Reading, now: Reading) -> float | None:
        """Return the joules drawn between two readings; None if they are not measured."""
        return self._energy.drawn(before.joules, now.joules)

    def usage_since(self, before: Reading, now: Reading) -> dict[str, Usage] | None:
        """Return the tokens read and written between two readings, by role; None without engines."""
        if not self._engines:
            return None
        return {role: _usage(now.work[role] - before.work[role]) for role in self._engines}


def _usage(work: Metrics) -> Usage:
    return Usage(prompt_tokens=work.prompt_tokens, cached_tokens=work.cached_tokens, generated_tokens=work.generated)

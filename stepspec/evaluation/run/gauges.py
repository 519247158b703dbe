"""Tokens that the engines read and wrote during a block of rows."""

from collections.abc import Mapping

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import Engine
from stepspec.evaluation.records import ModelUsage


class Gauges:
    """The counters of the engines by role."""

    def __init__(self, engines: Mapping[str, Engine] | None = None) -> None:
        self._engines = engines or {}

    def read(self) -> dict[str, EngineMetrics]:
        """Return the current values."""
        return {role: engine.metrics() for role, engine in self._engines.items()}

    def usage_since(
        self, before: Mapping[str, EngineMetrics], now: Mapping[str, EngineMetrics] | None = None
    ) -> dict[str, ModelUsage] | None:
        """Return the tokens read and written since a reading, up to another one, by role; None without engines."""
        now = self.read() if now is None else now
        return {role: _usage(now[role] - before[role]) for role in self._engines} or None


def _usage(work: EngineMetrics) -> ModelUsage:
    return ModelUsage(
        prompt_tokens=work.prompt_tokens, cached_tokens=work.cached_tokens, generated_tokens=work.generated
    )

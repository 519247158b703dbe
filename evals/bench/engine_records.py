"""What a measurement of a service stores about its engines."""

import asyncio
from typing import Any

from stepspec.api.loading import load_pair
from stepspec.evaluation.running.conditions import engine_record


def engine_records(pair: str | None) -> dict[str, Any]:
    """Return what target and draft of a pair run with. It loads them, so no service of theirs should run."""
    models = load_pair(pair=pair, notes=False)
    engines = {"target": engine_record(models.target), "draft": engine_record(models.draft)}
    asyncio.run(models.aclose())
    return engines

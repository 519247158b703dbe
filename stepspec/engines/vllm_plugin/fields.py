"""The fields of a request that set its acceptance rule in vLLM with stepspec's plugin.

They go into `SamplingParams.extra_args`, over HTTP into `vllm_xargs`:

    {"stepspec_acceptance": "ratio", "stepspec_threshold": 0.3, "stepspec_exact_digits": 1}
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from stepspec.engines.protocol import Acceptance, check_numbers
from stepspec.errors import UsageError, unknown_name

PREFIX = "stepspec_"
KEY = f"{PREFIX}key"
"""The field with a key of the request, by which `hooks.relaxed_positions` returns its relaxed tokens."""
MAX_KEY = 64
SETTINGS = ("acceptance", "threshold", "window", "entropy", "exact_digits")

TRIAL = {f"{PREFIX}acceptance": "?"}
REFUSAL = f"{PREFIX}acceptance must be one of"
"""How the plugin refuses `TRIAL`, by which a client sees that a server has it and can relax tokens."""

EXACT = Acceptance()


def fields_of(rule: Acceptance) -> dict[str, str | int | float]:
    """Return the fields of a request under a rule; none for the exact rule."""
    if rule.is_exact:
        return {}
    values = {"acceptance": rule.rule, "threshold": rule.threshold, "window": rule.window, "entropy": rule.entropy}
    values["exact_digits"] = int(rule.exact_digits) or None
    return {f"{PREFIX}{name}": value for name, value in values.items() if value is not None}


def acceptance_in(extra_args: Mapping[str, Any] | None) -> Acceptance:
    """Return the rule of a request with these arguments.

    Raises:
        UsageError: the rule is invalid.
    """
    found = {name: value for name, value in (extra_args or {}).items() if name.startswith(PREFIX)}
    for name, value in found.items():
        if not isinstance(value, str | int | float):
            raise UsageError(f"{name} must be a number or text, got {value!r}.")
    key = found.pop(KEY, "")
    if not isinstance(key, str) or len(key) > MAX_KEY:
        raise UsageError(f"{KEY} must be text of at most {MAX_KEY} characters.")
    return _acceptance(tuple(sorted(found.items()))) if found else EXACT


@lru_cache(maxsize=256)
def _acceptance(fields: tuple[tuple[str, Any], ...]) -> Acceptance:
    values = {name.removeprefix(PREFIX): value for name, value in fields}
    for name in values:
        if name not in SETTINGS:
            raise UsageError(unknown_name("field", PREFIX + name, {PREFIX + each for each in SETTINGS}))
    rules = ("exact", "ratio", "typical", "fly")
    rule = values.pop("acceptance", "exact")
    if rule not in rules:
        raise UsageError(f"{REFUSAL} {', '.join(rules)}, got {rule!r}.")
    digits = values.pop("exact_digits", 0)
    if digits not in (0, 1):
        raise UsageError(f"{PREFIX}exact_digits must be 0 or 1, got {digits!r}.")
    check_numbers(**values)
    if not isinstance(values.get("window", 1), int):
        raise UsageError(f"window must be a whole number, got {values['window']!r}.")
    return Acceptance(cast("Any", rule), **values, exact_digits=bool(digits))

"""The pairs that a service serves, from the options that name them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepspec.api.models import Pair, load_pair
from stepspec.api.pairs import EMBEDDED_NAME, PAIRS
from stepspec.errors import UsageError
from stepspec.loop.policy import Policy

NAMED = re.compile(r"([\w.-]+)=(.+)")
"""A pair with a name of its own, NAME=MODELS."""


class WantedPair(NamedTuple):
    """The models of a pair to load: its name, or spec strings."""

    pair: str | None
    target: str | None
    draft: str | None

    def arguments(self, policy: Policy | None, judges: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the arguments of `load_pair`.

        Args:
            policy: the service's policy; None if it is not known.
            judges: spec strings of judge models by name.
        """
        return {
            **self._asdict(),
            "needs_draft": policy is not None and policy.needs_draft,
            "judges": judges,
            "judge_names": policy.judge_models if policy is not None else (),
        }


def wanted_pairs(pairs: Sequence[str], target: str | None, draft: str | None) -> Mapping[str, WantedPair]:
    """Return the pairs to serve by name. The name of a pair of `target` is empty: it is that of the target.

    Args:
        pairs: values of --pair.
        target: the value of --target.
        draft: the value of --draft.

    Raises:
        UsageError: two pairs have the same name, or pairs and the target are both named.
    """
    if pairs and (target is not None or draft is not None):
        raise UsageError(
            "Name models either with --pair or with --target and --draft. --pair NAME=TARGET,DRAFT has both."
        )
    if not pairs:
        return (
            {"": WantedPair(None, target, draft)} if target or draft else {EMBEDDED_NAME: WantedPair(None, None, None)}
        )
    found: dict[str, WantedPair] = {}
    for each in pairs:
        named = NAMED.fullmatch(each)
        name, models = (named[1], named[2]) if named else (each.partition("?")[0], each)
        if name in found:
            raise UsageError(f"Two pairs have the name {name!r}. Name one of them with --pair NAME=MODELS.")
        if not named or models.partition("?")[0] in PAIRS:
            found[name] = WantedPair(models, None, None)
            continue
        first, _, second = models.partition(",")
        found[name] = WantedPair(None, first, second or None)
    return found


def load_pairs(wanted: Mapping[str, WantedPair], policy: Policy, judges: Mapping[str, str] | None) -> dict[str, Pair]:
    """Load pairs, and return them by name.

    Raises:
        UsageError, ModelError: see `load_pair`.
    """
    pairs: dict[str, Pair] = {}
    for name, models in wanted.items():
        loaded = load_pair(**models.arguments(policy, judges))
        pairs[name or loaded.target.name] = loaded
    return pairs

"""The served models: pairs by name, each under any policy that its engines support."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.api.session import StepSpec
from stepspec.base.files import former_name, list_data_files
from stepspec.errors import UsageError, unknown_name
from stepspec.loop.calibrated import UNKNOWN, proposing, settings_of
from stepspec.loop.certificate import NEXT_STEP
from stepspec.loop.policy import Policy, load_policy
from stepspec.serve.errors import NoSuchModelError, RefusedError
from stepspec.serve.fields import Speculation

MAX_SESSIONS = 64
"""Sessions of a model that are kept: one for each policy and threshold that was used last."""

UNUSED_DRAFT = f"The draft is not used: there are no thresholds for this pair. {NEXT_STEP.removesuffix('.')}"
"""A sentence of the start-up log, without its period."""

EXACT = "exact"
"""The policy that takes the place of one that is not exact."""


class ServedModel:
    """A pair under a name, with a session for each policy that was used."""

    def __init__(self, name: str, pair: Pair, policy: str) -> None:
        """Raises:
        UsageError: these models do not support the policy.
        """
        self.name, self.pair, self.policy = name, pair, policy
        self._sessions: OrderedDict[tuple[str, float | None], StepSpec] = OrderedDict()
        self._started = int(time.time())
        self._open(policy, None)

    @cached_property
    def policies(self) -> list[str]:
        """Names of the policies that these models support, the default one first."""
        others = [name for name in list_data_files("policies") if name != self.policy and self._supports(name)]
        return [self.policy, *others]

    def _supports(self, name: str) -> bool:
        policy = load_policy(name)[0]
        try:
            fit_policy(proposing(policy, settings_of(policy, self.pair.hash)), self.pair)
        except UsageError:
            return False
        return self.pair.draft is not None or not policy.needs_draft

    def session(self, policy: str | None, speculation: Speculation) -> tuple[str, StepSpec]:
        """Return the policy's name and the session for a request. Policy names are never used as paths.

        Args:
            policy: the policy in the model's name, or None.
            speculation: the request's own settings, which count before it.

        Raises:
            RefusedError: there is no such policy, these models do not support it, or it does not take the threshold.
        """
        name = speculation.policy or policy or self.policy
        if name != self.policy and name not in (known := list_data_files("policies")):
            message = former_name("policies", name) or unknown_name("policy", name, known)
            raise RefusedError("stepspec.policy", message)
        try:
            if speculation.exact and not self._policy(name).exact:
                name = EXACT
            return name, self._open(name, speculation.threshold)
        except UsageError as error:
            raise RefusedError("stepspec", str(error)) from error

    def _open(self, name: str, threshold: float | None) -> StepSpec:
        key = name, threshold
        if key not in self._sessions:
            policy: str | Policy = name
            needed = self._policy(name).judge_models.keys() - self.pair.judges.keys()
            if needed and self._sessions:  # else the operator is starting the service, and gets a longer error
                raise UsageError(
                    f"The policy {name!r} needs the judge model {min(needed)!r}, which this service does not have. Its "
                    "operator can add it with --judge."
                )
            if threshold is not None:
                policy = load_policy(name)[0].with_threshold(threshold)
            self._sessions[key] = StepSpec(policy=policy, pair=self.pair)
            if len(self._sessions) > MAX_SESSIONS:  # thresholds of clients never displace what a policy has learned
                del self._sessions[next(each for each in self._sessions if each[1] is not None)]
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def _policy(self, name: str) -> Policy:
        return load_policy(name)[0] if (name, None) not in self._sessions else self._sessions[name, None].policy

    def card(self, policy: str | None = None) -> dict[str, Any]:
        """Return the model card for a policy, by default the default one."""
        return {
            "id": self.name if policy is None else f"{self.name}@{policy}",
            "object": "model",
            "created": self._started,
            "owned_by": "stepspec",
            "max_model_len": self.pair.target.max_context,
            "draft": self.pair.draft.name if self.pair.draft else None,
            "policy": policy or self.policy,
        }

    @property
    def in_words(self) -> str:
        """What answers under the name, and whether the draft has nothing to do."""
        loaded = [(role, model.name, model.describe().get("dtype")) for role, model in self.pair.loaded.items()]
        models = ", ".join(f"{role} {name} ({dtype})" if dtype else f"{role} {name}" for role, name, dtype in loaded)
        return f"{models}, policy {self.policy}" + (f". {UNUSED_DRAFT}" if self._leaves_out_the_draft else "")

    @property
    def _leaves_out_the_draft(self) -> bool:
        """Whether the policy would ask the draft, if only for steps and with thresholds."""
        settings = settings_of(load_policy(self.policy)[0], self.pair.hash)
        is_unknown = any(UNKNOWN in each.sentences for each in settings)
        return self.pair.draft is not None and is_unknown and not self._policy(self.policy).needs_draft


class ServedModels:
    """All pairs of a service, by name. The first one is the default."""

    def __init__(self, pairs: Mapping[str, Pair], policy: str) -> None:
        """Raises:
        UsageError: a pair does not support the policy.
        """
        self._models = {name: ServedModel(name, pair, policy) for name, pair in pairs.items()}

    def find(self, name: str | None) -> tuple[ServedModel, str | None]:
        """Return a model and the policy in its name, `NAME` or `NAME@POLICY`. None is the default model.

        Raises:
            NoSuchModelError: there is no such model.
        """
        if name is None:
            return next(iter(self._models.values())), None
        if name in self._models:
            return self._models[name], None
        model, separator, policy = name.rpartition("@")
        if not separator or model not in self._models or policy not in self._models[model].policies:
            former = former_name("policies", policy) if model in self._models else None
            raise NoSuchModelError(name, [card["id"] for card in self.cards()], former)
        return self._models[model], policy

    def cards(self) -> list[dict[str, Any]]:
        """Return the cards of all models: of each the default policy, then all policies by name."""
        return [
            card
            for model in self._models.values()
            for card in (model.card(), *(model.card(policy) for policy in model.policies))
        ]

    @property
    def in_words(self) -> Sequence[str]:
        """A line for each model, for the log."""
        return [f"{name}: {model.in_words}" for name, model in self._models.items()]

    @property
    def pairs(self) -> Mapping[str, Pair]:
        """The pairs by name."""
        return {name: model.pair for name, model in self._models.items()}

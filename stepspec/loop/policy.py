"""Policy files in TOML: how steps are proposed, judged and salvaged, and how tokens are drafted."""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, cast

from pydantic import ValidationError, model_validator

from stepspec.base.file_model import load_toml
from stepspec.base.file_problems import first_problem
from stepspec.base.files import find_data_file
from stepspec.engines.judge_model import JudgeAbility
from stepspec.errors import UsageError
from stepspec.loop.families import FAMILIES, Family, FamilyTables
from stepspec.loop.families.score import ScoreTable
from stepspec.loop.family import FamilyTable
from stepspec.loop.judge import Judge, ThresholdJudge
from stepspec.loop.policy_tables import PolicyTables, SalvageTable

PolicyKind = Literal["target", "token", "draft", "step"]
"""The target alone, the target with token-level speculation, the draft alone, or step-level speculation."""

NOT_HASHED = frozenset({"summary", "paper"})
"""Keys of a policy that say nothing about what it does."""
SPEED_ONLY = {"score": frozenset({"depth", "draft_answer", "max_overhead"})}
"""Keys of tables that say when a text is written, and not which text is accepted."""

CALIBRATED = "remove it, and run 'stepspec calibrate', which stores thresholds for the models"
REMOVED = {
    "certificate": CALIBRATED,
    "temperatures": CALIBRATED,
    "fallbacks": "write a policy with those judges for the models that need them",
}
"""Tables that policy files once had, with what to do instead."""


class Policy(FamilyTables, PolicyTables):
    """One policy file. `family` selects who writes."""

    family: Family
    """Who writes the steps."""

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, tables: object) -> object:
        if isinstance(tables, Mapping) and (there := sorted(REMOVED & tables.keys())):
            raise ValueError(f"policy files have no table {there[0]} any more: {REMOVED[there[0]]}")
        return cast("object", tables)

    @model_validator(mode="after")
    def _judges_where_judged(self) -> "Policy":
        if self.settings.judged != bool(self.judges):
            needing = " and ".join(repr(name) for name, family in FAMILIES.items() if family.table.judged)
            raise ValueError(f"families {needing} need at least one [[judges]] table, and the other families take none")
        for judge in self.judges:
            if self.family not in judge.families:
                known = " and ".join(map(repr, judge.families))
                raise ValueError(f"the judge {judge.name} is for family {known}, not {self.family!r}")
            if judge.asks_target and not self.settings.reads_steps:
                raise ValueError(
                    f"the judge {judge.name} asks for a pass over the step, which {self.family!r} does not make"
                )
        names = [judge.name for judge in self.judges]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the judges {', '.join(names)} are the same")
        return self

    @property
    def settings_sha256(self) -> str:
        """Hash of the settings that decide which text is accepted. Defaults are left out, so that it outlives new
        settings."""
        settings = self.model_dump(mode="json", exclude_defaults=True, exclude=set(NOT_HASHED))
        for name, keys in SPEED_ONLY.items():
            table = {key: value for key, value in settings.pop(name, {}).items() if key not in keys}
            settings |= {name: table} if table else {}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def with_thresholds(self, thresholds: Mapping[str, float], min_logprob: float | None) -> "Policy":
        """Return the policy with other thresholds of its judges, by name, and another bound of salvage.

        Raises:
            ValueError: a judge does not take its threshold.
        """
        judges = tuple(with_threshold(judge, thresholds.get(judge.name)) for judge in self.judges)
        salvage = None if min_logprob is None else (self.salvage or SalvageTable()).with_min_logprob(min_logprob)
        return self.model_copy(update={"judges": judges, "salvage": salvage})

    def without_steps(self) -> "Policy":
        """Return the policy with every step written by the target, with the same token-level speculation."""
        defaults = {name: field.get_default() for name, field in FamilyTables.model_fields.items()}
        unjudged = {"judges": (), "judging": "all", "salvage": None, "first_target_steps": 0}
        return self.model_copy(update={**defaults, **unjudged, "family": "target"})

    def with_threshold(self, threshold: float) -> "Policy":
        """Return the policy with another threshold of its judge.

        Raises:
            UsageError: it has no judge with a threshold, or several, or the judge does not take this one.
        """
        judges = [judge for judge in self.judges if isinstance(judge, ThresholdJudge)]
        if len(judges) != 1:
            raise UsageError(f"A threshold needs a policy with one judge that has one; this policy has {len(judges)}.")
        try:
            changed = tuple(with_threshold(judge, threshold) if judge in judges else judge for judge in self.judges)
        except ValueError as error:
            raise UsageError(f"The threshold does not fit: {error}") from None
        return self.model_copy(update={"judges": changed})

    @property
    def settings(self) -> FamilyTable:
        """Settings of the family."""
        return getattr(self, self.family) if self.family in FamilyTables.model_fields else FAMILIES[self.family].table()

    @property
    def max_overhead(self) -> float | None:
        """See `ScoreTable.max_overhead`; None for the other families."""
        return self.settings.max_overhead if isinstance(self.settings, ScoreTable) else None

    def without_overhead_limit(self) -> "Policy":
        """Return the policy with speculation on every step, whether that pays or not."""
        if self.max_overhead is None:
            return self
        return self.model_copy(update={self.family: self.settings.model_copy(update={"max_overhead": None})})

    @property
    def exact(self) -> bool:
        """Whether the text has the target's distribution."""
        return self.token_level_exact and (self.family == "target" or self.step_level_exact)

    def kind(self, own_speculation: str | None = None) -> PolicyKind:
        """Return the policy's kind for an engine with the given built-in speculation, see `Engine.own_speculation`."""
        if self.family == "target":
            alone = self.token.drafter == "none"
            alone |= self.token.drafter == "engine" and own_speculation in (None, "none")
            return "target" if alone else "token"
        return "draft" if self.family == "draft" else "step"

    @property
    def needs_draft(self) -> bool:
        """Whether the policy uses the draft model."""
        return self.family != "target" or self.token.drafter == "draft-model"

    @model_validator(mode="after")
    def _tables_where_used(self) -> "Policy":
        for table, field in FamilyTables.model_fields.items():
            if self.family != table and getattr(self, table) != field.default:
                raise ValueError(f"a [{table}] table has no effect in family {self.family!r}")
        if not self.token_level_exact and self.family != "target":
            raise ValueError(f"acceptance {self.token.acceptance!r} is for family 'target', not {self.family!r}")
        if self.salvage is not None and not self.settings.reads_steps:
            raise ValueError(f"a [salvage] table has no effect in family {self.family!r}")
        if self.first_target_steps and not self.settings.speculates:
            raise ValueError(f"first_target_steps has no effect in family {self.family!r}")
        if self.judging != "all" and not self.settings.judged:
            raise ValueError(f"judging has no effect in family {self.family!r}")
        return self

    @property
    def judge_models(self) -> Mapping[str, JudgeAbility]:
        """The judge models that the judges need, by name."""
        return {judge.model: judge.model_needs for judge in self.judges if judge.model_needs is not None}  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def with_threshold(judge: Judge, threshold: float | None) -> Judge:
    """Return a judge with another threshold; None for its own.

    Raises:
        ValueError: the judge does not take this threshold.
    """
    if threshold is None:
        return judge
    try:
        return type(judge).model_validate(judge.model_dump() | {"threshold": threshold})
    except ValidationError as error:
        raise ValueError(f"the judge {judge.name}: {first_problem(error, type(judge))}") from None


def load_policy(name_or_file: str) -> tuple[Policy, str]:
    """Load a policy by name or path. Return it with the text of its file.

    Raises:
        UsageError: there is no such policy, or the file is invalid.
    """
    path = find_data_file("policies", name_or_file)
    return load_toml(path, Policy)

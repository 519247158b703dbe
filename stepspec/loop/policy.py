"""Policy files in TOML: how steps are proposed, judged and salvaged, and how tokens are drafted."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, Strict, ValidationError, field_validator, model_validator

from stepspec.base.file_model import FileModel, Version, load_toml, number_or_auto
from stepspec.base.file_problems import first_problem
from stepspec.base.files import find_data_file
from stepspec.engines.judge_model import JudgeAbility
from stepspec.engines.protocol import (
    MAX_DRAFTED,
    Ability,
    Acceptance,
    AcceptanceRule,
    DrafterChoice,
    DrafterName,
    Drafting,
    Tokenizer,
)
from stepspec.errors import UsageError
from stepspec.loop.certificate import Certificate, certificate_hash
from stepspec.loop.families import FAMILIES, Family, FamilyTables
from stepspec.loop.families.score import ScoreTable
from stepspec.loop.family import FamilyTable
from stepspec.loop.judge import AnyJudge, Judge, Panel, ThresholdJudge

PolicyKind = Literal["target", "token", "draft", "step"]
"""The target alone, the target with token-level speculation, the draft alone, or step-level speculation."""


class StepTable(FileModel):
    """Where a step ends."""

    delimiter: str = Field(default="\n\n", min_length=1)
    """Text that ends a step."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Longest step, in tokens."""
    draft_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds for the draft to write a step. A slower draft is not used for the rest of the request. With
    `max_overhead` the limit is lower where the target itself is faster."""
    judge_deadline_s: float = Field(default=10.0, gt=0)
    """Seconds for a judge to score a step, besides the target's pass over it. A slower judge rejects the step."""
    abort_entropy: float | None = Field(default=None, gt=0)
    """Rejects a draft step whose last 16 tokens have a mean entropy above this, in nats, and aborts it where the draft
    delivers it in chunks."""


class TokenTable(FileModel):
    """Token-level speculation inside the target's own writing. Exact unless `acceptance` is another rule."""

    drafter: DrafterChoice = "none"
    """The drafter. `auto` selects the draft model if the target's engine can draft with it, else the engine's built-in
    speculation, else prompt lookup."""
    num_tokens: int | Literal["auto"] = "auto"
    """Tokens drafted in each round. `auto` chooses from measured acceptance and costs."""
    acceptance: AcceptanceRule = "exact"
    """Which drafted tokens stand: those of the `exact` rule, or also those that are nearly as likely as the most likely
    token (`ratio`), typical of the target (`typical`, arXiv:2401.10774), or followed by exact ones where the target is
    undecided (`fly`, arXiv:2511.22972). Special tokens are always exact."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """`ratio`: the lowest probability relative to the most likely token's. `typical`: the threshold of the paper."""
    window: int | None = Field(default=None, ge=1, lt=MAX_DRAFTED)
    """`fly`: number of tokens after a relaxed one that the exact rule has to accept."""
    entropy: float | None = Field(default=None, ge=0)
    """`fly`: the lowest entropy of the target's three most likely tokens, in nats."""
    exact_digits: bool = False
    """Whether tokens with a digit are always exact."""
    hint: bool = True
    """Whether lookup drafters draft from what is left of a rejected step when the target writes in its place."""
    archive: str = ""
    """For the drafter `suffix`: names a collection of past outputs that policies share. Evaluations keep it from block
    to block."""

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, table: object) -> object:
        if isinstance(table, Mapping) and "tolerance" in table:
            raise ValueError('tolerance is now acceptance = "typical" with threshold, or "exact" in place of 0')
        return cast("object", table)

    @model_validator(mode="after")
    def _acceptance_has_its_settings(self) -> "TokenTable":
        try:
            self._drafting_by("draft-model" if self.drafter == "auto" else self.drafter)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _archive_of_suffix(self) -> "TokenTable":
        if self.archive and self.drafter != "suffix":
            raise ValueError(f"only the drafter 'suffix' has an archive of past outputs, not {self.drafter!r}")
        return self

    @field_validator("num_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        return number_or_auto(value, MAX_DRAFTED)

    @property
    def drafting(self) -> Drafting:
        """The table as the engine's `Drafting`. `session.fit_policy` must have replaced "auto" first."""
        assert self.drafter != "auto", "the policy was not fitted to its models"
        return self._drafting_by(self.drafter)

    def _drafting_by(self, drafter: DrafterName) -> Drafting:
        num_tokens = None if self.num_tokens == "auto" else self.num_tokens
        rule = Acceptance(self.acceptance, self.threshold, self.window, self.entropy, self.exact_digits)
        return Drafting(drafter, num_tokens, rule, self.archive)


class SalvageTable(FileModel):
    """Which part of a rejected step to keep."""

    min_logprob: float = Field(default=0.0, le=0)
    """Keeps the longest prefix in which every token is the target's own choice, or has at least this log-probability
    under the target, in nats. At 0 only the target's own choices count."""
    redraft: bool = False
    """Whether the draft goes on behind that prefix and the target's own next token, and is judged again. By default the
    target writes the rest of the step."""

    def with_min_logprob(self, min_logprob: float) -> "SalvageTable":
        """Return the table with another bound."""
        return self.model_copy(update={"min_logprob": min_logprob})


class TemperatureTable(FileModel):
    """Thresholds for sampling temperatures up to a bound."""

    at_most: float = Field(ge=0)
    """Highest temperature of a request that these settings are for."""
    thresholds: dict[str, float] = Field(min_length=1)
    """The threshold of each judge, by the judge's name."""
    min_logprob: float | None = Field(default=None, le=0)
    """Replaces `min_logprob` of `[salvage]`."""
    certificate: Certificate | None = None
    """What is known about the accuracy with these settings."""


class FallbackTable(FileModel):
    """Other judges, for targets without an ability."""

    without: Ability
    """The ability, see `Engine.abilities`. For instance, "cached scores" is missing where a target reads its whole
    prompt again to score a step."""
    judges: Annotated[tuple[AnyJudge, ...], Strict(False)] = Field(min_length=1)
    """Replaces `[[judges]]`."""
    salvage: SalvageTable | None = None
    """Replaces `[salvage]`."""


class Policy(FamilyTables):
    """One policy file. `family` selects who writes."""

    version: Version
    """Version of the file format: 1."""
    summary: str
    """One line for `stepspec policies` and reports."""
    paper: str | None = None
    """The paper that the policy follows."""
    family: Family
    """Who writes the steps."""
    first_target_steps: int = Field(default=0, ge=0)
    """Steps that the target writes before the draft proposes any."""
    salvage: SalvageTable | None = None
    """Keeps the prefix of a rejected step that the target agrees with, and regenerates only the rest."""
    step: StepTable = StepTable()
    """Where a step ends."""
    token: TokenTable = TokenTable()
    """Token-level speculation inside what the target writes."""
    judging: Literal["all", "cascade"] = "all"
    """`all` asks every judge: a step needs an acceptance and no rejection. `cascade` asks the judges in order, and the
    first one that accepts or rejects decides."""
    judges: Annotated[tuple[AnyJudge, ...], Strict(False)] = ()
    """The judges of a step. Those that ask the target share one pass of it."""
    certificate: Certificate | None = None
    """What is known about the accuracy of the policy. `stepspec calibrate` writes it."""
    temperatures: Annotated[tuple[TemperatureTable, ...], Strict(False)] = ()
    """Other thresholds for ranges of the sampling temperature, the lowest range first. Above the last one, those in
    `[[judges]]` count."""
    fallbacks: Annotated[tuple[FallbackTable, ...], Strict(False)] = ()
    """Other judges, for targets that lack an ability. The first table whose ability is missing counts, at every
    temperature and without a certificate."""

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
        if self.judges and not any(judge.can_accept for judge in self.judges):
            raise ValueError(f"the judges {', '.join(names)} only reject, so every step would be rejected")
        return self

    @model_validator(mode="after")
    def _temperatures_in_order(self) -> "Policy":
        bounds = [each.at_most for each in self.temperatures]
        if bounds != sorted(set(bounds)):
            raise ValueError("the tables [[temperatures]] must be in the order of at_most, each higher than the last")
        known = {judge.name for judge in self.judges if isinstance(judge, ThresholdJudge)}
        for table in self.temperatures:
            if unknown := sorted(table.thresholds.keys() - known):
                raise ValueError(f"[[temperatures]] sets a threshold of {unknown[0]}, but there is no such judge")
            if table.min_logprob is not None and self.salvage is None:
                raise ValueError("[[temperatures]] sets min_logprob, but there is no [salvage] table")
            self._checked(self._with(table))
        self._checked(self)
        return self

    @model_validator(mode="after")
    def _fallbacks_are_policies(self) -> "Policy":
        for table in self.fallbacks:
            given = {name: getattr(self, name) for name in self.model_fields_set}
            Policy.model_validate(given | self._instead(table))
        return self

    @staticmethod
    def _instead(table: FallbackTable) -> dict[str, Any]:
        changes = {"judges": table.judges, "salvage": table.salvage}
        return changes | {"certificate": None, "temperatures": (), "fallbacks": ()}

    def on(self, abilities: Collection[Ability]) -> tuple["Policy", Ability | None]:
        """Return the policy for a target with these abilities, and the ability whose lack has changed the judges."""
        table = next((each for each in self.fallbacks if each.without not in abilities), None)
        return (self, None) if table is None else (self.model_copy(update=self._instead(table)), table.without)

    @staticmethod
    def _checked(policy: "Policy") -> None:
        certificate = policy.certificate
        if certificate is None:
            return
        if certificate.sha256 != policy.certificate_hash(certificate.model_dump(mode="json")):
            raise ValueError(
                "the certificate does not belong to these settings: one of them was changed. Remove the table "
                "[certificate], or run 'stepspec calibrate' again"
            )

    def certificate_hash(self, certificate: Mapping[str, Any]) -> str:
        """Return the hash of a certificate of this policy, see `stepspec.loop.certificate.certificate_hash`."""
        return certificate_hash(self.model_dump(mode="json", exclude_defaults=True), certificate)

    def at(self, temperature: float) -> "Policy":
        """Return the policy for a request's sampling temperature, with the thresholds of its range."""
        table = next((each for each in self.temperatures if temperature <= each.at_most), None)
        return self if table is None else self._with(table)

    def _with(self, table: TemperatureTable) -> "Policy":
        judges = tuple(with_threshold(judge, table.thresholds.get(judge.name)) for judge in self.judges)
        salvage = self.salvage
        if salvage is not None and table.min_logprob is not None:
            salvage = salvage.with_min_logprob(table.min_logprob)
        changes = {"judges": judges, "salvage": salvage, "certificate": table.certificate, "temperatures": ()}
        return self.model_copy(update=changes)

    def with_threshold(self, threshold: float) -> "Policy":
        """Return the policy with another threshold of its judge, at every temperature and without a certificate.

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
        return self.model_copy(update={"judges": changed, "certificate": None, "temperatures": (), "fallbacks": ()})

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
    def token_level_exact(self) -> bool:
        """Whether the target's own text follows the target's distribution."""
        return self.token.acceptance == "exact"

    @property
    def step_level_exact(self) -> bool:
        """Whether only steps that the target would have written itself are kept of the draft's."""
        decides = [judge.exact for judge in self.judges]
        exact = all(decides) if self.judging == "cascade" else any(decides)
        return exact and (self.salvage is None or self.salvage.min_logprob == 0)

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

    def panel(self, tokenizer: Tokenizer) -> Panel:
        """Return the judges, ready to be asked.

        Raises:
            ModelError: a judge does not work with the target's tokenizer.
        """
        return Panel(self.judges, tokenizer, cascade=self.judging == "cascade", deadline_s=self.step.judge_deadline_s)

    @model_validator(mode="after")
    def _tables_where_used(self) -> "Policy":
        for table, field in FamilyTables.model_fields.items():
            if self.family != table and getattr(self, table) != field.default:
                raise ValueError(f"a [{table}] table has no effect in family {self.family!r}")
        if self.salvage is not None and not self.settings.reads_steps:
            raise ValueError(f"a [salvage] table has no effect in family {self.family!r}")
        if self.step.abort_entropy is not None and not self.settings.speculates:
            raise ValueError(f"abort_entropy has no effect in family {self.family!r}")
        if self.first_target_steps and not self.settings.speculates:
            raise ValueError(f"first_target_steps has no effect in family {self.family!r}")
        if self.judging != "all" and not self.settings.judged:
            raise ValueError(f"judging has no effect in family {self.family!r}")
        return self

    @property
    def judge_models(self) -> Mapping[str, JudgeAbility]:
        """The judge models that the judges need, by name."""
        return {judge.model: judge.model_needs for judge in self.judges if judge.model_needs is not None}  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    @property
    def waste(self) -> tuple[int, int]:
        """The arguments of `Ledger.may_waste`."""
        return self.step.max_step_tokens, self.settings.waste_rate

    @property
    def needs_scores(self) -> bool:
        """Whether the policy needs the target's log-probs of a proposed step's tokens."""
        return self.salvage is not None or any("scores" in judge.needs for judge in self.judges)

    @property
    def needs_draft_logprobs(self) -> bool:
        """Whether a judge or the family needs the draft's log-probs or entropies."""
        return bool(self.draft_needs)

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs."""
        needs = frozenset[Ability]({"entropies"} if self.step.abort_entropy is not None else ())
        return needs.union(self.settings.draft_needs, *(judge.draft_needs for judge in self.judges))


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

"""What the loop reads of a policy: where steps end, how they are judged and salvaged, and how tokens are drafted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, cast

from pydantic import Field, Strict, field_validator, model_validator

from stepspec.base.file_model import FileModel, Version, number_or_auto
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
from stepspec.loop.family import FamilyTable
from stepspec.loop.judge import AnyJudge, Panel


class StepTable(FileModel):
    """Where a step ends."""

    delimiter: str = Field(default="\n\n", min_length=1)
    """Text that ends a step."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Longest step, in tokens."""
    draft_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds for a step of the draft. A slower draft is not used again in the request."""
    judge_deadline_s: float = Field(default=10.0, gt=0)
    """Seconds for a judge, without the target's pass. A slower judge rejects the step."""


class TokenTable(FileModel):
    """Token-level speculation inside the target's own writing. Exact unless `acceptance` is another rule."""

    drafter: DrafterChoice = "none"
    """The drafter."""
    num_tokens: int | Literal["auto"] = "auto"
    """Tokens drafted in each round. `auto` chooses by measurement."""
    acceptance: AcceptanceRule = "exact"
    """The acceptance rule. All but `exact` are for family `target`."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """For `ratio` and `typical`."""
    window: int | None = Field(default=None, ge=1, lt=MAX_DRAFTED)
    """`fly`: tokens after a relaxed one that the exact rule must accept."""
    entropy: float | None = Field(default=None, ge=0)
    """`fly`: lowest entropy of the target's three most likely tokens, in nats."""
    exact_digits: bool = False
    """Whether tokens with a digit are always exact."""

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

    @field_validator("num_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        return number_or_auto(value, MAX_DRAFTED)

    @property
    def drafting(self) -> Drafting:
        """The table as the engine's `Drafting`. `session.fit_policy` must have replaced "auto" first."""
        assert self.drafter != "auto", "the policy was not fitted to its models"
        return self._drafting_by(self.drafter)

    @property
    def exact_drafting(self) -> Drafting:
        """The same with the exact rule."""
        return replace(self.drafting, acceptance=Acceptance())

    def _drafting_by(self, drafter: DrafterName) -> Drafting:
        num_tokens = None if self.num_tokens == "auto" else self.num_tokens
        rule = Acceptance(self.acceptance, self.threshold, self.window, self.entropy, self.exact_digits)
        return Drafting(drafter, num_tokens, rule)


class SalvageTable(FileModel):
    """Which part of a rejected step to keep."""

    min_logprob: float = Field(default=0.0, le=0)
    """Lowest log-probability of a kept token, in nats. The target's own choices are always kept."""
    redraft: bool = False
    """Whether the draft, not the target, continues the kept prefix."""

    def with_min_logprob(self, min_logprob: float) -> "SalvageTable":
        """Return the table with another bound."""
        return self.model_copy(update={"min_logprob": min_logprob})


class PolicyTables(FileModel, ABC):
    """The settings of a policy that all families share."""

    version: Version
    """Version of the file format."""
    summary: str
    """One line for lists and reports."""
    paper: str | None = None
    """The paper that the policy follows."""
    family: str
    """Who writes the steps."""
    first_target_steps: int = Field(default=0, ge=0)
    """Steps that the target writes before the draft proposes any."""
    salvage: SalvageTable | None = None
    """Keeps a prefix of rejected steps. Without the table, none."""
    step: StepTable = StepTable()
    """Length and time of a step."""
    token: TokenTable = TokenTable()
    """Token-level speculation."""
    judging: Literal["all", "cascade"] = "all"
    """`all`: a step needs an acceptance and no rejection. `cascade`: the first judge that decides."""
    judges: Annotated[tuple[AnyJudge, ...], Strict(False)] = ()
    """The judges of a step, in order."""

    @property
    @abstractmethod
    def settings(self) -> FamilyTable:
        """Settings of the family."""

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

    def panel(self, tokenizer: Tokenizer) -> Panel:
        """Return the judges, ready to be asked.

        Raises:
            ModelError: a judge does not work with the target's tokenizer.
        """
        return Panel(self.judges, tokenizer, cascade=self.judging == "cascade", deadline_s=self.step.judge_deadline_s)

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
        return frozenset[Ability]().union(self.settings.draft_needs, *(judge.draft_needs for judge in self.judges))

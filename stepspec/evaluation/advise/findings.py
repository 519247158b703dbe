"""Pydantic models of the file that `stepspec advise --json` writes: all measurements and the advice."""

from typing import Literal

from pydantic import Field

from stepspec.engines.protocol import DrafterName
from stepspec.evaluation.records import Conditions, EngineRecord, Percentiles, Record, TimeRecord
from stepspec.loop.policy import PolicyKind

Interval = tuple[float, float]


class ModelCosts(Record):
    """Costs of a model at one concurrency; medians over a few turns."""

    read_s: float | None
    """Seconds of the engine per prompt token; None if the engine had cached all prompts."""
    write_s: float
    """Seconds per generated token of a request."""
    pass_over_one: dict[int, float] = Field(default_factory=dict[int, float])
    """Cost of a pass by the number of tokens it verifies per request, relative to a pass over one. Target only."""
    round_trip_s: float | None = None
    """Seconds of the smallest request to the model's server, which each call takes too; None in this process."""


class PairCosts(Record):
    """Costs of both models at one concurrency."""

    concurrency: int
    target: ModelCosts
    draft: ModelCosts | None


class Trial(Record):
    """A drafter's results on a few prompts with a fixed number of tokens, and the speedup predicted from them."""

    drafter: DrafterName
    num_tokens: int
    acceptance: float
    """Acceptance rate (alpha) of checked draft tokens, which are those up to and including the first rejected one."""
    coverage: float
    """Share of rounds in which it proposed tokens."""
    cost: float
    """Cost of drafting a token relative to the target's generation of one (c)."""
    best_num_tokens: int
    """Number of tokens with the largest speedup by `advise.formula`; 0 if no speedup is above 1."""
    predicted: float
    """The speedup with `best_num_tokens`; 1 if that is 0."""
    ideal: float
    """The speedup by the formula if every drafted token were accepted."""


class Candidate(Record):
    """A policy that ran, compared with the target alone on the same prompts."""

    name: str
    kind: PolicyKind
    exact: bool
    drafter: DrafterName
    num_tokens: int | Literal["auto"]
    speedup: float | None
    """Ratio of summed wall seconds per request, over the prompts that finished under all policies."""
    speedup_ci: Interval | None
    throughput: float | None
    """Throughput of all requests together, over the target's."""
    accuracy: float
    """Share of answers that are right, or that agree with the target's own."""
    accuracy_ci: Interval
    accuracy_delta: float | None
    accuracy_delta_ci: Interval | None
    loss_upper: float | None
    """One-sided 95% bound of the accuracy lost, corrected for the number of inexact policies. None if exact, or if too
    many answers were cut short."""
    num_to_know: int | None
    """Number of prompts that would give an interval of ±1 point for the accuracy difference."""
    token_acceptance: float | None
    """Share of drafted tokens that were accepted; tokens after a rejected one count too."""
    step_acceptance: float | None
    step_tokens: float | None = None
    """Mean tokens of the committed steps that the draft wrote alone; None if there is none."""
    length_ratio: float | None
    num_cut_short: int
    """Number of answers that the token limit cut off."""
    no_speed: str | None = None
    """Reason why its speed does not count; see `stepspec.evaluation.records.PolicySummary`."""
    time_s: TimeRecord


class LoadFindings(Record):
    """The results at one concurrency."""

    costs: PairCosts
    num_prompts: int
    """Prompts that finished under all policies."""
    num_failed: int
    prompt_tokens: Percentiles
    output_tokens: Percentiles
    """Percentiles of answer lengths under the target alone."""
    reading_share: float | None
    """Share of the target's time spent on reading prompts."""
    candidates: list[Candidate]
    """Includes the target alone."""

    def named(self, name: str) -> Candidate | None:
        """Return the candidate of that name; None if there is none."""
        return next((each for each in self.candidates if each.name == name), None)


class PromptCounts(Record):
    """Counts of the prompts that were used, and how answers were graded."""

    num_rows: int
    """Number of rows that were read."""
    num_asked: int
    num_too_long: int
    num_shortened: int
    """Conversations of which only the user's last message was used."""
    graded: bool
    """Whether answers were compared with right answers. If not, they were compared with the target's own answers."""
    why_not_graded: str | None


class Memory(Record):
    """Bytes of weights and caches after a few requests; None if an engine does not report them."""

    target_bytes: int | None
    draft_bytes: int | None

    @property
    def draft_overhead(self) -> float | None:
        """The draft's memory over the target's; None if either is unknown."""
        if self.draft_bytes is None or not self.target_bytes:
            return None
        return self.draft_bytes / self.target_bytes


class Measured(Record):
    """Measurements from before the policies ran, stored so that an interrupted run can resume.

    In version 1 `max_tokens` counted rejected tokens too.
    """

    version: Literal[2] = 2
    pair: str
    data_sha256: str
    temperature: float
    max_tokens: int
    seed: int
    costs: list[PairCosts]
    trials: list[Trial]
    memory: Memory
    references: dict[str, str]
    """The text to compare answers with, by prompt. Empty before the target is asked, or if there are right answers."""
    rereads: bool = False
    """Whether the target reads the whole text again to score a step."""
    step_policy: str | None = None
    """The text of `two-level` with thresholds for these models; empty if there are none, None before
    they are chosen."""


ReasonKind = Literal[
    "slow draft", "distant draft", "low acceptance", "few drafts", "short answers", "full passes", "memory", "not shown"
]


class Reason(Record):
    """A reason why the target alone is advised."""

    kind: ReasonKind
    sentence: str


class Advice(Record):
    """The advice for the lowest concurrency that was measured."""

    policy: str
    policy_text: str
    """The text of the policy as it ran."""
    speedup: float | None
    speedup_ci: Interval | None
    unproven: str | None
    """A faster policy for which these prompts do not show whether it preserves answers."""
    pays_up_to: int | None
    """The highest measured concurrency up to which the policy pays; None if it is the target alone."""
    reasons: list[Reason]
    sentences: list[str]


class Findings(Conditions):
    """The file that `stepspec advise --json` writes. In version 1 `max_tokens` counted rejected tokens too."""

    version: Literal[2] = 2
    engines: dict[str, EngineRecord | None]
    pair: str
    temperature: float
    max_tokens: int
    seed: int
    prompts: PromptCounts
    memory: Memory
    trials: list[Trial]
    left_out: dict[str, str]
    """Policies that did not run, and why."""
    loads: list[LoadFindings]
    advice: Advice

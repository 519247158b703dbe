"""The record of all that `stepspec advise` measured, and of what it advises: the file that `--json` writes."""

from typing import Literal

from pydantic import Field

from stepspec.engines.protocol import DrafterName
from stepspec.evaluation.records import Conditions, EngineRecord, Percentiles, Record, TimeRecord
from stepspec.loop.policy import PolicyKind

Interval = tuple[float, float]


class ModelCosts(Record):
    """What a model takes with so many requests at once; medians of a few turns."""

    read_s: float | None
    """Seconds of the engine for a token of a prompt; None where all prompts were known to the engine already."""
    write_s: float
    """Seconds between two tokens of a request."""
    pass_over_one: dict[int, float] = Field(default_factory=dict[int, float])
    """What a pass takes that verifies so many tokens of each request, in passes over one; only of the target."""


class LoadCosts(Record):
    """What both models take with so many requests at once."""

    concurrency: int
    target: ModelCosts
    draft: ModelCosts | None


class Trial(Record):
    """What a drafter did on a few prompts with a fixed number of tokens, and what follows from that."""

    drafter: DrafterName
    num_tokens: int
    acceptance: float
    """Of a drafted token that was looked at, which are those up to the first refused one: alpha."""
    coverage: float
    """Share of rounds in which it had something to propose."""
    cost: float
    """Of drafting a token, over the target's writing of one: c."""
    best_num_tokens: int
    """With which the formula (`advise.formula`) gives the largest speedup; 0 if it gives none above 1."""
    predicted: float
    """That speedup; 1 if nothing is drafted."""
    ideal: float
    """The speedup that the formula would give if every drafted token were accepted."""


class Candidate(Record):
    """A policy that was run, beside the target alone on the same prompts."""

    name: str
    kind: PolicyKind
    exact: bool
    drafter: DrafterName
    num_tokens: int | Literal["auto"]
    speedup: float | None
    """Of a request, by sums of wall seconds over the prompts that are finished under all policies."""
    speedup_ci: Interval | None
    throughput: float | None
    """Of all requests together, over the target's."""
    accuracy: float
    """Share of right answers, or of those that agree with the target's own."""
    accuracy_ci: Interval
    accuracy_delta: float | None
    accuracy_delta_ci: Interval | None
    loss_upper: float | None
    """One-sided 95% bound of the accuracy lost, corrected for how many such policies were tried; None where too many
    answers were cut short to say."""
    num_to_know: int | None
    """Prompts by which the loss would be known to a point."""
    token_acceptance: float | None
    """Of drafted tokens, those behind a refused one included."""
    step_acceptance: float | None
    length_ratio: float | None
    num_cut_short: int
    """Answers that the limit of committed tokens ended."""
    no_speed: str | None = None
    """Why its speed does not count; see `stepspec.evaluation.records.PolicySummary`."""
    time_s: TimeRecord


class Load(Record):
    """What was found with so many requests at once."""

    costs: LoadCosts
    num_prompts: int
    """Finished under all policies."""
    num_failed: int
    prompt_tokens: Percentiles
    output_tokens: Percentiles
    """Of the target alone."""
    reading_share: float | None
    """Of the target's time that goes into reading prompts."""
    candidates: list[Candidate]
    """The target alone among them."""

    def named(self, name: str) -> Candidate | None:
        """The candidate of that name."""
        return next((each for each in self.candidates if each.name == name), None)


class Asked(Record):
    """Which prompts were asked."""

    num_rows: int
    """Looked at."""
    num_asked: int
    num_too_long: int
    num_shortened: int
    """Conversations of which only the last message of the user was asked."""
    graded: bool
    """Whether answers were compared with right ones; else they were compared with another answer of the target's."""
    why_not_graded: str | None


class Memory(Record):
    """Bytes of weights and caches after a few requests; None where an engine does not say."""

    target_bytes: int | None
    draft_bytes: int | None

    @property
    def draft_overhead(self) -> float | None:
        """What the draft takes over what the target takes."""
        if self.draft_bytes is None or not self.target_bytes:
            return None
        return self.draft_bytes / self.target_bytes


class Measured(Record):
    """What was measured before the policies were run, kept so that a run that was ended goes on where it was.

    In version 1 `max_tokens` counted rejected tokens too.
    """

    version: Literal[2] = 2
    pair: str
    data_sha256: str
    temperature: float
    max_tokens: int
    seed: int
    costs: list[LoadCosts]
    trials: list[Trial]
    memory: Memory
    references: dict[str, str]
    """By prompt, what answers are compared with; empty before the target is asked, or where there are golds."""


ReasonKind = Literal[
    "slow draft", "low acceptance", "few drafts", "short answers", "full passes", "memory", "not shown"
]


class Reason(Record):
    """Why the target alone is advised."""

    kind: ReasonKind
    sentence: str


class Advice(Record):
    """What is advised with the fewest requests at once that were measured."""

    policy: str
    policy_text: str
    """Of the policy as it was run."""
    speedup: float | None
    speedup_ci: Interval | None
    unproven: str | None
    """A faster policy of which these prompts do not show whether it keeps the answers."""
    pays_up_to: int | None
    """Requests at once up to which it pays, of the loads that were measured; None if it is the target alone."""
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
    prompts: Asked
    memory: Memory
    trials: list[Trial]
    left_out: dict[str, str]
    """Policies that were not run, and why."""
    loads: list[Load]
    advice: Advice

"""The models of everything that an evaluation reads or writes; `version` changes when a field changes its meaning.

A run is a folder: `run.json` (`RunRecord`), `rows.jsonl` (one `ResultRow` a line), `traces.jsonl` (one `Trace` a line,
with `--traces`), `blocks.jsonl` (`Block`), `failures.jsonl` (`Failure`), `summary.json` (`Summary`) and `report.md`.
Where several processes write parts of one run, the files are called after the part: `rows-2of4.jsonl`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from stepspec.loop.policy import PolicyKind


class Record(BaseModel):
    """Something that stepspec writes and reads back."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Conditions(Record):
    """Where and when something was measured."""

    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    started: str
    """UTC time, ISO 8601."""


BASELINE = "target"
"""The policy that all others are compared with: the target alone."""

Status = Literal["correct", "incorrect", "no_answer", "parse_error", "timeout"]


class PolicyRecord(Record):
    """A policy as it was used."""

    text: str
    sha256: str
    token_level_exact: bool = True
    """False for a policy with a tolerance."""
    kind: PolicyKind | None = None
    """Who writes; None where it is not known."""
    drafter: str | None = None
    """What drafted tokens: what the engines made of "auto"; None in runs of before it was kept."""

    @property
    def exact(self) -> bool:
        """Whether the policy's output has the target's distribution."""
        return self.kind in ("target", "token") and self.token_level_exact


class EngineRecord(Record):
    """A model as it was used. `weights` is a hash of the weight files."""

    name: str
    weights: str | None
    dtype: str | None
    device: str | None
    speculation: str | None = "none"
    """How the engine drafts tokens by itself, whatever a policy asks for; None where that is unknown."""
    forgets: bool = True
    """Whether its caches were cleared before each block. If not, a policy may find what an earlier one left there."""


class RunRecord(Record):
    """The conditions of a run. `identity` are the fields that must agree for a run to be resumed.

    Version 2: `max_tokens` counts committed tokens; in version 1 it counted rejected ones too.
    """

    version: Literal[2] = 2
    benchmark: str
    data_sha256: str
    num_problems: int
    prompt_id: str
    prompt_version: str
    policies: dict[str, PolicyRecord]
    engines: dict[str, EngineRecord | None]
    pair: str
    """One hash for the pair of models."""
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    concurrency: int
    grader: str = "integer"
    num_repeats: int = 1
    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    started: str
    """UTC time of the first start, ISO 8601."""

    def kind_of(self, policy: str) -> PolicyKind | None:
        """Who writes under a policy; None where it is not known."""
        return self.policies[policy].kind if policy in self.policies else None

    def is_exact(self, policy: str) -> bool:
        """Whether a policy's output has the target's distribution."""
        return policy in self.policies and self.policies[policy].exact

    def identity(self) -> dict[str, object]:
        """What makes two runs the same run: everything but where and when."""
        return self.model_dump(exclude={"versions", "commit", "hardware", "started"})


class TokenRecord(Record):
    """Token counts, named as in `stepspec.step.Counts`."""

    committed: int = 0
    accepted: int = 0
    salvaged: int = 0
    """Within `accepted`."""
    regenerated: int = 0
    forced: int = 0
    drafted: int = 0
    rejected: int = 0
    cancelled: int = 0
    discarded: int = 0


class TimeRecord(Record):
    """Exclusive critical-path seconds, each part measured by itself."""

    queue: float = 0.0
    draft: float = 0.0
    judge: float = 0.0
    target: float = 0.0
    controller: float = 0.0
    other: float = 0.0
    """What the parts leave of the wall time."""


class StepRecord(Record):
    """A step as rows keep it; `text` only in traces."""

    origin: Literal["draft", "salvaged", "target"]
    num_tokens: int
    num_from_draft: int
    scores: dict[str, float | None] = {}
    text: str | None = None


class ResultRow(Record):
    """One problem under one policy, once."""

    version: Literal[1] = 1
    problem: str
    policy: str
    repeat: int = 0
    prompt_id: str | None = None
    prompt_version: str | None = None
    level: int | None = None
    subject: str | None = None
    status: Status
    answer: str | None
    gold: str
    found_by: str | None = None
    """What gave the answer away: a box, hashes, a phrase, or that it was the last number."""
    decided_by: str | None = None
    """The comparison that decided: of numbers, of texts, or symbolic."""
    why: str | None = None
    """Why the answer is not correct, in a sentence."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    output_sha256: str
    """Hash of reasoning and answer, to tell whether two rows say the same."""
    wall_s: float
    first_step_s: float | None = None
    """Seconds until the first step was committed, which is when a user sees the first thought."""
    first_answer_s: float | None = None
    """Seconds until the first piece of the answer."""
    tokens: TokenRecord
    time_s: TimeRecord
    num_prompt_tokens: int
    steps_judged: int
    steps_accepted: int
    token_drafted: int
    token_accepted: int
    target_passes: int
    steps: list[StepRecord] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies a row in its run."""
        return self.problem, self.policy, self.repeat


class Trace(Record):
    """Everything a request said, for reading: its steps with their texts, and the answer."""

    version: Literal[1] = 1
    problem: str
    policy: str
    repeat: int = 0
    question: str
    steps: list[StepRecord]
    answer: str

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its row."""
        return self.problem, self.policy, self.repeat


class Usage(Record):
    """What a model read and wrote, in tokens of its own."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts' tokens those that did not have to be read again."""
    generated_tokens: int = 0


class Block(Record):
    """Rows of one policy that ran together, with what can be measured only of all of them."""

    version: Literal[1] = 1
    policy: str
    jobs: list[tuple[str, int]]
    """Problem and repeat of every row."""
    wall_s: float
    committed_tokens: int
    joules: float | None = None
    """Drawn meanwhile by the devices whose driver says so, whatever else ran on them."""
    usage: dict[str, Usage] | None = None
    """By role, target and draft."""


class Failure(Record):
    """A request that ended in an error and has no row."""

    version: Literal[1] = 1
    problem: str
    policy: str
    repeat: int = 0
    error: str
    at: str
    """UTC time, ISO 8601."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the row that is missing."""
        return self.problem, self.policy, self.repeat


class Percentiles(Record):
    """Of seconds over rows."""

    p50: float
    p90: float
    p99: float


class Throughput(Record):
    """Of blocks that are finished under every policy, idle time at their ends included, and no time of the grader."""

    problems_per_s: float
    tokens_per_s: float
    """Committed tokens."""
    speedup_vs_target: float | None
    speedup_vs_target_ci: tuple[float, float] | None
    joules_per_problem: float | None = None
    usage: dict[str, Usage] | None = None


class Group(Record):
    """The figures of some of the problems."""

    name: str
    n: int
    accuracy: float
    accuracy_ci: tuple[float, float]
    accuracy_delta: float | None
    accuracy_delta_ci: tuple[float, float] | None
    speedup_vs_target: float | None
    speedup_vs_target_ci: tuple[float, float] | None


class PolicySummary(Record):
    """One policy's figures. What was not measured is null; intervals are 95%.

    Speedups are ratios of sums of wall seconds over the same problems; `tokens` and `time_s` are sums. With several
    requests at once those of a batch depend on each other, which only the interval of `throughput` takes into account.
    """

    n: int
    accuracy: float
    """Of all requests. One that ended in an error counts as not correct."""
    accuracy_ci: tuple[float, float]
    accuracy_without_failed: float | None = None
    """The other reading: of the requests that did not end in an error."""
    accuracy_without_failed_ci: tuple[float, float] | None = None
    accuracy_delta: float | None
    """Accuracy minus the target's, on the same problems; requests that ended in an error count as not correct."""
    accuracy_delta_ci: tuple[float, float] | None
    accuracy_loss_upper95: float | None
    """One-sided 95% upper bound of the accuracy lost against the target."""
    no_speed: str | None = None
    """Why the policy's speed does not count, in words that end a sentence; null where it does. The speedups are still
    given, and are not to be shown without this."""
    answers_lost: int | None = None
    """Requests that the target answered and the policy did not: cut off by the limit, without an answer, or failed."""
    answers_gained: int | None = None
    """Requests that the policy answered and the target did not."""
    unanswered: int = 0
    """All requests of the policy that were cut off by the limit, have no answer, or failed."""
    wall_s: float
    speedup_vs_target: float | None
    speedup_vs_target_ci: tuple[float, float] | None
    speedup_vs_token: float | None
    speedup_vs_token_ci: tuple[float, float] | None
    length_ratio: float | None
    """Committed tokens over the target's."""
    tokens_per_s_ratio: float | None
    """Committed tokens per second over the target's; speedup = tokens_per_s_ratio / length_ratio."""
    step_acceptance: float | None
    step_acceptance_ci: tuple[float, float] | None = None
    """Of steps, which depend on each other within a problem."""
    token_acceptance: float | None
    token_drafted: int | None = None
    """Tokens drafted inside what the target wrote."""
    token_level_exact: bool = True
    """False under a policy with a tolerance: what the target wrote is then not of its distribution."""
    tokens_per_target_pass: float | None
    """Committed tokens per forward pass of the target."""
    judge_controller_share: float
    """Share of the wall time spent in judging and in the controller."""
    tokens: TokenRecord
    time_s: TimeRecord
    truncated: int
    """Texts that the token limit cut off."""
    no_answer: int
    """Texts in which no answer was found, cut off or not."""
    num_rows: int | None = None
    """Problems times repeats."""
    failed: int = 0
    """Requests that ended in an error. They have no row: accuracies count them as not correct, and `answers_lost` and
    `unanswered` count them; they are in no other figure."""
    parse_errors: int = 0
    """Answers that the grader could not read, and those that it gave up on; both count as not correct."""
    timeouts: int = 0
    by_last_number: int = 0
    """Correct answers that were merely the last number of the text."""
    accuracy_p: float | None = None
    """Of the hypothesis that the accuracy is the target's: McNemar's exact test, or with repeats a permutation test."""
    speedup_median: float | None = None
    """Median over problems of the target's time over the policy's."""
    speedup_median_ci: tuple[float, float] | None = None
    length_ratio_ci: tuple[float, float] | None = None
    tokens_per_s_ratio_ci: tuple[float, float] | None = None
    latency_s: Percentiles | None = None
    first_step_s: Percentiles | None = None
    first_answer_s: Percentiles | None = None
    throughput: Throughput | None = None
    groups: dict[str, list[Group]] = {}
    """By `level`, by `subject` and by `length`, a third of the problems each by the tokens under all policies: by those
    of one alone, the others would look slow where it was short by chance, and fast where it was long."""
    n_for_one_point: int | None = None
    """Problems needed to know the accuracy difference to a point up or down."""
    n_for_five_percent: int | None = None
    """Problems needed to know the speedup to 5% up or down."""


class Matched(Record):
    """The fastest policy that does not lose more accuracy than that, for all that is known; else the target itself.

    A policy is faster if its speed counts and the interval of its speedup lies above 1. Of policies that are not exact
    the one-sided 95% bounds of the loss, corrected for their number (Bonferroni), decide; exact ones lose nothing by
    construction.
    """

    loss: float
    policy: str
    speedup: float | None
    speedup_ci: tuple[float, float] | None


class Summary(Record):
    """`summary.json`, a public interface. From version 2 on fields are added, and none changes its meaning.

    What changed since version 1: `max_tokens` counts committed tokens alone; requests that ended in an error count as
    not correct; times have a part `other`; `accuracy_loss_upper95` holds with repeats too; a policy that leaves
    requests without an answer has no speed (`no_speed`), and `matched` names no policy that is not known to be faster.
    """

    version: Literal[2] = 2
    benchmark: str
    n: int
    """Problems that are finished under every policy."""
    temperature: float
    concurrency: int
    pair: str
    policies: dict[str, PolicySummary]
    num_rows: int | None = None
    """The rows that all of this was computed from, under all policies."""
    failed: dict[str, int] = {}
    """Requests that ended in an error, by policy, of policies without any row too."""
    token_baseline: str | None = None
    """The policy that `speedup_vs_token` is against: the fastest that speculates on tokens alone, exactly."""
    matched: Matched | None = None
    num_repeats: int = 1

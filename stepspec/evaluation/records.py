"""Pydantic models of all files that an evaluation reads or writes. `version` changes when a field's meaning changes.

A run is a folder: `run.json` (`RunRecord`), `rows.jsonl` (one `ResultRow` a line), `traces.jsonl` (one `Trace` a line,
with `--traces`), `blocks.jsonl` (`Block`), `failures.jsonl` (`Failure`), `summary.json` (`Summary`) and `report.md`.
If several processes write parts of one run, file names include the part: `rows-2of4.jsonl`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, Strict, model_validator

from stepspec.base.printable import printable
from stepspec.loop.calibrated import CalibratedSetting
from stepspec.loop.certificate import by_role
from stepspec.loop.policy import PolicyKind


class Record(BaseModel):
    """Base class of records that stepspec writes and reads back."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WithRemoved(Record):
    """A record with fields that earlier versions stored. Records that have them still load, without them."""

    removed_fields: ClassVar[frozenset[str]]

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        if isinstance(values, dict):
            stored = cast("dict[str, Any]", values)
            return {name: value for name, value in stored.items() if name not in cls.removed_fields}
        return values


Name = Annotated[str, AfterValidator(printable)]
"""A name that tables, figures and reports show. Runs may come from elsewhere."""
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Wall = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""Wall time, by which speeds are divided."""


class Conditions(Record):
    """Where and when a measurement was made."""

    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    machine: str | None = None
    """Hash that tells machines with the same hardware apart; None if unknown."""
    started: str
    """UTC time, ISO 8601."""

    def on_machine_of(self, other: "Conditions | RunRecord") -> bool:
        """Whether this was measured on the same machine as something else, as far as both say."""
        ours, theirs = ({**each.hardware, "machine": each.machine} for each in (self, other))
        return all(
            ours[name] == theirs[name] for name in ours.keys() & theirs.keys() if None not in (ours[name], theirs[name])
        )

    def is_like(self, other: "Conditions | RunRecord") -> bool:
        """Whether machine, versions and commit are the same."""
        return self.on_machine_of(other) and (self.versions, self.commit) == (other.versions, other.commit)


BASELINE = "target"
"""The policy that all others are compared with: the target alone."""

VARIANT = re.compile(r".+?:[\w.-]+=")
"""The beginning of the name of a variant, see `stepspec.evaluation.run.variants`."""

Status = Literal["correct", "incorrect", "no_answer", "parse_error", "timeout"]
Reading = Literal["strict", "flexible"]
"""Which answers count: only those that the text marks or states, or also the last number of a text without one."""
Exactness = Literal["exact", "exact up to rounding"]
"""In narrow data types, a pass over several tokens can resolve a near tie differently from passes over one."""


class PolicyRecord(Record):
    """A policy as it was used."""

    text: str
    sha256: str
    token_level_exact: bool = True
    """False for a policy that relaxes the acceptance of drafted tokens."""
    step_level_exact: bool = False
    """Whether only steps that the target would have written itself are kept of the draft's."""
    kind: PolicyKind
    """Who writes under the policy, see `stepspec.loop.policy.Policy.kind`."""
    drafter: str | None = None
    """The drafter that ran, after the engines resolved "auto"; None in runs from before this field existed."""
    judges: Annotated[tuple[str, ...], Strict(False)] = ()
    """Names of the judges that ran; empty in runs from before this field existed."""
    calibrated: CalibratedSetting | None = None
    """What was calibrated for the models and the temperature; it counts before the text."""
    notes: Annotated[tuple[str, ...], Strict(False)] = ()
    """Sentences on what its calibration does not cover in the run."""

    @property
    def exact(self) -> bool:
        """Return whether the policy's output has the target's distribution."""
        return self.token_level_exact and (self.kind in ("target", "token") or self.step_level_exact)


class EngineRecord(Record):
    """A model as it was used. `weights` is a hash of the weight files."""

    name: Name
    weights: str | None
    dtype: str | None
    device: str | None
    threads: Count | None = None
    """CPU threads; None if unknown or on another device."""
    speculation: str | None = "none"
    """How the engine drafts tokens on its own, independent of the policy; None if unknown."""
    forgets: bool = True
    """Whether its caches were cleared before each block. If not, a policy may reuse what an earlier one left there."""

    @property
    def is_server(self) -> bool:
        """Whether it ran in a server, which may be a program on the same machine."""
        return " at http" in (self.device or "")


def compared_models(engines: Mapping[str, EngineRecord | None]) -> Mapping[str, Mapping[str, str]]:
    """Return what certificates compare of models, see `stepspec.loop.certificate.by_role`."""
    known = {role.removeprefix("judge "): each for role, each in engines.items() if each is not None}
    return by_role({role: each.model_dump() for role, each in known.items()})


class RunRecord(Record):
    """The conditions of a run. The fields of `identity` must match for a run to be resumed.

    Version 2: `max_tokens` counts committed tokens; in version 1 it counted rejected ones too.
    """

    version: Literal[2] = 2
    benchmark: Name
    data_sha256: str
    num_problems: Count
    prompt_id: str
    prompt_version: str
    first_prompt: str | None = None
    """The first problem's prompt as the target reads it, with its special tokens."""
    policies: dict[Name, PolicyRecord]
    engines: dict[str, EngineRecord | None]
    pair: str
    """Hash of the pair of models."""
    temperature: float
    top_p: float
    max_tokens: Count
    seed: int
    concurrency: Count
    grader: str = "integer"
    last_number: bool | None = None
    """Whether the last number of a text counts as its answer if it has no other; None in runs from before this field
    existed."""
    num_repeats: Count = 1
    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    machine: str | None = None
    started: str
    """UTC time of the first start, ISO 8601."""
    resumed: list[Conditions] = []
    """Other machines, versions and commits with which the run was resumed, or its parts ran."""
    busy: str | None = None
    """A warning, if other programs kept the machine busy during the run; else None."""

    @property
    def reading(self) -> Reading | None:
        """The reading of the rows' statuses; None if unknown. Whole numbers are only read in boxes."""
        if self.last_number is None and self.grader != "integer":
            return None
        return "flexible" if self.last_number and self.grader != "integer" else "strict"

    def kind_of(self, policy: str) -> PolicyKind | None:
        """Return the kind of a policy; None if unknown."""
        return self.policies[policy].kind if policy in self.policies else None

    def is_exact(self, policy: str) -> bool:
        """Return whether a policy's output has the target's distribution."""
        return policy in self.policies and self.policies[policy].exact

    @property
    def exact_in_words(self) -> Exactness:
        """How exact an exact policy is with the target's data type. Unknown ones may be narrow."""
        target = self.engines.get(BASELINE)
        return "exact" if target is not None and target.dtype == "float32" else "exact up to rounding"

    def exactness(self, policy: str) -> Exactness | Literal["not exact"]:
        """Return how exact a policy is. The target is compared with itself."""
        if not self.is_exact(policy):
            return "not exact"
        return "exact" if policy == BASELINE else self.exact_in_words

    def identity(self) -> dict[str, object]:
        """Return the fields that define a run: everything except where and when it ran."""
        others: dict[str, Any] = dict.fromkeys((*Conditions.model_fields, "resumed", "busy"), True)
        return self.model_dump(exclude={**others, "policies": {"__all__": {"notes"}}})

    @property
    def conditions(self) -> Conditions:
        """Where and when it started."""
        return Conditions(**{name: getattr(self, name) for name in Conditions.model_fields})


class TokenRecord(Record):
    """Token counts, named as in `stepspec.loop.counts.Counts`."""

    committed: Count = 0
    accepted: Count = 0
    salvaged: Count = 0
    """Included in `accepted`."""
    regenerated: Count = 0
    forced: Count = 0
    drafted: Count = 0
    rejected: Count = 0
    abandoned: Count = Field(default=0, validation_alias=AliasChoices("abandoned", "cancelled"))
    """Earlier: `cancelled`."""
    discarded: Count = 0


class TimeRecord(Record):
    """Exclusive seconds on the critical path, each part measured separately."""

    queue: Seconds = 0.0
    """Waiting for the engines."""
    draft: Seconds = 0.0
    judge: Seconds = 0.0
    target: Seconds = 0.0
    controller: Seconds = 0.0
    other: Seconds = 0.0
    """Wall time that the other parts do not cover."""


class StepRecord(Record):
    """A step as stored in rows. Only traces set `text`."""

    origin: Literal["draft", "salvaged", "target"]
    num_tokens: Count
    num_from_draft: Count
    scores: dict[Name, float | None] = {}
    text: str | None = None


def strict_status(status: Status, found_by: str | None) -> Status:
    """Return the status of an answer by the strict reading, in which the last number of a text is no answer."""
    return "no_answer" if found_by == "last number" else status


class ResultRow(WithRemoved):
    """The result of one problem under one policy, for one repeat."""

    removed_fields = frozenset({"reached"})

    version: Literal[1] = 1
    problem: str
    policy: Name
    repeat: Count = 0
    prompt_id: str | None = None
    prompt_version: str | None = None
    level: int | None = None
    subject: Name | None = None
    status: Status
    answer: str | None
    gold: str
    found_by: str | None = None
    """How the answer was found: in a box, after hashes, by a phrase, or as the last number."""
    strict_status: Status = Field(
        default_factory=lambda row: strict_status(row.get("status") or "no_answer", row.get("found_by"))
    )
    """The status by the strict reading; `status` is by the flexible one, if the benchmark has it."""
    decided_by: str | None = None
    """The comparison that decided the grade: of numbers, of texts, or symbolic."""
    why: str | None = None
    """One sentence that explains why the answer is not correct."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    output_sha256: str
    """Hash of reasoning and answer, to detect rows with the same output."""
    wall_s: Wall
    first_step_s: Seconds | None = None
    """Seconds until the first step was committed, when a user sees the first reasoning."""
    first_answer_s: Seconds | None = None
    """Seconds until the first chunk of the answer."""
    longest_gap_s: Seconds | None = None
    """Longest time between two commits, of steps or of chunks of the answer."""
    tokens: TokenRecord
    time_s: TimeRecord
    num_prompt_tokens: Count
    steps_proposed: Count | None = None
    """Steps that the draft proposed; None in rows from before this field existed."""
    not_proposed: Name | None = None
    """Why the draft proposed no step, or no further one; see `stepspec.loop.result.NotProposed`."""
    steps_judged: Count
    steps_accepted: Count
    token_drafted: Count
    token_accepted: Count
    relaxed_tokens: Count = 0
    """Tokens that stand by a relaxed acceptance rule alone."""
    first_relaxed: Count | None = None
    """Tokens of the text before the first of them; None if there is none."""
    target_passes: Count
    steps: list[StepRecord] = []
    node: str | None = None
    """The machine that it ran on; None for the one in `run.json`. A run's speeds compare times of the same machine."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Problem, policy and repeat, which identify a row in its run."""
        return self.problem, self.policy, self.repeat

    @property
    def is_answered(self) -> bool:
        """Whether the text was not cut off by the token limit and has an answer."""
        return self.finish_reason != "length" and self.status != "no_answer"

    def without_steps(self) -> "ResultRow":
        """Return the row without what grows with its text, to keep many in memory."""
        return self.model_copy(update={"steps": []})

    def on(self, node: "Node | None") -> "ResultRow":
        """Return the row as one of a machine, unless it already is one of another or the machine is `run.json`'s."""
        return self if node is None or self.node else self.model_copy(update={"node": node.name})


class JudgedStepRecord(WithRemoved):
    """What was seen of a step that the draft proposed, see `stepspec.loop.step.JudgedStep`."""

    removed_fields = frozenset({"draft_entropies", "draft_margins"})

    index: Count
    text: str
    num_tokens: Count
    accepted: bool
    asked: bool
    scores: dict[Name, float | None]
    target_logprobs: list[float] | None
    own_choices: list[bool] | None
    draft_logprobs: list[float] | None
    num_salvaged: Count
    draft_s: Seconds
    judge_s: Seconds
    write_s: Seconds


class Trace(Record):
    """The full output of a request: its steps with their texts, the answer, and what `stepspec replay` reads."""

    version: Literal[1] = 1
    problem: str
    policy: Name
    repeat: Count = 0
    question: str
    steps: list[StepRecord]
    answer: str
    judged_steps: list[JudgedStepRecord] = []
    """The draft's steps in the order in which they were judged. Empty in traces from before this field existed."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its row."""
        return self.problem, self.policy, self.repeat


class ModelUsage(Record):
    """What a model read and wrote, in tokens of its own vocabulary."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Prompt tokens that were cached and did not have to be read again."""
    generated_tokens: Count = 0


class Node(Record):
    """A machine of a run on several."""

    name: Name
    """Its address."""
    hardware: dict[str, str | int | float]
    num_workers: Count = 1
    """Sets of models that answered there beside each other, and share its processors and memory."""


class Block(WithRemoved):
    """Rows of one policy that ran together, with measurements that cover all of them."""

    removed_fields = frozenset({"joules"})

    version: Literal[1] = 1
    policy: Name
    jobs: list[tuple[str, int]]
    """Problem and repeat of every row."""
    wall_s: Wall
    committed_tokens: Count
    usage: dict[str, ModelUsage] | None = None
    """By role, target and draft."""
    node: Node | None = None
    """Where it ran; None for the machine in `run.json`."""
    cpu_s: Seconds | None = None
    """Processor seconds of stepspec and the processes that it started; None if unknown."""
    others_share: Fraction | None = Field(default=None, validation_alias=AliasChoices("others_share", "others"))
    """Share of all processors of the machine that other programs used; None if unknown. Earlier: `others`."""
    load: float | None = None
    """The system's load average over the last minute, at the end."""

    def on(self, node: Node | None) -> "Block":
        """Return the block as one of a machine, see `ResultRow.on`."""
        if node is None or self.node:
            return self
        # Workers on one machine count each other as other programs.
        others_share = self.others_share if node.num_workers == 1 else None
        return self.model_copy(update={"node": node, "others_share": others_share})


class Failure(Record):
    """A request that ended in an error and has no row."""

    version: Literal[1] = 1
    problem: str
    policy: Name
    repeat: Count = 0
    error: str
    at: str
    """UTC time, ISO 8601."""
    too_long: bool = False
    """Whether the prompt does not fit the context of a model, so that repeating the request cannot help."""

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the missing row."""
        return self.problem, self.policy, self.repeat


class Percentiles(Record):
    """Percentiles of seconds over rows."""

    p50: float
    p90: float
    p99: float


class Throughput(WithRemoved):
    """Throughput over blocks that finished under every policy. Includes idle time at their ends, excludes grading."""

    removed_fields = frozenset({"joules_per_problem"})

    problems_per_s: float
    tokens_per_s: float
    """Committed tokens."""
    speedup_vs_target: float | None
    speedup_vs_target_ci: tuple[float, float] | None
    usage: dict[str, ModelUsage] | None = None


class Group(Record):
    """Figures over a subset of the problems."""

    name: Name
    n: Count
    accuracy: float
    accuracy_ci: tuple[float, float]
    accuracy_delta: float | None
    accuracy_delta_ci: tuple[float, float] | None
    speedup_vs_target: float | None
    speedup_vs_target_ci: tuple[float, float] | None


class Estimate(Record):
    """A figure with its 95% interval."""

    value: float
    ci: tuple[float, float]


class PolicySummary(WithRemoved):
    """Figures of one policy. Values that were not measured are null. Intervals are 95%.

    Speedups are ratios of summed wall seconds over the same problems. `tokens` and `time_s` are sums. Concurrent
    requests of a batch depend on each other; only the interval of `throughput` accounts for that.
    """

    removed_fields = frozenset({"by_last_number", "n_for_five_percent", "stretches"})

    n: Count
    accuracy: float
    """Over all requests, by `Summary.reading`. A request that ended in an error counts as not correct."""
    accuracy_ci: tuple[float, float]
    strict_accuracy: float | None = None
    """By the strict reading; None if that is the only one, and in summaries from before this field existed."""
    strict_accuracy_ci: tuple[float, float] | None = None
    at_k: dict[str, Estimate] = {}
    """`pass@k` and `maj@k` for k = 1, 2, 4, ... and the number of repeats, and `avg@k` for the last; see
    `stepspec.evaluation.repeats`. Empty without repeats."""
    accuracy_without_failed: float | None = None
    """Over only the requests that did not end in an error."""
    accuracy_without_failed_ci: tuple[float, float] | None = None
    accuracy_delta: float | None
    """Accuracy minus the target's, on the same problems; requests that ended in an error count as not correct."""
    accuracy_delta_ci: tuple[float, float] | None
    accuracy_loss_upper95: float | None
    """One-sided 95% upper bound of the accuracy lost against the target."""
    num_compared: Count | None = None
    """Problems of `accuracy_delta`, `lost` and `won`: those that ended under every policy, with an answer or an error.
    None in summaries from before this field existed."""
    lost: float | None = None
    """Problems that the target answered correctly and the policy did not. With repeats, means over them."""
    won: float | None = None
    """Problems that the policy answered correctly and the target did not."""
    accuracy_kept: Exactness | Literal["within a point", "not known"] | None = None
    """Whether the policy keeps the target's accuracy, by the rule of `Matched`. It is not known of a policy that leaves
    requests unanswered."""
    no_speed: str | None = None
    """Why the policy's speed does not count, as a clause that ends a sentence; null if it counts. The speedups are
    still set, but do not show them without this reason."""
    answers_lost: Count | None = None
    """Requests that the target answered and the policy did not: cut off by the limit, without an answer, or failed."""
    answers_gained: Count | None = None
    """Requests that the policy answered and the target did not."""
    unanswered: Count = 0
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
    steps: int | None = None
    """Steps of the texts; None in summaries from before this field existed, like the next."""
    steps_proposed: Count | None = None
    """Steps that the draft proposed."""
    not_proposed: dict[str, int] = {}
    """Requests in which the draft proposed no step, or no further one, by the reason."""
    step_acceptance: float | None
    step_acceptance_ci: tuple[float, float] | None = None
    """Accounts for the dependence of steps within a problem."""
    token_acceptance: float | None
    token_drafted: Count | None = None
    """Tokens drafted at token level, within the target's own text."""
    relaxed_share: float | None = None
    """Share of the committed tokens that stand by a relaxed acceptance rule alone; None in results from before this
    field existed."""
    token_level_exact: bool = True
    """False for a policy that relaxes acceptance: the target's tokens then do not follow its own distribution."""
    tokens_per_target_pass: float | None
    """Committed tokens per forward pass of the target."""
    judge_controller_share: float
    """Share of the wall time spent in judging and in the controller."""
    tokens: TokenRecord
    time_s: TimeRecord
    truncated: Count
    """Texts that the token limit cut off."""
    no_answer: Count
    """Texts in which no answer was found, cut off or not."""
    num_rows: Count | None = None
    """Problems times repeats."""
    failed: Count = 0
    """Requests that ended in an error and have no row. Accuracies count them as not correct. `answers_lost` and
    `unanswered` include them; no other figure does."""
    parse_errors: Count = 0
    """Answers that the grader could not parse. They count as not correct, as do those in `timeouts`."""
    timeouts: Count = 0
    accuracy_p: float | None = None
    """p value for equal accuracy of policy and target: McNemar's exact test, or a permutation test with repeats."""
    speedup_median: float | None = None
    """Median over problems of the target's time over the policy's."""
    speedup_median_ci: tuple[float, float] | None = None
    length_ratio_ci: tuple[float, float] | None = None
    tokens_per_s_ratio_ci: tuple[float, float] | None = None
    latency_s: Percentiles | None = None
    first_step_s: Percentiles | None = None
    first_answer_s: Percentiles | None = None
    longest_gap_s: Percentiles | None = None
    throughput: Throughput | None = None
    groups: dict[str, list[Group]] = {}
    """Figures by `level`, `subject` and `length`. The length groups are thirds of the problems by tokens under all
    policies. With thirds by one policy alone, the others would look slow where it was short by chance, and fast where
    it was long."""
    cpu_s: Seconds | None = None
    """Processor seconds of stepspec during its blocks, in which it waited `wall_s` for answers."""
    others_share: Fraction | None = Field(default=None, validation_alias=AliasChoices("others_share", "others"))
    """Mean share of all processors that other programs used meanwhile. Earlier: `others`."""
    n_for_one_point: Count | None = None
    """Problems needed for an interval of ±1 point of the accuracy difference."""


class Matched(Record):
    """The fastest policy that is known to lose at most `loss` of accuracy, or else the target itself.

    A policy is faster if its speed counts and the interval of its speedup lies above 1. For policies that are not
    exact, the one-sided 95% bounds of the loss decide, corrected for their number (Bonferroni). Exact policies lose
    nothing by construction.
    """

    loss: float
    policy: Name
    speedup: float | None
    speedup_ci: tuple[float, float] | None


class Summary(Record):
    """`summary.json`, a public interface. Since version 2, fields may be added, but no field changes its meaning.

    Changes since version 1: `max_tokens` counts committed tokens only; requests that ended in an error count as not
    correct; times have a part `other`; `accuracy_loss_upper95` also holds with repeats; a policy that leaves requests
    without an answer has no speed (`no_speed`); `matched` names only policies that are known to be faster.
    """

    version: Literal[2] = 2
    benchmark: Name
    n: Count
    """Problems that finished under every policy."""
    temperature: float
    concurrency: Count
    pair: str
    policies: dict[Name, PolicySummary]
    num_rows: Count | None = None
    """Number of rows that the summary was computed from, under all policies."""
    failed: dict[str, int] = {}
    """Requests that ended in an error, by policy, including policies without any row."""
    first_failure: Failure | None = None
    """One of these requests: the first that may succeed if it is repeated, else the first one."""
    token_baseline: str | None = None
    """The baseline of `speedup_vs_token`: the fastest exact token-level policy."""
    matched: Matched | None = None
    num_repeats: Count = 1
    reading: Reading | None = None
    """The reading of all figures of correct answers but `strict_accuracy`; None if unknown."""
    nodes: list[Node] = []
    """The machines of a run on several."""
    num_apart: Count = 0
    """Requests that ran on different machines under the policies. They count for no time."""
    busy: str | None = None
    """A warning, if other programs kept the machine busy during the run; else None."""

    def named(self, what: str) -> str:
        """Return the name of a figure of correct answers with its reading: `accuracy (flexible)`."""
        return f"{what} ({self.reading})" if self.reading else what

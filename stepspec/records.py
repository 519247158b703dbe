"""The models of everything that an evaluation reads or writes; `version` changes when a field changes its meaning.

A run is a folder: `run.json` (`RunRecord`), `rows.jsonl` (one `Row` a line), `traces.jsonl` (one `Trace` a line, with
`--traces`), `summary.json` (`Summary`) and `report.md`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from stepspec.policy import FileModel


class Record(BaseModel):
    """Something that stepspec writes and reads back."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingTable(FileModel):
    """How a benchmark is sampled unless the command line says otherwise."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Benchmark(FileModel):
    """One file in `evals/`: where problems come from, how they are put, and how answers are graded."""

    version: Literal[1]
    title: str
    summary: str
    source: Literal["gsm-mini", "file"]
    """`gsm-mini` is drawn by the generator; `file` is a jsonl given with `--data`."""
    split: str = "test"
    default_limit: int | None = Field(default=None, ge=1)
    """How many problems are taken unless `--limit` says otherwise; None is all."""
    prompt: str = "bare"
    """A name in `stepspec.prompts.PROBLEM_PROMPTS`."""
    grader: Literal["integer"] = "integer"
    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens generated per problem, rejected and discarded ones included."""
    sampling: SamplingTable = SamplingTable()


class PolicyRecord(Record):
    """A policy as it was used."""

    text: str
    sha256: str
    token_level_exact: bool = True
    """False for a policy with a tolerance."""


class EngineRecord(Record):
    """A model as it was used. `weights` is a hash of the weight files."""

    name: str
    weights: str | None
    dtype: str | None
    device: str | None


class RunRecord(Record):
    """The conditions of a run. `identity` are the fields that must agree for a run to be resumed."""

    version: Literal[1] = 1
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
    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    started: str
    """UTC time of the first start, ISO 8601."""

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
    """Exclusive critical-path seconds."""

    queue: float = 0.0
    draft: float = 0.0
    judge: float = 0.0
    target: float = 0.0
    controller: float = 0.0


class StepRecord(Record):
    """A step as rows keep it; `text` only in traces."""

    origin: Literal["draft", "salvaged", "target"]
    num_tokens: int
    num_from_draft: int
    scores: dict[str, float | None] = {}
    text: str | None = None


class Row(Record):
    """One problem under one policy, once."""

    version: Literal[1] = 1
    problem: str
    policy: str
    repeat: int = 0
    level: int | None = None
    status: Literal["correct", "incorrect", "no_answer"]
    answer: str | None
    gold: str
    finish_reason: Literal["stop", "length"]
    output_sha256: str
    """Hash of reasoning and answer, to tell whether two rows say the same."""
    wall_s: float
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


class PolicySummary(Record):
    """One policy's figures. What was not measured is null; intervals are 95%.

    Speedups are ratios of sums of wall seconds over the same problems; `tokens` and `time_s` are sums.
    """

    n: int
    accuracy: float
    accuracy_ci: tuple[float, float]
    accuracy_delta: float | None
    """Accuracy minus the target's, on the same problems."""
    accuracy_delta_ci: tuple[float, float] | None
    accuracy_loss_upper95: float | None
    """One-sided 95% upper bound of the accuracy lost against the target."""
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
    token_acceptance: float | None
    token_level_exact: bool = True
    """False under a policy with a tolerance: what the target wrote is then not of its law."""
    tokens_per_target_pass: float | None
    """Committed tokens per forward pass of the target."""
    judge_controller_share: float
    """Share of the wall time spent in judging and in the controller."""
    tokens: TokenRecord
    time_s: TimeRecord
    truncated: int
    no_answer: int


class Summary(Record):
    """`summary.json`, a public interface."""

    version: Literal[1] = 1
    benchmark: str
    n: int
    temperature: float
    concurrency: int
    pair: str
    policies: dict[str, PolicySummary]

"""Pydantic models of the files that a calibration writes: its plan, so that it can resume, and its results."""

from typing import Literal

from stepspec.evaluation.records import Conditions, EngineRecord, Record, WithRemoved

Interval = tuple[float, float]
Measure = Literal["accuracy", "agreement"]


class Identity(Record):
    """What must be the same for a calibration to resume."""

    pair: str
    models: dict[str, str]
    benchmark: str
    data_sha256: str
    prompt_version: str
    policy: str
    """The text of the policy file."""
    measure: Measure
    max_loss: float
    confidence: float
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    concurrency: int
    num_repeats: int


class SettingRecord(WithRemoved):
    """A setting of the path, with what the recorded steps predict."""

    removed_fields = frozenset({"predicted_accuracy", "surprise"})

    name: str
    thresholds: dict[str, float]
    min_logprob: float | None
    predicted_speedup: float
    predicted_vs_token: float | None
    predicted_acceptance: float | None

    @property
    def is_slower_than_tokens(self) -> bool:
        """Whether the recorded steps predict that token-level speculation alone is clearly faster."""
        return self.predicted_vs_token is not None and self.predicted_vs_token < 0.9


class Planned(Record):
    """`plan.json`: the path, fixed before any problem of the test is run."""

    version: Literal[1] = 1
    identity: Identity
    num_recorded: int
    """Problems whose steps were recorded, the first ones in the order of the calibration."""
    num_planned: int
    """Problems that the bets are tuned for. The test may use more or fewer."""
    path: list[SettingRecord]


Status = Literal["certified", "loses more", "unknown", "not tested"]


class Tested(WithRemoved):
    """A setting of the path after the test."""

    removed_fields = frozenset({"changed"})

    setting: SettingRecord
    status: Status
    """`loses more`: the loss is known to be larger than the limit. `unknown`: the problems did not suffice."""
    num_problems: int
    """Problems that it ran on."""
    accuracy: float | None
    target_accuracy: float | None
    """On the same problems."""
    loss_upper: float | None
    """Upper bound of the loss."""
    num_needed: int | None
    """Estimated number of problems that would certify it; None if none would."""
    step_acceptance: float | None
    """Share of the judged steps that were accepted; None if none was judged."""

    @property
    def loss(self) -> float | None:
        """The share of right answers that it lost on these problems; below zero is a gain."""
        return None if self.accuracy is None or self.target_accuracy is None else self.target_accuracy - self.accuracy


class Speed(Record):
    """The speed of one setting in a run of its own, one request at a time, interleaved with its baselines."""

    num_problems: int
    vs_target: float | None
    vs_target_ci: Interval | None
    vs_token: float | None
    vs_token_ci: Interval | None
    step_acceptance: float | None


class Calibrated(Conditions):
    """`calibration.json`: the results."""

    version: Literal[1] = 1
    identity: Identity
    engines: dict[str, EngineRecord | None]
    num_recorded: int
    draft_accuracy: float | None = None
    """Accuracy of the draft alone on the recorded problems; None if it was not measured, as without right answers."""
    recorded_target_accuracy: float | None = None
    """The target's on the same problems."""
    num_for_test: int = 0
    """Problems that were left for the test; 0 in files from before this field existed."""
    num_repeated: int = 0
    """Problems that were left out because their question is that of another one."""
    num_refused: int
    """Prompts left out because the target's answer to them cannot be found in its text."""
    path: list[Tested]
    chosen: str
    """Name of the setting that is stored for the models."""
    certified: bool
    num_certificates: int = 1
    """Certificates of this machine that come from the same problems, with this one."""
    pays: bool = True
    """Whether the draft proposes steps with the chosen setting; always in files from before this field existed."""
    speed: Speed | None
    sentences: list[str]

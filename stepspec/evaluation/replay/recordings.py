"""Reads the recorded steps of a run: its traces with `judged_steps`, by policy and problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, ResultRow, RunRecord, Trace
from stepspec.evaluation.runs import iter_rows, iter_traces, policy_of, read_run, says
from stepspec.loop.families.score import ScoreTable
from stepspec.loop.policy import Policy

Key = tuple[str, int]
"""Problem and repeat."""


@dataclass(frozen=True)
class RecordedRequest:
    """One recorded request: its row and its trace."""

    row: ResultRow
    trace: Trace

    @property
    def correct(self) -> bool:
        """Whether its answer is right."""
        return self.row.status == "correct"


@dataclass(frozen=True)
class Recording:
    """The requests of one policy of family `score` that a run recorded."""

    name: str
    policy: Policy
    requests: Mapping[Key, RecordedRequest]
    drafts: bool
    """Whether the draft model drafts the tokens that the target writes."""


@dataclass(frozen=True)
class Recordings:
    """A run with recorded steps. All recordings and baselines have the same requests."""

    run: RunRecord
    recordings: Sequence[Recording]
    baselines: Mapping[str, Mapping[Key, ResultRow]]
    """The rows of `target` and of the exact token-level policies."""

    def drafts(self, policy: str) -> bool:
        """Whether the draft model drafts tokens under a policy of the run."""
        return _drafts(self.run, policy)

    @property
    def keys(self) -> Sequence[Key]:
        """The requests that finished under every recorded policy and baseline."""
        return list(self.recordings[0].requests)


def read_recordings(folder: Path) -> Recordings:
    """Read the recorded steps of a run.

    Raises:
        UsageError: the folder holds no run, it has no recorded steps, or no request finished under all policies.
        StepSpecError: a file cannot be read.
    """
    run = read_run(folder)
    if BASELINE not in run.policies:
        raise UsageError(f"{folder} has no policy {BASELINE!r} to compare with.")
    policies = {name: policy_of(run, name) for name in run.policies}
    scored = {name: each for name, each in policies.items() if is_recorded(each)}
    rows: dict[str, dict[Key, ResultRow]] = {name: {} for name in policies}
    for row in iter_rows(folder):
        rows[row.policy][row.problem, row.repeat] = row
    traces: dict[str, dict[Key, Trace]] = {name: {} for name in scored}
    for trace in iter_traces(folder):
        key = trace.problem, trace.repeat
        row = rows.get(trace.policy, {}).get(key)
        if trace.policy in scored and row is not None and says(trace) == row.output_sha256:
            traces[trace.policy][key] = trace
    if not any(trace.judged_steps for of_policy in traces.values() for trace in of_policy.values()):
        raise UsageError(
            f"{folder} has no recorded steps. Run 'stepspec eval' with --record and a policy of family 'score'."
        )
    exact = [name for name in policies if name == BASELINE or (run.is_exact(name) and run.kind_of(name) == "token")]
    finished = [key for key in rows[BASELINE] if all(key in rows[name] for name in exact)]
    finished = [key for key in finished if all(key in of_policy for of_policy in traces.values())]
    if not finished:
        raise UsageError(f"No request in {folder} finished under every policy. Resume the run first.")
    recordings = [
        Recording(
            name,
            policy,
            {key: RecordedRequest(rows[name][key], traces[name][key]) for key in finished},
            _drafts(run, name),
        )
        for name, policy in scored.items()
    ]
    return Recordings(run, recordings, {name: {key: rows[name][key] for key in finished} for name in exact})


def _drafts(run: RunRecord, policy: str) -> bool:
    return run.policies[policy].drafter == "draft-model"


def is_recorded(policy: Policy) -> bool:
    """Return whether traces hold what a replay needs of a policy: those of family `score`."""
    return isinstance(policy.settings, ScoreTable)

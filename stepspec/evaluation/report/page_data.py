"""The rows and traces of a run in the page: compressed, as many traces as the size of the page allows.

Problems on which a policy and the target disagree go first. Text from a model cannot become markup, because base64 has
no characters with a meaning in HTML.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepspec.evaluation.records import StepRecord, Trace
from stepspec.evaluation.report.tally import ORIGIN_LETTERS, Outcome, ProblemTally, RunTally
from stepspec.evaluation.runs import TraceIndex, reasoning, says

CHUNK_CHARACTERS = 400_000
"""JSON characters in one chunk. The page unpacks a chunk when it shows one of its problems."""
MAX_ANSWER = 400
"""Maximum characters of an answer or a reason in the problem list. Traces contain the full text."""
PREVIEW = 160


@dataclass(frozen=True)
class PageData:
    """The embedded data of the page, in base64."""

    index: str
    """The problems with their outcomes."""
    chunks: Sequence[str]
    """The traces in chunks. The index stores the chunk of each problem."""
    num_problems: int
    num_traced: int
    num_left_out: int
    """Problems whose traces exist but do not fit."""


def embed(policies: Sequence[str], tally: RunTally, traces: TraceIndex | None, budget: int) -> PageData:
    """Pack a run into an index and at most `budget` characters of traces."""
    chunks: list[str] = []
    chunk_of: dict[str, int] = {}
    previews: dict[str, str] = {}
    for problems, text in _trace_chunks(policies, tally, traces, previews):
        packed = _pack(text)
        if len(packed) > budget:
            break
        budget -= len(packed)
        chunk_of |= dict.fromkeys(problems, len(chunks))
        chunks.append(packed)
    problems = [
        _problem(policies, name, problem, chunk_of.get(name, -1), previews.get(name, ""))
        for name, problem in tally.problems.items()
    ]
    index = _pack(_json({"policies": list(policies), "problems": problems}))
    num_known = 0 if traces is None else sum(name in traces for name in tally.problems)
    return PageData(index, chunks, len(problems), len(chunk_of), num_known - len(chunk_of))


def by_interest(tally: RunTally) -> list[str]:
    """Return the problems in order of interest: lost against the target, then won, then the rest."""
    return sorted(tally.problems, key=lambda name: _rank(tally.problems[name]))


def _rank(problem: ProblemTally) -> int:
    target = problem.outcomes.get("target", {})
    pairs = [
        (target[repeat].status == "correct", outcome.status == "correct")
        for policy, outcomes in problem.outcomes.items()
        for repeat, outcome in outcomes.items()
        if policy != "target" and repeat in target
    ]
    if (True, False) in pairs:
        return 0
    return 1 if (False, True) in pairs else 2


def _trace_chunks(
    policies: Sequence[str], tally: RunTally, traces: TraceIndex | None, previews: dict[str, str]
) -> Iterator[tuple[list[str], str]]:
    """Yield chunks of problem names and their traces as JSON. Adds the start of each question to `previews`."""
    if traces is None:
        return
    names: list[str] = []
    parts: list[str] = []
    for name in by_interest(tally):
        known = traces.of(name)
        if not known:
            continue
        previews[name] = known[0].question[:PREVIEW]
        names.append(name)
        parts.append(f"{_json(name)}:{_json(_traced(policies, tally.problems[name], known))}")
        if sum(map(len, parts)) > CHUNK_CHARACTERS:
            yield names, f"{{{','.join(parts)}}}"
            names, parts = [], []
    if parts:
        yield names, f"{{{','.join(parts)}}}"


def _traced(policies: Sequence[str], problem: ProblemTally, traces: Sequence[Trace]) -> dict[str, object]:
    """Return a problem's traces. A text that several policies wrote is stored once."""
    texts: dict[str, int] = {}

    def index_of(text: str) -> int:
        return texts.setdefault(text, len(texts))

    steps_and_answers: dict[str, object] = {}
    for (policy, repeat), trace in _of_rows(problem, traces).items():
        steps = [_step(step, index_of(step.text or "")) for step in trace.steps]
        # The reasoning of a model without thinking is its answer, so do not show it twice.
        answer = None if trace.answer == reasoning(trace) else index_of(trace.answer)
        steps_and_answers[f"{policies.index(policy)} {repeat}"] = [steps, answer]
    return {"question": traces[0].question, "texts": list(texts), "traces": steps_and_answers}


def _of_rows(problem: ProblemTally, traces: Sequence[Trace]) -> dict[tuple[str, int], Trace]:
    """Return the trace of each row. If there are several, choose the one that matches the row's hash."""
    found: dict[tuple[str, int], Trace] = {}
    for trace in traces:
        outcome = problem.outcomes.get(trace.policy, {}).get(trace.repeat)
        key = trace.policy, trace.repeat
        if outcome is not None and (key not in found or says(trace) == outcome.output_sha256):
            found[key] = trace
    return found


def _step(step: StepRecord, text: int) -> list[object]:
    scores = {judge: score if score is None else float(f"{score:.4g}") for judge, score in step.scores.items()}
    return [text, ORIGIN_LETTERS[step.origin], step.num_tokens, step.num_from_draft, scores]


def _problem(policies: Sequence[str], name: str, problem: ProblemTally, chunk: int, preview: str) -> dict[str, object]:
    outcomes = [
        {repeat: _outcome(outcome) for repeat, outcome in problem.outcomes.get(policy, {}).items()}
        for policy in policies
    ]
    return {
        "id": name,
        "gold": _short(problem.gold),
        "level": problem.level,
        "subject": problem.subject,
        "chunk": chunk,
        "preview": preview,
        "outcomes": outcomes,
    }


def _outcome(outcome: Outcome) -> list[object]:
    return [
        outcome.status,
        _short(outcome.answer),
        outcome.found_by,
        outcome.decided_by,
        _short(outcome.why),
        int(outcome.truncated),
        float(f"{outcome.wall_s:.4g}"),
        outcome.num_tokens,
        outcome.origins,
    ]


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]}…"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _pack(text: str) -> str:
    # Text from a model may contain a lone surrogate, which UTF-8 cannot encode.
    packed = gzip.compress(text.encode(errors="replace"), mtime=0)
    return base64.b64encode(packed).decode("ascii")

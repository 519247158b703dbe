"""Measures judges on labelled steps: how well scores separate right steps from wrong ones, and what they cost.

A judge sees each step as in a request, after the question and the steps before it. Judgments are stored as they are
made, so a run that was stopped continues where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, ValidationError, model_validator

from stepspec.api.models import Pair
from stepspec.api.policy_support import check_judging
from stepspec.base.file_model import FileModel
from stepspec.base.file_problems import first_problem
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Engine, Probe, TokenBuffer, Verification, Verify
from stepspec.errors import UsageError
from stepspec.evaluation.records import Conditions, EngineRecord, Record
from stepspec.evaluation.replay.decisions import SETTINGS_OF_DECISIONS, same_scores
from stepspec.evaluation.report.cells import count, number, percent, significant
from stepspec.evaluation.run.data import read_rows
from stepspec.evaluation.stats.judge_scores import Bin, area_alone, auc, reliability, risks
from stepspec.loop.judge import Evidence, Judge, Panel
from stepspec.loop.policy import Policy
from stepspec.loop.step import Step

MIN_CLASS = 20
"""Minimum number of questions with a right step, and with a wrong one, for an interval of an area."""
SHARES = range(5, 101, 5)
"""Shares of accepted steps, in percent, at which the risk is stored."""
HEADS = ("judge", "steps", "area", "Brier score", "risk area", "wrong in the best half", "a judgment", "passes")


class LabelledSolution(FileModel):
    """A line of a file of labelled steps."""

    question: str = Field(min_length=1)
    """The question as a model is asked, with any instructions."""
    steps: list[str]
    """The texts of the steps. Joined, they are the solution, so a step includes the blank line that ends it."""
    labels: list[Annotated[float, Strict(False), Field(ge=0, le=1)]] = Field(min_length=1)
    """Whether each step is right: true, false or the probability that it is. Steps after the first false one, or the
    first one with probability 0, need no label, and are not judged."""
    source: str
    """Who wrote the solution, or where it comes from."""
    ids: list[list[Annotated[int, Field(ge=0)]]] | None = None
    """The token ids of each step, if the draft has written them."""

    @model_validator(mode="after")
    def _steps_match(self) -> "LabelledSolution":
        if not len(self.labels) <= len(self.steps) == len(self.ids or self.steps) or not all(self.steps):
            raise ValueError("each step needs a text, each label a step, and each step its ids if there are any")
        return self

    @property
    def judged(self) -> list[float]:
        """The labels of the steps up to the first wrong one."""
        return self.labels[: [*self.labels, 0.0].index(0.0) + 1]


def read_labelled_steps(path: Path) -> list[LabelledSolution]:
    """Read a jsonl file of labelled solutions, which may be gzipped.

    Raises:
        UsageError: the file cannot be read, has no solution, or a line is none.
    """
    found: list[LabelledSolution] = []
    for row in read_rows(path):
        try:
            found.append(LabelledSolution.model_validate(row.fields))
        except ValidationError as error:
            raise UsageError(f"{row.where}: {first_problem(error, LabelledSolution)}") from error
    if not found:
        raise UsageError(f'{path} has no labelled steps; it needs lines with "question", "steps", "labels", "source".')
    return found


class Judgment(Record):
    """A line of the file of judgments."""

    key: str
    """Hash of models, judge and step."""
    judge: str
    score: float | None
    ms: float
    passes: int
    """Passes of the target."""


class JudgeFigures(Record):
    """What a judge is worth. What could not be computed is None."""

    judge: str
    num_steps: int
    """Steps that it judged."""
    num_scored: int
    """Steps with a score. The figures are about these."""
    area: float | None = None
    """Area under the ROC: the probability that a right step scores above a wrong one, with ties as half."""
    area_low: float | None = None
    """Lower end of its interval, over questions, because steps to one question depend on each other."""
    area_high: float | None = None
    why: str | None = None
    """A clause that says why the area or its interval is unknown."""
    brier: float | None = None
    """Brier score; None if scores are no probabilities."""
    bins: tuple[Bin, ...] = ()
    """Share of right steps by score, in bins of about equal count."""
    risks: dict[int, float] = Field(default_factory=dict[int, float])
    """Share of wrong steps among the accepted ones by the percentage of accepted steps, best scores first."""
    risk_area: float | None = None
    """Area under the curve of risk by coverage."""
    ms: float | None = None
    """Median milliseconds of a judgment."""
    passes: float | None = None
    """Mean passes of the target."""


class JudgeBench(Conditions):
    """The file that `stepspec judge-bench` writes."""

    version: Literal[1] = 1
    data: str
    data_sha256: str
    engines: dict[str, EngineRecord | None]
    num_questions: int
    num_solutions: int
    num_steps: int
    right: float
    """Share of right steps."""
    best_area: float | None
    """Area of a judge whose scores are the labels; below 1 if labels are probabilities."""
    judges: tuple[JudgeFigures, ...]
    notes: dict[str, str]
    """Why judges were left out, or have failed on steps, which then have no judgment."""


def choose_judges(
    policies: Mapping[str, Policy], pair: Pair, solutions: Sequence[LabelledSolution]
) -> tuple[dict[str, Judge], dict[str, str]]:
    """Return the judges of policies by name, and for each one that cannot judge these steps with these models the
    reason. Judges that differ only in thresholds give the same scores, and count as one.

    Raises:
        UsageError: there is no judge that can.
    """
    judges, notes = dict[str, Judge](), dict[str, str]()
    for title, judge in ((title, judge) for title, policy in policies.items() for judge in policy.judges):
        if any(same_scores(judge, other) for other in judges.values()):
            continue
        name = judge.name if judge.name not in judges else f"{judge.name} ({title})"
        try:
            check_judging(policies[title].model_copy(update={"judges": (judge,), "salvage": None}), pair)
            judge.probe(pair.target.tokenizer)
            if "score" not in judge.families:
                raise UsageError("Labelled steps do not have the target's own step.")
            if judge.draft_needs and not any(draft_ids(pair, each) for each in solutions):
                raise UsageError("It needs the draft's log-probabilities, and no step has token ids of this draft.")
            judges[name] = judge
        except UsageError as error:
            notes[name] = f"left out. {error}"
    if not judges:
        raise UsageError(" ".join(f"{name} is {why}" for name, why in notes.items()) or "The policies have no judges.")
    return judges, notes


def draft_ids(pair: Pair, solution: LabelledSolution) -> list[list[int]] | None:
    """Return the draft's ids of each step; None if the solution has none, or those of another draft."""
    if solution.ids is None or pair.draft is None or "scores" not in pair.draft.abilities:
        return None
    return solution.ids if [*map(pair.draft.tokenizer.decode, solution.ids)] == solution.steps else None


async def judge_steps(
    pair: Pair,
    judges: Mapping[str, Judge],
    solutions: Sequence[LabelledSolution],
    file: Path,
    show: Callable[[None, int, int], None],
) -> tuple[list[JudgeFigures], dict[str, str]]:
    """Judge every step, one at a time. Return the figures of each judge, and the last error of those that failed.

    Args:
        pair: the models.
        judges: the judges by name.
        solutions: the labelled solutions.
        file: the file of judgments, to which each is appended. Those that it has are not made again.
        show: is called with the number of finished steps and of all steps.

    Raises:
        EngineError: the target failed.
    """
    panels = {name: Panel([judge], pair.target.tokenizer) for name, judge in judges.items()}
    found: dict[str, list[tuple[Judgment, float, str]]] = {name: [] for name in judges}
    errors, done, total = dict[str, str](), 0, sum(len(each.judged) for each in solutions)
    stored = {each.key: each for each in _stored(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as output:
        output.write("\n")  # a killed process may have left an incomplete line
        for solution in solutions:
            await pair.forget()
            num_stored = len(stored)
            reader = _SolutionReader(pair, solution)
            for (index, label), (name, judge) in product(enumerate(solution.judged), judges.items()):
                if judge.draft_needs and reader.draft_ids is None:
                    continue
                if (key := _key(pair, judge, solution, index)) not in stored:
                    try:
                        score, ms, passes = await reader.judge(index, judge, panels[name])
                    except UsageError as error:
                        errors[name] = f"not able to judge some steps. The last error: {error}"
                        continue
                    stored[key] = Judgment(key=key, judge=name, score=score, ms=ms, passes=passes)
                    output.write(stored[key].model_dump_json() + "\n")
                    output.flush()
                found[name].append((stored[key], label, solution.question))
            done += len(solution.judged)
            if len(stored) > num_stored or done == total:  # those of an earlier run would make the rest look fast
                show(None, done, total)
    return [_figures(name, judge, found[name]) for name, judge in judges.items()], errors


class _SolutionReader:
    """Reads a solution step by step with the models of a pair. Judges that need the same pass share it."""

    def __init__(self, pair: Pair, solution: LabelledSolution) -> None:
        self._pair, self._solution, self._seen = pair, solution, dict[object, tuple[Verification, float]]()
        self.draft_ids = draft_ids(pair, solution)
        own_ids = [*map(pair.target.tokenizer.encode_text, solution.steps)]
        self._ids = self.draft_ids if self.draft_ids is not None and pair.one_vocabulary else own_ids

    async def judge(self, index: int, judge: Judge, panel: Panel) -> tuple[float | None, float, int]:
        """Return the score of a step, the milliseconds of the judgment, and the target's passes.

        Raises:
            UsageError: the judge failed, or the step does not fit the context of a model.
        """
        passes, saved_s = 0, 0.0

        async def verify(probes: Sequence[Probe]) -> Verification:
            nonlocal passes, saved_s
            scores = bool(judge.needs & {"scores", "choices"})
            seen, seconds = await self._read(self._pair.target, self._ids, index, tuple(probes), scores=scores)
            passes, saved_s = passes + seen.passes, saved_s + seconds
            return seen

        texts, logprobs = self._solution.steps, None
        if judge.draft_needs and self._pair.draft is not None and self.draft_ids is not None:
            logprobs = (await self._read(self._pair.draft, self.draft_ids, index, (), scores=True))[0].logprobs
        before = [Step(at, "draft", text, len(self._ids[at]), 0, "delimiter") for at, text in enumerate(texts[:index])]
        known = self._solution.question, before, texts[index], self._ids[index], logprobs
        since = time.perf_counter()
        verdict = await panel.judge(Evidence(*known, models=self._pair.judges), verify)
        if verdict.errors:
            raise UsageError(verdict.errors[judge.name])
        return verdict.scores[judge.name], round(1000 * (time.perf_counter() - since + saved_s), 3), passes

    async def _read(
        self, engine: Engine, steps: list[list[int]], index: int, probes: tuple[Probe, ...], *, scores: bool
    ) -> tuple[Verification, float]:
        """Return a model's pass over a step, and what to add to the seconds of this call: those of the pass if it was
        made for another judge, or less those for what is before the step."""
        kind, since = (index, engine, probes, scores), time.perf_counter()
        if kind in self._seen:
            return self._seen[kind]
        ids = chain(encode_request(engine.tokenizer, self._solution.question), *steps[:index])
        before = TokenBuffer([*ids], group=f"judges {hash(kind[2:])}")  # others leave nothing in its cache
        await engine.verify(Verify(before, (), scores=False))
        started = time.perf_counter()
        seen = await engine.verify(Verify(before, steps[index], probes, scores))
        self._seen[kind] = seen, time.perf_counter() - started
        return seen, since - started


def _key(pair: Pair, judge: Judge, solution: LabelledSolution, index: int) -> str:
    settings = judge.model_dump(mode="json", exclude=set(SETTINGS_OF_DECISIONS))
    steps = solution.question, solution.steps[: index + 1], (solution.ids or ())[: index + 1]
    return hashlib.sha256(json.dumps([repr(pair.by_role), settings, steps]).encode()).hexdigest()[:24]


def _stored(file: Path) -> Iterator[Judgment]:
    """Yield the judgments of a file. Other lines are ignored."""
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(ValidationError):
            yield Judgment.model_validate_json(line)


def _figures(name: str, judge: Judge, judged: Sequence[tuple[Judgment, float, str]]) -> JudgeFigures:
    scored = [(each.score, label, question) for each, label, question in judged if each.score is not None]
    if not scored:
        return JudgeFigures(judge=name, num_steps=len(judged), num_scored=0, why="no step has a score")
    scores, labels, questions = zip(*scored, strict=True)
    area, value, risk = auc(scores, labels, questions, MIN_CLASS), area_alone(scores, labels), risks(scores, labels)
    return JudgeFigures(
        judge=name,
        num_steps=len(judged),
        num_scored=len(scored),
        area=value,
        area_low=None if area.interval is None else area.interval[0],
        area_high=None if area.interval is None else area.interval[1],
        why="there are not both right and wrong steps" if value is None else area.why,
        brier=fmean(y * (1 - s) ** 2 + (1 - y) * s**2 for s, y, _ in scored) if judge.is_probability else None,
        bins=reliability(scores, labels, questions),
        risks={at: round(float(risk[-(-at * len(risk) // 100) - 1]), 6) for at in SHARES},
        risk_area=float(risk.mean()),
        ms=median(each.ms for each, *_ in judged),
        passes=fmean(each.passes for each, *_ in judged),
    )


def judge_bench(about: Mapping[str, Any], solutions: Sequence[LabelledSolution]) -> JudgeBench:
    """Return all results, from those that are not about the solutions alone."""
    labels = [label for each in solutions for label in each.judged]
    return JudgeBench(
        **about,
        num_questions=len({each.question for each in solutions}),
        num_solutions=len(solutions),
        num_steps=len(labels),
        right=fmean(labels),
        best_area=area_alone(labels, labels),
    )


def csv_rows(judges: Sequence[JudgeFigures]) -> list[dict[str, object]]:
    """Return the figures of judges by `HEADS`, with the ends of the interval, and times in seconds."""
    found = list[dict[str, object]]()
    for each in judges:
        figures = each.judge, each.num_scored, each.area, each.brier, each.risk_area, each.risks.get(50)
        heads, ends = (*HEADS, "area low", "area high"), (each.area_low, each.area_high)
        found.append(dict(zip(heads, (*figures, each.ms and each.ms / 1000, each.passes, *ends), strict=True)))
    return found


def rows_of(found: JudgeBench) -> list[list[str]]:
    """Return the rows of the table, by `HEADS`."""
    return [
        [
            each.judge,
            f"{each.num_scored:,}" + (f" of {each.num_steps:,}" if each.num_scored < each.num_steps else ""),
            number(each.area)[0] + ("" if each.area_low is None else f" [{each.area_low:.2f}, {each.area_high:.2f}]"),
            *(number(each.brier)[0], number(each.risk_area)[0], percent(each.risks.get(50))),
            *(significant(each.ms, "ms"), number(each.passes)[0]),
        ]
        for each in found.judges
    ]


def in_words(found: JudgeBench) -> str:
    """Return what was judged, without a period at the end."""
    steps = f"{count(found.num_steps, 'step')} of {count(found.num_solutions, 'solution')}"
    best = "" if found.best_area in (None, 1) else f"; with the labels as scores, the area is {found.best_area:.2f}"
    return (
        f"{found.data}: {steps} to {count(found.num_questions, 'question')}, {percent(1 - found.right)} of them wrong"
        f"{best}; with their mean as each score, the Brier score is {found.right * (1 - found.right):.2f}"
    )

"""Totals over result rows: scores, and the lowest accepted ones."""

from make_runs import make_run

from stepspec.evaluation.records import StepRecord
from stepspec.evaluation.report.tally import RunTally

RUN = make_run(1)
ROW = next(row for row in RUN.rows if row.policy == "two-level")


def step(origin: str, score: float | None = 0.0, judge: str = "j") -> StepRecord:
    return StepRecord.model_validate({"origin": origin, "num_tokens": 4, "num_from_draft": 0, "scores": {judge: score}})


def test_scores_are_counted_by_outcome() -> None:
    unjudged = StepRecord(origin="target", num_tokens=1, num_from_draft=0)
    steps = [unjudged, step("draft", -1.5), step("salvaged", -3.0), step("target", None), step("draft", -0.5)]
    rows = [
        ROW.model_copy(update={"steps": steps, "status": "incorrect"}),
        ROW.model_copy(update={"steps": [step("draft", -0.25)], "problem": "q", "status": "correct"}),
    ]
    tally = RunTally.of(rows).policies["two-level"]
    scores = tally.scores["j"]
    assert (list(scores.accepted), list(scores.refused)) == ([-1.5, -0.5, -0.25], [-3.0])
    assert (list(scores.lowest), list(scores.correct), scores.problems) == ([-1.5, -0.25], [0, 1], [ROW.problem, "q"])


def test_an_outcome_stores_the_origin_of_each_step() -> None:
    tally = RunTally.of([ROW.model_copy(update={"steps": [step("draft"), step("salvaged"), step("target")]})])
    assert tally.problems[ROW.problem].outcomes["two-level"][0].origins == "dst"

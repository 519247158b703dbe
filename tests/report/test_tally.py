"""Totals over result rows: judged steps by position, scores, lowest accepted scores and ratios by problem."""

from make_runs import make_run

from stepspec.evaluation.records import StepRecord
from stepspec.evaluation.report.tally import RunTally

RUN = make_run(1)
ROW = next(row for row in RUN.rows if row.policy == "two-level")


def step(origin: str, score: float | None = 0.0, judge: str = "j") -> StepRecord:
    return StepRecord.model_validate({"origin": origin, "num_tokens": 4, "num_from_draft": 0, "scores": {judge: score}})


def test_steps_are_counted_by_position_and_scores_by_outcome() -> None:
    unjudged = StepRecord(origin="target", num_tokens=1, num_from_draft=0)
    steps = [unjudged, step("draft", -1.5), step("salvaged", -3.0), step("target", None), step("draft", -0.5)]
    rows = [
        ROW.model_copy(update={"steps": steps, "status": "incorrect"}),
        ROW.model_copy(update={"steps": [step("draft", -0.25)], "problem": "q", "status": "correct"}),
    ]
    tally = RunTally.of(rows).policies["two-level"]
    places = {problem: (list(each.judged), list(each.accepted)) for problem, each in tally.places.items()}
    assert places == {ROW.problem: ([0, 1, 1, 1, 1], [0, 1, 0, 0, 1]), "q": ([1], [1])}
    scores = tally.scores["j"]
    assert (list(scores.accepted), list(scores.refused)) == ([-1.5, -0.5, -0.25], [-3.0])
    assert (list(scores.lowest), list(scores.correct), scores.problems) == ([-1.5, -0.25], [0, 1], [ROW.problem, "q"])


def test_the_judged_steps_of_repeats_add_up_within_their_problem() -> None:
    rows = [
        ROW.model_copy(update={"repeat": repeat, "steps": [step("draft")] * 2 + [step(last)]})
        for repeat, last in enumerate(["draft", "target"])
    ]
    places = RunTally.of(rows).policies["two-level"].places[ROW.problem]
    assert (list(places.judged), list(places.accepted)) == ([2, 2, 2], [2, 2, 1])


def test_lengths_are_compared_in_the_repeats_that_both_policies_have_finished() -> None:
    def row(policy: str, repeat: int, committed: int):
        tokens = ROW.tokens.model_copy(update={"committed": committed})
        return ROW.model_copy(update={"policy": policy, "repeat": repeat, "tokens": tokens})

    tally = RunTally.of([row("target", 0, 10), row("target", 1, 30), row("step", 1, 15), row("step", 2, 99)])
    assert tally.length_ratios("step", "target") == [0.5]
    assert tally.length_ratios("step", "missing") == []


def test_an_outcome_stores_the_origin_of_each_step() -> None:
    tally = RunTally.of([ROW.model_copy(update={"steps": [step("draft"), step("salvaged"), step("target")]})])
    assert tally.problems[ROW.problem].outcomes["two-level"][0].origins == "dst"

"""Data embedded in the page: every outcome, and the most interesting traces that fit."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from make_runs import MadeRun, make_run

from stepspec.evaluation.report.page_data import PageData, by_interest, embed
from stepspec.evaluation.report.tally import RunTally
from stepspec.evaluation.runs import TraceIndex, iter_rows


def unpack(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def packed(made: MadeRun, folder: Path, budget: int = 10**7) -> tuple[RunTally, PageData]:
    made.write(folder)
    tally = RunTally.of(iter_rows(folder))
    return tally, embed(list(made.run.policies), tally, TraceIndex(folder), budget)


def test_everything_is_embedded_if_there_is_room(tmp_path: Path) -> None:
    made = make_run(12, num_repeats=2)
    _, embedded = packed(made, tmp_path)
    assert (embedded.num_problems, embedded.num_traced, embedded.num_left_out) == (12, 12, 0)
    index = unpack(embedded.index)
    trace = made.traces[-1]
    problem = next(each for each in index["problems"] if each["id"] == trace.problem)
    row = made.rows[-1]
    policy = index["policies"].index(trace.policy)
    assert problem["outcomes"][policy]["1"][:2] == [row.status, row.answer]
    embedded_problem = unpack(embedded.chunks[problem["chunk"]])[trace.problem]
    steps, answer = embedded_problem["traces"][f"{policy} 1"]
    assert [embedded_problem["texts"][step[0]] for step in steps] == [step.text for step in trace.steps]
    assert [step[1] for step in steps] == [step.origin[0] for step in trace.steps]
    assert (embedded_problem["texts"][answer], embedded_problem["question"]) == (trace.answer, trace.question)


def test_without_room_disagreements_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    tally, embedded = packed(make_run(900, policies=["target", "two-level"]), tmp_path, budget=250_000)
    assert 0 < sum(map(len, embedded.chunks)) <= 250_000
    assert embedded.num_left_out == 900 - embedded.num_traced > 0
    first = set(by_interest(tally)[: embedded.num_traced])
    problems = unpack(embedded.index)["problems"]
    assert {each["id"] for each in problems if each["chunk"] >= 0} == first
    lost = [
        name
        for name, problem in tally.problems.items()
        if problem.outcomes["target"][0].status == "correct" != problem.outcomes["two-level"][0].status
    ]
    assert set(by_interest(tally)[: len(lost)]) == set(lost)


def test_a_text_written_by_several_policies_is_embedded_once(tmp_path: Path) -> None:
    _, embedded = packed(make_run(1, policies=["target", "token"]), tmp_path)
    (embedded_problem,) = unpack(embedded.chunks[0]).values()
    assert len(embedded_problem["texts"]) == len(set(embedded_problem["texts"]))
    assert embedded_problem["traces"]["0 0"] == embedded_problem["traces"]["1 0"]


def test_the_trace_that_matches_the_row_is_embedded(tmp_path: Path) -> None:
    made = make_run(1, policies=["target"])
    stale = made.traces[0].model_copy(update={"answer": "of a run that was killed"})
    for order in ([stale, *made.traces], [*made.traces, stale]):
        both = MadeRun(made.run, made.rows, order)
        _, embedded = packed(both, tmp_path)
        (embedded_problem,) = unpack(embedded.chunks[0]).values()
        assert stale.answer not in embedded_problem["texts"]


def test_an_answer_equal_to_the_reasoning_is_not_embedded_twice(tmp_path: Path) -> None:
    made = make_run(1, policies=["draft"])
    reasoning = "".join(step.text or "" for step in made.traces[0].steps)
    made.traces[0] = made.traces[0].model_copy(update={"answer": reasoning})
    _, embedded = packed(made, tmp_path)
    (embedded_problem,) = unpack(embedded.chunks[0]).values()
    assert embedded_problem["traces"]["0 0"][1] is None


def test_without_traces_only_outcomes_are_embedded(tmp_path: Path) -> None:
    made = make_run(3)
    tally = RunTally.of(made.rows)
    embedded = embed(list(made.run.policies), tally, None, 10**7)
    assert embedded.chunks == []
    assert (embedded.num_problems, embedded.num_traced, embedded.num_left_out) == (3, 0, 0)


def test_embedded_data_is_base64_without_markup(tmp_path: Path) -> None:
    _, embedded = packed(make_run(2, hostile=True), tmp_path)
    assert all(re.fullmatch(r"[A-Za-z0-9+/]+=*", text) for text in [embedded.index, *embedded.chunks])


def test_very_long_answers_are_truncated_in_the_list(tmp_path: Path) -> None:
    made = make_run(1, policies=["target"])
    made.rows[0] = made.rows[0].model_copy(update={"answer": "9" * 1_000_000})
    assert len(embed(["target"], RunTally.of(made.rows), None, 0).index) < 2_000

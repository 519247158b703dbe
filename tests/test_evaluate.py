"""Evaluations: the order of requests, and the files that they store and resume from."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import ScriptedEngine, WordTokenizer
from scripted_runs import POLICIES, Script, answer_right, make_problems, make_result, make_run, play, rows_of

from stepspec.api.models import Pair
from stepspec.base.files import list_data_files
from stepspec.cli.eval import print_tables
from stepspec.cli.report import main as report_runs
from stepspec.errors import ContextError, EngineError, StepSpecError, UsageError
from stepspec.evaluation.grade import Grade, Grading
from stepspec.evaluation.machine import Processors
from stepspec.evaluation.records import Block, Node, ResultRow, RunRecord, Summary, Trace
from stepspec.evaluation.run import (
    Keeping,
    Part,
    RunFolder,
    RunSettings,
    conditions,
    evaluate,
    load_benchmark,
    load_policies,
    load_problems,
    merge,
    summarise,
)
from stepspec.evaluation.run.results import MAX_FAILURES_IN_A_ROW
from stepspec.evaluation.run.runner import WARM_UP_QUESTION
from stepspec.evaluation.run.schedule import balanced_orders, rounds, seed_of
from stepspec.evaluation.runs import iter_blocks, iter_failures, iter_traces, read_run, says
from stepspec.loop.counts import Times
from stepspec.loop.result import Result
from stepspec.loop.step import Step

# The order of requests.


def test_at_concurrency_1_policies_alternate_and_take_turns_at_being_first(tmp_path: Path) -> None:
    script = Script(answer_right)
    play(tmp_path / "run", script, make_problems(3))
    a, b, c = POLICIES
    assert [policy for policy, _ in script.recorded] == [a, c, b, b, c, a, b, a, c]
    assert [question for _, question in script.recorded[::3]] == ["What is 0?", "What is 1?", "What is 2?"]


@pytest.mark.parametrize("num_policies", range(1, 9))
def test_each_policy_runs_as_often_before_as_after_every_other(num_policies: int) -> None:
    policies = [f"p{number}" for number in range(num_policies)]
    orders = balanced_orders(policies)
    for one, other in itertools.pairwise(orders):
        assert sorted(one) == sorted(other) == policies
    for pair in itertools.permutations(policies, 2):
        before = [order.index(pair[0]) < order.index(pair[1]) for order in orders]
        assert all(sum(before[at : at + 2]) == 1 for at in range(0, len(orders), 2))
    successions = Counter(pair for order in orders for pair in itertools.pairwise(order))
    positions = Counter((policy, position) for order in orders for position, policy in enumerate(order))
    assert len(set(successions.values())) <= 1
    assert len(successions) == num_policies * (num_policies - 1)
    assert len(set(positions.values())) == 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_engines_forget_before_every_block_and_not_within_one(tmp_path: Path, concurrency: int) -> None:
    problems = make_problems(20)
    script = Script(answer_right)
    play(tmp_path / "run", script, problems, make_run(problems, concurrency=concurrency))
    size = 1 if concurrency == 1 else 4 * concurrency
    assert script.since_forgetting == [min(size, 20 - start) for start in range(0, 20, size) for _ in POLICIES]


@pytest.mark.parametrize("concurrency", [1, 2, 5])
@pytest.mark.parametrize("num_problems", [1, 7, 41])
def test_every_job_is_scheduled_once(concurrency: int, num_problems: int) -> None:
    found = rounds(make_problems(num_problems), POLICIES, concurrency, num_repeats=2)
    blocks = [block for each in found for block in each]
    keys = [job.key for block in blocks for job in block]
    assert len(keys) == len(set(keys)) == num_problems * len(POLICIES) * 2


def test_there_are_no_more_concurrent_requests_than_rows(tmp_path: Path) -> None:
    problems, script = make_problems(3), Script(answer_right)
    play(tmp_path / "run", script, problems, make_run(problems, concurrency=10**9))
    assert script.most_at_once == 3
    assert len(script.asked) == 2 * 3 * len(POLICIES)  # each policy warms up with as many


def test_concurrent_requests_never_share_a_batch_between_policies(tmp_path: Path) -> None:
    problems = make_problems(40)
    script = Script(answer_right)
    play(tmp_path / "run", script, problems, make_run(problems, concurrency=3))
    assert script.most_at_once == 3
    assert all(len(policies) == 1 for policies in script.policies_at_once)
    blocks = [block for each in rounds(problems, POLICIES, 3) for block in each]
    assert [len(block) for block in blocks] == [12] * 9 + [4] * 3
    first, second = balanced_orders(POLICIES)[:2]
    assert [block[0].policy for block in blocks[:6]] == [*first, *second]


def test_each_policy_is_warmed_up_and_the_warm_up_leaves_no_row(tmp_path: Path) -> None:
    script = Script(answer_right)
    play(tmp_path / "run", script, make_problems(1))
    assert [policy for policy, question in script.asked if question == WARM_UP_QUESTION] == list(POLICIES)
    assert {row.problem for row in rows_of(tmp_path / "run")} == {"p0"}


def test_a_problem_has_the_same_seed_under_every_policy_and_another_in_every_repeat(tmp_path: Path) -> None:
    script = Script(answer_right)
    problems = make_problems(4)
    play(tmp_path / "run", script, problems, make_run(problems, num_repeats=2))
    seeds = Counter(sampling.seed for sampling in script.samplings if sampling.seed)
    assert len(seeds) == 4 * 2
    assert set(seeds.values()) == {len(POLICIES)}


def test_seeds_do_not_change_between_versions() -> None:
    assert seed_of(7, "p0", 0) == int.from_bytes(hashlib.sha256(b"7/0/p0").digest()[:4], "big")


# On disk.


def test_a_run_folder_holds_conditions_rows_traces_summary_and_report(tmp_path: Path) -> None:
    problems = make_problems(2)
    summary = play(tmp_path / "new" / "run", Script(answer_right), problems, traces=True)
    folder = tmp_path / "new" / "run"
    assert {file.name for file in folder.iterdir()} == {
        "run.json",
        "rows.jsonl",
        "traces.jsonl",
        "blocks.jsonl",
        "summary.json",
        "report.md",
    }
    stored = make_run(problems).model_copy(update={"busy": summary.busy})  # which depends on other programs
    assert RunRecord.model_validate_json((folder / "run.json").read_bytes()) == stored
    assert Summary.model_validate_json((folder / "summary.json").read_bytes()) == summary
    traces = [Trace.model_validate_json(line) for line in (folder / "traces.jsonl").read_bytes().splitlines()]
    assert {trace.steps[0].text for trace in traces if trace.policy == "two-level"} == {"One.\n\n"}
    assert all("text" not in step for row in map(json.loads, (folder / "rows.jsonl").open()) for step in row["steps"])


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_a_run_killed_anywhere_resumes_to_the_same_rows(tmp_path: Path, cut: int) -> None:
    problems = make_problems(5)
    play(tmp_path / "whole", Script(answer_right), problems)
    play(tmp_path / "cut", Script(answer_right), problems)
    file = tmp_path / "cut" / "rows.jsonl"
    os.truncate(file, max(0, file.stat().st_size - cut))
    (tmp_path / "cut" / "summary.json").unlink()

    script = Script(answer_right)
    summary = play(tmp_path / "cut", script, problems)
    assert 1 <= len(script.recorded) <= 15
    assert sorted(rows_of(tmp_path / "cut"), key=repr) == sorted(rows_of(tmp_path / "whole"), key=repr)
    assert untimed(summary) == untimed(Summary.model_validate_json((tmp_path / "whole" / "summary.json").read_bytes()))


def untimed(summary: Summary) -> dict[str, object]:
    """Return the summary without what depends on the clock and on other programs."""
    return summary.model_dump(exclude={"policies": {"__all__": {"throughput", "cpu_s", "others_share"}}, "busy": True})


def test_a_finished_run_makes_no_requests(tmp_path: Path) -> None:
    play(tmp_path / "run", Script(answer_right), make_problems(3))
    script = Script(answer_right)
    play(tmp_path / "run", script, make_problems(3))
    assert script.asked == []


class Failing:
    """Answers right, but raises an error for some questions."""

    def __init__(self, *questions: str, kind: type[EngineError] | type[ContextError] = EngineError) -> None:
        self.questions = set(questions)
        self.kind = kind

    def __call__(self, policy: str, question: str) -> Result:
        if question in self.questions:
            raise self.kind("It broke.")
        return answer_right(policy, question)


@pytest.mark.parametrize("kind", [EngineError, ContextError])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_failed_request_loses_only_its_own_row(
    tmp_path: Path, kind: type[EngineError] | type[ContextError], concurrency: int
) -> None:
    problems = make_problems(12)
    run = make_run(problems, concurrency=concurrency)
    summary = play(tmp_path, Script(Failing("What is 2?", kind=kind)), problems, run)
    assert len(rows_of(tmp_path)) == 11 * len(POLICIES)
    assert summary.n == 11
    assert [policy.failed for policy in summary.policies.values()] == [1, 1, 1]
    assert {(failure.problem, failure.error) for failure in iter_failures(tmp_path)} == {("p2", "It broke.")}


def test_failed_requests_are_retried_only_on_request(tmp_path: Path) -> None:
    problems = make_problems(4)
    play(tmp_path, Script(Failing("What is 1?")), problems)
    script = Script(answer_right)
    assert play(tmp_path, script, problems).n == 3
    assert script.asked == []
    summary = play(tmp_path, script, problems, retry_errors=True)
    assert [question for _, question in script.recorded] == ["What is 1?"] * len(POLICIES)
    assert (summary.n, [policy.failed for policy in summary.policies.values()]) == (4, [0, 0, 0])


def test_an_engine_that_is_gone_stops_the_run_and_fails_no_problem(tmp_path: Path) -> None:
    problems = make_problems(20)
    gone = Failing(*(problem.question for problem in problems[3:]))
    with pytest.raises(
        EngineError, match=f"{MAX_FAILURES_IN_A_ROW} requests in a row failed under .*. The last error: It"
    ):
        play(tmp_path, Script(gone), problems)
    assert len(rows_of(tmp_path)) == 3 * len(POLICIES)
    assert list(iter_failures(tmp_path)) == []
    assert play(tmp_path, Script(answer_right), problems).n == 20


def test_problems_that_do_not_fit_never_stop_the_run(tmp_path: Path) -> None:
    problems = make_problems(12)
    long = Failing(*(problem.question for problem in problems[3:11]), kind=ContextError)
    assert play(tmp_path, Script(long), problems).n == 4
    assert len(list(iter_failures(tmp_path))) == 8 * len(POLICIES)


def test_a_run_of_which_no_request_finishes_is_an_error_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, run = make_problems(8), make_run(make_problems(8))
    long = Failing(*(problem.question for problem in problems), kind=ContextError)
    summary = play(tmp_path / "none", Script(long), problems)
    reason = (
        r"24 requests failed and count as not correct\. target on p0: It broke\. All errors are in failures\.jsonl\.$"
    )
    with pytest.raises(StepSpecError, match=rf"No request of .*none finished\. {reason}"):
        print_tables([(summary, run)], tmp_path / "none", 24)
    assert capsys.readouterr().out == ""
    summary = play(tmp_path / "some", Script(Failing("What is 1?")), problems)
    print_tables([(summary, run)], tmp_path / "some", 24)
    *_, failed, headline, stored = capsys.readouterr().out.splitlines()
    assert "on p1: It broke. All errors are in failures.jsonl. 'stepspec eval --retry-errors' repeats them." in failed
    assert headline.startswith("No policy that keeps the target's accuracy")
    assert "To see a report" in stored
    report_runs([tmp_path / "some"])
    assert failed in capsys.readouterr().out.splitlines()


def test_a_policy_that_always_fails_stops_the_run_even_if_others_succeed(tmp_path: Path) -> None:
    def fail(policy: str, question: str) -> Result:
        if policy == "two-level" and question != WARM_UP_QUESTION:
            raise EngineError("It broke.")
        return answer_right(policy, question)

    with pytest.raises(EngineError, match="failed under two-level"):
        play(tmp_path, Script(fail), make_problems(20))


def test_half_a_character_does_not_stop_the_run(tmp_path: Path) -> None:
    def half(policy: str, question: str) -> Result:
        result = make_result("\\boxed{1} \ud83d")
        return replace(result, reasoning="a\udc00", steps=(Step(0, "target", "a\udc00", 1, 0, "text"),))

    play(tmp_path, Script(half), make_problems(1), traces=True)
    assert {trace.answer for trace in iter_traces(tmp_path)} == {"\\boxed{1} ?"}
    assert {trace.steps[0].text for trace in iter_traces(tmp_path)} == {"a?"}
    assert {row.output_sha256 for row in rows_of(tmp_path)} == {says(trace) for trace in iter_traces(tmp_path)}


class SlowGrading(Grading):
    """Takes half a second for every answer."""

    def grade(self, text: str, gold: str, *, cut_short: bool = False) -> Grade:
        time.sleep(0.5)
        return super().grade(text, gold, cut_short=cut_short)


@pytest.mark.parametrize(("concurrency", "num_problems"), [(1, 2), (3, 6)])
def test_grading_time_is_not_counted(tmp_path: Path, concurrency: int, num_problems: int) -> None:
    problems = make_problems(num_problems)
    run = make_run(problems, concurrency=concurrency)
    with SlowGrading("integer") as grading:
        asyncio.run(evaluate(run, problems, Script(answer_right).systems, Keeping(tmp_path), grading=grading))
    assert len(rows_of(tmp_path)) == num_problems * len(POLICIES)
    assert max(block.wall_s for block in iter_blocks(tmp_path)) < 0.5


def test_failures_at_the_very_end_are_stored(tmp_path: Path) -> None:
    play(tmp_path, Script(Failing("What is 3?")), make_problems(4))
    assert len(list(iter_failures(tmp_path))) == len(POLICIES)


def test_counts_that_do_not_add_up_stop_the_run(tmp_path: Path) -> None:
    def miscount(policy: str, question: str) -> Result:
        result = answer_right(policy, question)
        return replace(result, counts=replace(result.counts, committed=1))

    with pytest.raises(AssertionError):
        play(tmp_path / "run", Script(miscount), make_problems(1))


@pytest.mark.parametrize(("field", "value"), [("seed", 8), ("max_tokens", 65), ("pair", "other"), ("temperature", 0.5)])
def test_another_run_in_the_folder_is_refused_by_what_differs(tmp_path: Path, field: str, value: object) -> None:
    problems = make_problems(1)
    play(tmp_path / "run", Script(answer_right), problems)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    with pytest.raises(UsageError, match=f"differs in {field}"):
        play(
            tmp_path / "run",
            Script(answer_right),
            problems,
            make_run(problems).model_copy(update={field: value}),
        )
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_run_resumes_on_another_day_and_machine(tmp_path: Path) -> None:
    problems = make_problems(1)
    play(tmp_path / "run", Script(answer_right), problems)
    elsewhere = {"started": "2001-01-01T00:00:00+00:00", "commit": "abc", "hardware": {"cpu": "other"}}
    play(tmp_path / "run", Script(answer_right), problems, make_run(problems).model_copy(update=elsewhere))
    assert read_run(tmp_path / "run").model_copy(update={"busy": None}) == make_run(problems)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="holds no run"):
        play(tmp_path, Script(answer_right), make_problems(1))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_start_killed_while_it_wrote_its_conditions_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".run.json.4711.tmp").write_text('{"version": 1, "bench')
    assert play(tmp_path, Script(answer_right), make_problems(1)).n == 1


def test_a_file_in_place_of_the_folder_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        play(tmp_path / "run", Script(answer_right), make_problems(1))
    with pytest.raises(StepSpecError, match="Cannot store the run in"):
        play(tmp_path / "run" / "below", Script(answer_right), make_problems(1))


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Generator[None]:
    """Limit the file size: the system then refuses writes in the same way as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_full_disk_is_an_error_in_one_sentence_and_rows_stay_complete(tmp_path: Path, concurrency: int) -> None:
    problems = make_problems(20)
    run = make_run(problems, concurrency=concurrency)
    with files_up_to(4_000), pytest.raises(StepSpecError, match=r"Finished rows stay valid"):
        play(tmp_path / "run", Script(answer_right), problems, run)
    assert 0 < len(rows_of(tmp_path / "run")) < 20
    assert play(tmp_path / "run", Script(answer_right), problems, run).n == 20
    assert len(rows_of(tmp_path / "run")) == 60


def test_a_disk_too_full_for_the_conditions_leaves_nothing_that_looks_like_a_run(tmp_path: Path) -> None:
    with files_up_to(10), pytest.raises(StepSpecError, match="Cannot store the run"):
        play(tmp_path / "run", Script(answer_right), make_problems(1))
    assert not (tmp_path / "run" / "run.json").exists()
    assert play(tmp_path / "run", Script(answer_right), make_problems(1)).n == 1


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    play(tmp_path / "run", Script(answer_right), make_problems(1))
    file = tmp_path / "run" / "rows.jsonl"
    lines = file.read_text("utf-8").splitlines()
    file.write_text("\n".join([lines[0], lines[1][:20], lines[2]]) + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 2 is not a valid ResultRow"):
        play(tmp_path / "run", Script(answer_right), make_problems(1))


def test_a_damaged_run_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        play(tmp_path, Script(answer_right), make_problems(1))


# Parts.


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1 / 2"])
def test_an_invalid_part_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 2/4"):
        Part.parse(text)


def test_parts_in_one_folder_make_up_the_run(tmp_path: Path) -> None:
    problems = make_problems(11)
    asked: list[tuple[str, str]] = []
    for number in (3, 1, 2):
        script = Script(answer_right)
        summary = play(tmp_path / "parts", script, problems, part=Part(number, 3))
        asked += script.recorded
    assert len(asked) == len(set(asked)) == 11 * len(POLICIES)
    assert untimed(summary) == untimed(play(tmp_path / "whole", Script(answer_right), problems))
    assert len(list((tmp_path / "parts").glob("rows-*of3.jsonl"))) == 3


def test_parts_of_several_machines_are_merged_without_duplicate_rows(tmp_path: Path) -> None:
    problems = make_problems(8)
    here, there = (make_run(problems).model_copy(update={"hardware": {"cpu": cpu}}) for cpu in ("Own", "Other"))
    play(tmp_path / "a", Script(answer_right), problems, here, part=Part(1, 2), traces=True)
    play(tmp_path / "b", Script(Failing("What is 1?")), problems, there, part=Part(2, 2), traces=True)
    for _ in range(2):  # merging again adds nothing
        summary = merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "all")
        assert summary.n == 7
        assert summary.policies["two-level"].failed == 1
        assert len(rows_of(tmp_path / "all")) == len(list(iter_traces(tmp_path / "all"))) == 7 * len(POLICIES)
        assert len(list(iter_blocks(tmp_path / "all"))) == 7 * len(POLICIES)
    assert [each.hardware for each in read_run(tmp_path / "all").resumed] == [{"cpu": "Other"}]
    assert {row.node for row in rows_of(tmp_path / "all")} == {None, "machine Other"}


def test_parts_that_are_merged_one_after_the_other_keep_their_machines(tmp_path: Path) -> None:
    problems = make_problems(4)
    for number, name in enumerate("ab", 1):
        run = make_run(problems).model_copy(update={"machine": name * 4, "hardware": {"cpu": name}})
        play(tmp_path / name, Script(answer_right), problems, run, part=Part(number, 2))
        summary = merge([tmp_path / name], tmp_path / "all")
    assert {row.node for row in rows_of(tmp_path / "all")} == {None, "machine bbbb"}
    assert [(each.name, each.hardware["cpu"]) for each in summary.nodes] == [
        ("machine aaaa", "a"),
        ("machine bbbb", "b"),
    ]


class Killed(BaseException):
    """Ends an evaluation like a signal."""


def test_a_run_resumed_elsewhere_lists_all_conditions_and_pools_no_times(tmp_path: Path) -> None:
    """Killed after every request and resumed in turn on three machines, one of them a twin of the first with another
    commit, a run compares the times of no problem that was answered on two of them."""
    problems, folder = make_problems(6), tmp_path / "run"
    here = make_run(problems).model_copy(update={"hardware": {"cpu": "A"}, "machine": "a", "commit": "1"})
    machines = [here, here.model_copy(update={"commit": "2"}), here.model_copy(update={"machine": "b"})]
    place = -1

    def answer(policy: str, question: str) -> Result:
        if len(script.recorded) > 1:
            raise Killed
        times = Times(engine_wait=0.5, target=10.0**place, wall=10.0**place)
        return replace(answer_right(policy, question), times=times)

    for place in [0] * 3 + [1] * 2 + [2] * 9 + [0] * 9:
        script = Script(answer)
        with contextlib.suppress(Killed):
            play(folder, script, problems, machines[place])
    summary = play(folder, Script(answer_right), problems, here)
    nodes = {(row.problem, row.policy): row.node for row in rows_of(folder)}
    assert set(nodes.values()) == {None, "machine b"}
    mixed = [each.id for each in problems if len({nodes[each.id, policy] for policy in POLICIES}) > 1]
    assert (summary.num_apart, len(mixed)) == (len(mixed), 2)
    assert {node.name for node in summary.nodes} == {"machine a", "machine b"}
    timed = [row for row in rows_of(folder) if row.policy == "target" and row.problem not in mixed]
    assert summary.policies["target"].wall_s == pytest.approx(sum(row.wall_s for row in timed))
    assert summary.policies["target"].time_s.queue > 0, "rows have the time until the engines began as `queue`"
    assert summary.policies["target"].time_s.target == pytest.approx(sum(row.time_s.target for row in timed))
    assert (latency := summary.policies["target"].latency_s) is not None
    assert latency.p99 <= max(row.wall_s for row in timed)
    assert [(each.machine, each.commit) for each in read_run(folder).resumed] == [("a", "2"), ("b", "1")]
    report = (folder / "report.md").read_text("utf-8")
    assert "resumed on A" in report
    assert "2 requests ran on different machines under the policies and count for no time" in report


def test_a_busy_machine_is_recorded_and_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures come from /proc on Linux; elsewhere from the load average, of which stepspec's part is subtracted."""

    def run(name: str, others_s: float, load: float, *, without_proc: bool = False) -> Summary:
        clock = itertools.count()

        def read() -> Processors:
            seconds = time.perf_counter()
            own_s, all_s = 0.5 * seconds, (0.5 + others_s) * seconds
            next(clock)
            return Processors(own_s, None if without_proc else all_s, load)

        monkeypatch.setattr(Processors, "read", read)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        return play(tmp_path / name, Script(slow), make_problems(3))

    def slow(policy: str, question: str) -> Result:
        time.sleep(0.005)
        return answer_right(policy, question)

    for name, given in {"idle": (0.2, 9.0), "loaded": (2.0, 0.0)}.items():
        summary, is_busy = run(name, *given), name == "loaded"
        assert summary.policies["target"].others_share == pytest.approx(given[0] / 4, rel=0.3)
        assert bool(summary.busy) == bool(read_run(tmp_path / name).busy) == is_busy
        assert ("Other programs used" in (tmp_path / name / "report.md").read_text("utf-8")) == is_busy
        (first, *_) = iter_blocks(tmp_path / name)
        assert first.load == given[1]
        assert (first.cpu_s or 0) / first.wall_s == pytest.approx(0.5, rel=0.3)
    assert not run("idle elsewhere", 0.0, 0.5, without_proc=True).busy
    assert run("loaded elsewhere", 0.0, 2.5, without_proc=True).busy


def test_the_processors_of_this_machine_are_read() -> None:
    before, since = Processors.read(), time.perf_counter()
    child = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    now = Processors.read()
    assert now.own_s - before.own_s >= 0.25, "ended children count"
    others = now.others_since(before, time.perf_counter() - since)
    assert others is not None
    assert 0 <= others <= 1


def test_the_processor_seconds_do_not_fall_while_threads_end() -> None:
    stop = threading.Event()

    def start_threads() -> None:
        while not stop.is_set():
            threading.Thread(target=time.sleep, args=(0.0001,)).start()

    starter = threading.Thread(target=start_threads)
    starter.start()
    try:
        seconds = [Processors.read().own_s for _ in range(300)]
    finally:
        stop.set()
        starter.join()
    assert seconds == sorted(seconds)


def test_processor_seconds_that_were_lost_with_a_process_are_unknown() -> None:
    before, now = Processors(9.0, 20.0, 0.0), Processors(2.0, 21.0, 0.0)
    assert now.own_since(before) is None
    assert now.others_since(before, 1.0) is None


def test_workers_on_one_machine_are_no_other_programs(tmp_path: Path) -> None:
    block = Block(policy="target", jobs=[("p0", 0)], wall_s=1.0, committed_tokens=3, cpu_s=1.0, others_share=0.5)
    alone, shared = (Node(name="n", hardware={}, num_workers=number) for number in (1, 2))
    assert block.on(alone).others_share == 0.5
    assert block.on(shared).others_share is None
    play(tmp_path / "run", Script(answer_right), make_problems(1))
    found = summarise(make_run(make_problems(1)), rows_of(tmp_path / "run"), [block.on(shared)])
    assert (found.busy, found.policies["target"].cpu_s) == (None, 1.0)


def test_what_runs_is_shown_from_the_warm_up_on(tmp_path: Path) -> None:
    shown: list[str] = []
    done = [-1]

    def show(row: ResultRow | str | None, num_done: int, num_rows: int) -> None:
        assert (num_done >= done[-1], num_rows) == (True, 9)
        done.append(num_done)
        if isinstance(row, str):
            shown.append(row)

    problems = make_problems(3)
    with Grading("integer") as grading:
        systems = Script(answer_right).systems
        asyncio.run(
            evaluate(make_run(problems), problems, systems, Keeping(tmp_path / "run"), grading=grading, on_row=show)
        )
    assert shown[:3] == [f"warm-up of {name}" for name in POLICIES]
    assert Counter(shown[3:]) == dict.fromkeys(POLICIES, 3)


def test_rows_are_stored_while_their_block_runs(tmp_path: Path) -> None:
    """A process that is killed in a block loses none of its finished rows."""
    problems, stored = make_problems(16), [0]

    def answer(policy: str, question: str) -> Result:
        file = tmp_path / "run" / "rows.jsonl"
        stored.append(file.read_bytes().count(b"\n") if file.exists() else 0)
        time.sleep(0.01)  # longer than grading takes
        return answer_right(policy, question)

    play(tmp_path / "run", Script(answer), problems, make_run(problems, concurrency=4))
    within_blocks = [after - before for before, after in itertools.pairwise(stored)]
    assert max(within_blocks) < 8, "no block of 16 is stored at once"


@pytest.mark.parametrize("stray_answer", ["Something else.", None])
def test_a_trace_whose_row_was_never_written_is_not_merged(tmp_path: Path, stray_answer: str | None) -> None:
    problems = make_problems(1)
    play(tmp_path / "a", Script(answer_right), problems, traces=True)
    file = tmp_path / "a" / "traces.jsonl"
    first = next(iter_traces(tmp_path / "a"))
    stray = first.model_copy(update={"answer": stray_answer or first.answer})
    file.write_text(stray.model_dump_json() + "\n" + file.read_text("utf-8"), "utf-8")
    merge([tmp_path / "a"], tmp_path / "all")
    assert "Something else." not in {trace.answer for trace in iter_traces(tmp_path / "all")}
    assert len(list(iter_traces(tmp_path / "all"))) == len(POLICIES)


def test_a_merge_that_was_killed_after_its_rows_still_gets_the_blocks(tmp_path: Path) -> None:
    problems = make_problems(3)
    play(tmp_path / "a", Script(answer_right), problems)
    merge([tmp_path / "a"], tmp_path / "all")
    (tmp_path / "all" / "blocks.jsonl").unlink()
    summary = merge([tmp_path / "a"], tmp_path / "all")
    assert summary.policies["target"].throughput is not None
    assert list(iter_blocks(tmp_path / "all")) == list(iter_blocks(tmp_path / "a"))


def test_only_parts_of_one_run_are_merged_and_only_into_a_new_folder(tmp_path: Path) -> None:
    problems = make_problems(2)
    play(tmp_path / "a", Script(answer_right), problems)
    play(tmp_path / "b", Script(answer_right), problems, make_run(problems).model_copy(update={"seed": 8}))
    with pytest.raises(UsageError, match=r"not parts of one run: they differ in seed \(7 there, 8 here\)"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    with pytest.raises(UsageError, match="one of the parts"):
        merge([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(UsageError, match="holds no run"):
        merge([tmp_path / "nothing"], tmp_path / "all")


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    problems = make_problems(1)
    with RunFolder(tmp_path) as locked:
        locked.begin(make_run(problems))
        with pytest.raises(UsageError, match="Another process is writing"):
            play(tmp_path, Script(answer_right), problems)
        play(tmp_path, Script(answer_right), problems, part=Part(1, 2))
    assert play(tmp_path, Script(answer_right), problems).n == 1


# Blocks.


@pytest.mark.parametrize("concurrency", [1, 3])
def test_throughput_counts_the_blocks_that_all_policies_have_finished(tmp_path: Path, concurrency: int) -> None:
    problems = make_problems(30)
    summary = play(tmp_path, Script(answer_right), problems, make_run(problems, concurrency=concurrency))
    blocks = list(iter_blocks(tmp_path))
    assert sum(len(block.jobs) for block in blocks) == 30 * len(POLICIES)
    for name, policy in summary.policies.items():
        own = [block for block in blocks if block.policy == name]
        assert policy.throughput is not None
        assert policy.throughput.problems_per_s == pytest.approx(30 / sum(block.wall_s for block in own))
        assert policy.throughput.usage is None


# Policies and conditions.


def test_the_target_is_always_one_of_the_policies() -> None:
    assert list(load_policies(["two-level"])) == ["target", "two-level"]
    assert list(load_policies(["two-level", "target"])) == ["two-level", "target"]


def test_policies_need_different_names_and_the_target_alone_as_the_baseline(tmp_path: Path) -> None:
    impostor = tmp_path / "target.toml"
    impostor.write_text(list_data_files("policies")["lookup"].read_text("utf-8"), "utf-8")
    with pytest.raises(UsageError, match="must be the target alone"):
        load_policies([str(impostor)])
    impostor.write_text(list_data_files("policies")["two-level"].read_text("utf-8"), "utf-8")
    with pytest.raises(UsageError, match="must be the target alone"):
        load_policies([str(impostor)])
    with pytest.raises(UsageError, match="two policies called 'two-level'"):
        load_policies(["two-level", "two-level"])


def test_conditions_record_where_figures_come_from() -> None:
    name, benchmark = load_benchmark("gsm-mini")
    problems = load_problems(benchmark, None, 2)
    policies = load_policies(["target", "exact", "specreason"])
    settings = RunSettings(temperature=0.7, num_repeats=3)
    engine = ScriptedEngine(WordTokenizer(), [], name="target")
    run = conditions(name, benchmark, problems, policies, settings, Pair(engine, None))
    assert (run.num_repeats, run.grader, run.policies["target"].kind) == (3, "integer", "target")
    assert (run.temperature, run.max_tokens, run.num_problems) == (0.7, benchmark.max_tokens, 2)
    assert run.policies["target"].text == policies["target"][1]
    assert {name: run.is_exact(name) for name in policies} == {"target": True, "exact": True, "specreason": False}
    assert "python" in run.versions
    assert {"cpu", "cores"} <= set(run.hardware)
    assert run.started.endswith("+00:00")

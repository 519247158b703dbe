"""`python -m evals.bench agent`: tasks, the check of calls, state and answers, and the record. No model runs here."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from evals.bench.__main__ import app
from evals.bench.agent_runs import (
    EARLY,
    HEADS,
    POLICIES,
    TWO_LEVEL,
    Agents,
    Reply,
    TaskRun,
    compare,
    lines_of,
    rows_of,
    run_task,
    runs_left,
)
from evals.bench.agent_tasks import CALCULATE, KINDS, TABLES, Call, Task, Turn, World, make_tasks
from evals.bench.documents import MEASURED
from stepspec.errors import UsageError
from stepspec.langchain.early_tools import EarlyCounts

Change = Callable[[Turn], Call]
TASKS = [replace(task, delay_s=0.0) for task in make_tasks(24, 0)]


def right_call(turn: Turn) -> Call:
    return turn.call


class Oracle:
    """A conversation that makes the calls of `change`, by default the right ones. Its time passes by request."""

    def __init__(self, task: Task, world: World, change: Change = right_call, request_s: float = 2.0) -> None:
        self._task, self._world, self._change, self._request_s = task, world, change, request_s
        self._turns, self._clock = iter(task.turns), count()
        self.early: EarlyCounts | None = None

    def ask(self, question: str) -> Sequence[Reply]:
        turn = next(self._turns)
        assert question == turn.question
        call = self._change(turn)
        result = self._task.call(call, self._world)
        answer = f"It is {result}, {self._task.answer}." if call == turn.call else "I do not know."
        return [self._reply([call], [result], ""), self._reply([], [], answer)]

    def _reply(self, calls: Sequence[Call], results: Sequence[str], text: str) -> Reply:
        since = next(self._clock) * (self._request_s + 1)
        return Reply(calls, results, text, 10, since, 0.5, since + 1 if text else since, since + self._request_s)


def found(task: Task, folder: Path, change: Change = right_call) -> TaskRun:
    world = task.world(folder / "own")
    return run_task(task, Oracle(task, world, change), world, task.wanted(folder / "wanted"), (0, "anthropic", "token"))


def test_tasks_depend_on_the_seed_alone() -> None:
    assert make_tasks(24, 7) == make_tasks(24, 7)
    assert make_tasks(24, 7) != make_tasks(24, 8)
    assert make_tasks(6, 0) == make_tasks(24, 0)[:6]


def test_there_are_three_to_five_turns_and_three_delays_of_slow_tools() -> None:
    tasks = make_tasks(24, 0)
    assert {len(task.turns) for task in tasks} == {3, 4, 5}
    assert {task.delay_s for task in tasks} == {0.0, 0.3, 0.6, 1.0}
    assert [bool(task.early) for task in tasks] == [False] * 6 + [True] * 18
    assert {name for task in tasks for name in task.early} == {
        *("find_person", "find_product", "list_files", "query", "read_file")
    }


@pytest.mark.parametrize("number", range(24))
def test_the_wanted_calls_solve_a_task(number: int, tmp_path: Path) -> None:
    run = found(TASKS[number], tmp_path)
    assert run.solved
    assert all(run.calls_right)
    assert not any(result.startswith("Error") for result in TASKS[number].wanted(tmp_path / "again")[0])
    num_turns = len(TASKS[number].turns)
    assert (run.num_requests, run.num_tokens) == (2 * num_turns, 20 * num_turns)
    assert (run.reading_s, run.text_s, run.calls_s) == (num_turns, num_turns * 1.5, num_turns * 1.5)
    assert run.tools_s == num_turns


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.parametrize(
    "change",
    [
        lambda turn: Call("no_such_tool", turn.call.arguments),
        lambda turn: Call(turn.call.name, None),
        lambda turn: Call(turn.call.name, {**(turn.call.arguments or {}), "unit": "cm"}),
        lambda turn: Call(turn.call.name, dict.fromkeys(turn.call.arguments or (), 5.5) or {"name": "x"}),
    ],
)
def test_a_wrong_call_counts_as_wrong(change: Change, number: int, tmp_path: Path) -> None:
    run = found(TASKS[number], tmp_path, change)
    assert not any(run.calls_right)
    assert not run.solved


def test_a_change_that_is_missing_fails_the_task_although_the_answer_is_right(tmp_path: Path) -> None:
    task = TASKS[0]

    def change(turn: Turn) -> Call:
        return (
            Call("set_stock", {**cast("Any", turn.call.arguments), "stock": 1}) if turn is task.turns[1] else turn.call
        )

    run = found(task, tmp_path, change)
    assert run.calls_right == [True, False, True]
    assert not run.solved


def test_other_words_for_the_same_call_are_right(tmp_path: Path) -> None:
    task = TASKS[0]
    same = {"find_product": {"name": "GUITAR "}, "calculate": {"expression": "60*4"}}

    def change(turn: Turn) -> Call:
        return Call(turn.call.name, same.get(turn.call.name, turn.call.arguments))

    assert found(task, tmp_path, change).calls_right == [True] * 3


@pytest.mark.parametrize(
    ("sql", "result"),
    [("DELETE FROM products", "Error: attempt to write a readonly database"), ("SELECT 1", "[[1]]"), ("x", "Error")],
)
def test_a_query_changes_nothing(sql: str, result: str, tmp_path: Path) -> None:
    task = TASKS[4]
    world = task.world(tmp_path)
    before = world.state()
    assert task.call(Call("query", {"sql": sql}), world).startswith(result)
    assert world.state() == before
    assert set(before[0]) == set(TABLES)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("3 * (4 + 5)", "27"), ("-7 / 2", "-3.5"), ("1/0", "Error"), ("x", "Error"), ("2**9", "Error"), ("(", "Error")],
)
def test_the_calculator(expression: str, result: str, tmp_path: Path) -> None:
    task = Task((CALCULATE,), (), None, 0.0)
    assert task.call(Call("calculate", {"expression": expression}), task.world(tmp_path)).startswith(result)


def test_a_file_has_no_folder(tmp_path: Path) -> None:
    world = TASKS[1].world(tmp_path)
    TASKS[1].call(Call("write_file", {"name": "../../out.txt", "text": "no"}), world)
    assert world.names() == ["old.txt", "out.txt", "plan.txt"]


def compared(left: Iterable[tuple[int, str, str]]) -> tuple[Agents, list[tuple[str, str]]]:
    """Return a record of oracles of which `target` takes twice as long, and the order of the runs."""
    order: list[tuple[str, str]] = []

    def begin(task: Task, world: World, policy: str, system: str) -> Oracle:
        order.append((policy, system))
        conversation = Oracle(task, world, request_s=4.0 if policy == "target" else 2.0)
        conversation.early = EarlyCounts(3, 2, 1, 1, 0.4) if policy == EARLY else None
        return conversation

    clients = {"langchain": begin, "anthropic": begin}
    runs = [*compare(TASKS, clients, [*left])]
    seconds = [{"seconds": 2.0 if run.policy == "target" else 1.0 + run.task % 2 / 10} for run in runs]
    runs = [run.model_copy(update=each) for run, each in zip(runs, seconds, strict=True)]
    about = {"versions": {}, "commit": None, "hardware": {}, "started": "2026-01-01T00:00:00+00:00"}
    return Agents.model_validate(
        {**about, "pair": "qwen", "seed": 0, "temperature": 0.0, "engines": {}, "runs": runs}
    ), order


def test_policies_take_turns_and_early_tools_run_where_they_can() -> None:
    tasks = make_tasks(8, 0)
    left = runs_left(tasks, ("langchain", "anthropic"), POLICIES)
    assert [policy for number, client, policy in left if (number, client) == (6, "langchain")] == [*POLICIES]
    assert [policy for number, client, policy in left if (number, client) == (7, "langchain")] == [*POLICIES[::-1]]
    assert {(number, client) for number, client, policy in left if policy == EARLY} == {
        (6, "langchain"),
        (7, "langchain"),
    }
    done = compared(left[:5])[0].runs
    assert runs_left(tasks, ("langchain", "anthropic"), POLICIES, done) == left[5:]


def test_the_record_round_trips_and_its_table_has_all_figures() -> None:
    left = [
        (number, client, policy) for number in range(12) for client in ("langchain", "anthropic") for policy in POLICIES
    ]
    record, order = compared(left)
    assert Agents.model_validate_json(record.model_dump_json()) == record
    assert len({system for _, system in order[4:]}) == len(left), "no two runs have the same prompt"
    assert len({len(system) for _, system in order}) == 1
    rows = rows_of(record)
    assert all(len(row) == len(HEADS) for row in rows)
    assert [row[:2] for row in rows] == [
        [client, policy] for client in ("langchain", "anthropic") for policy in POLICIES
    ]
    default, target = rows[0], rows[3]
    assert default[4].startswith("1.90×")
    assert target[4:6] == ["1.00×", "–"]
    result = record.results[0]
    assert result.speedup is not None
    assert result.speedup[1] is not None
    assert result.resolution is not None
    assert 0 < result.resolution < 0.1
    assert default[8].startswith("+0.0%")
    lines = lines_of(record)
    assert len(lines) == 5
    assert lines[2].endswith("early tools change the time under `two-level` by +0.0% [+0.0, +0.0].")
    assert lines[3] == "Of 24 early calls, 12 were used and 12 dropped."
    slower = [
        run.model_copy(update={"seconds": run.seconds * (2 if run.policy == EARLY else 1)}) for run in record.runs
    ]
    assert lines_of(record.model_copy(update={"runs": slower}))[2].endswith("by +100.0% [+100.0, +100.0].")
    block = MEASURED["agent"]
    assert [*block.heads] == [*HEADS]
    assert block.in_words(record).startswith("12 tasks of three to five turns")


def test_a_record_of_one_policy_has_a_table_too() -> None:
    record, _ = compared([(0, "anthropic", TWO_LEVEL)])
    assert [row[4] for row in rows_of(record)] == ["–"]
    assert len(lines_of(record)) == 1


def test_the_command_refuses_the_file_of_another_measurement(tmp_path: Path) -> None:
    file = tmp_path / "agent.json"
    record, _ = compared([(0, "anthropic", TWO_LEVEL)])
    for text, problem in (
        (record.model_dump_json(), "runs with other"),
        (json.dumps({}), "is not a file of this command"),
    ):
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError, match=problem):
            CliRunner().invoke(app, ["agent", "--seed", "1", "--json", str(file)], catch_exceptions=False)
    with pytest.raises(UsageError, match="tokne"):
        CliRunner().invoke(app, ["agent", "--policy", "tokne"], catch_exceptions=False)

"""`python -m evals.bench agent`: tasks, the check of calls and answers, and the record. No model runs here."""

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evals.bench.__main__ import app
from evals.bench.agent import POLICIES
from evals.bench.agent_clients import clients
from evals.bench.agent_runs import HEADS, Agents, Reply, compare, in_words, model_for, rows_of, run_task
from evals.bench.agent_tasks import KINDS, Call, Task, Turn, make_tasks
from stepspec.errors import UsageError

Change = Callable[[Turn], Call]


def right_call(turn: Turn) -> Call:
    return Call(turn.tool.name, turn.arguments)


class Oracle:
    """A conversation that makes the calls of `change`, by default the right ones, and answers with their results."""

    def __init__(self, task: Task, change: Change = right_call) -> None:
        self._task, self._turns, self._change = task, iter(task.turns), change

    def ask(self, question: str, tool_choice: str) -> Sequence[Reply]:
        turn = next(self._turns)
        assert question == turn.question
        call = self._change(turn)
        result = self._task.call(call)
        return [Reply([call], "", 100, 40), Reply([], f"The answer is \\boxed{{{result}}}.", 120, 100)]


def test_tasks_depend_on_the_seed_alone() -> None:
    described = [[(turn.question, turn.arguments, turn.answer) for turn in task.turns] for task in make_tasks(40, 7)]
    again = [[(turn.question, turn.arguments, turn.answer) for turn in task.turns] for task in make_tasks(40, 7)]
    other = [[(turn.question, turn.arguments, turn.answer) for turn in task.turns] for task in make_tasks(40, 8)]
    assert described == again
    assert described != other


def test_right_calls_get_everything_right() -> None:
    for task in make_tasks(100, 0):
        found = run_task(task, Oracle(task), "named", 0, "openai", "target")
        assert found.calls_right == [True] * 3
        assert found.answers_right == [True] * 3
        assert found.num_requests == 6


def test_later_questions_need_the_result_before_them() -> None:
    for task in make_tasks(100, 0):
        for earlier, turn in zip(task.turns, task.turns[1:], strict=False):
            assert earlier.answer in turn.arguments.values()
            assert str(earlier.answer) not in turn.question.split()


@pytest.mark.parametrize(
    "change",
    [
        lambda turn: Call("no_such_tool", turn.arguments),
        lambda turn: Call(turn.tool.name, None),
        lambda turn: Call(turn.tool.name, {}),
        lambda turn: Call(turn.tool.name, dict.fromkeys(turn.arguments, "Anything")),
        lambda turn: Call(turn.tool.name, {**turn.arguments, "unit": "cm"}),
        lambda turn: Call(turn.tool.name, {name: str(value) + "0" for name, value in turn.arguments.items()}),
    ],
)
def test_a_wrong_call_counts_as_wrong(change: Change) -> None:
    for task in make_tasks(len(KINDS), 0):
        found = run_task(task, Oracle(task, change), "auto", 0, "openai", "target")
        assert found.calls_right == [False] * 3
        assert not any(found.answers_right)


def test_only_the_wrong_turn_counts_as_wrong() -> None:
    (task,) = make_tasks(1, 0)

    def change(turn: Turn) -> Call:
        return Call(task.turns[0].tool.name, task.turns[0].arguments) if turn is task.turns[1] else right_call(turn)

    found = run_task(task, Oracle(task, change), "required", 0, "openai", "target")
    assert found.calls_right == [True, False, True]
    assert found.answers_right == [True, False, True]


def test_a_second_call_beside_the_wanted_one_counts_as_wrong() -> None:
    turn = make_tasks(1, 0)[0].turns[0]
    assert turn.is_right([right_call(turn)])
    assert not turn.is_right([right_call(turn), right_call(turn)])
    assert not turn.is_right([])


def test_case_of_names_and_order_of_factors_do_not_matter() -> None:
    price, product, _ = make_tasks(2, 0)[1].turns
    (item,) = price.arguments.values()
    assert price.is_right([Call("price_of", {"item": str(item).upper()})])
    assert product.is_right([Call("multiply", {"a": product.arguments["b"], "b": product.arguments["a"]})])
    assert product.is_answered(f"It is {product.answer}.")
    assert not product.is_answered(f"It is {product.answer}0.")
    assert not product.is_answered("")


def compared(num_tasks: int) -> tuple[Agents, list[tuple[str, str]]]:
    """Return a record of oracles of which the policy `token` always calls wrongly, and the order of the runs."""
    order: list[tuple[str, str]] = []

    def begin(task: Task, model: str, system: str) -> Oracle:
        order.append((model, system))
        return Oracle(task, (lambda _: Call("wrong", {})) if model.endswith("@token") else right_call)

    served = [{"id": "smol", "policy": "two-level"}]
    served += [{"id": f"smol@{name}", "policy": name} for name in ("two-level", "target", "token")]
    models = {policy: model_for(policy, served) for policy in ("two-level", "target", "token")}
    with pytest.raises(UsageError, match="tokne"):
        model_for("tokne", served)
    clients = {"langchain": begin, "openai": begin}
    runs = [run for each in compare(make_tasks(num_tasks, 0), clients, models, "named") for run in each]
    about: Mapping[str, Any] = {"clients": list(clients), "policies": list(models), "tool_choice": "named"}
    conditions = {"versions": {}, "commit": None, "hardware": {}, "started": "2026-01-01T00:00:00+00:00"}
    return Agents(**conditions, **about, seed=0, temperature=0.0, service="smol", engines={}, runs=runs), order


def test_the_record_round_trips_and_its_table_has_all_figures() -> None:
    found, _ = compared(24)
    assert Agents.model_validate_json(found.model_dump_json()) == found
    assert [each.client for each in found.results] == ["langchain"] * 3 + ["openai"] * 3 + ["both"] * 3
    stepspec, target, token = found.results[3:6]
    assert (stepspec.calls_right, token.calls_right, token.answers_right) == (1, 0, 0)
    assert token.calls_right_ci[1] > 0, "no share is certain"
    assert stepspec.reuse == pytest.approx(140 / 220)
    assert stepspec.speedup_ci is not None
    assert target.speedup == 1
    rows = rows_of(found)
    assert [row[1] for row in rows] == ["two-level", "target", "token"] * 3
    assert all(len(row) == len(HEADS) for row in rows)
    assert rows[1][3] == "1.00×"
    assert "63.6%" in rows[0]
    assert "24 tasks of three turns, tool_choice names the tool" in in_words(found)


def test_clients_and_policies_take_turns_and_no_two_runs_have_the_same_prompt() -> None:
    found, order = compared(9)
    models = ["smol", "smol@target", "smol@token"]
    assert [model for model, _ in order] == [*models * 9, *reversed(models)], "the first only warm up"
    assert [run.client for run in found.runs] == ["langchain"] * 12 + ["openai"] * 12 + ["langchain"] * 3
    assert len({system for _, system in order}) == len(order)
    assert len({len(system) for _, system in order}) == 1


@contextmanager
def scripted_service(*tasks: Task) -> Generator[tuple[str, list[Any]]]:
    """Serve the wanted call after a question, and its result as the answer. Yields the address and all requests."""
    wanted, requests = {turn.question: turn for task in tasks for turn in task.turns}, list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            last = requests[-1]["messages"][-1]
            message = {"role": "assistant", "content": f"It is {last['content']}."}
            if last["role"] == "user":
                turn = wanted[last["content"]]
                function = {"name": turn.tool.name, "arguments": json.dumps(turn.arguments)}
                call = {"id": f"call_{len(requests)}", "type": "function", "function": function}
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
            usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
            usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            about = {"id": "1", "object": "chat.completion", "created": 0, "model": "smol"}
            self.send_json({**about, "choices": [choice], "usage": usage})

        def do_GET(self) -> None:
            cards = [{"id": name, "object": "model", "created": 0, "owned_by": "", "policy": name} for name in POLICIES]
            self.send_json({"object": "list", "data": cards})

        def send_json(self, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally:
            server.shutdown()
            thread.join()


def plain(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says to the model, in one form for both clients."""
    messages = [
        {key: each[key] or "" for key in ("role", "content", "tool_call_id") if key in each}
        | {"calls": [call["function"] for call in each.get("tool_calls", ())]}
        for each in request["messages"]
    ]
    kept = {key: request[key] for key in ("model", "tools", "tool_choice", "temperature", "parallel_tool_calls")}
    return {**kept, "messages": messages, "limit": request.get("max_completion_tokens", request.get("max_tokens"))}


def test_both_clients_send_the_same_requests() -> None:
    (task,) = make_tasks(1, 0)
    sent: dict[str, list[Any]] = {}
    for name in ("langchain", "openai"):
        with scripted_service(task) as (address, requests):
            begin = clients(address, "none", 0.0)[name]
            conversation = begin(task, "smol@token", "Answer with the tools.")
            found = run_task(task, conversation, "named", 0, name, "token")
        assert found.calls_right == found.answers_right == [True] * 3
        assert (found.cached_tokens, found.prompt_tokens) == (16, 36)
        sent[name] = [plain(request) for request in requests]
    assert sent["langchain"] == sent["openai"]
    choices = [request["tool_choice"] for request in sent["openai"]]
    assert choices[1::2] == ["auto"] * 3
    assert [choice["function"]["name"] for choice in choices[::2]] == [turn.tool.name for turn in task.turns]


def test_the_command_goes_on_with_its_file_and_refuses_another(tmp_path: Path) -> None:
    file = tmp_path / "agent.json"
    tasks = make_tasks(3, 0)
    with scripted_service(*tasks) as (address, _):
        for limit in (1, 3):
            arguments = ["agent", "--base-url", address, "--limit", str(limit), "--json", str(file)]
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
            assert result.exit_code == 0, result.output
        found = Agents.model_validate_json(file.read_text("utf-8"))
        assert [run.task for run in found.runs[::3]] == [0, 1, 2]
        assert [result.calls_right for result in found.results] == [1.0] * 6
        with pytest.raises(UsageError, match="runs with other seed"):
            CliRunner().invoke(app, [*arguments, "--seed", "1"], catch_exceptions=False)
        file.write_text("{}", "utf-8")
        with pytest.raises(UsageError, match="is not a file of this command"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)

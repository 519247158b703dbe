"""Evaluations on a real local Ray: the rows of one process, also when workers are killed, and one progress line."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from scripted_runs import make_problems, make_result, make_run
from typer.testing import CliRunner, Result

pytest.importorskip("ray", reason="ray is not installed")
from ray.exceptions import RayActorError

from evals.bench.service.script import Script, scripted_pair
from stepspec.api.models import Pair, load_pair
from stepspec.cli import app
from stepspec.errors import EngineError, ModelError, TargetError, UsageError
from stepspec.evaluation.benchmark import asked
from stepspec.evaluation.grade import Grade
from stepspec.evaluation.records import Node, ResultRow, RunRecord, Summary
from stepspec.evaluation.run import (
    Evaluation,
    Executor,
    Grader,
    Keeping,
    Local,
    RunSettings,
    conditions,
    fit_policies,
    load_benchmark,
    load_policies,
    load_problems,
    summarise,
)
from stepspec.evaluation.run.on_ray import (
    About,
    Cluster,
    NoRoomError,
    OnRay,
    Place,
    _check_same,
    _completed,
    connected,
)
from stepspec.evaluation.run.runner import make_row
from stepspec.evaluation.run.schedule import Job, JobBlock
from stepspec.evaluation.runs import iter_blocks, iter_failures, iter_rows, iter_traces, says

NUM_PROBLEMS = 3
STEPS = "specreason"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(Cluster("local", workers=2, cpus=0.5)) as found:
        yield found


async def evaluated(executor: Executor, folder: Path, num_problems: int = NUM_PROBLEMS, kill: Any = None) -> Any:
    """Run policies on the first problems of gsm-mini, at temperature 0. None of them decides by measured times."""
    name, benchmark = load_benchmark("gsm-mini")
    problems = load_problems(benchmark, None, num_problems)
    async with executor:
        fitted = await executor.call(partial(fit_policies, load_policies(["target", "token", STEPS])))
        settings = RunSettings(temperature=0.0, max_tokens=100)
        make = partial(conditions, name, benchmark, problems, fitted.policies, settings)
        task = Evaluation(
            await executor.call(make),
            {name: policy for name, (policy, _) in fitted.policies.items()},
            Keeping(folder, traces=True),
            Grader(benchmark.grader),
            ask=partial(asked, benchmark),
            gauges=True,
        )
        return await executor.evaluate(task, problems.problems, on_row=kill)


def texts(folder: Path) -> dict[Any, Any]:
    """Return what the rows of a run say, by their keys."""
    return {row.key: (row.output_sha256, row.status, row.tokens, row.steps) for row in iter_rows(folder)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    asyncio.run(evaluated(Local(load_pair(notes=False)), folder))
    return folder


def workers() -> list[psutil.Process]:
    """Return the processes of the workers."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::Worker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def no_worker_is_left() -> bool:
    """Whether all workers end within some seconds."""
    end = time.monotonic() + 20
    while workers() and time.monotonic() < end:
        time.sleep(0.1)
    return not workers()


class Killer:
    """Kills a worker after every second row, until it has killed enough."""

    def __init__(self, num_kills: int) -> None:
        self.num_left = num_kills

    def __call__(self, row: ResultRow | str | None, done: int, total: int) -> None:
        if self.num_left and isinstance(row, ResultRow) and done % 2:
            for process in workers()[:1]:
                os.kill(process.pid, signal.SIGKILL)
                self.num_left -= 1


@pytest.mark.parametrize(
    ("num_problems", "num_kills"), [(NUM_PROBLEMS, 1), pytest.param(24, 10, marks=pytest.mark.soak)]
)
def test_killed_workers_change_no_row(
    cluster: Cluster, alone: Path, tmp_path: Path, num_problems: int, num_kills: int
) -> None:
    if num_problems > NUM_PROBLEMS:
        alone = tmp_path / "alone"
        asyncio.run(evaluated(Local(load_pair(notes=False)), alone, num_problems))
    killer = Killer(num_kills)
    notes: list[str] = []
    executor = OnRay(cluster, partial(load_pair, notes=False), notes.append)
    summary = asyncio.run(evaluated(executor, tmp_path / "run", num_problems, killer))
    assert killer.num_left == 0
    assert any("died. Another one does its work." in each for each in notes)
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len(list(iter_rows(tmp_path / "run"))) == 3 * num_problems
    assert texts(tmp_path / "run") == texts(alone)
    traces = {trace.key: says(trace) for trace in iter_traces(tmp_path / "run")}
    assert all(traces[row.key] == row.output_sha256 for row in iter_rows(tmp_path / "run"))
    assert not list(iter_failures(tmp_path / "run"))
    (node,) = summary.nodes
    assert {row.node for row in iter_rows(tmp_path / "run")} == {node.name}
    assert all(block.usage and block.node for block in iter_blocks(tmp_path / "run"))
    assert summary.policies[STEPS].speedup_vs_target is not None
    assert no_worker_is_left()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_errors_of_workers_are_those_of_one_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(load: Any, *functions: tuple[Any, type[Exception], str]) -> None:
        async with OnRay(cluster, load) as executor:
            for function, error, message in functions:
                with pytest.raises(error, match=message):
                    await executor.call(function)

    with pytest.raises(ModelError, match="There is no folder"):
        asyncio.run(call(partial(load_pair, "torch:/nothing", needs_draft=False)))

    # Functions inside this one, because workers cannot import this file.
    def refuse(pair: Pair) -> None:
        raise TargetError(f"The pair has {len(pair.judges)} judges.", "so far")

    def divide(pair: Pair) -> float:
        return 1 / len(pair.judges)

    def die(pair: Pair) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("stepspec.evaluation.run.on_ray.MAX_DEATHS", 2)
    asyncio.run(
        call(
            partial(scripted_pair, Script()),
            (refuse, TargetError, "The pair has 0 judges"),
            (divide, EngineError, "A worker failed: division by zero"),
            (die, EngineError, "2 workers died one after the other"),
        )
    )
    assert no_worker_is_left()


def test_without_a_cluster_the_error_says_what_to_do(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "How many?"}\n')
    for command in (("eval", "gsm-mini"), ("calibrate", "gsm-mini", "--split", "train"), ("advise", "--data", prompts)):
        files = () if command[0] == "eval" else ("--policy-file", tmp_path / "new.toml")
        found = invoke(*command, *files, "--output", tmp_path / "run", "--ray", "127.0.0.1:1")
        assert isinstance(found.exception, UsageError)
        assert "Cannot use a Ray cluster at '127.0.0.1:1': [Errno 111]" in str(found.exception)
        found = invoke(*command, *files, "--output", tmp_path / "run", "--workers", "2")
        assert "--workers is for a Ray cluster. Add --ray ADDRESS" in str(found.exception)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_not_ray_is_refused_within_seconds(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(answer)
                connection.settimeout(5)
                while connection.recv(1024):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match="what listens there is not Ray"), connected(Cluster(address)):
            pass
        thread.join()


# Faults that a real cluster does not make on demand, with scripted workers.


class Call:
    """A method of a scripted worker, called like one of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Any:
        async def call() -> Any:
            return self._function(*arguments)

        return call()


class ScriptedWorker:
    """A worker that answers every job, and dies at block `dies_at`, if that is not 0."""

    def __init__(self, run: RunRecord, dies_at: int = 0) -> None:
        self.run_record, self.dies_at = run, dies_at
        self.warmed_up: set[str] = set()
        self.ran: list[Job] = []
        self.begin, self.run = Call(self._begin), Call(self._run)

    def _begin(self, task: Evaluation, blocks: Sequence[JobBlock]) -> None:
        self.warmed_up = {job.policy for block in blocks for job in block}

    def _run(self, block: JobBlock) -> list[Any]:
        self.dies_at -= 1
        if self.dies_at == 0:
            raise RayActorError
        self.ran += block
        rows = [make_row(self.run_record, job, make_result("1", 1.0), Grade("correct")) for job in block]
        return [("add", (row, None)) for row in rows]


async def evaluated_by(*workers: list[ScriptedWorker], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """Evaluate two problems with a place for each list of workers, which start one after the other."""
    problems = make_problems(2)
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.ray.kill", lambda handle: None)
    executor = OnRay(Cluster("local", len(workers), 1, 0), partial(load_pair, notes=False))

    async def start(waiting: list[ScriptedWorker]) -> tuple[Any, About]:
        if not waiting:
            raise NoRoomError("The cluster had no room.")
        return waiting.pop(0), About(Node(name="a", hardware={}), {}, {})

    executor._places = [Place(partial(start, each)) for each in workers]
    await executor._places[-1].worker()  # as an earlier evaluation leaves it
    task: Any = SimpleNamespace(run=make_run(problems), keeping=Keeping(folder))
    return await executor.evaluate(task, problems)


def test_a_new_worker_warms_up_for_every_policy_and_repeats_no_finished_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(make_problems(2))
    first, second = ScriptedWorker(run, dies_at=5), ScriptedWorker(run)
    asyncio.run(evaluated_by([first, second], folder=tmp_path / "run", monkeypatch=monkeypatch))
    assert len(first.ran) == 4
    assert len(second.ran) == 2
    assert first.warmed_up == second.warmed_up == set(run.policies)
    assert len({job.key for job in first.ran + second.ran}) == 6


def test_without_room_for_a_worker_the_others_go_on_and_the_last_one_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(make_problems(2))
    summary = asyncio.run(evaluated_by([], [ScriptedWorker(run)], folder=tmp_path / "one", monkeypatch=monkeypatch))
    assert summary.n == 2
    # There are two rounds, so one of three places is idle.
    dying = [ScriptedWorker(run, dies_at=2)], [], [ScriptedWorker(run, dies_at=3)]
    with pytest.raises(NoRoomError):
        asyncio.run(evaluated_by(*dying, folder=tmp_path / "two", monkeypatch=monkeypatch))
    assert len(list(iter_rows(tmp_path / "two"))) == 3


def test_calls_that_share_a_worker_note_its_death_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.ray.kill", lambda handle: None)
    started: list[Any] = []

    def answer(function: Any) -> int:
        if len(started) == 1:
            raise RayActorError
        return 7

    async def start() -> tuple[Any, About]:
        await asyncio.sleep(0)
        started.append(SimpleNamespace(call=Call(answer)))
        return started[-1], About(Node(name="a", hardware={}), {}, {})

    async def call_twice() -> list[int]:
        executor = OnRay(Cluster("local", 1, 1, 0), partial(load_pair, notes=False))
        executor._places = [Place(start)]
        return await asyncio.gather(executor.call(len), executor.call(len))

    assert asyncio.run(call_twice()) == [7, 7]
    assert len(started) == 2


def test_workers_take_what_the_machines_have() -> None:
    small, large, gpu = {"CPU": 2.0}, {"CPU": 8.0}, {"CPU": 16.0, "GPU": 8.0}
    assert _completed(Cluster("auto"), [small, large, {}]) == Cluster("auto", workers=5, cpus=2, gpus=0)
    assert _completed(Cluster("auto"), [small, gpu]) == Cluster("auto", workers=8, cpus=1, gpus=1)
    assert _completed(Cluster("auto", workers=1, cpus=4), [small, large]).workers == 1
    with pytest.raises(UsageError, match="takes 16 CPUs and 0 GPUs, and no machine"):
        _completed(Cluster("auto", cpus=16), [small, large])


def test_workers_with_other_models_or_versions_are_refused() -> None:
    def about(name: str, **changes: Any) -> About:
        fields: dict[str, Any] = {"models": {"target": "1"}, "versions": {"torch": "2.13"}}
        return About(Node(name=name, hardware={}), **(fields | changes))

    _check_same(about("a"), about("b"))
    with pytest.raises(UsageError, match=r"The versions on a and b differ \(torch 2.13 and 2.12\)"):
        _check_same(about("a"), about("b", versions={"torch": "2.12"}))
    with pytest.raises(UsageError, match="The models on a and b differ"):
        _check_same(about("a"), about("b", models={"target": "2"}))


def test_times_are_compared_on_the_same_machine_only() -> None:
    problems = {problem.id: problem for problem in make_problems(3)}
    run = make_run(list(problems.values()))

    def row(problem: str, policy: str, node: str, wall_s: float) -> ResultRow:
        made = make_row(run, Job(problems[problem], policy, 0), make_result("1", wall_s), Grade("correct"))
        return made.model_copy(update={"node": node})

    rows = [row("p1", "target", "a", 2.0), row("p1", "token", "a", 1.0), row("p1", "stepspec", "a", 1.0)]
    apart = [row("p2", "target", "a", 2.0), row("p2", "token", "a", 2.0), row("p2", "stepspec", "b", 20.0)]
    summary = summarise(run, [*rows, *apart])
    assert summary.policies["stepspec"].speedup_vs_target == 2.0
    assert (summary.num_apart, summary.n, summary.policies["stepspec"].n) == (1, 2, 2)
    same = summarise(run, [*rows, *(each.model_copy(update={"node": "b"}) for each in apart)])
    assert (same.policies["stepspec"].speedup_vs_target or 9) < 1

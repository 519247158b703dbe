"""Evaluations on a real local Ray: the rows of one process, also when workers are killed."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from commands import without_torch
from scripted_runs import make_problems, make_result, make_run
from typer.testing import CliRunner, Result

pytest.importorskip("ray", reason="ray is not installed")
import ray

from evals.bench.controller import embedded_tokenizer
from evals.bench.service.script import Script, ScriptedEngine, scripted_pair
from stepspec.api.models import Pair, load_pair
from stepspec.cli import app
from stepspec.engines.protocol import Generate, TokenChunk, Verification, Verify
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
    EvalModels,
    NoRoomError,
    OnRay,
    Worker,
    _check_same,
    _completed,
    connected,
)
from stepspec.evaluation.run.runner import make_row
from stepspec.evaluation.run.schedule import Job, JobBlock
from stepspec.evaluation.runs import iter_blocks, iter_failures, iter_rows, iter_traces, says

NUM_PROBLEMS = 2
STEPS = "specreason"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster, by default for scripted engines only: its workers start without PyTorch."""
    hidden = nullcontext() if getattr(request, "param", "") == "embedded" else without_torch()
    with hidden, connected(Cluster("local", workers=2, cpus=0.5)) as found:
        yield found


def scripted() -> Callable[[], Pair]:
    """Return a function that loads scripted engines which give each problem another answer."""

    # Inside this function, because workers cannot import this file.
    class Varying(ScriptedEngine):
        async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
            self.num_steps.setdefault(call.prompt, len(call.prompt) % 7)  # the step with which the script starts
            async for chunk in super().generate(call):
                yield chunk

        async def verify(self, call: Verify) -> Verification:
            nines = (self.tokenizer.encode_text("9")[0],) * len(call.probes)  # the best rating
            labels = tuple((-1.0,) * len(probe.labels) for probe in call.probes)
            return replace(await super().verify(call), probe_choices=nines, probe_logprobs=labels)

    def load() -> Pair:
        tokenizer, script = embedded_tokenizer(), Script(10)
        draft = Varying(tokenizer, script=script)
        return Pair(Varying(tokenizer, num_steps=draft.num_steps, script=script), draft)

    return load


async def evaluated(executor: Executor, folder: Path, num_problems: int = NUM_PROBLEMS, kill: Any = None) -> Any:
    """Run policies on the first problems of gsm-mini, at temperature 0. None of them decides by measured times."""
    name, benchmark = load_benchmark("gsm-mini")
    problems = load_problems(benchmark, None, num_problems)
    async with executor:
        fitted = await executor.call(partial(fit_policies, load_policies(["target", "token", STEPS])))
        settings = RunSettings(temperature=0.0, max_tokens=400)
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


def workers() -> list[psutil.Process]:
    """Return the processes of the workers."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::EvalModels" in " ".join(process.cmdline()):
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


def check_kills(
    cluster: Cluster, load: Callable[[], Pair], folder: Path, num_problems: int = NUM_PROBLEMS, num_kills: int = 1
) -> None:
    """Check the rows of a run whose workers are killed by those of one process."""
    asyncio.run(evaluated(Local(load()), folder / "alone", num_problems))
    alone = texts(folder / "alone")
    assert len({text for text, *_ in alone.values()}) >= num_problems
    killer = Killer(num_kills)
    run, executor = folder / "run", OnRay(cluster, load)
    summary = asyncio.run(evaluated(executor, run, num_problems, killer))
    assert killer.num_left == 0
    lines = (run / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len(list(iter_rows(run))) == 3 * num_problems
    assert texts(run) == alone
    traces = {trace.key: says(trace) for trace in iter_traces(run)}
    assert all(traces[row.key] == row.output_sha256 for row in iter_rows(run))
    assert not list(iter_failures(run))
    (node,) = summary.nodes
    assert node.num_workers == 2
    assert {row.node for row in iter_rows(run)} == {node.name}
    assert all(block.usage and block.node for block in iter_blocks(run))
    assert summary.policies[STEPS].speedup_vs_target is not None
    assert no_worker_is_left()


def test_killed_workers_change_no_row(cluster: Cluster, tmp_path: Path) -> None:
    check_kills(cluster, scripted(), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
def test_ten_killed_workers_change_no_row_of_the_embedded_pair(cluster: Cluster, tmp_path: Path) -> None:
    check_kills(cluster, partial(load_pair, notes=False), tmp_path, num_problems=24, num_kills=10)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_errors_of_workers_are_those_of_one_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.MAX_RETRIES", 0)
    cluster, attempts = replace(cluster, workers=1), list[str]()

    # Functions inside this one, because workers cannot import this file.
    def load() -> Pair:
        attempts.append("in this worker")
        return load_pair("torch:/nothing", needs_draft=False) if len(attempts) == 1 else scripted_pair(Script())

    def refuse(pair: Pair) -> None:
        raise TargetError(f"The pair has {len(pair.judges)} judges.", "so far")

    def divide(pair: Pair) -> float:
        return 1 / len(pair.judges)

    def die(pair: Pair) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def call_all() -> None:
        async with OnRay(cluster, load) as executor:
            with pytest.raises(ModelError, match="There is no folder"):
                await executor.call(str)
            with pytest.raises(TargetError, match="The pair has 0 judges"):
                await executor.call(refuse)
            with pytest.raises(EngineError, match="A worker failed: division by zero"):
                await executor.call(divide)
            with pytest.raises(EngineError, match="A worker died, at most 1 times during the same work"):
                await executor.call(die)

    async def find_room() -> None:
        async with OnRay(replace(cluster, cpus=1000), load):
            pass

    asyncio.run(call_all())
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.ROOM_S", 1.0)
    with pytest.raises(NoRoomError, match="The cluster has no room for a worker"):
        asyncio.run(find_room())
    assert no_worker_is_left()


def test_without_a_cluster_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.REACH_S", 0.2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "How many?"}\n')
    advise = ("advise", "--data", prompts, "--policy-file", tmp_path / "new.toml")
    for command in (("eval", "gsm-mini"), ("calibrate", "gsm-mini", "--split", "train"), advise):
        found = invoke(*command, "--output", tmp_path / "run", "--ray", "127.0.0.1:1")
        assert isinstance(found.exception, UsageError)
        assert "a Ray cluster at '127.0.0.1:1': no Ray answers there. Give the HOST:PORT" in str(found.exception)
        found = invoke(*command, "--output", tmp_path / "run", "--workers", "2")
        assert "--workers is for a Ray cluster. Add --ray ADDRESS" in str(found.exception)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_not_ray_is_refused_within_seconds(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(answer)
                    connection.settimeout(2)
                    with connection:
                        while connection.recv(1024):
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match="no Ray answers there"), connected(Cluster(address)):
            pass
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


# Faults that a real cluster does not make on demand, with scripted workers.


class Call:
    """A method of a scripted worker, called like one of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class ScriptedActor:
    """An actor that runs `num_blocks` blocks, and then has no room any more."""

    def __init__(self, run: RunRecord, num_blocks: int = 1000) -> None:
        self.run_record, self.num_blocks = run, num_blocks
        self.run, self.ready = Call(self._run), Call(self._ready)

    async def _ready(self) -> None:
        if not self.num_blocks:
            await asyncio.sleep(60)

    async def _run(self, prepared: Any, block: JobBlock) -> tuple[About, list[Any]]:
        await self._ready()
        self.num_blocks -= 1
        rows = [make_row(self.run_record, job, make_result("1", 1.0), Grade("correct")) for job in block]
        return About(Node(name="a", hardware={}), {}), [("add", (row, None)) for row in rows]


async def evaluated_by(*num_blocks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """Evaluate two problems with one worker for each number of blocks, after which it is lost."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr("stepspec.evaluation.run.on_ray.ROOM_S", 0.05)
    problems = make_problems(2)
    run = make_run(problems)
    executor = OnRay(Cluster("local", len(num_blocks), 1, 0), partial(load_pair, notes=False))
    executor._workers = [Worker(ScriptedActor(run, number)) for number in num_blocks]
    task: Any = SimpleNamespace(run=run, keeping=Keeping(folder), only=None)
    return await executor.evaluate(task, problems)


def test_others_do_the_work_of_lost_workers_and_the_last_one_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, num_blocks in (("start", (0, 1000)), ("amid", (2, 1000)), ("end", (2, 4))):
        summary = asyncio.run(evaluated_by(*num_blocks, folder=tmp_path / name, monkeypatch=monkeypatch))
        assert summary.n == 2
        assert len((tmp_path / name / "rows.jsonl").read_text().splitlines()) == 6
    with pytest.raises(NoRoomError):
        asyncio.run(evaluated_by(2, 1, folder=tmp_path / "lost", monkeypatch=monkeypatch))
    assert len(list(iter_rows(tmp_path / "lost"))) == 3


def test_a_worker_warms_up_once_for_every_policy_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "a")
    asked: list[str] = []

    class Runs:
        async def warm_up(self, blocks: Any, receiver: Any) -> None:
            asked.append("warm-up of " + ", ".join(block[0].policy for block in blocks))

        async def run_block(self, block: JobBlock, receiver: Any) -> None:
            asked.append(block[0].policy)

    problem = make_problems(1)[0]
    target, token = ([Job(problem, policy, 0)] for policy in ("target", "token"))

    async def run() -> None:
        models = EvalModels(partial(scripted_pair, Script()))
        for _ in range(2):
            prepared = asyncio.get_running_loop().create_future()
            prepared.set_result((SimpleNamespace(runner=lambda pair, gradings: Runs()), [target, token]))
            for block in (target, token):
                await models.run([prepared], block)

    asyncio.run(run())
    assert asked == ["warm-up of target, token", "target", "token"] * 2


def test_workers_take_what_the_machines_have() -> None:
    small, large, gpu = {"CPU": 2.0}, {"CPU": 8.0}, {"CPU": 16.0, "GPU": 8.0}
    assert _completed(Cluster("auto"), [small, large, {}]) == Cluster("auto", workers=5, cpus=2, gpus=0)
    assert _completed(Cluster("auto"), [small, gpu]) == Cluster("auto", workers=8, cpus=1, gpus=1)
    assert _completed(Cluster("auto", workers=1, cpus=4), [small, large]).workers == 1
    with pytest.raises(UsageError, match="No machine has 16 CPUs and 0 GPUs"):
        _completed(Cluster("auto", cpus=16), [small, large])


def test_workers_with_other_models_or_versions_are_refused() -> None:
    def about(name: str, **changes: str) -> About:
        return About(Node(name=name, hardware={}), {"target": "1", "torch": "2.13"} | changes)

    _check_same(about("a"), about("b"))
    with pytest.raises(UsageError, match=r"Install the same models and packages on a and b: torch 2.13 and 2.12"):
        _check_same(about("a"), about("b", torch="2.12"))
    with pytest.raises(UsageError, match="on a and b: target 1 and 2"):
        _check_same(about("a"), about("b", target="2"))


def test_times_are_compared_on_the_same_machine_only() -> None:
    problems = {problem.id: problem for problem in make_problems(3)}
    run = make_run(list(problems.values()))

    def row(problem: str, policy: str, node: str, wall_s: float) -> ResultRow:
        made = make_row(run, Job(problems[problem], policy, 0), make_result("1", wall_s), Grade("correct"))
        return made.model_copy(update={"node": node})

    rows = [row("p1", "target", "a", 2.0), row("p1", "token", "a", 1.0), row("p1", "two-level", "a", 1.0)]
    apart = [row("p2", "target", "a", 2.0), row("p2", "token", "a", 2.0), row("p2", "two-level", "b", 20.0)]
    summary = summarise(run, [*rows, *apart])
    assert summary.policies["two-level"].speedup_vs_target == 2.0
    assert (summary.num_apart, summary.n, summary.policies["two-level"].n) == (1, 2, 2)
    same = summarise(run, [*rows, *(each.model_copy(update={"node": "b"}) for each in apart)])
    assert (same.policies["two-level"].speedup_vs_target or 9) < 1

"""Measurements of the service: the load generator against known delays, and faults that checks must find."""

import asyncio
import json
import os
import selectors
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from evals.bench.__main__ import app
from evals.bench.service.client import Address, Client, Exchange, chat_request
from evals.bench.service.concurrency import AtConcurrency, Concurrency, at_concurrency, models_of
from evals.bench.service.faults import EndFigures, FaultFigures, Faults, end_under_load, faults
from evals.bench.service.instant import Instant, InstantFigures
from evals.bench.service.load import closed_loop, even_times, open_arrivals, percentiles, poisson_times
from evals.bench.service.overload import Overload, OverloadFigures, overload
from evals.bench.service.process import Service, StartedService, scripted_command, started
from evals.bench.service.records import Scenario, finish_scenario, rows_of
from evals.bench.service.script import Script
from evals.bench.service.streams import StreamFigures, Streams, streams
from stepspec.evaluation.records import Percentiles

CONDITIONS: Mapping[str, Any] = {"versions": {}, "commit": None, "hardware": {}, "started": ""}
ERROR = {"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}}
ANSWER = {"choices": [{"message": {"content": "12"}}], "usage": {"completion_tokens": 10}}
REQUEST = chat_request("How many?")
SLACK_S = 0.5
"""What a busy machine may add to a delay."""
DELIVERY_S = 0.001
"""What the operating system may take to deliver bytes from one socket of this process to another one."""


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything can run, and else goes straight on to the next timer.

    Delays are then what a test says, however busy the machine is. It is for a server and a client in one process.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_SimulatedWaits(self.pass_time))

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds


class _SimulatedWaits(selectors.DefaultSelector):
    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout and min(timeout, DELIVERY_S))
        if timeout and not ready:
            self._pass_time(timeout)
        return ready


@dataclass
class FakeService:
    """A service in the process of the test, with known delays and faults that are switched on.

    Attributes:
        delay_s: seconds before the answer, or before each chunk of a stream, by model.
        num_running: requests that run before others get status 503; None for no limit.
        busy_s: seconds that status 503 takes.
        retry_after: whether status 503 says when to try again.
        leaks: whether it forgets a file descriptor and a task at each connection that the client closes.
    """

    delay_s: Mapping[str | None, float] = field(default_factory=lambda: {None: 0.0})
    num_running: int | None = None
    busy_s: float = 0.0
    retry_after: bool = True
    leaks: bool = False
    in_flight: int = 0
    leaked: list[IO[bytes]] = field(default_factory=list)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with suppress(OSError, EOFError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length")), 0)
                body = await reader.readexactly(length)
                if head.startswith("GET"):
                    writer.write(_response(200, self._page(head.split(" ")[1])))
                elif head.startswith("POST"):
                    await self._answer(body, writer)
                else:
                    writer.write(_response(400, b""))
                if "Connection: close" in head:
                    break
        if self.leaks:
            self.leaked.append(open(os.devnull, "rb"))  # noqa: ASYNC230, SIM115
        self.writers.discard(writer)
        writer.close()

    def _page(self, path: str) -> bytes:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": name, "policy": "two-level"} for name in ("m", "m@target")]}).encode()
        return (
            str(len(self.leaked)).encode()
            if path == "/tasks"
            else f"stepspec_requests_running {self.in_flight}.0".encode()
        )

    async def _answer(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = _read(body)
        if asked is None:
            writer.write(_response(400, json.dumps(ERROR).encode()))
        elif self.num_running is not None and self.in_flight >= self.num_running:
            await asyncio.sleep(self.busy_s)
            headers = ("Retry-After: 1",) if self.retry_after else ()
            writer.write(_response(503, json.dumps(ERROR).encode(), *headers))
        else:
            self.in_flight += 1
            try:
                await self._run(asked, writer)
            finally:
                self.in_flight -= 1

    async def _run(self, asked: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        delay_s = self.delay_s[asked.get("model")]
        if not asked.get("stream"):
            await asyncio.sleep(delay_s)
            writer.write(_response(200, json.dumps(ANSWER).encode()))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for text in ("", "1", "2"):
            _write_chunk(writer, json.dumps({"choices": [{"delta": {"content": text}}]}))
            await asyncio.sleep(delay_s)
        _write_chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")


def _read(body: bytes) -> dict[str, Any] | None:
    """Return a request that is valid and not too long."""
    with suppress(ValueError, RecursionError):
        found = json.loads(body)
        if len(body) < 100_000 and isinstance(found, dict) and found.get("messages"):
            return found
    return None


def _response(status: int, body: bytes, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} A", *headers, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _write_chunk(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


@asynccontextmanager
async def _serving(fake: FakeService) -> AsyncGenerator[Service, None]:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    try:
        yield Service(Address(*server.sockets[0].getsockname()), os.getpid())
    finally:
        server.close()
        for writer in [*fake.writers]:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # for the tasks of these connections to end
        for each in fake.leaked:
            each.close()


def _measured(fake: FakeService, measure: Callable[[Service], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        clock = asyncio.get_running_loop().time
        with mock.patch.multiple(time, perf_counter=clock, monotonic=clock):
            async with _serving(fake) as service:
                return await measure(service)

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(run())


def _sent(fake: FakeService, load: Callable[[Client], Awaitable[list[Exchange]]]) -> list[Exchange]:
    async def measure(service: Service) -> list[Exchange]:
        async with Client(service.address) as client:
            return await load(client)

    return _measured(fake, measure)


def _check(scenario: Scenario, name: str) -> bool:
    (check,) = [each for each in scenario.checks if each.name == name]
    return check.holds


def test_times_are_those_of_the_delays() -> None:
    (stream,) = _sent(FakeService({None: 0.2}), lambda client: closed_loop(client, [chat_request("?", stream=True)], 1))
    assert stream.answered
    assert stream.status_at is not None
    assert stream.content_at is not None
    assert stream.status_at == stream.due
    assert stream.content_at - stream.due == pytest.approx(0.2)  # the first chunk has no text
    assert stream.seconds == pytest.approx(0.6)


def test_a_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    fake = FakeService({None: 0.1}, num_running=4)
    assert all(each.answered for each in _sent(fake, lambda client: closed_loop(client, [REQUEST] * 8, 4)))
    refused = sum(each.refused for each in _sent(fake, lambda client: closed_loop(client, [REQUEST] * 5, 5)))
    assert refused == 1


def test_latency_counts_from_the_time_of_arrival() -> None:
    async def blocked(client: Client) -> list[Exchange]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedTime)
        loop.call_later(0.05, loop.pass_time, 0.3)
        return await open_arrivals(client, REQUEST, [0.0, 0.1])

    found = _sent(FakeService(), blocked)
    assert [each.answered for each in found] == [True, True]
    assert found[1].seconds == pytest.approx(0.25)


def test_open_arrivals_beyond_the_bound_are_not_sent() -> None:
    found = _sent(FakeService({None: 0.2}), lambda client: open_arrivals(client, REQUEST, [0.0] * 5, max_open=3))
    assert sorted(each.failure or "" for each in found) == ["", "", "", "not sent", "not sent"]


def test_arrivals_have_their_rate() -> None:
    times = poisson_times(100.0, 50.0, seed=1)
    assert times == poisson_times(100.0, 50.0, seed=1)
    assert abs(len(times) - 5000) < 350  # five standard deviations
    assert even_times(100.0, 3) == [0.0, 0.01, 0.02]


def test_percentiles_are_values() -> None:
    assert percentiles(range(1, 101)) == Percentiles(p50=50, p90=90, p99=99)
    assert percentiles([]) is None


def test_a_speedup_is_that_of_the_delays() -> None:
    async def measure(service: Service) -> Concurrency:
        policy, *models = await models_of(service)
        assert (policy, models) == ("two-level", ["m", "m@target"])
        result = await at_concurrency(service, ("m", "m@target"), ["?"] * 12, 2, 3, 0.0, lambda *_: None)
        about = {"policy": policy, "benchmark": "gsm-mini", "temperature": 0.0, "engines": {}}
        return Concurrency.model_validate({**CONDITIONS, **about, "results": [result]})

    found = _measured(FakeService({"m": 0.03, "m@target": 0.09}), measure)
    assert found.results[0].speedup == pytest.approx(3.0)
    assert found.results[0].tokens_ratio == pytest.approx(3.0)
    assert found.results[0].requests_per_s == pytest.approx(2 / 0.03)
    assert found.holds
    assert not _measured(FakeService({"m": 0.03, "m@target": 0.01}), measure).holds


def test_faults_of_an_overloaded_service_are_found() -> None:
    fake = FakeService({None: 0.1}, num_running=1, busy_s=0.3, retry_after=False)
    figures = _measured(fake, lambda service: overload(service, 2, 0, 0.1, 0.6, 0))  # it claims to run two
    found = Overload.model_validate({**CONDITIONS, "figures": figures})
    names = ("goodput over capacity", "status 503, p99", "503 without Retry-After")
    assert not any(_check(found, name) for name in names)
    assert not found.holds
    quick = FakeService({None: 0.1}, num_running=2)
    found = found.model_copy(update={"figures": _measured(quick, lambda service: overload(service, 2, 0, 0.1, 0.6, 0))})
    assert _check(found, "503 without Retry-After")
    assert found.figures.refused_s is not None
    assert figures.refused_s.p50 >= 0.3 > found.figures.refused_s.p50


def test_leaks_are_found() -> None:
    for leaks in (False, True):
        fake = FakeService({None: 0.01}, leaks=leaks)
        found = _measured(fake, lambda service: faults(service, 0.03, 8, 0, settle_s=0.3))
        assert (found.descriptors > 0, found.tasks > 0) == (leaks, leaks)
        assert found.in_flight == 0
        assert sum(each.wrong for each in found.visits) == 0


@dataclass(frozen=True)
class AbruptService(StartedService):
    """A service in this process that drops its connections at its end."""

    drop: Callable[[], None]

    def stop(self) -> float:
        self.drop()
        return 0.0


def test_requests_that_are_cut_off_are_found() -> None:
    fake = FakeService({None: 10.0})

    async def measure(service: Service) -> EndFigures:
        loop = asyncio.get_running_loop()

        def drop() -> None:
            for writer in [*fake.writers]:
                loop.call_soon_threadsafe(writer.transport.abort)

        process: Any = None
        abrupt = AbruptService(service.address, service.pid, process, drop)
        return await end_under_load(abrupt, concurrency=4, load_s=0.4)

    async def run() -> EndFigures:
        async with _serving(fake) as service:
            return await measure(service)

    found = asyncio.run(run())
    assert (found.accepted, found.answered, found.cut_off) == (4, 0, 4)


QUICK, SLOW = Percentiles(p50=0.1, p90=0.1, p99=0.1), Percentiles(p50=0.3, p90=0.3, p99=0.3)
GOOD: list[Scenario] = [
    Instant(
        **CONDITIONS,
        figures=InstantFigures(
            concurrency=16, requests=100, failed=0, requests_per_s=400.0, cpu_ms=1.0, generator_cpu_ms=1.0,
            http_ms=4.0, in_process_ms=1.0, memory_mib=[10.0, 11.0, 12.0],
        ),
    ),
    Streams(
        **CONDITIONS,
        figures=StreamFigures(
            streams=10, rate=1.0, seconds=3.0, chunk_s=0.1, incomplete=0, late=0.0, status_s=QUICK, content_s=QUICK,
            longest_gap_s=QUICK, peak_memory_mib=1.0, service_cpu=0.5,
        ),
    ),
    Overload(
        **CONDITIONS,
        figures=OverloadFigures(
            max_running=4, max_queued=2, service_s=0.1, capacity_per_s=40.0, offered_per_s=120.0, seconds=1.0,
            requests=120, accepted=0.33, goodput_per_s=39.0, refused_s=QUICK, accepted_s=QUICK, normal_s=QUICK,
            normal_failed=0, without_retry_after=0, others=0, late=0.0, seed=0,
        ),
    ),
    Faults(
        **CONDITIONS,
        faults=FaultFigures(seed=0, visits=[], in_flight=0, tasks=0, descriptors=0, memory_mib=1.0),
        end=EndFigures(accepted=4, answered=3, refused=1, cut_off=0, seconds=1.0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "part", "change"),
    [
        (0, "figures", {"requests_per_s": 299.0}),
        (0, "figures", {"http_ms": 6.1}),
        (0, "figures", {"memory_mib": [10.0, 11.0, 20.0]}),
        (0, "figures", {"failed": 1}),
        (1, "figures", {"status_s": SLOW}),
        (1, "figures", {"content_s": None}),
        (1, "figures", {"longest_gap_s": SLOW.model_copy(update={"p99": 0.36})}),
        (1, "figures", {"incomplete": 1}),
        (1, "figures", {"late": 0.02}),
        (2, "figures", {"goodput_per_s": 35.0}),
        (2, "figures", {"refused_s": SLOW}),
        (2, "figures", {"accepted_s": SLOW}),
        (2, "figures", {"normal_failed": 1}),
        (2, "figures", {"others": 1}),
        (3, "faults", {"in_flight": 1}),
        (3, "faults", {"memory_mib": 17.0}),
        (3, "end", {"cut_off": 1}),
        (3, "end", {"seconds": 11.0}),
    ],
)
def test_a_figure_past_its_limit_does_not_hold(number: int, part: str, change: Mapping[str, Any]) -> None:
    good = GOOD[number]
    assert good.holds
    assert all(row[-1] != "no" for row in rows_of(good))
    bad = good.model_copy(update={part: getattr(good, part).model_copy(update=change)})
    assert not bad.holds
    assert type(good).model_validate_json(bad.model_dump_json()) == bad


@pytest.mark.parametrize(("change", "holds"), [({}, True), ({"speedup": 0.9}, False), ({"tokens_per_s": 299.0}, False)])
def test_throughput_is_checked_against_the_target_and_against_one_request(
    change: Mapping[str, Any], holds: bool
) -> None:
    one = AtConcurrency(
        concurrency=1, blocks=2, requests=4, failed=0, requests_per_s=1.0, target_requests_per_s=0.5,
        tokens_per_s=100.0, target_tokens_per_s=50.0, speedup=2.0, speedup_ci=None, tokens_ratio=2.0,
        tokens_ratio_ci=None,
    )  # fmt: skip
    many = one.model_copy(update={"concurrency": 16, "tokens_per_s": 300.0, **change})
    about: Any = {"policy": "two-level", "benchmark": "gsm-mini", "temperature": 0.0, "engines": {}}
    assert Concurrency(**CONDITIONS, **about, results=[one, many]).holds == holds


SCRIPT = Script(3, 0.0, 0.2)


@pytest.fixture(scope="module")
def scripted() -> Iterator[StartedService]:
    """A scripted service. The last test of this file ends it."""
    with started(scripted_command(SCRIPT, max_running=4, max_queued=2)) as service:
        yield service


def test_the_command_writes_its_figures_and_ends_with_1_if_one_is_past_its_limit(
    scripted: StartedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.bench.service.instant.TURNS", 1)
    monkeypatch.setattr("evals.bench.service.instant.BLOCKS", 2)
    monkeypatch.setattr("evals.bench.service.instant.started", lambda command: nullcontext(scripted))
    file = tmp_path / "instant.json"
    arguments = ["service.instant", "--requests", "10", "--concurrency", "4", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    found = Instant.model_validate_json(file.read_text("utf-8"))
    assert found.figures.failed == 0
    assert not found.holds, "it takes longer than an instant one"
    assert result.exit_code == 1
    finish_scenario([], GOOD[0], None)  # ends as usual


def test_the_scripted_service_keeps_its_script_and_its_limits(scripted: StartedService) -> None:
    figures, burst, in_flight, num_tasks = asyncio.run(_seen(scripted))
    end = asyncio.run(end_under_load(scripted, concurrency=8, load_s=0.5))
    assert figures.incomplete == 0
    assert figures.longest_gap_s is not None
    assert 0.15 < figures.longest_gap_s.p50 < 0.2 + SLACK_S
    assert sum(each.answered for each in burst) == 6
    refused = [each for each in burst if not each.answered]
    assert len(refused) == 4
    assert all(each.refused and each.status == 503 and "retry-after" in each.headers for each in refused)
    assert (in_flight, num_tasks > 0) == (0, True)
    assert end.accepted > 0
    assert end.cut_off == 0


async def _seen(service: Service) -> tuple[StreamFigures, list[Exchange], int, int]:
    figures = await streams(service, SCRIPT, 2, 10.0)
    async with Client(service.address) as client:
        burst = await closed_loop(client, [REQUEST] * 10, 10)
        return figures, burst, await service.num_in_flight(client), await service.num_tasks(client)

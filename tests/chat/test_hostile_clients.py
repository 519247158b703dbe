"""`stepspec serve` in a separate process, under hostile clients."""

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from stepspec.cli import app
from stepspec.cli.sockets import listening_sockets
from stepspec.errors import UsageError

CHAT = "/v1/chat/completions"
SERVE = [sys.executable, "-c", "from stepspec.cli import main; main()", "serve", "--port", "0"]
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
OVERSIZED = 50_000_000


def chat_body(content: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def with_messages(messages: str) -> bytes:
    return f'{{"messages": [{messages}]}}'.encode()


TURN = '{"role": "user", "content": "a"}'
BLOCK = '{"type": "text", "text": "a"}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MANY_TOOLS = [{**TOOL, "function": {**TOOL["function"], "name": f"f{number}"}} for number in range(9_000)]  # type: ignore[dict-item]

HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "one long message": lambda: chat_body("hello there friend " * 160_000),
    "a word without end": lambda: chat_body("a" * 3_000_000),
    "digits": lambda: chat_body("1" * 3_000_000),
    "unicode": lambda: with_messages(f'{{"role": "user", "content": "{"é漢😀" * 300_000}"}}'),
    "special tokens": lambda: chat_body("<|end|>" * 400_000),
    "beginnings of special tokens": lambda: chat_body("<" * 3_000_000),
    "many messages": lambda: with_messages(",".join([TURN] * 80_000)),
    "small messages": lambda: with_messages(",".join([TURN] * 30_000)),
    "empty messages": lambda: with_messages("{}" + ",{}" * 1_300_000),
    "wrong messages": lambda: with_messages("1" + ",1" * 90_000),
    "many blocks": lambda: with_messages(f'{{"role": "user", "content": [{",".join([BLOCK] * 30_000)}]}}'),
    "deep lists": lambda: with_messages("[" * 3_900_000),
    "deep objects": lambda: with_messages('{"a":' * 700_000),
    "empty lists": lambda: with_messages("[]" + ",[]" * 1_300_000),
    "many keys": lambda: with_messages("{" + ",".join(f'"{number}":0' for number in range(300_000)) + "}"),
    "equal keys": lambda: with_messages("{" + ",".join(['"a":0'] * 600_000) + "}"),
    "a long number": lambda: with_messages("9" * 3_900_000),
    "a long fraction": lambda: with_messages("0." + "9" * 3_900_000),
    "no JSON": lambda: b"a" * 3_900_000,
    "a long model name": lambda: chat_body("hello", model="a" * 3_000_000),
    "a long stop string": lambda: chat_body("hello", stop="a" * 3_000_000),
    "many unknown fields": lambda: chat_body("hello", **{f"x{number}": 0 for number in range(90_000)}),
    "many tools": lambda: chat_body("hello", tools=MANY_TOOLS),
    "a long call": lambda: with_messages(
        json.dumps({"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "f", "arguments": "[]," * 900_000}}
        ]}) + "," + TURN
    ),
    "a long schema as a string": lambda: chat_body("hello", guided_json=json.dumps({"enum": list(range(99_000))})),
    "the same in another format": lambda: json.dumps(
        {"input": "hello", "guided_json": json.dumps({"enum": list(range(99_000))})}
    ).encode(),
    "a long kind of output": lambda: chat_body("hello", structured_outputs={"x" * 3_000_000: 1}),
    "a long field of a form": lambda: chat_body("hello", response_format={"type": "text", "x" * 3_000_000: 1}),
    "many choices": lambda: chat_body("hello", guided_choice=[f"c{number}" for number in range(99_000)]),
    "many stop tokens": lambda: chat_body("hello", stop_token_ids=list(range(99_000))),
}  # fmt: skip
"""Functions that build request bodies just under the size limit."""

ODD = ("many unknown fields", "a long schema as a string", "the same in another format")
PATHS = {"the same in another format": "/v1/responses"}
"""Routes of messages that are not chat requests."""


@dataclass
class Service:
    """A running service. `lines` holds its log lines."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def post(
        self, body: bytes | Iterator[bytes], headers: Mapping[str, str] | None = None, path: str = CHAT
    ) -> tuple[int, Any]:
        """Send a request and return the status and the JSON of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def wait_for(self, pattern: str) -> str:
        """Wait for a log line that matches the pattern, and return the first one."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if re.search(pattern, line):
                    return line
            time.sleep(0.02)
        raise AssertionError(self.lines)


def started(**variables: str) -> Service:
    process = subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **variables}
    )
    service = Service(process, 0)
    assert process.stdout is not None

    threading.Thread(target=service.lines.extend, args=(iter(process.stdout.readline, ""),), daemon=True).start()
    service.port = int(service.wait_for("Serving at http").partition("/v1")[0].rpartition(":")[2])
    return service


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    running = started()
    yield running
    running.process.kill()
    running.process.wait()


@dataclass
class Attack:
    """Seconds that each `/health` probe took, and the responses to the hostile messages."""

    taken: list[float] = field(default_factory=list)
    answers: list[tuple[str, int, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Assert that every message was rejected with a short error, except the valid but odd ones."""
        for name, status, answer in self.answers:
            if name in ODD:
                assert status == 200, answer
                assert len(answer["metrics"]["ignored_fields"]) == (50 if name == "many unknown fields" else 0)
            else:
                assert status in (400, 404), (name, status, answer)
                assert len(answer["error"]["message"]) <= 300, name
                assert len(answer["error"]["param"] or "") <= 64, name


PROBE = """
import http.client, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
while True:
    begin = time.perf_counter()
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b""
    print(time.perf_counter() - begin, flush=True)
    time.sleep(0.01)
"""
"""Prints how many seconds each probe takes, in a process of its own, which waits for nothing that the attackers do."""


def attacked(service: Service, num_probes: int) -> Attack:
    """Probe `/health` while two threads send hostile messages and a third sends bodies of 50 MB.

    Sends each message at least once and makes at least `num_probes` probes.
    """
    attack, enough = Attack(), threading.Event()
    bodies = {name: make() for name, make in HOSTILE.items()}
    waiting = iter(bodies.items())

    def send() -> None:
        for name, body in itertools.chain(waiting, itertools.cycle(bodies.items())):
            if enough.is_set() and len(attack.answers) >= len(bodies):
                return
            attack.answers.append((name, *service.post(body, path=PATHS.get(name, CHAT))))

    def flood() -> None:
        while not enough.is_set():
            assert service.post(b" " * OVERSIZED)[0] == 413

    command = [sys.executable, "-c", PROBE, str(service.port)]
    with ThreadPoolExecutor(3) as pool, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        work = [pool.submit(each) for each in (send, send, flood)]
        for line in probe.stdout:
            attack.taken.append(float(line))
            if len(attack.taken) >= num_probes:
                enough.set()
                if all(each.done() for each in work[:2]):
                    break
        probe.kill()
        for each in work:
            each.result()
    return attack


def test_health_answers_while_hostile_messages_are_in_flight(service: Service) -> None:
    attack = attacked(service, 50)
    attack.check()
    assert statistics.median(attack.taken) < 0.25
    assert max(attack.taken) < 2.5


@pytest.mark.soak
def test_health_answers_within_100_ms_at_p99_over_1000_probes(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = attacked(service, 1_000)
    attack.check()
    taken = sorted(attack.taken)
    figures = {"p50": statistics.median(taken), "p99": taken[int(len(taken) * 0.99)], "max": taken[-1]}
    with capsys.disabled():
        latencies = ", ".join(f"{name} {value * 1000:.1f}" for name, value in figures.items())
        print(f"\n/health, ms: {latencies}; {len(taken)} probes, {len(attack.answers)} hostile messages")
    assert figures["p99"] < 0.1
    assert figures["max"] < 0.5


def test_a_body_over_the_limit_is_rejected_before_it_is_read(service: Service) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 50_000

    before = resident_mb(service)
    for status, answer in (service.post(b" " * OVERSIZED), service.post(b" " * 4_000_001), service.post(chunks())):
        assert status == 413
        assert answer["error"]["code"] == "request_too_large"
        assert "4000000 bytes" in answer["error"]["message"]
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as wire:
        wire.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % CHAT.encode())
        wire.sendall(b"Content-Length: 999999999999\r\n\r\n")
        assert b" 413 " in wire.recv(1000)
    assert resident_mb(service) - before < 40


def resident_mb(service: Service) -> float:
    return psutil.Process(service.process.pid).memory_info().rss / 1e6


def opened(service: Service, sent: bytes) -> socket.socket:
    """Return a connection with a small buffer on which something is sent."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.settimeout(30)
    wire.connect(("127.0.0.1", service.port))
    wire.sendall(sent)
    return wire


def head(num_bytes: int, *fields: str) -> bytes:
    """Return the head of a chat request whose body has a number of bytes."""
    given = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {num_bytes}", *fields)
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", *given, "", ""]).encode()


def health(service: Service) -> None:
    """Assert that `/health` answers quickly on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=5)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def load(service: Service) -> int:
    """Return the number of requests that run or wait."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=5)
    connection.request("GET", "/load")
    found = json.loads(connection.getresponse().read())["server_load"]
    connection.close()
    return found


def cpu_s(service: Service) -> float:
    return sum(psutil.Process(service.process.pid).cpu_times()[:2])


@pytest.mark.soak
def test_a_head_of_80_mb_costs_neither_time_nor_memory(service: Service) -> None:
    time.sleep(1)
    begin, before = cpu_s(service), resident_mb(service)
    chunked = head(9).replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")
    for begun in (GET + b"X: ", GET + b"X", b"GET /", chunked + b"0\r\nX: ", chunked + b"1;a="):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as wire:
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                wire.sendall(begun)
                while num_sent < 80_000_000:
                    num_sent += wire.send(b"a" * 100_000)
            assert num_sent < 80_000_000
        health(service)
    assert cpu_s(service) - begin < 1
    assert resident_mb(service) - before < 40


@pytest.mark.soak
def test_thousands_of_connections_leave_health_alone_and_are_closed(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        wires: list[socket.socket] = []
        for number in range(5_000):
            sent = (b"", b"GET /hea", head(9) + b"1")[number % 3]
            with contextlib.suppress(ConnectionError):
                wires.append(stack.enter_context(opened(service, sent)))
            if number % 500 == 0:
                health(service)
        health(service)
        assert num_connections(service) <= 4_100
        end = time.monotonic() + 60
        while num_connections(service) > 5 and time.monotonic() < end:
            health(service)
            time.sleep(1)
        assert num_connections(service) <= 5
    assert service.post(chat_body("How many apples?", max_tokens=5))[0] == 200


def num_connections(service: Service) -> int:
    found = psutil.Process(service.process.pid).net_connections("tcp")
    return sum(each.status not in ("LISTEN", "CLOSE_WAIT") for each in found)


@pytest.mark.soak
def test_many_clients_that_do_not_read_are_cut_off_and_leave_nothing(service: Service) -> None:
    fields = {"stream": True, "n": 16, "ignore_eos": True, "max_tokens": 900, "logprobs": True, "top_logprobs": 5}
    body = chat_body("How many?", **fields)
    assert service.post(body.replace(b'"stream": true', b'"stream": false'))[0] == 200
    figures: list[float] = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(opened(service, head(len(body)) + body))
            time.sleep(2)
            assert load(service) >= 100
            end = time.monotonic() + 400
            while load(service) and time.monotonic() < end:
                time.sleep(1)
            assert load(service) == 0
            figures.append(resident_mb(service))
    assert figures[1] < figures[0] * 1.2, figures


@pytest.mark.soak
def test_256_bodies_of_one_key_leave_the_entrance_to_others() -> None:
    service = started(STEPSPEC_API_KEYS="first-key-of-many,second-key-of-many")
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(256):
                stack.enter_context(opened(service, head(9, "Authorization: Bearer first-key-of-many") + b"1"))
            ask = chat_body("How many apples?", max_tokens=5)
            for _ in range(20):
                assert service.post(ask, {"Authorization": "Bearer second-key-of-many"})[0] == 200
            for _ in range(60):  # without a key, bodies are not read
                stack.enter_context(opened(service, head(3_999_999, "Authorization: Bearer a-key-of-nobody")))
            assert service.post(ask, {"Authorization": "Bearer second-key-of-many"})[0] == 200
    finally:
        service.process.kill()
        service.process.wait()


def test_the_log_has_one_line_for_a_request(service: Service) -> None:
    status, answer = service.post(chat_body("How many apples?", max_tokens=21, unknown=1, **{"a\nb": 2}))
    assert status == 200
    tokens = answer["usage"]["completion_tokens"]
    service.wait_for(
        rf"[0-9a-f]{{32}} 127\.0\.0\.1 POST {CHAT} 200 \d+\.\d+ s {tokens} tokens model 'embedded' policy two-level "
        r"client 'anonymous' queued \d+\.\d+ s ignored 'unknown', 'a\\nb' \(with a note"
    )
    note = answer["metrics"]["stepspec"]["note"]
    assert "embedded pair" in note
    service.post(chat_body("How many pears?", max_tokens=5))
    service.wait_for(rf"POST {CHAT} 200 \d+\.\d+ s 5 tokens model .* s \(with a note")
    assert sum(note in line for line in service.lines) == 1, "the service says once what the pair knows"
    assert sum("unknown" in line for line in service.lines) == 1
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("GET", "/nothing%0Athere?key=secret")
    connection.getresponse().read()
    connection.close()
    service.wait_for(r"GET /nothing%0Athere 404 \d+\.\d+ s$")
    assert sum("there" in line for line in service.lines) == 1
    assert not any("secret" in line for line in service.lines)


def test_a_second_ctrl_c_ends_the_service_immediately(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as wire:
        wire.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % CHAT.encode())
        wire.sendall(b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")  # a request that never completes
        assert b" 100 " in wire.recv(1000)  # the service is waiting for the body
        service.process.send_signal(signal.SIGINT)
        service.wait_for("Shutting down")
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(timeout=0.3)
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(timeout=30) == 128 + signal.SIGINT


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("stepspec.serve.pairs.load_pair", load)


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "a..b", "x" * 70, "192.0.2.1"])
def test_an_unavailable_address_is_an_error_before_any_model_is_loaded(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--insecure", "--host", host, "--port", str(port)])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith(f"Cannot listen at {host}, port {port}: ")


def test_a_port_in_use_is_rejected() -> None:
    (first,) = listening_sockets("127.0.0.1", 0)
    with first, pytest.raises(UsageError, match="in use"):
        listening_sockets("127.0.0.1", first.getsockname()[1])


def test_a_service_listens_at_every_address_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("both", 0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    first, second = listening_sockets("both", 0)
    with first, second:
        assert [each.getsockname()[0] for each in (first, second)] == ["127.0.0.1", "127.0.0.2"]
        assert first.getsockname()[1] == second.getsockname()[1]

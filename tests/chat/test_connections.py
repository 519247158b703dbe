"""Connections: heads without end, clients that send or read slowly, and more connections than there is room for."""

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from following import following_pair
from service import running

from stepspec.serve import Keys, ServiceLimits, Settings, connections
from stepspec.serve.keys import ENVIRONMENT

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def said(content: str) -> Any:
    return {"messages": [{"role": "user", "content": content}]}


ASK = said("How many?")
LONG = b"a" * 75_000


def post(request: Any, head: bytes = b"") -> bytes:
    body = json.dumps(request).encode()
    return POST + head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(following_pair(), Settings()) as (_, port):
        yield port


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEAD_S": 0.5, "BODY_S": 1.0, "IDLE_S": 0.5, "STALL_S": 2.0}.items():
        monkeypatch.setattr(connections, name, seconds)


def answered(port: int, *parts: bytes) -> bytes:
    """Send bytes, and return what comes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire, suppress(ConnectionError):
        for part in parts:
            wire.sendall(part)
            time.sleep(0.02)
        return read(wire)
    return b""


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def read(wire: socket.socket) -> bytes:
    """Return what comes until the connection is closed."""
    found = b""
    with suppress(ConnectionError):
        while part := wire.recv(100_000):
            found += part
    return found


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([GET + b"X: " + LONG], 431),
        ([GET + b"X: ", *[b"a" * 9_000] * 8], 431),
        ([GET + b"X: " + LONG + b"\r\n\r\n"], 431),
        ([GET + b"X" * 70_000 + b": 1\r\n\r\n"], 431),
        ([GET + b"".join(b"X%d: 1\r\n" % number for number in range(101)) + b"\r\n"], 431),
        ([b"GET /" + LONG], 414),
        ([b"GET /", *[b"a" * 9_000] * 8], 414),
        ([b"GET /" + b"a" * 33_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], 414),
        ([b"\r\n" * 40_000], 431),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=" + LONG], 431),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: " + LONG], 431),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: 1\r\n" * 101], 431),
        ([b"no HTTP at all\r\n\r\n"], 400),
        ([b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"], 405),
    ],
    ids=["header", "in parts", "complete", "name", "count", "URL", "URL in parts", "complete URL", "line ends",
         "chunk extension", "trailer", "trailers", "no HTTP", "CONNECT"],
)  # fmt: skip
def test_a_head_over_the_limit_is_refused_while_it_arrives(port: int, parts: list[bytes], status: int) -> None:
    # A client that still sends when the service closes may lose the response, so send no more than needed.
    head, _, body = answered(port, *parts).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_request_for_an_upgrade_is_answered_as_any_other(port: int, size: int) -> None:
    body = json.dumps(said("so " * 3_000)).encode()
    chunked = POST + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    sent = post(ASK, UPGRADE) + GET + UPGRADE + b"\r\n" + chunked + GET + b"Connection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(sent), size):
            wire.sendall(sent[start : start + size])
        assert read(wire).count(b"HTTP/1.1 200 ") == 4


def test_requests_just_under_the_limits_are_answered(port: int) -> None:
    many = b"".join(b"X%d: 1\r\n" % number for number in range(98)) + b"\r\n"
    body = json.dumps(ASK).encode()
    chunks = b"".join(b"1;%s\r\n%c\r\n" % (b"a" * 1_000, byte) for byte in body)
    for sent in (
        GET + b"Connection: close\r\nX: " + b"a" * 63_800 + b"\r\n\r\n",
        GET + b"Connection: close\r\n" + many,
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        GET + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n",
    ):
        assert answered(port, sent).startswith(b"HTTP/1.1 200 ")
    pipelined = (GET + b"\r\n") * 9 + GET + b"Connection: close\r\n\r\n"
    assert answered(port, pipelined).count(b"HTTP/1.1 200 ") == 10
    assert answered(port, (GET + b"\r\n") * 900).count(b"HTTP/1.1 200 ") < 100


INCOMPLETE = {
    "nothing": b"",
    "a line": b"GET /hea",
    "a head": GET + b"X: 1\r\n",
    "one request": GET + b"\r\n",
    "a second head": GET + b"\r\nGET /hea",
    "a body that is not read": GET + b"Content-Length: 99\r\n\r\n1",
    "a body that is too large": POST + b"Content-Length: 99999999\r\n\r\n1",
    "a body": POST + b"Content-Length: 99\r\n\r\n1",
}


@pytest.mark.usefixtures("quick")
def test_a_connection_that_sends_no_complete_request_is_closed_however_it_trickles(port: int) -> None:
    with ExitStack() as stack:
        wires = {name: stack.enter_context(socket.create_connection(("127.0.0.1", port))) for name in INCOMPLETE}
        for name, wire in wires.items():
            wire.settimeout(0.01)
            wire.sendall(INCOMPLETE[name])
        end = time.monotonic() + 5
        while wires and time.monotonic() < end:
            for name, wire in list(wires.items()):
                try:
                    if not wire.recv(1_000):
                        del wires[name]
                except TimeoutError:
                    with suppress(ConnectionError):
                        wire.sendall(b"\r\n" if name == "one request" else b"1")
                except ConnectionError:
                    del wires[name]
            time.sleep(0.1)
        assert [*wires] == []


@pytest.mark.usefixtures("quick")
def test_a_request_that_takes_long_is_not_cut_off_also_if_half_a_later_one_has_come() -> None:
    with running(following_pair(delay_s=1.4), Settings()) as (_, slow), ExitStack() as stack:
        wires = [stack.enter_context(socket.create_connection(("127.0.0.1", slow), timeout=10)) for _ in range(3)]
        for wire, later in zip(wires, (b"", b"GET /hea", POST + b"Content-Length: 9\r\n\r\n1"), strict=True):
            wire.sendall(post(ASK) + later)
        for wire in wires:
            assert read(wire).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_ends_its_request_also_if_others_wait(caplog: pytest.LogCaptureFixture) -> None:
    with running(following_pair(delay_s=2), Settings()) as (server, port):
        admission = server._service.admission  # pyright: ignore[reportPrivateUsage]
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.sendall(post(ASK) + (GET + b"\r\n") * 3)
            wait_until(lambda: admission.num_running == 1)
        left = time.monotonic()
        wait_until(lambda: admission.num_running == 0)
        assert time.monotonic() < left + 1
    assert not [each for each in caplog.records if each.exc_info]


def test_open_connections_are_limited_and_those_that_are_idle_give_way(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 16)
    with ExitStack() as stack:
        wires = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(60)]
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        assert read(wires[0]) == b""
        wires[-1].sendall(GET + b"Connection: close\r\n\r\n")
        assert read(wires[-1]).startswith(b"HTTP/1.1 200 ")


def test_connections_whose_client_reads_or_sends_nothing_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 16)
    with running(following_pair(delay_s=2), Settings()) as (server, port), ExitStack() as stack:
        busy = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        busy.sendall(post(ASK, b"Connection: close\r\n"))
        wait_until(lambda: server._service.admission.num_running == 1)  # pyright: ignore[reportPrivateUsage]
        unread = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16
        for sent in (unread, POST + b"Content-Length: 9\r\n\r\n1"):
            for _ in range(30):
                wire = stack.enter_context(socket.socket())
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                wire.connect(("127.0.0.1", port))
                wire.sendall(sent)
            time.sleep(0.2)
            wait_until(lambda: 1 < len(server.server_state.connections) <= 16)  # several give way together
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        assert read(busy).startswith(b"HTTP/1.1 200 ")


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return a file with a certificate of the loopback address and its key, and a context that trusts it."""
    authority, trusted = trustme.CA(), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    authority.configure_trust(trusted)
    return folder / "both.pem", trusted


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_tls_client_that_does_not_close_the_connection_too_is_cut_off(tmp_path: Path, loop: str) -> None:
    both, trusted = certificate(tmp_path)
    make = pytest.importorskip(loop).new_event_loop
    broken = POST + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"
    with (
        running(following_pair(), Settings(), cert=both, key=both, loop_factory=make) as (server, port),
        ExitStack() as stack,
    ):
        for sent in (b"", GET + b"\r\n", broken):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            wire = stack.enter_context(trusted.wrap_socket(raw, server_hostname="127.0.0.1"))
            wire.sendall(sent)
        assert len(server.server_state.connections) == 3
        wait_until(lambda: not server.server_state.connections)
        assert httpx.get(f"https://127.0.0.1:{port}/health", verify=trusted).status_code == 200


def test_a_connection_that_cannot_be_checked_does_not_end_the_service(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(connection: connections.Connection, now: float) -> None:
        raise AttributeError("no transport")

    with socket.create_connection(("127.0.0.1", port), timeout=5) as wire:
        monkeypatch.setattr(connections.Connection, "check", failing)
        assert read(wire) == b""
    monkeypatch.undo()
    assert [each.message for each in caplog.records if each.exc_info] == ["A connection failed."]
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200


def test_connections_are_limited_before_the_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 16)
    both, trusted = certificate(tmp_path)
    with running(following_pair(), Settings(), cert=both, key=both) as (server, port), ExitStack() as stack:
        wires = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(60)]
        wait_until(lambda: 0 < len(server.server_state.connections) <= 16)
        assert read(wires[0]) == b""
        with httpx.Client(verify=trusted, base_url=f"https://127.0.0.1:{port}") as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json=ASK).status_code == 200
        wires[-1].sendall(GET + b"\r\n")
        wires[-2].close()
        for wire in wires:
            wire.close()
        wait_until(lambda: not server.server_state.connections)


@pytest.mark.usefixtures("quick")
def test_a_stream_holds_its_place_while_it_is_read_and_is_cut_off_when_it_is_not() -> None:
    with running(following_pair(), Settings()) as (server, port), ExitStack() as stack:
        admission = server._service.admission  # pyright: ignore[reportPrivateUsage]
        body = json.dumps({**said("so " * 1_000), "stream": True, "n": 8}).encode()
        wires = [stack.enter_context(socket.socket()) for _ in range(2)]
        for wire in wires:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(("127.0.0.1", port))
            wire.settimeout(5)
            wire.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: admission.num_running == 16)
        time.sleep(0.6)
        assert admission.num_running == 16
        unread, slow = wires
        found, end = b"", time.monotonic() + 20
        while (part := slow.recv(8_000)) and time.monotonic() < end:
            found += part
            time.sleep(0.01)
        assert b"[DONE]" in found
        wait_until(lambda: admission.num_running == 0)
        assert b"[DONE]" not in read(unread)


def test_a_key_does_not_keep_others_from_sending() -> None:
    keys = Keys(environment={ENVIRONMENT: "first-key-of-many,second-key-of-many"})
    settings = Settings(limits=ServiceLimits(max_running=4, max_queued=4), keys=keys)
    with running(following_pair(), settings) as (server, port), ExitStack() as stack:
        root = f"http://127.0.0.1:{port}"
        first, second = ({"Authorization": f"Bearer {name}-key-of-many"} for name in ("first", "second"))
        wires: list[socket.socket] = []
        for _ in range(8):
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            wire.sendall(POST + b"Authorization: Bearer first-key-of-many\r\nContent-Length: 9\r\n\r\n1")
            wires.append(wire)
        entrance = server._service.admission.entrance  # pyright: ignore[reportPrivateUsage]
        wait_until(lambda: entrance.num_places == 8)
        assert httpx.post(f"{root}/v1/chat/completions", json=ASK, headers=first).status_code == 503
        assert httpx.get(f"{root}/ready").status_code == 200
        for _ in range(3):
            assert httpx.post(f"{root}/v1/chat/completions", json=ASK, headers=second).status_code == 200
        assert wires[0].recv(1_000).startswith(b"HTTP/1.1 503 ")
        nobody = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        nobody.sendall(POST + b"Authorization: Bearer another-key-of-many\r\nContent-Length: 9\r\n\r\n")
        assert nobody.recv(1_000).startswith(b"HTTP/1.1 401 "), "keys are checked before a body is read"

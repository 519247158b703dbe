"""The service on a real local Ray: answers, errors, scaling, and a replica that is killed under load."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from commands import without_torch

pytest.importorskip("ray", reason="ray is not installed")
from ray.exceptions import RayActorError

from evals.bench.service.client import Client, chat_request
from evals.bench.service.process import StartedService, started
from evals.bench.service.replicas import processes, ray_command, under_kill
from stepspec.errors import UsageError
from stepspec.loop.policy import load_policy
from stepspec.serve.keys import ENVIRONMENT, Rates
from stepspec.serve.keys import Client as KeyClient
from stepspec.serve.merged_metrics import merged_metrics
from stepspec.serve.ray import Arguments, Board, Front, app

ASK: list[Any] = [{"role": "user", "content": "How many?"}]
ANSWER = "The answer is 12."


@pytest.fixture(scope="module")
def service() -> Iterator[StartedService]:
    options = {"most_replicas": 2, "requests_per_replica": 2, "delay": 0.2, "max_running": 4}
    with without_torch(), started(ray_command(1, **options)) as running:
        yield running


@pytest.fixture
def root(service: StartedService) -> str:
    return f"http://{service.address.host}:{service.address.port}"


def test_it_answers_streams_and_refuses_like_one_process(root: str) -> None:
    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "scripted"
        found = client.chat.completions.create(model="scripted", messages=ASK)
        assert found.choices[0].message.content == ANSWER
        chunks = client.chat.completions.create(model="scripted", messages=ASK, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert ANSWER in client.responses.create(model="scripted", input="How many?").output_text
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model="scripted", messages=5)  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError, match="Known: scripted"):
            client.chat.completions.create(model="other", messages=ASK)
    answer = httpx.post(f"{root}/v1/chat/completions", json={"messages": ASK, "request_id": "mine"})
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert httpx.get(f"{root}/health").status_code == httpx.get(f"{root}/").status_code == 200
    answer = httpx.get(f"{root}/v1/models", headers={"Host": "attacker.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    too_large = httpx.post(f"{root}/v1/chat/completions", content=b" " * 4_000_001)
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "request_too_large")
    end = time.monotonic() + 10
    while 'replica="' not in (text := httpx.get(f"{root}/metrics").text) and time.monotonic() < end:
        time.sleep(0.2)
    assert "stepspec_committed_tokens_total{" in text


def test_a_websocket_is_refused_without_a_traceback(root: str) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    for path in ("/", "/v1/chat/completions", "/metrics"):
        answer = httpx.get(f"{root}{path}", headers={**upgrade, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
        assert answer.status_code == 403
    logs = Path("/tmp/ray/session_latest/logs/serve")
    assert not any("Traceback" in log.read_text() for log in logs.glob("replica_default_front_*"))


def test_it_scales_under_load_and_survives_a_killed_replica(service: StartedService) -> None:
    assert len(processes(service, "models")) == 1

    async def load_until_there_are_two() -> None:
        async with Client(service.address) as client, asyncio.timeout(60):
            while len(processes(service, "models")) < 2:
                found = await asyncio.gather(*(client.send(chat_request("How many?")) for _ in range(16)))
                assert all(each.answered or each.refused for each in found)

    asyncio.run(load_until_there_are_two())
    found = asyncio.run(under_kill(service, 4.0))
    assert found.lost == 0, found
    assert found.answered > 50
    assert found.back_s is not None, found
    assert found.back_s < 30


def front_of(arguments: Arguments, **models: Any) -> Any:
    """Return a front outside of Ray."""
    deployed: Any = Front
    made = deployed.func_or_class.__bases__[0]  # Ray's class around it needs a cluster
    return made(arguments, SimpleNamespace(**models), None)


def test_without_keys_only_this_machine_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(client: str, host: str, **settings: Any) -> tuple[int, str]:
        board = SimpleNamespace(metrics=SimpleNamespace(remote=metrics))
        front = front_of(Arguments(**settings))
        front._board = board
        transport = httpx.ASGITransport(front.__serve_build_asgi_app__(), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as sender:
            found = await sender.get("/metrics")
            return found.status_code, found.text

    async def metrics() -> bytes:
        return b""

    def status(client: str, host: str = "localhost", **settings: Any) -> int:
        return asyncio.run(answer(client, host, **settings))[0]

    assert {status(client) for client in ("127.0.0.1", "::1", "::ffff:127.0.0.1")} == {200}
    for client in ("10.0.0.9", "::ffff:10.0.0.9", "fe80::1%eth0", "2001:db8::1"):
        assert status(client) == 403
        assert status(client, insecure=True) == 200
    assert "api_keys" in asyncio.run(answer("10.0.0.9", "localhost"))[1]
    assert status("127.0.0.1", "attacker.example") == 403
    assert status("127.0.0.1", "models.example", allowed_host="models.example") == 200
    monkeypatch.setenv(ENVIRONMENT, "a-key-of-a-client")
    assert status("10.0.0.9", "models.example") == 200
    assert status("10.0.0.9", "attacker.example", allowed_host=["models.example"]) == 403


def test_without_keys_it_does_not_start_behind_a_proxy_that_hides_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(UsageError, match="RAY_SERVE_ENABLE_HA_PROXY"):
        front_of(Arguments())
    front_of(Arguments(insecure=True))
    monkeypatch.setenv(ENVIRONMENT, "a-key-of-a-client")
    front_of(Arguments())


@pytest.mark.parametrize("authorization", [b"", b"Bearer a-key-of-nobody", b"Bearer"])
def test_a_body_is_not_read_without_a_key(authorization: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "a-key-of-a-client")
    sent = list[Any]()

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", authorization), (b"content-length", b"9")]
    scope = {**SCOPE, "headers": headers}
    asyncio.run(front_of(Arguments())._forward(scope, receive, send))
    assert sent[0]["status"] == 401


SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


class ScriptedStream:
    """What a replica sends, until it dies where there is an error."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    async def __aiter__(self) -> AsyncGenerator[list[Any], None]:
        for each in self._messages:
            if isinstance(each, Exception):
                raise each
            yield [dict(each)]

    def cancel(self) -> None: ...


@pytest.mark.parametrize(
    ("replicas", "parts"),
    [
        ([[RayActorError()], [START, PART, LAST]], [b"data: 1", b"[DONE]"]),
        ([[START, PART, RayActorError()]], [b"data: 1", b"replica_lost"]),
        ([[START, PART, LAST, RayActorError()]], [b"data: 1", b"[DONE]"]),
    ],
    ids=["before it answers", "during the answer", "after the last part"],
)
def test_a_stream_ends_once_whenever_its_replica_dies(replicas: list[Any], parts: list[bytes]) -> None:
    answers, sent = iter(replicas), list[Any]()
    models: Any = SimpleNamespace(respond=SimpleNamespace(remote=lambda *asked: ScriptedStream(next(answers))))
    front = front_of(Arguments(), options=lambda **options: models)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(front._forward(SCOPE, receive, send))
    bodies = [each["body"] for each in sent if each["type"] == "http.response.body"]
    assert len(bodies) == len(parts)
    assert all(part in body for part, body in zip(parts, bodies, strict=True))
    assert not sent[-1].get("more_body", False)


def test_a_session_of_one_key_is_not_that_of_another() -> None:
    asked: list[str] = []
    models: Any = SimpleNamespace(respond=SimpleNamespace(remote=lambda *asked: ScriptedStream([START, LAST])))

    def chosen(session_id: str, **_: Any) -> Any:
        asked.append(session_id)
        return models

    front: Any = front_of(Arguments(insecure=True))
    front._models = SimpleNamespace(options=chosen)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None: ...

    for session, key in (("a", "k"), ("a", "k"), ("b", "k"), ("a", "o"), (None, "k")):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        headers += [] if session is None else [(b"x-session-id", session.encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers, "query_string": b""}
        asyncio.run(front._forward(scope, receive, send))
    assert asked[0] == asked[1]
    assert len(set(asked)) == 4
    assert asked[4] == "", "a request without a session goes to the less busy replica"


def test_limits_of_a_key_count_over_all_replicas() -> None:
    client, here, there = KeyClient("team", requests_per_minute=3), Rates(), Rates()
    here.check(client)
    there.check(client)

    async def exchanged() -> None:
        board = Board.func_or_class()  # type: ignore[operator]
        assert await board.exchange("there", b"# TYPE a gauge\na 1.0\n", there.counts()) == {}
        here.elsewhere = await board.exchange("here", b"# TYPE a gauge\na 2.0\n", here.counts())
        text = (await board.metrics()).decode()
        assert 'a{replica="there"} 1.0' in text
        assert 'a{replica="here"} 2.0' in text

    asyncio.run(exchanged())
    assert here.elsewhere == {("team", "requests"): 1}
    here.check(client)
    with pytest.raises(UsageError, match="limited to 3 requests"):
        here.check(client)


def test_metrics_of_replicas_are_merged_by_family() -> None:
    text = b'# HELP a_total Things.\n# TYPE a_total counter\na_total{kind="x"} 1.0\n'
    merged = merged_metrics({"one": text, "two": text}).decode()
    assert merged.count("# TYPE a_total counter") == 1
    assert 'a_total{kind="x",replica="one"} 1.0' in merged


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"policy": "nothing"}, "There is no policy"),
        ({"pair": "smal"}, "There is no pair"),
        ({"pair": ["a=embedded", "a=embedded"]}, "Two pairs"),
        ({"target": "torch:/nothing"}, "There is no folder"),
    ],
)
def test_invalid_arguments_are_errors_before_anything_is_loaded(arguments: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        app(Arguments(**arguments))


def test_the_recipe_for_eight_gpus_has_known_arguments() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((Path(__file__).parents[1] / "docs/deploy/ray-eight-gpus.yaml").read_text())
    (application,) = recipe["applications"]
    assert application["import_path"] == "stepspec.serve.ray:app"
    arguments = Arguments(**application["args"])
    assert arguments.target is not None
    assert '"method":"ngram"' in arguments.target
    assert not load_policy(arguments.policy)[0].needs_draft

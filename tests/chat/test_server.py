"""The server: draining, HTTPS, logs, web origins, and a draft or a target that dies and comes back."""

import io
import json
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from following import FollowingEngine, following_pair
from scripted import Call, Reply
from service import running, serving
from typer.testing import CliRunner

from stepspec import Pair
from stepspec.api.scope import PairScope
from stepspec.cli import app
from stepspec.errors import EngineError
from stepspec.serve import Settings, connections
from stepspec.serve.hosts import LOCAL
from stepspec.serve.log import line_formatter

ASK: Any = {"messages": [{"role": "user", "content": "How many?"}], "stream": True}


RAW = '{"messages": [{"role": "user", "content": "How many?"}], "tools": []}\n<|assistant|>'


def stream(port: int, into: list[str], **fields: Any) -> None:
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=ASK | fields, timeout=30) as answer:
        into.extend(line for line in answer.iter_lines() if line.startswith("data: "))


class DeadJudge:
    """A judge model whose server is unreachable."""

    name = "reward"
    abilities = frozenset({"reward"})

    async def reward(self, prompt: str, steps: Sequence[str], group: str | None = None) -> float:
        raise EngineError("http://10.1.2.3:8000/v1 answered 500: no such file /srv/models/reward.")

    def describe(self) -> Mapping[str, str]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


def test_the_error_of_a_judge_goes_to_the_log_and_not_to_clients(caplog: pytest.LogCaptureFixture) -> None:
    with serving(replace(following_pair(), judges={"reward": DeadJudge()}), "rsd") as address:
        answers = [httpx.post(f"{address}/chat/completions", json=ASK | {"stream": each}) for each in (False, True)]
    for answer in answers:
        assert "The judge reward failed at " in answer.text
        assert "10.1.2.3" not in answer.text
        assert "/srv" not in answer.text
    assert len([each for each in caplog.records if "10.1.2.3" in each.getMessage()]) == 2, "once for each request"


class Stories(PairScope):
    """A pair that knows no question."""

    def note(self, mean_logprob: float | None) -> str | None:
        return self.knows


def test_the_note_on_unfamiliar_questions_is_logged_once_also_after_another_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scope = Stories(version=1, knows="It knows stories.", least_logprob=0.0, measured="by hand")
    pair = replace(following_pair(), judges={"reward": DeadJudge()})
    with serving({"first": pair, "second": replace(pair, scope=scope)}, "rsd") as address:
        for model in ("first", "second", "second"):
            answer = httpx.post(f"{address}/chat/completions", json=ASK | {"model": model, "stream": False})
            assert answer.json()["metrics"]["stepspec"]["note"]
    assert [each.getMessage() for each in caplog.records].count("It knows stories.") == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [("chat/completions", ASK), ("completions", {"prompt": RAW}), ("responses", {"input": "How many?"})],
)
def test_a_stream_begins_with_the_note_on_an_unfamiliar_question(path: str, fields: Any) -> None:
    scope = Stories(version=1, knows="It knows stories.", least_logprob=0.0, measured="by hand")
    with serving(replace(following_pair(), scope=scope), "target") as address:
        answer = httpx.post(f"{address}/{path}", json={**fields, "stream": True})
    lines = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if '"stepspec"' in line]
    assert lines[0]["stepspec"] == {"note": "It knows stories."}


@pytest.mark.parametrize(("drain_s", "last"), [(20.0, "data: [DONE]"), (0.8, "shut down")])
def test_running_requests_end_or_are_ended_after_sigterm(
    drain_s: float, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    caplog.set_level(logging.INFO, "stepspec")
    with httpx.Client() as client, running(following_pair(delay_s=1.5), Settings(drain_s=drain_s)) as (server, port):
        thread = threading.Thread(target=stream, args=(port, lines))
        thread.start()
        admission = server._service.admission  # pyright: ignore[reportPrivateUsage]
        while not admission.num_running:
            time.sleep(0.01)
        since = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        while not admission.is_draining:
            time.sleep(0.01)
        root = f"http://127.0.0.1:{port}"
        assert client.get(f"{root}/ready").status_code == 503, "a load balancer can see that the service ends"
        refused = client.post(f"{root}/v1/chat/completions", json=ASK)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert client.head(f"{root}/health").status_code == 200
        thread.join()
        assert time.monotonic() - since < 5
    assert last in lines[-1]
    if last == "shut down":
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "service_overloaded"
    logged = {found["status"]: found for each in caplog.records if (found := vars(each)).get("method") == "POST"}
    reason = "service_overloaded 'draining'"
    assert (logged[503]["error"], logged[503]["complete"]) == (reason, True)
    assert (logged[200].get("error"), logged[200]["complete"]) == ((reason, False) if drain_s < 1 else (None, True))


def test_https_and_structured_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    for chain in issued.cert_chain_pems:
        chain.write_to_path(cert, append=True)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    handler = logging.StreamHandler(written := io.StringIO())
    handler.setFormatter(line_formatter(as_json=True))
    monkeypatch.setattr(logging.getLogger("stepspec"), "handlers", [handler])
    caplog.set_level(logging.INFO, "stepspec")
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    with running(following_pair(), Settings(log_prompts=True), cert=cert, key=key) as (_, port):
        silent = socket.create_connection(("127.0.0.1", port), timeout=10)
        sent = {"messages": ASK["messages"], "request_id": "mine", "session_id": "s"}
        answer = httpx.post(f"https://127.0.0.1:{port}/v1/chat/completions", json=sent, verify=context)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        with silent:
            assert silent.recv(1) == b"", "a client has as much time for its handshake as for a head"
    entries = [json.loads(line) for line in written.getvalue().splitlines()]
    entry = next(each for each in entries if each.get("path") == "/v1/chat/completions")
    assert (entry["request_id"], entry["session_id"], entry["status"], entry["policy"]) == ("mine", "s", 200, "target")
    assert entry["num_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert "How many?" in entry["prompt"]
    assert written.getvalue().count("How many?") == 1
    swapped = ["serve", "--check", "--port", "0", "--tls-cert", str(key), "--tls-key", str(cert)]
    assert "are not a certificate and its key, in this order" in CliRunner().invoke(app, swapped).stdout
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.TraditionalOpenSSL
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, password))
    encrypted = ["serve", "--check", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    assert "the key is encrypted" in CliRunner().invoke(app, encrypted).stdout


def test_only_named_web_origins_may_use_the_service_and_prompts_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cors_origins=["https://a.example"])
    with running(following_pair(), settings) as (server, port):
        caplog.set_level(logging.INFO, "stepspec")
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            answer = httpx.post(url, json=ASK, headers={"Origin": origin, "Authorization": "Bearer secret-key"})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            assert httpx.options(url, headers={"Origin": origin, **asked}).is_success is allowed
        httpx.post(url, json={**ASK, "min_tokens": 5})
        monkeypatch.setattr(server._service, "received", None)  # pyright: ignore[reportPrivateUsage]
        answer = httpx.post(url, json=ASK, headers={"Origin": "https://a.example", "X-Request-Id": "mine"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "The service failed. See request mine in the service's log."
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["x-request-id"] == "mine"
    assert "mine failed with an internal error" in caplog.text
    assert "POST /v1/chat/completions 200" in caplog.text
    assert "400" in caplog.text
    assert "invalid_request_error 'min_tokens'" in caplog.text
    assert "How many" not in caplog.text
    assert "secret-key" not in caplog.text


def test_a_name_that_leads_to_this_machine_is_not_answered_unless_it_is_allowed() -> None:
    with running(following_pair(), Settings(hosts=(*LOCAL, "models.example"))) as (_, port):
        for host, status in {
            **dict.fromkeys(("localhost", "127.0.0.1", "[::1]", "a.localhost", "MODELS.example"), 200),
            **dict.fromkeys(("attacker.example", "localhost.attacker.example", "127.0.0.1@a", "["), 403),
        }.items():
            for path in ("/v1/models", "/metrics", "/"):
                answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
                assert answer.status_code == status, host
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-host" in answer.json()["error"]["message"]


class Dying(FollowingEngine):
    """An engine that fails while it is dead, or whose answers have no braces."""

    dead = without_braces = False

    def _reply_to(self, call: Call) -> Reply:
        reply = super()._reply_to(call)
        if self.without_braces:
            return replace(reply, text=reply.text.replace("}", ""))
        return Reply(fails=EngineError("The server at 10.0.0.9 has gone away.")) if self.dead else reply


def test_an_engine_that_dies_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    pair = following_pair()
    target = Dying(pair.target.tokenizer, "target")  # type: ignore[arg-type]
    with running(Pair(target, pair.draft), Settings()) as (_, port):
        root = f"http://127.0.0.1:{port}"

        def up() -> str:
            text = httpx.get(f"{root}/metrics").text
            return next(
                line for line in text.splitlines() if line.startswith("stepspec_engine_up") and "target" in line
            )[-3:]

        body = ASK | {"stream": False}
        assert httpx.post(f"{root}/v1/chat/completions", json=body).status_code == 200
        target.dead = True
        answer = httpx.post(f"{root}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        request_id = answer.headers["x-request-id"]
        shown = f"A model failed. See request {request_id} in the service's log."
        assert answer.json()["error"]["message"] == shown
        assert f"{request_id} failed: The server at 10.0.0.9 has gone away." in caplog.text
        lines: list[str] = []
        stream(port, lines)
        assert "10.0.0.9" not in "".join(lines)
        assert up() == "0.0"
        target.dead = False
        assert httpx.post(f"{root}/v1/chat/completions", json=body).status_code == 200
        assert up() == "1.0"
        target.without_braces = True
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        answer = httpx.post(f"{root}/v1/chat/completions", json=body | {"response_format": form})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"].startswith("The JSON schema cannot be followed")
        assert up() == "1.0", "a schema that cannot be followed says nothing about the engine"
        assert target.num_open == 0

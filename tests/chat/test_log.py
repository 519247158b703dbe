"""The service's log: one line for each entry, of any text from clients and servers, in text and in JSON."""

import http.client
import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from following import FollowingEngine, following_pair
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import Call, Reply
from test_server import RAW, running

from stepspec import Pair
from stepspec.base.printable import printable
from stepspec.serve import Keys, ServiceLimits, Settings
from stepspec.serve.keys import ENVIRONMENT
from stepspec.serve.log import POLLED, line_formatter
from stepspec.serve.models import ServedModel

HOSTILE = "\x1b]0;owned\x07\x9b2J\r\nINFO a false line\u2028\u2029\u202e\x7f\x85\x0b"
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "

ADDRESSES = [((), "127.0.0.1"), (("10.9.9.9",), "127.0.0.1"), (("127.0.0.1",), "203.0.113.9")]
"""The address in the log by the trusted proxies, if this machine says that 203.0.113.9 asks."""


class Lines(logging.Handler):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self.setFormatter(line_formatter(as_json=as_json))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def lines(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """What the whole process logs, formatted as text, or as JSON with the parameter True."""
    caplog.set_level(logging.INFO, "stepspec")
    handler = Lines(as_json=getattr(request, "param", False))
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@given(st.text())
@example(HOSTILE)
def test_an_entry_is_one_line_without_control_characters(text: str) -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "Failed: %s", (text,), None)
    record.color_message = "\x1b[1mFailed\x1b[0m"
    (line,) = line_formatter(as_json=False).format(record).splitlines()
    assert re.match(TIME + "ERROR Failed: ", line)
    assert line == printable(line)
    (line,) = line_formatter(as_json=True).format(record).splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == f"Failed: {text}"
    assert "\\u001b[1m" not in line
    when = datetime.fromisoformat(json.loads(line)["asctime"])
    assert when.utcoffset() is not None
    assert when.timestamp() == pytest.approx(record.created, abs=0.002)


@given(st.text())
@example(HOSTILE)
def test_a_traceback_cannot_begin_a_line_of_the_log(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "It broke.", (), sys.exc_info())
    first, *rest = line_formatter(as_json=False).format(record).split("\n")
    assert first.endswith("ERROR It broke.")
    assert all(line.startswith("    ") and line == printable(line) for line in rest)


@pytest.mark.parametrize("lines", [False, True], indirect=True)
def test_hostile_headers_write_one_line_for_a_request(lines: Lines) -> None:
    span = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
    values = [HOSTILE.replace("\r\n", "").encode(errors="replace"), b"\x9b2J,=;" * 500, b"a,b=\xc2\x9bc,d" * 180]
    headers = [(name, value) for name in (b"baggage", b"tracestate", b"x-request-id") for value in values]
    with running(following_pair(), Settings()) as (_, port):
        lines.texts.clear()
        for name, value in headers:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
                wire.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
                wire.sendall(b"traceparent: " + span + b"\r\n" + name + b": " + value + b"\r\n\r\n")
                while wire.recv(1000):
                    pass
    others = [line for line in lines.texts if "/v1/models" not in line]
    assert len(others) <= len(headers), "one line for a head that the parser refuses, or for a bad tracestate"
    assert len(lines.texts) - len(others) >= 2 * len(values), "not all are refused by the parser"
    assert all(line == printable(line) for line in lines.texts)


def test_successful_polls_are_not_logged_and_failures_are(lines: Lines) -> None:
    with running(following_pair(), Settings()) as (server, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        def get(path: str) -> int:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            return answer.status

        assert {get(path) for path in POLLED * 3} == {200}
        assert not [line for line in lines.texts if "GET" in line]
        server._service.admission.is_draining = True  # pyright: ignore[reportPrivateUsage]
        assert get("/ready") == 503
        assert get("/v1/models") == 200
        connection.close()
    asked = [line for line in lines.texts if "GET" in line]
    for line, expected in zip(asked, ("/ready 503", "/v1/models 200"), strict=True):
        assert re.match(TIME + rf"INFO \w+ 127\.0\.0\.1 GET {expected} ", line)
    assert "Shutting down" in lines.texts[-1]


@pytest.mark.parametrize("lines", [False, True], indirect=True)
@pytest.mark.parametrize(("proxies", "address"), ADDRESSES)
def test_the_address_of_a_client_is_that_of_a_trusted_proxy(lines: Lines, proxies: Sequence[str], address: str) -> None:
    settings = Settings(keys=Keys(None, {ENVIRONMENT: "k" * 20}))
    with running(following_pair(), settings, proxies=proxies) as (_, port):
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/v1/models", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 401
        assert 'stepspec_http_responses_total{status="401"} 1.0' in httpx.get(f"{url}/metrics").text
    (line,) = [each for each in lines.texts if "/v1/models" in each]
    if line.startswith("{"):
        entry = json.loads(line)
        assert (entry["client_ip"], entry["error"], entry["status"]) == (address, "invalid_api_key", 401)
    assert f" {address} GET /v1/models 401 " in line


@pytest.mark.parametrize("lines", [False, True], indirect=True)
def test_a_prompt_is_logged_once_if_at_all(lines: Lines) -> None:
    for log_prompts in (False, True):
        with running(following_pair(), Settings(log_prompts=log_prompts)) as (_, port):
            body = {"messages": [{"role": "user", "content": f"How many?{HOSTILE}"}]}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).is_success
        assert sum(line.count("How many?") for line in lines.texts) == log_prompts
    assert all(line == printable(line) for line in lines.texts)


@pytest.mark.parametrize("lines", [True], indirect=True)
@pytest.mark.parametrize(
    ("path", "prefix", "fields"),
    [
        ("chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "How many?"}]}),
        ("responses", "resp_", {"input": "How many?"}),
        ("completions", "cmpl-", {"prompt": RAW, "n": 2}),
    ],
)
def test_the_line_of_a_text_has_its_costs_and_the_id_of_the_answer(
    lines: Lines, path: str, prefix: str, fields: Any
) -> None:
    with running(following_pair(), Settings()) as (_, port):
        body = {"model": "target@two-level", "temperature": 2.0, **fields}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=body).json()
    (entry,) = [json.loads(line) for line in lines.texts if f"POST /v1/{path} 200" in line]
    assert answer["id"] == prefix + entry["request_id"]
    assert entry["prompt_tokens"] == answer["usage"].get("prompt_tokens", answer["usage"].get("input_tokens"))
    assert entry["finish_reason"] == ("stop, stop" if "n" in fields else "stop")
    assert 0 <= entry["queue_s"] < entry["ttft_s"] < entry["seconds"]
    if answer["metrics"]["stepspec"] is not None:
        counts = answer["metrics"]["stepspec"]["counts"]
        assert entry["drafted"] == counts["drafted"] + counts["token_drafted"] > 0
        assert entry["accepted"] == counts["accepted"] + counts["token_accepted"] > 0
        assert entry["target_passes"] == counts["target_passes"] > 0


class Waiting(FollowingEngine):
    """An engine whose calls wait for it."""

    def _reply_to(self, call: Call) -> Reply:
        return replace(super()._reply_to(call), queue_s=0.05)


@pytest.mark.parametrize("lines", [True], indirect=True)
@pytest.mark.parametrize("num_answers", [1, 2])
def test_time_in_the_queue_is_that_of_the_service_in_responses_log_and_metrics(
    lines: Lines, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ServedModel.session

    def slow_session(*arguments: Any) -> Any:
        time.sleep(0.05)
        return session(*arguments)

    monkeypatch.setattr(ServedModel, "session", slow_session)
    pair = Pair(Waiting(following_pair().target.tokenizer, "target", delay_s=0.3), None)  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "How many?"}], "n": num_answers, "stream": True}
    settings = Settings(limits=ServiceLimits(max_running=1))
    with running(pair, settings) as (_, port), ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{port}"
        first = threads.submit(httpx.post, f"{url}/v1/chat/completions", json=body)
        time.sleep(0.1)  # else the second one's slow session holds up the first one in the queue
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body), first.result()]
        (total,) = re.findall(r"^stepspec_queue_seconds_sum\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    found = [
        chunk["metrics"]
        for answer in answers
        for line in answer.text.splitlines()
        if line.startswith("data: {") and "metrics" in (chunk := json.loads(line.removeprefix("data: ")))
    ]
    queued = sorted(each["queue_time_ms"] / 1000 for each in found)
    assert len(queued) == 2 * num_answers
    assert queued[0] < 0.02, "a request that no other one precedes waits for the engine and for nothing else"
    assert queued[1] >= 0.1
    assert sum(queued) == pytest.approx(float(total), abs=1e-6)
    assert all(min(each["stepspec"]["times"][name] for name in ("engine_wait", "controller")) >= 0.05 for each in found)
    logged = sorted(json.loads(line)["queue_s"] for line in lines.texts if "POST" in line)
    firsts = [queued[0], queued[-num_answers]]
    assert logged == pytest.approx(firsts, abs=0.02)


def test_in_json_mode_every_line_of_the_process_is_json() -> None:
    program = (
        "import logging, warnings\n"
        "from stepspec.serve.log import configure_logs\n"
        "configure_logs(as_json=True)\n"
        "logging.getLogger('opentelemetry.baggage').warning('bad %s', 'a\\n\\x9b')\n"
        "logging.getLogger('uvicorn.error').info('up', extra={'color_message': '\\x1b[1mup'})\n"
        "warnings.warn('old')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('asyncio').exception('lost')\n"
        "logging.getLogger('stepspec.serve').info('one')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert [each["levelname"] for each in found] == ["WARNING", "INFO", "WARNING", "ERROR", "INFO"]
    assert "ZeroDivisionError" in found[3]["exc_info"]
    assert not any("color_message" in each for each in found)

"""Server errors raise a message that names the server and says what to do. A script plays the server."""

import asyncio
import base64
import contextlib
import json
import math
import re
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy import Call, Fault, Script, ServerFixture

from stepspec import StepSpec, load_pair
from stepspec.engines.hugging_face import HuggingFaceTokenizer, load_tokenizer
from stepspec.engines.protocol import (
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.remote import RemoteEngine
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.detection import found_server
from stepspec.engines.remote.routers import ROUTERS
from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, UsageError
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

TOKENIZER = str(WEIGHTS / "target")
STEADY = str(Path(__file__).parents[1] / "steady.toml")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def response(fields: Any, status: int = 200, **settings: Any) -> Fault:
    """Return a JSON response."""
    return Fault(status=status, body=json.dumps(fields).encode(), **settings)


def events(*found: Any, done: bool = True) -> Fault:
    """Return a stream of server-sent events."""
    lines = [f"data: {json.dumps(each) if not isinstance(each, str) else each}\n\n" for each in found]
    body = "".join(lines) + ("data: [DONE]\n\n" if done else "")
    return Fault(status=200, body=body.encode(), content_type="text/event-stream")


def completion(*ids: int, **fields: Any) -> dict[str, Any]:
    """Return a completion, or a chunk of one, with these token ids."""
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids), "finish_reason": None} | fields]}


MODELS = {"data": [{"id": "target", "root": TOKENIZER, "max_model_len": 64, "owned_by": "vllm"}]}


def healthy(call: Call) -> Fault:
    """Respond like a correct server that writes one token."""
    if call.path.endswith("/models"):
        return response(MODELS)
    if call.path.endswith("/completions"):
        rows = [None, *({"6": {"logprob": -1.0, "rank": 1}},) * 2] if "prompt_logprobs" in call.fields else None
        choice = completion(9, finish_reason="length", prompt_logprobs=rows)["choices"][0]
        return response({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    return response({}, 404)


def load(url: str) -> RemoteEngine:
    return RemoteEngine.load(url)


def test_a_server_with_valid_responses_is_loaded(server: ServerFixture) -> None:
    engine = load(server(healthy).url)
    assert (engine.name, engine.max_context) == ("target", 64)
    assert engine.abilities == {"scores", "choices", "forget"}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda call: Fault(status=200, body=b"<html>hello", content_type="text/html"), "a web page.*ends in /v1"),
        (lambda call: Fault(status=200, body=b'{"data": [{"id"'), "JSON that cannot be read"),
        (lambda call: response({"data": 7}), "invalid list of models .data"),
        (lambda call: response([]), "JSON that is not an object"),
        (
            lambda call: response({"error": {"message": "no such key"}}, 401),
            "rejected the API key.*no such key.*STEPSPEC_API_KEY",
        ),
        (lambda call: response({"detail": "Not Found"}, 404), "does not have this model or path.*Not Found"),
        (lambda call: response({"error": "on fire"}, 500), "failed.*on fire"),
        (lambda call: Fault(status=200, cut_after=0, body=b"", reset=True), "http://127.0.0.1"),
        (
            lambda call: response(MODELS) if "models" in call.path else response({"message": "no text"}, 400),
            "reject.*no text",
        ),
        (lambda call: response(MODELS) if "models" in call.path else response({"choices": []}), "0 choices"),
        (
            lambda call: response(MODELS) if "models" in call.path else response({"choices": 3}),
            "invalid completion.*choices",
        ),
        (
            lambda call: (
                response(MODELS) if "models" in call.path else response({"error": {"message": "x", "code": 404}})
            ),
            "404",
        ),
    ],
)
def test_loading_rejects_invalid_responses(server: ServerFixture, script: Script, message: str) -> None:
    proxy = server(script)
    with pytest.raises(ModelError, match=f"(?s){message}") as caught:
        load(proxy.url)
    assert proxy.url in str(caught.value)


def test_an_unreachable_port_is_named() -> None:
    with pytest.raises(ModelError, match=r"Nothing answers at http://127.0.0.1:9/v1 .*host and port"):
        load("http://127.0.0.1:9/v1")


def test_https_to_a_server_without_tls_is_an_error(server: ServerFixture) -> None:
    proxy = server(healthy)
    with pytest.raises(ModelError, match=r"No TLS connection.*SSL_CERT_FILE"):
        load(proxy.url.replace("http", "https"))


def test_a_model_that_the_server_does_not_have_is_named(server: ServerFixture) -> None:
    with pytest.raises(ModelError, match=r"no model 'targt'\. Did you mean 'target'\?"):
        load(server(healthy).url + "#targt")


def test_one_of_several_models_must_be_chosen(server: ServerFixture) -> None:
    two = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(ModelError, match=r"has 2 models; add one after '#': one, two"):
        load(server(lambda call: response(two)).url)


def test_a_tokenizer_that_is_not_found_must_be_named_in_the_address(server: ServerFixture, tmp_path: Path) -> None:
    models = {"data": [{"id": "some-model", "root": str(tmp_path)}]}
    proxy = server(lambda call: response(models) if "models" in call.path else healthy(call))
    with pytest.raises(ModelError, match=r"tokenizer.*\?tokenizer=NAME"):
        load(proxy.url)
    assert load(f"{proxy.url}?tokenizer={TOKENIZER}").name == "some-model"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("http:", "does not name a model"),
        ("http://", "names no host"),
        ("http://127.0.0.1:9/v1?timout=3", "no option of an address 'timout'.*Did you mean 'timeout'"),
        ("http://127.0.0.1:9/v1?timeout=soon", "timeout='soon' of an address is not a number"),
        ("http://127.0.0.1:9/v1?timeout=nan", "timeout of an address must be a number above 0, got nan"),
        ("http://127.0.0.1:9/v1?first_token_timeout=-1", "first_token_timeout .* above 0, got -1"),
        ("http://127.0.0.1:9/v1?max_response_mb=0", "max_response_mb .* above 0, got 0"),
        ("http://127.0.0.1:9/v1?retries=-1", "retries of an address must be at least 0, got -1"),
        ("http://127.0.0.1:99999/v1", "is not a valid address: Port out of range"),
        ("http://[::1/v1", "is not a valid address: Invalid IPv6 URL"),
        ("http://127.0.0.1:9/v1?key_env=NOBODY_SET_THIS", "NOBODY_SET_THIS.*is not set"),
    ],
)
def test_an_invalid_address_is_rejected(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pair(spec, "torch:nowhere")


async def generated_ids(engine: RemoteEngine, max_tokens: int = 8) -> tuple[int, ...]:
    chunk = await collect(engine.generate(Generate(TokenBuffer([5, 6, 7]), Sampling(), Stop(max_tokens))))
    await engine.aclose()
    return chunk.ids


def streaming(answer: Fault) -> Script:
    return lambda call: answer if call.fields.get("stream") else healthy(call)


async def test_a_stream_is_read_to_its_end(server: ServerFixture) -> None:
    answer = events(
        completion(8, 9), completion(10, finish_reason="length"), {"choices": [], "usage": {"prompt_tokens": 3}}
    )
    assert await generated_ids(load(server(streaming(answer)).url)) == (8, 9, 10)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (events(completion(8), done=False), "ended the response before it was complete"),
        (events(completion(8, finish_reason="content_filter")), "unknown finish_reason 'content_filter'"),
        (events(completion(8), '{"choices": [{"te'), "JSON that cannot be read"),
        (events(completion(8), {"error": {"message": "out of memory", "code": 500}}), "out of memory"),
        (events(completion(8), completion(99_999_999)), "a token that the tokenizer does not have"),
        (events({"choices": [{"text": "a"}]}), "text without token ids"),
        (Fault(status=200, body=b"<html>", content_type="text/html"), "a web page"),
        (response({"message": "boo"}, 418), "rejected the request .418: boo"),
    ],
)
async def test_an_invalid_stream_is_an_error(server: ServerFixture, answer: Fault, message: str) -> None:
    proxy = server(streaming(answer))
    engine = load(proxy.url)
    with pytest.raises(EngineError, match=message) as caught:
        await generated_ids(engine)
    assert proxy.url in str(caught.value)


async def test_a_prompt_that_is_too_long_is_a_context_error(server: ServerFixture) -> None:
    message = {"error": {"message": "This model's maximum context length is 2 tokens."}}
    engine = load(server(streaming(response(message, 400))).url)
    with pytest.raises(ContextError, match="maximum context length is 2"):
        await generated_ids(engine)
    with pytest.raises(ContextError, match="context of 64"):
        await collect(engine.generate(Generate(TokenBuffer([5] * 64), Sampling(), Stop(1))))


async def test_a_silent_server_times_out(server: ServerFixture) -> None:
    proxy = server(streaming(Fault(hangs=True, status=200)))
    engine = load(proxy.url + "?timeout=0.3")
    with pytest.raises(EngineError, match=r"sent no token for 0.3 s"):
        await generated_ids(engine)


def endless(block: bytes, every_s: float = 0.0, body: bytes = b"", content_type: str = "text/event-stream") -> Fault:
    return Fault(status=200, body=body, content_type=content_type, forever=block, every_s=every_s)


def bomb() -> Fault:
    """Return a gzip body that expands to 256 MB of spaces."""
    packer = zlib.compressobj(1, wbits=31)
    body = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(256)) + packer.flush()
    return Fault(status=200, body=body, headers=(("Content-Encoding", "gzip"),))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (bomb, "content-encoding 'gzip', although none was requested"),
        (
            lambda: replace(response({}, 503), headers=(("Content-Encoding", "br, zstd"),)),
            "content-encoding 'br, zstd'",
        ),
        (lambda: endless(b"data: " + b"x" * 65_536), "an event of more than 1 MB"),
        (lambda: endless(b"data: xy\n" * 4096), "an event of more than 1 MB"),
        (lambda: endless(b": keep-alive\r" * 4096), "an event of more than 1 MB"),
        (lambda: endless(b": keep-alive\r\n\r\n" * 4096), "more than 2 MB .max_response_mb=N"),
        (lambda: endless(b" " * 65_536, body=b"<html>", content_type="text/html"), "more than 2 MB"),
    ],
)
async def test_large_responses_take_little_memory(
    server: ServerFixture, answer: Callable[[], Fault], message: str
) -> None:
    engine = load(server(streaming(answer())).url + "?max_response_mb=2&timeout=60&retries=0")
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=message):
            await generated_ids(engine)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (endless(b" " * 65_536, content_type="application/json"), "more than 2 MB"),
        (endless(b"[]," * 20_000, body=b"[", content_type="application/json"), "more than 2 MB"),
    ],
)
def test_large_responses_are_rejected_when_loading(server: ServerFixture, answer: Fault, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(server(lambda call: answer).url + "?max_response_mb=2")


def test_json_with_too_many_values_is_rejected(server: ServerFixture) -> None:
    text = b"[" + b"[]," * 2_000_001 + b"1]"
    with pytest.raises(ModelError, match="JSON of more than 4,000,000 values"):
        load(server(lambda call: Fault(status=200, body=text)).url)


EMPTY = f"data: {json.dumps(completion())}\n\n".encode()
ONE = events(completion(8), done=False).body
MANY = events(completion(8), completion(9, finish_reason="length"), done=False).body


@pytest.mark.parametrize(
    ("answer", "limits", "message"),
    [
        (endless(b": keep-alive\n\n", 0.02), "timeout=0.3", "no token for 0.3 s .*timeout="),
        (endless(EMPTY, 0.02), "timeout=0.3", "no token for 0.3 s"),
        (endless(EMPTY, 0.02), "timeout=60&first_token_timeout=0.3", "no token for 0.3 s .*first_token_timeout="),
        (endless(EMPTY, 0.02, body=ONE), "timeout=0.3&first_token_timeout=60", "no token for 0.3 s .* timeout="),
        (endless(ONE, 0.02, body=MANY), "timeout=0.3", "no token for 0.3 s"),
        (endless(b" ", 0.02, content_type="text/html"), "timeout=0.3", "no token for 0.3 s"),
        (Fault(hangs=True, status=200), "timeout=60&first_token_timeout=0.3", "no token for 0.3 s"),
    ],
)
async def test_responses_without_tokens_do_not_extend_the_timeout(
    server: ServerFixture, answer: Fault, limits: str, message: str
) -> None:
    engine = load(server(streaming(answer)).url + f"?{limits}")
    started = time.monotonic()
    with pytest.raises(EngineError, match=message):
        await generated_ids(engine)
    assert 0.25 < time.monotonic() - started < 20


async def test_each_token_restarts_the_timeout(server: ServerFixture) -> None:
    answer = endless(ONE, every_s=0.25)
    assert await generated_ids(load(server(streaming(answer)).url + "?timeout=2"), max_tokens=10) == (8,) * 10


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("status", [200, 500])
async def test_deeply_nested_json_is_an_error(server: ServerFixture, status: int) -> None:
    answer = events(DEEP) if status == 200 else Fault(status=status, body=DEEP.encode())
    proxy = server(streaming(answer))
    with pytest.raises(EngineError, match=r"nested too deeply|failed \(500"):
        await generated_ids(load(proxy.url + "?retries=0"))
    with pytest.raises(ModelError, match=r"nested too deeply|failed \(500"):
        load(server(lambda call: Fault(status=status, body=DEEP.encode())).url)


async def test_an_error_message_is_one_short_line(server: ServerFixture) -> None:
    message = {"error": {"message": "first\nsecond \x1b[2J\u200f\u061c" + "x" * 10_000}}
    with pytest.raises(EngineError) as caught:
        await generated_ids(load(server(streaming(response(message, 418))).url))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


async def test_a_header_that_cannot_be_replayed_is_dropped(server: ServerFixture) -> None:
    answer = events(completion(8, finish_reason="length"))
    answer = replace(answer, headers=(("X-Session-Id", "\xe4\u0152"),))
    engine, buffer = load(server(streaming(answer)).url), TokenBuffer([5, 6])
    for _ in range(2):
        assert (await collect(engine.generate(Generate(buffer, Sampling(), Stop(4))))).ids == (8,)
    await engine.aclose()


JUNK = [
    None,
    True,
    -1,
    0,
    2,
    7.5,
    1e400,
    -1e400,
    math.nan,
    10**30,
    "x",
    "",
    "7",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
]
SCORES = {"logprobs": {"top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.5}]}}


def full_json(call: Call) -> Any:
    """Return the JSON with which a server that supports every extension answers any call."""
    if call.path.endswith("/models"):
        return MODELS
    if call.path.endswith("/version"):
        return {"version": "1"}
    if call.path.endswith("/metrics"):
        return "vllm:num_requests_running 0"
    if call.path.endswith("/generate"):
        scored = {"input_token_logprobs": [[-1.0, 6, None]] * 2, "input_top_logprobs": [[[-1.0, 6, None]]] * 2}
        return {"output_ids": [9], "meta_info": scored | {"cached_tokens": 1}}
    prompt = call.fields["prompt"]
    several = prompt if isinstance(prompt[0], list) else [prompt]
    rows = [None, *({"6": {"logprob": -1.0, "rank": 1}},) * (len(several[0]) - 1)]
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 1.0, "generation_time_ms": 1.0}
    metrics["speculative_decoding"] = {"num_draft_tokens": 1, "num_accepted_draft_tokens": 1}
    fields = SCORES | {"finish_reason": "length", "prompt_logprobs": rows, "text": "a"}
    choices = [completion(9, **fields)["choices"][0] | {"index": index} for index in range(len(several))]
    return {"choices": choices, "usage": usage, "metrics": metrics}


def changed(found: Any, path: Sequence[int], junk: Any) -> Any:
    """Return the JSON with one value replaced by `junk`. The numbers choose the key at each level."""
    if not path or not isinstance(found, dict | list) or not found:
        return junk
    keys = list(found) if isinstance(found, dict) else list(range(len(found)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(found) if isinstance(found, dict) else list(found)
    copy[key] = changed(found[key], path[1:], junk)
    return copy


class Changing:
    """Answer like `full_json`, and apply `change` to the responses of the endpoint `where`."""

    def __init__(self) -> None:
        self.change: Callable[[Any], Any] = lambda found: found
        self.where = ""

    def __call__(self, call: Call) -> Fault:
        found, endpoint = full_json(call), "stream" if call.fields.get("stream") else call.path.rpartition("/")[2]
        found = self.change(found) if endpoint == self.where else found
        return events(found) if call.fields.get("stream") else response(found)


async def use(url: str, tokenizer: HuggingFaceTokenizer) -> None:
    """Make every kind of call to a server, and check that the results are valid for the controller."""
    address = Address.parsed(url)
    engine = RemoteEngine(address, found_server(address), tokenizer)
    buffer, probe = TokenBuffer([5, 6, 7]), Probe((7,), (7, 8))
    try:
        chunk = await collect(engine.generate(Generate(buffer, Sampling(), Stop(1))))
        step = await collect(engine.generate(Generate(buffer, Sampling(), Stop(1, ("\n\n",)))))
        found = await engine.verify(Verify(buffer, [6, 6], [probe, probe]))
    finally:
        await engine.aclose()
    ids = (*chunk.ids, *step.ids, *(found.choices or ()), found.next_choice, *found.probe_choices)
    assert all(0 <= id < tokenizer.num_ids for id in ids)
    assert all(each <= 0.01 for each in (*(found.logprobs or ()), *sum(found.probe_logprobs, ())))
    assert all(each >= 0 for each in (chunk.queue_s, chunk.cached, step.passes, found.cached))


@pytest.mark.parametrize("takes_scores", ["prompt_logprobs", "generate"])
def test_wrong_types_raise_stepspec_errors_or_do_no_harm(server: ServerFixture, takes_scores: str) -> None:
    script = Changing()
    rejects_scores = takes_scores == "generate"
    proxy = server(
        lambda call: response({}, 400) if rejects_scores and "prompt_logprobs" in call.fields else script(call)
    )
    tokenizer = load_tokenizer(TOKENIZER)
    asyncio.run(use(proxy.url, tokenizer))
    assert {call.path.rpartition("/")[2] for call in proxy.calls} >= {"models", "completions", "version"}

    @settings(max_examples=30, database=None)
    @given(
        st.sampled_from(["models", "completions", "stream", takes_scores, "version"]),
        st.lists(st.integers(0, 9), max_size=7),
        st.sampled_from(JUNK),
    )
    def check(where: str, path: list[int], junk: Any) -> None:
        script.where, script.change = where, lambda found: changed(found, path, junk)
        with contextlib.suppress(StepSpecError):
            asyncio.run(use(proxy.url + "?timeout=5&retries=0", tokenizer))

    check()


@pytest.mark.parametrize("field", ["max_model_len", "root", "id"])
def test_a_wrong_type_in_the_model_list_names_its_field(server: ServerFixture, field: str) -> None:
    models = {"data": [MODELS["data"][0] | {field: 7 if field != "max_model_len" else "x"}]}
    with pytest.raises(ModelError, match=rf"invalid list of models .data\.0\.{field}: Input should be a valid"):
        load(server(lambda call: response(models)).url)


async def test_temporary_errors_are_retried_and_retry_after_is_respected(server: ServerFixture) -> None:
    answers = iter(
        [
            response({}, 503),
            response({}, 429, headers=(("Retry-After", "1"),)),
            events(completion(8, finish_reason="length")),
        ]
    )
    proxy = server(lambda call: next(answers) if call.fields.get("stream") else healthy(call))
    assert await generated_ids(load(proxy.url)) == (8,)
    assert sum(bool(call.fields.get("stream")) for call in proxy.calls) == 3


async def test_the_number_of_retries_is_limited(server: ServerFixture) -> None:
    proxy = server(streaming(response({"error": {"message": "full"}}, 503)))
    with pytest.raises(EngineError, match=r"overloaded \(503: full"):
        await generated_ids(load(proxy.url + "?retries=2"))
    assert sum(bool(call.fields.get("stream")) for call in proxy.calls) == 3


async def test_the_key_comes_from_the_environment_and_is_never_shown(
    server: ServerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "a-secret")
    proxy = server(streaming(response({"message": "no"}, 401)))
    engine = load(proxy.url + "?key_env=MY_KEY")
    with pytest.raises(EngineError, match="MY_KEY") as caught:
        await generated_ids(engine)
    assert all(call.headers["authorization"] == "Bearer a-secret" for call in proxy.calls)
    assert "a-secret" not in str(caught.value) + str(engine.describe()) + repr(engine)


async def test_a_password_in_an_address_is_sent_and_never_shown(server: ServerFixture) -> None:
    proxy = server(streaming(response({"message": "no"}, 401)))
    engine = load(proxy.url.replace("://", "://me:a%20secret@"))
    with pytest.raises(EngineError, match="rejected") as caught:
        await generated_ids(engine)
    sent = f"Basic {base64.b64encode(b'me:a secret').decode()}"
    assert all(call.headers["authorization"] == sent for call in proxy.calls)
    assert "secret" not in str(caught.value) + str(engine.describe()) + repr(engine)


SENT = {
    "vllm": {"x-session-id": "conversation-1"},
    "ray": {"x-session-id": "conversation-1"},
    "production-stack": {"x-user-id": "conversation-1"},
    "llm-d": {"x-session-id": "conversation-1", "x-session-token": "replica-3"},
    "aibrix": {
        "x-aibrix-session-key": "conversation-1",
        "x-session-id": "pod-7",
        "routing-strategy": "session-affinity",
    },
    "sglang": {"x-smg-routing-key": "conversation-1"},
    "dynamo": {"x-dynamo-session-id": "conversation-1"},
}
"""By router, the headers of the second call of a request."""
OTHERS = {name for headers in SENT.values() for name in headers}


@pytest.mark.parametrize("router", ROUTERS)
async def test_every_router_gets_the_headers_that_it_reads(server: ServerFixture, router: str) -> None:
    answer = events(completion(8, finish_reason="length"))
    headers = (("X-Session-Token", "replica-3"), ("X-Session-Id", "pod-7"))
    proxy = server(streaming(Fault(status=200, body=answer.body, content_type=answer.content_type, headers=headers)))
    engine = load(f"{proxy.url}?router={router}")
    buffer = TokenBuffer([5, 6], "conversation-1")
    for _ in range(2):
        await collect(engine.generate(Generate(buffer, Sampling(), Stop(4))))
    await engine.aclose()
    call = [call for call in proxy.calls if call.fields.get("stream")][-1]
    assert {name: value for name, value in call.headers.items() if name in OTHERS} == SENT[router]
    hints = {"agent_hints": {"osl": 4}} if router == "dynamo" else None
    assert call.fields.get("nvext") == hints


@pytest.mark.parametrize("session", ["", " a", "a\r\nX-Other: b", "\u00e9", "\ud800"])
async def test_an_id_that_no_header_can_have_is_hashed(server: ServerFixture, session: str) -> None:
    proxy = server(streaming(events(completion(8, finish_reason="length"))))
    engine = load(proxy.url)
    await collect(engine.generate(Generate(TokenBuffer([5, 6], session), Sampling(), Stop(4))))
    await engine.aclose()
    call = [call for call in proxy.calls if call.fields.get("stream")][-1]
    assert re.fullmatch("[0-9a-f]{32}", call.headers["x-session-id"])
    assert "x-other" not in call.headers


async def test_calls_of_one_request_share_their_headers(server: ServerFixture) -> None:
    answer = events(completion(8, finish_reason="length"))
    answer = Fault(status=200, body=answer.body, content_type=answer.content_type, headers=(("X-Token", "replica-3"),))
    proxy = server(streaming(answer))
    engine = load(proxy.url + "?session_header=X-Flow&replay_headers=x-token")
    one, other = TokenBuffer([5, 6]), TokenBuffer([5, 6])
    for buffer in (one, one, other):
        await collect(engine.generate(Generate(buffer, Sampling(), Stop(4))))
    await engine.aclose()
    first, second, third = (call.headers for call in proxy.calls if call.fields.get("stream"))
    assert first["x-flow"] == second["x-flow"] != third["x-flow"]
    assert "x-token" not in first
    assert second["x-token"] == "replica-3"
    assert "x-token" not in third


async def test_a_policy_that_the_server_cannot_support_is_rejected(server: ServerFixture) -> None:
    def plain(call: Call) -> Fault:
        return response({"message": "unknown field"}, 400) if "prompt_logprobs" in call.fields else healthy(call)

    pair = load_pair(server(plain).url, f"torch:{WEIGHTS / 'draft'}")
    assert pair.target.abilities == {"forget"}
    with pytest.raises(UsageError, match=r"log-probabilities of proposed tokens.*'specreason'"):
        StepSpec(policy=STEADY, pair=pair)
    StepSpec(policy="specreason", pair=pair)
    await pair.aclose()


async def test_a_step_comes_in_one_chunk(server: ServerFixture) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    step = response({**completion(8, 9, 10, finish_reason="length"), "usage": usage})
    proxy = server(lambda call: step if call.fields.get("max_tokens") == 3 else healthy(call))
    engine = load(proxy.url)
    chunks = [each async for each in engine.generate(Generate(TokenBuffer([5, 6, 7]), Sampling(), Stop(3, ("\n\n",))))]
    await engine.aclose()
    assert [(each.ids, each.end, each.passes, each.cached) for each in chunks] == [((8, 9, 10), "length", 3, 2)]


def test_each_position_of_a_text_has_its_own_seed() -> None:
    one, other = Sampling(seed=1), Sampling(seed=2)
    seeds = [each.seed_at(position) for each in (one, other) for position in (0, 1, 100)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [each.seed_at(position) for each in (one, other) for position in (0, 1, 100)]
    assert all(0 <= seed < 2**31 for seed in seeds)

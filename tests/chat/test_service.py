"""`stepspec serve` over loopback: the OpenAI client, the stepspec client, LangChain, and clients that disconnect."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from following import THOUGHTS, FollowingEngine, following_pair
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from scripted import check_deltas
from service import serving, serving_app
from typer.testing import CliRunner

from stepspec import AnswerDelta, Pair, Result, StepSpec, SyncStepSpec
from stepspec.api.pairs import EMBEDDED
from stepspec.cli import app
from stepspec.client import RemoteStepSpec
from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, UsageError
from stepspec.langchain import ChatStepSpec
from stepspec.loop.result import Done, Event
from stepspec.loop.step import StepCommitted, StepDelta, StepJudged, StepProposed
from stepspec.serve import Settings
from stepspec.serve.admission import ServiceLimits

pytestmark = pytest.mark.anyio

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
STEPS = StepProposed | StepJudged | StepCommitted
ASK: list[Any] = [{"role": "user", "content": "How many?"}]
RAW = json.dumps({"messages": ASK, "tools": None}) + "\n<|assistant|>"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(following_pair()) as base_url:
        yield base_url


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as opened:
        yield opened


def untimed(result: Result) -> dict[str, Any]:
    """Return a result as a dictionary without the values that differ from run to run."""
    plain = result.to_dict()
    calls = [{**call, "id": None} for call in plain.pop("tool_calls")]  # type: ignore[attr-defined]
    return {**{name: value for name, value in plain.items() if name != "times"}, "tool_calls": calls}


# The OpenAI client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert listed[0] == "target"
    assert {"target@two-level", "target@token", "target@target"} < {*listed}
    assert client.models.retrieve("target@token").model_extra["policy"] == "token"  # type: ignore[index]
    assert client.models.retrieve("target").owned_by == "stepspec"
    with pytest.raises(openai.NotFoundError, match="Known: target"):
        client.models.retrieve("targte")


def test_a_complete_response(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="target", messages=ASK)
    choice, more = found.choices[0], found.choices[0].message.model_extra
    assert choice.message.content == "\n\nYou said 1 things, How many? among them."
    assert more is not None
    assert more["reasoning"] == more["reasoning_content"] == "".join(THOUGHTS)
    assert choice.finish_reason == "stop"
    usage = found.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
    assert found.model_extra is not None
    assert found.model_extra["metrics"]["stepspec"]["counts"]["steps_accepted"] == 2
    assert [step["origin"] for step in choice.model_extra["stepspec"]["steps"]] == ["draft", "draft"]  # type: ignore[index]


def test_a_streamed_response(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    request: Any = {"model": "target", "messages": ASK, "stream_options": options}
    chunks = list(
        client.chat.completions.create(**request, stream=True, extra_body={"stepspec": {"policy": "specreason"}})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.model_extra["reasoning"] for delta in deltas if delta.model_extra] == list(THOUGHTS)
    assert len([delta for delta in deltas if delta.content]) > 2
    assert "".join(delta.content or "" for delta in deltas) == "\n\nYou said 1 things, How many? among them."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens > 0


def test_without_include_usage_there_is_no_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="target", messages=ASK, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].model_extra["metrics"]["stepspec"]["policy"] == "two-level"  # type: ignore[index]


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="target", messages=ASK, extra_body={"include_reasoning": False})
    assert not found.choices[0].message.model_extra


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    ask: list[Any] = [{"role": "user", "content": "Please add 4."}]
    request: Any = {"model": "target", "messages": ask, "tools": [ADD], "tool_choice": choice}
    found = client.chat.completions.create(**request)
    (call,) = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == ("tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 4})
    assert (found.choices[0].message.content or "") == ""
    chunks = list(client.chat.completions.create(**request, stream=True))
    first, *others = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "add")
    assert {(delta.index, delta.id, delta.function.name) for delta in others} <= {(0, None, None)}
    assert "".join(delta.function.arguments for delta in (first, *others)) == call.function.arguments


def test_the_openai_client_assembles_streamed_tool_calls(client: openai.OpenAI) -> None:
    other = {**ADD, "function": {**ADD["function"], "name": "double"}}
    ask: list[Any] = [{"role": "user", "content": "Please add 4 and double it."}]
    with client.chat.completions.stream(model="target", messages=ask, tools=[ADD, other]) as events:
        calls = events.get_final_completion().choices[0].message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("add", {"a": 4}),
        ("double", {"a": 4}),
    ]


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask: list[Any] = [{"role": "user", "content": "It is 7."}]
    found = client.chat.completions.create(model="target", messages=ask, response_format=form)
    assert json.loads(found.choices[0].message.content or "") == {"n": 7}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "temperature"),
        ("stepspec", {"policy": "../../etc/passwd"}, "There is no policy"),
        ("policy", "token", "Use stepspec.policy"),
        ("model", "target@../../etc/passwd", "There is no model"),
        ("response_format", {"type": "yaml"}, "json_schema"),
        ("tool_choice", "required", "there are no tools"),
        ("stop", [""], "empty"),
        ("reasoning_effort", "high", "thinking_token_budget"),
        ("messages", [], "empty"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "text"),
        ("messages", "hello", "messages"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": 5}, *ASK], "tool_calls must be a list"),
        ("messages", [{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": [1]}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_are_rejected(address: str, field: str, value: Any, message: str, stream: bool) -> None:
    body = {"model": "target", "messages": ASK, "stream": stream, field: value}
    sent = json.dumps(body).encode()
    answer = httpx.post(f"{address}/chat/completions", content=sent, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=ASK)
    assert caught.value.code == "model_not_found"


def test_a_body_that_is_not_json_is_rejected(address: str) -> None:
    answer = httpx.post(f"{address}/chat/completions", content=b"{")
    assert answer.status_code == 400
    assert "message" in answer.json()["error"]
    assert httpx.get(f"{address}/nothing").json()["error"]["type"] == "invalid_request_error"


def test_the_service_is_healthy(address: str) -> None:
    assert httpx.get(f"{address.removesuffix('/v1')}/health").status_code == 200


def test_a_long_prompt_is_a_context_length_error() -> None:
    with serving(following_pair(max_context=20)) as address, openai.OpenAI(base_url=address, api_key="none") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="target", messages=ASK)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        for path, body in (("/v1/completions", {"prompt": "word " * 50}), ("/tokenize", {"prompt": "word " * 50})):
            error = httpx.post(address.removesuffix("/v1") + path, json=body).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


# Clients that disconnect


def num_open(pair: Pair) -> int:
    """Return the number of open calls of both engines."""
    assert isinstance(pair.target, FollowingEngine)
    assert isinstance(pair.draft, FollowingEngine)
    return pair.target.num_open + pair.draft.num_open


def wait_until_free(pair: Pair) -> None:
    """Wait up to 5 s until no engine has an open call."""
    deadline = time.monotonic() + 5
    while num_open(pair) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_open(pair) == 0


@pytest.mark.parametrize(("stream", "delay_s"), [(False, 0.0), (True, 0.2), (True, 60.0)])
def test_a_client_that_disconnects_frees_the_engines(stream: bool, delay_s: float) -> None:
    """Includes a client that disconnects before the first output."""
    pair = following_pair(delay_s=delay_s, hangs=not stream)
    with serving(pair) as address:
        body = {"messages": ASK, "stream": stream}

        def ask() -> None:
            sent = {"url": f"{address}/chat/completions", "json": body, "timeout": 0.5}
            if stream and delay_s < 1:
                with httpx.stream("POST", **sent) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.TimeoutException):
                    httpx.post(**sent)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        wait_until_free(pair)
        assert pair.target.calls or pair.draft.calls  # type: ignore[attr-defined]


# The stepspec client


async def test_the_remote_api_answers_like_the_local_one(address: str) -> None:
    local = StepSpec(policy="specreason", pair=following_pair())
    requests: Sequence[tuple[Any, dict[str, Any]]] = [
        ("How many?", {}),
        ("How many?", {"prompt": "boxed", "max_tokens": 12}),
        ("How many?", {"max_thinking_tokens": 3}),
        ("How many?", {"stop": ["said"]}),
        ("Please add 4.", {"tools": [ADD]}),
        ("Please add 4.", {"tools": [ADD], "tool_choice": "add"}),
        ("It is 7.", {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}),
    ]
    async with RemoteStepSpec(address, policy="specreason") as remote:
        for question, options in requests:
            assert untimed(await remote.generate(question, **options)) == untimed(
                await local.generate(question, **options)
            )
            remote_events = [event async for event in remote.stream(question, **options)]
            local_events = [event async for event in local.stream(question, **options)]
            assert shown(remote_events) == shown(local_events)


STREAMED: Sequence[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    ("chat/completions", {"messages": ASK}, lambda chunk: chunk["choices"][0]["delta"].get("reasoning", "")),
    ("completions", {"prompt": f"{RAW}<think>"}, lambda chunk: chunk["choices"][0]["text"]),
    ("responses", {"input": "How many?"}, lambda event: "reasoning" in event["type"] and event.get("delta", "")),
    ("messages", {"max_tokens": 99, "messages": ASK}, lambda event: event.get("delta", {}).get("thinking", "")),
]
"""Routes, their requests, and the thinking in a chunk of their streams."""


async def test_what_the_target_writes_is_streamed_by_tokens() -> None:
    with serving(following_pair(), "target") as address:
        async with httpx.AsyncClient(timeout=60) as client:
            for path, body, thinking_of in STREAMED:
                sent = {"model": "target", **body, "stream": True}
                lines = (await client.post(f"{address}/{path}", json=sent)).text.splitlines()
                chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                found = [text for chunk in chunks if (text := thinking_of(chunk))]
                assert "".join(found).partition("</think>")[0] == "".join(THOUGHTS), path
                assert len(found) > 2 * len(THOUGHTS)
        local = [
            event async for event in StepSpec(policy="target", pair=following_pair()).stream("How?", step_deltas=True)
        ]
        async with RemoteStepSpec(address) as remote:
            events = [event async for event in remote.stream("How?", step_deltas=True)]
            assert not [event async for event in remote.stream("How?") if isinstance(event, StepDelta)]
        assert events[:-1] == local[:-1]
        assert check_deltas(local) > len(THOUGHTS)


def shown(events: Sequence[Event]) -> list[Any]:
    """Return the events, those of tool calls by their types: each call has an id of its own."""
    return [event if isinstance(event, AnswerDelta | STEPS) else event.type for event in events]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"model": "gpt-5"}, ModelError, "gpt-5"),
        ({"policy": "nothing"}, UsageError, "There is no policy"),
    ],
)
async def test_the_remote_api_raises_the_same_errors_as_the_local_one(
    address: str, settings: dict[str, str], kind: type[StepSpecError], message: str
) -> None:
    async with RemoteStepSpec(address, **settings) as remote:
        with pytest.raises(kind, match=message):
            await remote.generate("How many?")


async def test_the_remote_api_raises_a_context_error_for_a_long_prompt() -> None:
    with serving(following_pair(max_context=20)) as address:
        async with RemoteStepSpec(address) as remote:
            with pytest.raises(ContextError, match="context of 20"):
                await remote.generate("How many?")


@pytest.mark.parametrize("seed", [2**63 - 1, 1 - 2**63])
async def test_the_highest_seed_has_several_answers_in_every_format(seed: int) -> None:
    with serving(following_pair(), "specreason") as address:
        sent = {"messages": [{"role": "user", "content": "How many?"}], "seed": seed, "n": 2, "temperature": 0.6}
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            answer = await client.post("/chat/completions", json=sent)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == 2
            assert (await client.post("/responses", json={"seed": seed, "input": "How many?"})).status_code == 200
        async with RemoteStepSpec(address) as remote:
            assert (await remote.generate("How many?", sampling={"seed": seed})).answer
    highest, lowest = Sampling(seed=2**63 - 1), Sampling(seed=1 - 2**63)
    assert highest.reseeded(1) == lowest
    assert len({highest.reseeded(number).seed for number in range(16)}) == 16
    assert (await StepSpec(pair=following_pair(), policy="specreason").generate("How?", sampling=highest)).answer


async def test_the_time_of_a_caller_does_not_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.client.GRACE_S", 0.1)
    with serving(following_pair(delay_s=0.1), "specreason") as address:
        async with RemoteStepSpec(address) as remote:
            async for event in remote.stream("How many?", deadline_s=1.0):
                if isinstance(event, StepCommitted) and event.step.index == 0:
                    await asyncio.sleep(1.5)
    assert isinstance(event, Done)


async def test_a_deadline_between_the_answer_and_its_metrics_is_not_taken_for_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepspec.client.GRACE_S", 0.1)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat() -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"delta": {"content": "9."}, "finish_reason": "stop"}]}\n\n'
            await asyncio.sleep(2)

        return StreamingResponse(lines(), media_type="text/event-stream")

    with serving_app(app) as address:
        async with RemoteStepSpec(address) as remote:
            with pytest.raises(EngineError, match=r"did not end the request within 0\.1 s"):
                await remote.generate("How many?", deadline_s=0.2)


async def test_an_unreachable_service_is_an_engine_error() -> None:
    async with RemoteStepSpec("http://127.0.0.1:9/v1", retries=0) as remote:
        with pytest.raises(EngineError, match="Nothing answers"):
            await remote.generate("How many?")


@pytest.mark.parametrize("in_the_middle", [True, False])
async def test_a_server_without_metrics_is_an_engine_error(*, in_the_middle: bool) -> None:
    """The second one is what other servers send, which do not know the request's fields."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> StreamingResponse:
        choice = {"index": 0, "delta": {"content": "7"}, "finish_reason": None if in_the_middle else "stop"}
        chunk = json.dumps({"model": "a", "choices": [choice]})
        return StreamingResponse(iter([f"data: {chunk}\n\n", "data: [DONE]\n\n"]), media_type="text/event-stream")

    with serving_app(app) as address:
        async with RemoteStepSpec(address) as remote:
            wanted = "before it was complete" if in_the_middle else "sent no metrics. Check that it is a service"
            with pytest.raises(EngineError, match=wanted):
                await remote.generate("How many?")


def test_the_model_id_of_a_server_is_no_terminal_code() -> None:
    server, id = FastAPI(), "m\x1b]0;owned\x07\x9b2J\u2028\n"

    @server.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": id, "object": "model", "max_model_len": 4096}]}

    @server.post("/v1/completions")
    async def complete() -> dict[str, Any]:
        return {"model": id, "choices": [{"index": 0, "text": "4", "finish_reason": "stop"}]}

    with serving_app(server) as address:
        done = CliRunner().invoke(app, ["models", f"{address}?tokenizer={EMBEDDED / 'target'}"], catch_exceptions=False)
    assert "Target: m\\x1b]0;owned\\x07\\x9b2J\\u2028\\n\n" in done.stdout
    assert done.stdout.replace("\n", "").isprintable()


DEADLINE = {"stepspec": {"deadline_s": 0.3}, "model": "target"}
ROUTES: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], object]]] = {
    "chat/completions": ({"messages": ASK}, lambda answer: answer["choices"][0]["finish_reason"]),
    "completions": ({"prompt": RAW, "n": 3}, lambda answer: answer["choices"][2]["finish_reason"]),
    "responses": ({"input": "a"}, lambda answer: answer["incomplete_details"]["reason"]),
}


async def test_a_request_ends_at_its_deadline_in_every_interface_in_the_queue_too() -> None:
    pair = following_pair(delay_s=60)
    ends = list[object]()

    async def limit_of(work: Awaitable[Any]) -> None:
        found = await work
        ends.append(found.limit if isinstance(found, Result) else found.response_metadata["stepspec"]["limit"])

    async def route(path: str, client: httpx.AsyncClient) -> None:
        fields, reason = ROUTES[path]
        answer = await client.post(path, json={**DEADLINE, **fields})
        assert answer.status_code == 200
        ends.append(reason(answer.json()))
        async with client.stream("POST", path, json={**DEADLINE, **fields, "stream": True}) as streamed:
            assert re.search("length|max_output_tokens", (await streamed.aread()).decode())

    with serving(pair, settings=Settings(limits=ServiceLimits(max_running=1))) as address:
        options = {"base_url": address, "api_key": "none", "model": "target"}
        blocking = SyncStepSpec(pair=following_pair(delay_s=60))
        async with RemoteStepSpec(address) as remote, httpx.AsyncClient(base_url=address, timeout=10) as client:
            since = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for path in ROUTES:
                    group.create_task(route(path, client))
                group.create_task(limit_of(remote.generate("a", deadline_s=0.3)))
                group.create_task(limit_of(StepSpec(pair=following_pair(delay_s=60)).generate("a", deadline_s=0.3)))
                group.create_task(limit_of(ChatStepSpec(pair=following_pair(delay_s=60)).ainvoke("a", deadline_s=0.3)))
                group.create_task(limit_of(ChatStepSpec(**options).ainvoke("a", deadline_s=0.3)))
                group.create_task(limit_of(anyio.to_thread.run_sync(partial(blocking.generate, "a", deadline_s=0.3))))
            assert time.perf_counter() - since < 5
        assert sorted(map(str, ends)) == sorted(["deadline"] * 5 + ["length"] * 2 + ["max_output_tokens"])
        wait_until_free(pair)


async def test_a_service_that_does_not_keep_the_deadline_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.client.GRACE_S", 0.1)
    monkeypatch.setattr("stepspec.loop.limits.Limits.start", lambda self: None)
    with serving(following_pair(delay_s=2)) as address:
        async with RemoteStepSpec(address) as remote:
            with pytest.raises(EngineError, match="did not end the request within"):
                await remote.generate("How many?", deadline_s=0.1)


async def test_closing_the_remote_stream_frees_the_engines() -> None:
    pair = following_pair(delay_s=0.05)
    with serving(pair) as address:
        async with RemoteStepSpec(address) as remote:
            events = remote.stream("How many?")
            await anext(events)
            await events.aclose()
        await anyio.to_thread.run_sync(wait_until_free, pair)


# LangChain over the wire


async def test_the_chat_model_answers_the_same_remotely(address: str) -> None:
    local = ChatStepSpec(pair=following_pair(), policy="specreason")
    remote = ChatStepSpec(base_url=address, policy="specreason")
    one, other = await local.ainvoke("How many?"), await remote.ainvoke("How many?")
    assert one.content_blocks == other.content_blocks
    assert one.usage_metadata == other.usage_metadata
    with_tools = await remote.bind_tools([ADD], tool_choice="add").ainvoke("Please add 4.")
    assert [(call["name"], call["args"]) for call in with_tools.tool_calls] == [("add", {"a": 4})]
    assert remote.invoke("How many?").content == one.content


async def test_without_a_policy_the_chat_model_uses_that_of_the_service_and_names_it() -> None:
    with serving(following_pair(), "specreason") as address:
        for settings, policy in (({}, "specreason"), ({"policy": "target"}, "target")):
            message = await ChatStepSpec(base_url=address, **settings).ainvoke("How many?")
            assert message.response_metadata["stepspec"]["policy"] == policy
    assert (await ChatStepSpec(pair=following_pair()).ainvoke("How many?")).response_metadata["stepspec"]["policy"] == (
        "two-level"
    )


class Served(ChatModelIntegrationTests):
    """The standard suite of LangChain against the service."""

    base_url = ""

    @pytest.fixture(autouse=True)
    def _address(self, address: str) -> None:
        type(self).base_url = address

    @pytest.fixture(scope="module", autouse=True)
    async def _one_loop(self, anyio_backend: str) -> None:
        """Use one event loop for all tests: the OpenAI client keeps connections that belong to one loop."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatStepSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.base_url}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False


class TestServed(Served):
    """`ChatStepSpec` with the address of the service."""

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "target@token"


class TestOpenAI(Served):
    """OpenAI's chat completions, as other agent frameworks use them."""

    uses_responses = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "target",
            "base_url": self.base_url,
            "api_key": "none",
            "stream_usage": True,
            "use_responses_api": self.uses_responses,
        }


class TestOpenAIResponses(TestOpenAI):
    """OpenAI's Responses API."""

    uses_responses = True

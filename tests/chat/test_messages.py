"""Anthropic's Messages API, with the official client against a service on loopback."""

import json
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic, AuthenticationError, BadRequestError, NotFoundError
from anthropic.types import ToolUseBlock
from following import THOUGHTS, asked_of, following_pair
from service import serving

from stepspec import Pair
from stepspec.serve import Settings
from stepspec.serve.errors import RefusedError
from stepspec.serve.keys import Keys
from stepspec.serve.messages_answer import SIGNATURE
from stepspec.serve.messages_request import MessagesRequest

FORM: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
ADD: Any = {"name": "add", "description": "A tool.", "input_schema": FORM}
SAY: Any = {**ADD, "name": "say"}
CALL_BOTH = "Please add 4 and say 'two words'."
USER: Any = {"role": "user", "content": "How many?"}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1"}
ANSWER = "\n\nYou said 1 things, How many? among them."


@pytest.fixture(scope="module")
def address(agent_address: str) -> str:
    return agent_address.removesuffix("/v1")


@pytest.fixture
def client(address: str) -> Anthropic:
    return Anthropic(base_url=address, api_key="none", max_retries=0)


def requested(**fields: Any) -> MessagesRequest:
    body = {"model": "target", "max_tokens": 100, "messages": [USER], **fields}
    return MessagesRequest.parsed(json.dumps(body).encode())


def chat_fields(**fields: Any) -> dict[str, Any]:
    """Return the fields of the chat request."""
    return requested(**fields).text_request.model_dump(exclude_unset=True)


# Answers


def test_each_step_is_a_thinking_block(client: Anthropic) -> None:
    message = client.messages.create(model="target", max_tokens=100, messages=[USER])
    assert [block.type for block in message.content] == ["thinking", "thinking", "text"]
    thoughts = [(block.thinking, block.signature) for block in message.content if block.type == "thinking"]
    assert thoughts == [(thought, SIGNATURE) for thought in THOUGHTS]
    assert message.content[-1].type == "text"
    assert message.content[-1].text == ANSWER
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.output_tokens > 10
    metrics: Any = message.model_dump()["metrics"]
    assert metrics["stepspec"]["policy"] == "specreason"


def test_a_stream_adds_up_to_the_same_message(client: Anthropic) -> None:
    """The client builds the message from the events, and fails if they come in another order."""
    fields: Any = {"model": "target", "max_tokens": 200, "messages": [{"role": "user", "content": CALL_BOTH}]}
    whole = client.messages.create(**fields, tools=[ADD, SAY])
    with client.messages.stream(**fields, tools=[ADD, SAY]) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "thinking", "tool_use", "tool_use"]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"

    def without_ids(message: Any) -> list[dict[str, Any]]:
        return [{key: value for key, value in block.items() if key != "id"} for block in message.to_dict()["content"]]

    assert without_ids(streamed) == without_ids(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


@pytest.mark.anyio
async def test_the_asynchronous_client_streams_text(address: str) -> None:
    async with (
        AsyncAnthropic(base_url=address, api_key="none") as client,
        client.messages.stream(model="target", max_tokens=100, messages=[USER]) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == ANSWER


def test_a_conversation_with_tools_round_trips(client: Anthropic, agent_pair: Pair) -> None:
    messages: Any = [{"role": "user", "content": CALL_BOTH}]
    fields: Any = {"model": "target", "max_tokens": 200, "tools": [ADD, SAY], "system": "Be brief."}
    first = client.messages.create(messages=messages, **fields)
    calls = [block for block in first.content if isinstance(block, ToolUseBlock)]
    assert [(call.name, call.input) for call in calls] == [
        ("add", {"a": 4, "text": "two words"}),
        ("say", {"a": 4, "text": "two words"}),
    ]
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": call.name} for call in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(messages=messages, **fields)
    assert second.content[-1].type == "text"
    assert second.content[-1].text == "\n\nIt is add, say."
    seen = asked_of(agent_pair.target)
    assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "tool"]
    assert seen[2]["reasoning_content"] == "".join(THOUGHTS)
    assert [call["id"] for call in seen[2]["tool_calls"]] == [call.id for call in calls]


def test_a_message_has_what_ended_it(client: Anthropic) -> None:
    stopped = client.messages.create(model="target", max_tokens=100, messages=[USER], stop_sequences=["ever", "things"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "things")
    assert stopped.content[-1].type == "text"
    assert stopped.content[-1].text == "\n\nYou said 1 "
    cut = client.messages.create(model="target", max_tokens=3, messages=[USER])
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_a_stop_string_may_end_the_answer_in_a_call(client: Anthropic) -> None:
    fields: Any = {"model": "target", "messages": [{"role": "user", "content": CALL_BOTH}], "tools": [ADD]}
    cut = client.messages.create(max_tokens=200, stop_sequences=["two"], **fields)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "two")
    assert not [block for block in cut.content if block.type == "tool_use"]


def test_half_a_call_is_not_in_the_message(client: Anthropic) -> None:
    fields: Any = {"model": "target", "messages": [{"role": "user", "content": CALL_BOTH}], "tools": [ADD]}
    whole = client.messages.create(max_tokens=200, **fields)
    assert whole.stop_reason == "tool_use"
    cut = client.messages.create(max_tokens=whole.usage.output_tokens - 4, **fields)
    assert cut.stop_reason == "max_tokens"
    assert not [block for block in cut.content if block.type == "tool_use"]


def test_tokens_are_counted_as_in_the_answer(client: Anthropic) -> None:
    fields: Any = {"model": "target", "messages": [USER], "system": "Be brief.", "tools": [ADD]}
    count = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(max_tokens=50, **fields).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_prompt_beyond_the_context_is_counted_and_not_answered(client: Anthropic) -> None:
    fields: Any = {"model": "target", "messages": [{"role": "user", "content": "word " * 200_000}]}
    assert client.messages.count_tokens(**fields).input_tokens > 200_000
    with pytest.raises(BadRequestError, match=r"prompt is too long: \d+ tokens > 100000 maximum\.") as caught:
        client.messages.create(max_tokens=10, **fields)
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


# Requests


def test_the_attribution_of_claude_code_is_left_out() -> None:
    """It differs in each request, so that nothing behind it could be reused."""
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=abc12;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    expected = {"role": "system", "content": "You are an agent.\n\nBe brief."}
    assert chat_fields(system=blocks)["messages"][0] == expected
    joined = "\n\n".join(block["text"] for block in blocks if isinstance(block["text"], str))
    assert chat_fields(system=joined)["messages"][0] == expected


def test_a_request_as_claude_code_sends_it_is_answered_and_reuses_its_prefix(address: str) -> None:
    def body(number: int) -> dict[str, Any]:
        system = ["x-anthropic-billing-header: cch=" + f"{number:05};", "You are an agent. " * 50]
        return {
            "model": "target",
            "max_tokens": 200,
            "stream": True,
            "system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in system],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]}
            ],
            "tools": [{**ADD, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
            "metadata": {"user_id": "user_1"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
        }

    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    found = [
        httpx.post(f"{address}/v1/messages?beta=true", json=body(number), headers=headers, timeout=60)
        for number in range(2)
    ]
    assert [each.status_code for each in found] == [200, 200], found[0].text
    events = [json.loads(line[6:]) for line in found[1].text.splitlines() if line.startswith("data: ")]
    (delta,) = (event for event in events if event["type"] == "message_delta")
    starts = [event["message"]["usage"]["input_tokens"] for event in events if event["type"] == "message_start"]
    usage = delta["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == starts[0]
    assert delta["metrics"]["ignored_fields"] == ["output_config.effort", "context_management"]


def test_a_model_without_separate_thinking_gets_no_limit_for_it() -> None:
    with serving(following_pair(thinks=False), "specreason") as address:
        client = Anthropic(base_url=address.removesuffix("/v1"), api_key="none")
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        message = client.messages.create(model="target", max_tokens=100, messages=[USER], thinking=thinking)
        assert [block.type for block in message.content] == ["text"]
        metrics: Any = message.model_dump()["metrics"]
        assert metrics["ignored_fields"] == ["thinking.budget_tokens"]


def test_fields_are_translated() -> None:
    found = chat_fields(
        temperature=0.5,
        top_k=5,
        seed=3,
        stop_sequences=["a"],
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        tools=[ADD],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": FORM}},
        stepspec={"policy": "token"},
    )
    assert found["max_completion_tokens"] == 100
    assert (found["temperature"], found["top_k"], found["seed"], found["stop"]) == (0.5, 5, 3, ["a"])
    assert (found["thinking_token_budget"], found["include_reasoning"]) == (1024, False)
    assert found["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "A tool.", "parameters": FORM}}
    ]
    assert (found["tool_choice"], found["parallel_tool_calls"]) == ("required", False)
    assert found["response_format"]["json_schema"]["schema"] == FORM
    assert found["stepspec"] == {"policy": "token"}
    assert chat_fields(thinking={"type": "disabled"})["enable_thinking"] is False
    assert chat_fields(tool_choice={"type": "tool", "name": "add"})["tool_choice"]["function"] == {"name": "add"}


def test_results_of_tools_come_before_what_the_user_says_with_them() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    texts = [{"type": "text", "text": "Five."}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": texts}
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    said = {"type": "text", "text": "And now?"}
    found = chat_fields(
        messages=[
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
            {"role": "user", "content": [said, result, failed, said]},
        ]
    )["messages"]
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool", "tool", "user"]
    assert [turn["content"] for turn in found[2:]] == ["Five.", "The tool failed.", "And now?\n\nAnd now?"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "conversation is empty"),
        ({"messages": ["hello"]}, "messages.0 must be an object"),
        ({"messages": [{"role": "human", "content": "x"}]}, "human"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages.0.content must be a string or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' are not supported"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "last turn"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "stop"}}, "'stop'"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": 0}]}]}, "messages.0.content.0.content"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"temperature": 99}, "temperature"),
    ],
)
def test_what_is_not_supported_is_refused(address: str, fields: dict[str, Any], complaint: str) -> None:
    body = {"model": "target", "max_tokens": 10, "messages": [USER], **fields}
    response = httpx.post(f"{address}/v1/messages", json=body, timeout=60)
    assert response.status_code == 400
    found = response.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert complaint in found["error"]["message"]


def test_errors_are_in_the_format_of_the_api(client: Anthropic) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.messages.create(model="other", max_tokens=10, messages=[USER])
    error: Any = caught.value.body
    assert error["error"]["type"] == "not_found_error"
    assert error["request_id"]
    for method, path, status, kind in (
        ("GET", "", 405, "invalid_request_error"),
        ("POST", "/b", 404, "not_found_error"),
    ):
        response = httpx.request(method, f"{client.base_url}/v1/messages{path}", timeout=60)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_keys_are_taken_from_either_header() -> None:
    key = "a-key-of-16-chars"
    with serving(
        following_pair(), "specreason", Settings(keys=Keys(environment={"STEPSPEC_API_KEYS": key}))
    ) as address:
        root = address.removesuffix("/v1")
        for arguments in ({"api_key": key}, {"auth_token": key}):
            client = Anthropic(base_url=root, **arguments)  # pyright: ignore
            assert client.messages.create(model="target", max_tokens=50, messages=[USER]).stop_reason
        with pytest.raises(AuthenticationError) as caught:
            Anthropic(base_url=root, api_key="another").messages.create(model="target", max_tokens=5, messages=[USER])
        error: Any = caught.value.body
        assert error["error"]["type"] == "authentication_error"


def test_a_request_without_a_model_is_refused() -> None:
    with pytest.raises(RefusedError, match="model"):
        MessagesRequest.parsed(json.dumps({"max_tokens": 1, "messages": [USER]}).encode())

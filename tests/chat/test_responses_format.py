"""The format of OpenAI's Responses API: requests become chat requests, and results become responses and events."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from following import THOUGHTS, asked_of, following_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseInputItem, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, TypeAdapter
from service import serving

from stepspec import Pair, StepSpec
from stepspec.api.session import PreparedRequest
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.chat.prompts import checked_messages
from stepspec.errors import ContextError, EngineError, UsageError
from stepspec.loop.result import Done, Event, Result
from stepspec.loop.step import StepCommitted
from stepspec.serve.errors import NoSuchModelError, RefusedError
from stepspec.serve.requests import ChatRequest
from stepspec.serve.responses_answer import ResponsesAnswer
from stepspec.serve.responses_request import ADVICE, RESPONSES, ResponsesRequest
from stepspec.serve.translated import PASSED

pytestmark = pytest.mark.anyio

FORM = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
ADD, SAY = ({"type": "function", "name": name, "parameters": FORM} for name in ("add", "say"))
CALL_BOTH = "Please add 4 and say 'two words'."
ANSWER = "\n\nYou said 1 things, How many? among them."
USER = {"role": "user", "content": "How many?"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
INPUT_ITEMS: TypeAdapter[Any] = TypeAdapter(list[ResponseInputItem])


def requested(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parsed(json.dumps({"input": "How many?", **fields}).encode())


def chat_fields(**fields: Any) -> dict[str, Any]:
    """Return the fields of the chat request."""
    return requested(**fields).text_request.model_dump(exclude_unset=True)


def turns(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat_fields(input=[*items], **fields)["messages"]


async def prepared(request: ResponsesRequest, pair: Pair) -> PreparedRequest:
    with request.in_its_words():
        (question,) = request.questions()
        options = request.text_request.options(())
        return await StepSpec(pair=pair, policy="specreason").prepare(question, options)


@dataclass
class Run:
    """A request, the events of its stream, and its complete response."""

    events: Sequence[dict[str, Any]]
    whole: dict[str, Any]
    result: Result

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]["response"]

    @property
    def types(self) -> list[str]:
        """The types of the events. Consecutive equal ones count once."""
        found = [event["type"].removeprefix("response.") for event in self.events]
        return [each for index, each in enumerate(found) if found[index - 1 : index] != [each]]


async def run(pair: Pair | None = None, **fields: Any) -> Run:
    request = requested(**fields)
    ready = await prepared(request, pair or following_pair())

    def answering() -> ResponsesAnswer:
        return ResponsesAnswer("target", "specreason", request, "mine", thinks=ready.thinking is not None)

    answer = answering()
    events = answer.begin()
    async for event in ready.stream():
        if isinstance(event, Done):
            events += answer.end([event.result])
            done = Run(events, answering().whole([event.result]), event.result)
            check_stream(events)
            check_response(done.whole)
            assert same(done.last) == same(done.whole)
            return done
        events += answer.chunks(0, event)
    raise AssertionError("There was no last event.")


def check_response(response: Mapping[str, Any]) -> None:
    Response.model_validate_json(json.dumps(response))


def check_stream(events: Sequence[Mapping[str, Any]]) -> None:
    """Check the events against the types of OpenAI's client, and against each other."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items: list[Any] = []
    text, num_done = "", 0
    for event in events:
        if event["type"].startswith("stepspec."):
            continue
        parsed = EVENTS.validate_json(json.dumps(event))
        assert parsed.type == event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        if event["type"] == "response.output_item.added":
            assert len(items) == num_done, "An item begins before the one before it has ended."
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            text = ""
        elif event["type"].endswith(".delta"):
            assert event["delta"] or event["type"] == "response.reasoning_text.delta"
            text += event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == text
        elif event["type"].endswith("text.done"):
            assert event["text"] == text
        elif event["type"] == "response.content_part.done":
            assert event["part"]["text"] == text
        elif event["type"] == "response.output_item.done":
            num_done += 1
            assert event["item"]["id"] == items[-1]["id"]
            assert text_of(event["item"]) == text
            items[-1] = event["item"]
    if events[-1]["type"] != "response.failed":
        assert num_done == len(items)
        assert [same(item) for item in events[-1]["response"]["output"]] == [same(item) for item in items]
    check_response(events[-1]["response"])


def text_of(item: Mapping[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def same(value: Any) -> Any:
    """Return a value without what differs between the stream and the complete response."""
    if isinstance(value, Mapping):
        left_out = ("id", "created_at", "completed_at", "stepspec", "logprobs")
        return {name: same(each) for name, each in value.items() if name not in left_out}
    return [same(each) for each in value] if isinstance(value, list) else value


# Responses


async def test_each_step_is_a_delta_of_the_reasoning_and_the_answer_follows() -> None:
    found = await run()
    part = ["output_item.added", "content_part.added"]
    assert found.types == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    steps = [event for event in found.events if event["type"] == "response.reasoning_text.delta"]
    assert tuple(event["delta"] for event in steps) == THOUGHTS
    assert [event["stepspec"]["step"]["index"] for event in steps] == [0, 1]
    assert "text" not in steps[0]["stepspec"]["step"]
    reasoning, message = found.last["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "".join(THOUGHTS)}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    assert message["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    assert Response.model_validate(found.last).output_text == ANSWER
    assert [len(step["length"] * "x") for step in found.whole["stepspec"]["steps"]] == [*map(len, THOUGHTS)]


async def test_ids_have_the_prefixes_of_openai() -> None:
    found = await run(input=CALL_BOTH, tools=[ADD, SAY])
    assert found.last["id"].startswith("resp_")
    assert [item["id"].partition("_")[0] for item in found.last["output"]] == ["rs", "fc", "fc"]
    assert len({item["id"] for item in found.last["output"]}) == 3


async def test_usage_and_metrics_are_those_of_the_result() -> None:
    found = await run(prompt_cache_key="a", stream_options={"include_obfuscation": False})
    usage, counted = found.last["usage"], found.result.usage
    assert usage["input_tokens"] == counted.prompt_tokens
    assert usage["output_tokens"] == counted.completion_tokens
    assert usage["total_tokens"] == counted.prompt_tokens + counted.completion_tokens
    assert usage["output_tokens_details"] == {"reasoning_tokens": counted.reasoning_tokens}
    assert usage["input_tokens_details"]["cached_tokens"] == counted.cached_tokens
    assert found.last["metrics"]["stepspec"]["policy"] == "specreason"
    assert found.last["metrics"]["ignored_fields"] == ["prompt_cache_key", "stream_options.include_obfuscation"]


async def test_the_response_repeats_the_settings() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    settings = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 500,
        "metadata": {"a": "b"},
        "user": "me",
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "tools": [ADD],
        "reasoning": {"effort": None, "summary": "auto"},
        "top_logprobs": 0,
    }
    found = await run(**settings, text={"format": form}, store=False, truncation="disabled", background=False)
    fixed = {"text": {"format": form, "verbosity": "medium"}, "store": False, "truncation": "disabled"}
    for name, value in {**settings, **fixed, "previous_response_id": None, "background": False}.items():
        assert found.last[name] == found.events[0]["response"][name] == value
    assert json.loads(found.result.answer).keys() == {"a"}


@pytest.mark.parametrize("chunk_size", [1, 30])
async def test_function_calls_are_items(chunk_size: int) -> None:
    found = await run(following_pair(chunk_size=chunk_size), input=CALL_BOTH, tools=[ADD, SAY])
    assert found.last["status"] == "completed"
    calls = found.last["output"][1:]
    assert [call["name"] for call in calls] == ["add", "say"]
    assert [call["call_id"] for call in calls] == [call.id for call in found.result.tool_calls]
    assert [json.loads(call["arguments"])["text"] for call in calls] == ["two words"] * 2
    done = [event for event in found.events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == ["add", "say"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("none", []), ("required", ["add", "say"]), ({"type": "function", "name": "say"}, ["say"])],
)
async def test_the_tool_choice_counts(choice: Any, names: list[str]) -> None:
    found = await run(input=CALL_BOTH, tools=[ADD, SAY], tool_choice=choice)
    calls = [item["name"] for item in found.last["output"] if item["type"] == "function_call"]
    assert (calls == names) if isinstance(choice, dict) or not names else calls[:1] == names[:1]


@pytest.mark.parametrize("asked", ["How many?", CALL_BOTH])
@pytest.mark.parametrize("most", [*range(1, 40, 3)])
async def test_a_limit_makes_the_response_incomplete_anywhere(asked: str, most: int) -> None:
    found = await run(following_pair(chunk_size=1), input=asked, tools=[ADD, SAY], max_output_tokens=most)
    if found.result.finish_reason != "length":
        assert found.last["status"] == "completed"
        return
    assert found.events[-1]["type"] == "response.incomplete"
    assert found.last["status"] == "incomplete"
    assert found.last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "completed_at" not in found.last
    statuses = [item["status"] for item in found.last["output"]]
    assert set(statuses[:-1]) <= {"completed"}
    assert all(call.problem is None for call in found.result.tool_calls)


async def test_a_model_without_separate_thinking_has_no_reasoning_item() -> None:
    found = await run(following_pair(thinks=False))
    assert [item["type"] for item in found.last["output"]] == ["message"]


async def test_reasoning_can_be_left_out() -> None:
    found = await run(include_reasoning=False, stepspec={"events": True})
    assert [item["type"] for item in found.last["output"]] == ["message"]
    assert "stepspec" not in found.whole


async def test_proposed_and_judged_steps_are_events_on_request() -> None:
    assert not [event for event in (await run()).events if event["type"].startswith("stepspec.")]
    found = await run(stepspec={"events": True})
    own = [event for event in found.events if event["type"].startswith("stepspec.")]
    assert {event["type"] for event in own} == {"stepspec.step.proposed", "stepspec.step.judged"}
    assert own[0]["stepspec"]["event"]["text"] == THOUGHTS[0]


async def test_the_message_has_the_log_probabilities_of_its_tokens() -> None:
    for fields in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        found = await run(**fields)
        (part,) = found.last["output"][1]["content"]
        assert "".join(each["token"] for each in part["logprobs"]) == ANSWER
        assert part["logprobs"] == found.whole["output"][1]["content"][0]["logprobs"]
        done = next(event for event in found.events if event["type"] == "response.output_text.done")
        assert done["logprobs"] == part["logprobs"]


def ended(answer: ResponsesAnswer, events: Sequence[Event], result: Result) -> list[dict[str, Any]]:
    return [*answer.begin(), *(each for event in events for each in answer.chunks(0, event)), *answer.end([result])]


def answering(**fields: Any) -> ResponsesAnswer:
    return ResponsesAnswer("target", "specreason", requested(**fields), "mine", thinks=True)


async def test_text_after_a_call_is_a_second_message() -> None:
    result = (await run()).result
    call = ToolCall("abcdefghi", "add", "{}")
    events = [AnswerDelta("One."), ToolCalled(0, call), AnswerDelta("Two.")]
    found = ended(answering(), events, result)
    check_stream(found)
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["message", "function_call", "message"]


async def test_an_empty_answer_is_an_empty_message() -> None:
    result = (await run()).result
    found = ended(answering(), [], result)
    check_stream(found)
    (message,) = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


async def test_an_invalid_call_is_a_message() -> None:
    call = ToolCall("abcdefghi", "", "[1", "The arguments are not valid JSON.")
    found = ended(answering(), [AnswerDelta("[1"), ToolCalled(0, call)], (await run()).result)
    check_stream(found)
    (message,) = found[-1]["response"]["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "[1")


@pytest.mark.parametrize("num_events", range(4))
async def test_an_error_fails_the_response(num_events: int) -> None:
    steps = [StepCommitted(step) for step in (await run()).result.steps]
    answer = answering()
    found = answer.begin()
    for event in [*steps, AnswerDelta("The")][:num_events]:
        found += answer.chunks(0, event)
    found += answer.failed(EngineError("The target is gone."))
    check_stream(found)
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "The target is gone."}
    assert [item["status"] for item in response["output"]][-1:] == ["incomplete"][:num_events]


# Input


async def test_a_string_is_a_turn_of_the_user_and_instructions_come_first() -> None:
    assert chat_fields(input="How many?", instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        USER,
    ]


async def test_messages_may_have_either_form() -> None:
    found = turns(
        {"role": "user", "content": "One"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": part} for part in ("Thr", "ee")],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "msg_1"},
        {"type": None, "role": "user", "content": "Four"},
    )
    assert [(turn["role"], turn["content"]) for turn in found] == [
        ("user", "One"),
        ("assistant", "Two"),
        ("user", "Three"),
        ("assistant", "No."),
        ("user", "Four"),
    ]


def test_system_messages_at_the_beginning_are_one_turn() -> None:
    found = turns({"role": "developer", "content": "B"}, {"role": "system", "content": "C"}, USER, instructions="A")
    assert found == [{"role": "system", "content": "A\n\nB\n\nC"}, USER]
    assert [turn["role"] for turn in turns(USER, {"role": "developer", "content": "A"}, USER)] == [
        *("user", "system", "user")
    ]


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"id-{name}", "name": name, "arguments": "{}", "id": f"fc_{name}"}


def output(name: str, content: Any = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"id-{name}", "output": content}


def test_consecutive_items_of_the_assistant_are_one_turn() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "One moment."}
    found = turns(USER, thought, said, called("add"), called("say"), output("add"), output("say"), thought, said, USER)
    calls = [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("add", "say")
    ]
    assert found == [
        USER,
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "id-add", "content": "4"},
        {"role": "tool", "tool_call_id": "id-say", "content": "4"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Hm."},
        USER,
    ]


def test_a_summary_counts_if_there_is_no_other_reasoning() -> None:
    summary = [{"type": "summary_text", "text": text} for text in ("One.", "Two.")]
    thought = {"type": "reasoning", "summary": summary, "content": None, "encrypted_content": "abc"}
    assert turns(USER, thought, USER)[1] == {"role": "assistant", "content": "", "reasoning_content": "One.\n\nTwo."}


def test_outputs_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": text} for text in "12"]
    assert turns(USER, called("add"), output("add", parts))[2]["content"] == "12"


async def test_a_conversation_with_tools_round_trips() -> None:
    pair = following_pair()
    items: list[Any] = [{"role": "user", "content": CALL_BOTH}]
    first = await run(pair, input=items, tools=[ADD, SAY], instructions="Be brief.")
    INPUT_ITEMS.validate_python(first.last["output"])
    calls = [item for item in first.last["output"] if item["type"] == "function_call"]
    items += [*first.last["output"], *(output("", call["name"]) | {"call_id": call["call_id"]} for call in calls)]
    second = await run(pair, input=items, tools=[ADD, SAY], instructions="Be brief.")
    assert second.result.answer == "\n\nIt is add, say."
    seen = asked_of(pair.target)
    assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "tool"]
    assert seen[2]["reasoning_content"] == "".join(THOUGHTS)
    assert [call["id"] for call in seen[2]["tool_calls"]] == [call.id for call in first.result.tool_calls]
    items += [*second.last["output"], {"role": "user", "content": "Sure?"}]
    await run(pair, input=items, tools=[ADD, SAY])
    seen = asked_of(pair.target)
    assert (seen[4]["content"], seen[4]["reasoning_content"]) == (second.result.answer, "".join(THOUGHTS))


# Other fields


def test_tools_that_codex_offers_to_every_model_are_left_out() -> None:
    tools = [ADD, {"type": "namespace", "name": "agents", "tools": [SAY]}, {"type": "web_search"}]
    request = requested(tools=tools, client_metadata={"a": "b"})
    assert [tool["function"]["name"] for tool in request.text_request.tools or ()] == ["add"]
    assert request.ignored == ["tools.1", "tools.2", "client_metadata"]


def test_fields_are_translated() -> None:
    strict = {**ADD, "strict": True, "description": None}
    form = {"type": "json_schema", "name": "n", "schema": FORM, "strict": True}
    found = chat_fields(
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "detailed"},
        text={"format": form, "verbosity": "medium"},
        tools=[strict],
        tool_choice={"type": "function", "name": "add"},
        include=["reasoning.encrypted_content"],
        stepspec={"policy": "token"},
        model="target",
        store=None,
    )
    assert found["max_completion_tokens"] == 5
    assert found["reasoning_effort"] == "low"
    assert found["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": FORM, "strict": True},
    }
    assert found["tools"] == [{"type": "function", "function": {"name": "add", "parameters": FORM, "strict": True}}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert (found["logprobs"], found["stepspec"], found["model"]) == (False, {"policy": "token"}, "target")
    assert chat_fields(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


EXTRAS: Mapping[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"1": 1.0},
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [1],
    "ignore_eos": True,
    "thinking_token_budget": 3,
    "guided_json": FORM,
    "guided_choice": ["a"],
    "structured_outputs": {"choice": ["a"]},
    "enable_thinking": True,
    "include_reasoning": False,
    "chat_template_kwargs": {"a": 1},
    "draft_chat_template_kwargs": {"a": 1},
    "priority": 1,
    "request_id": "a",
    "session_id": "a",
    "cache_salt": "a",
}


def test_fields_of_vllm_are_passed_on() -> None:
    assert EXTRAS.keys() == set(PASSED) <= ChatRequest.model_fields.keys()
    for name, value in EXTRAS.items():
        assert chat_fields(**{name: value})[name] == value
        assert requested(**{name: value}).ignored == []


def test_every_field_of_openai_is_known() -> None:
    without_effect = {
        *("access_programs", "background_options", "image", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier"),
    }
    known = ResponsesRequest.model_fields.keys() | RESPONSES.keys()
    assert ResponseCreateParamsBase.__annotations__.keys() - known == without_effect


def test_unknown_fields_are_listed() -> None:
    found = requested(
        service_tier="flex", text={"a": 1}, reasoning={"b": 1, "context": "auto"}, stream_options={"c": 1}
    )
    assert found.ignored == ["service_tier", "text.a", "reasoning.b", "stream_options.c"]


def test_the_document_has_all_fields() -> None:
    properties = ResponsesRequest.model_json_schema()["properties"]
    assert properties.keys() == {*ResponsesRequest.model_fields, *PASSED, *RESPONSES}
    assert "$ref" not in json.dumps([properties[name] for name in PASSED])


# Refusals

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
WEATHER = {"type": "json_schema", "name": "n", "schema": FORM}
REFUSED: Sequence[tuple[str, dict[str, Any]]] = [
    ("store", {"store": True}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("background", {"background": True}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("truncation", {"truncation": "auto"}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("context_management", {"context_management": [{"type": "compaction"}]}),
    ("moderation", {"moderation": {"model": "a"}}),
    ("messages", {"messages": [USER]}),
    ("max_tokens", {"max_tokens": 5}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": True}),
    ("policy", {"policy": "token"}),
    ("min_tokens", {"min_tokens": 2}),
    ("include", {"include": ["file_search_call.results"]}),
    ("include.0", {"include": [1]}),
    ("input", {"input": None}),
    ("input.0", {"input": ["How many?"]}),
    ("input.0.type", {"input": [{}]}),
    ("input.0.type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input.0.type", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
    ("input.0.type", {"input": [{"type": ["message"]}]}),
    ("input.0.role", {"input": [{"role": "tool", "content": "a"}]}),
    ("input.0.role", {"input": [{"role": 1, "content": "a"}]}),
    ("input.0.content", {"input": [{"role": "user", "content": None}]}),
    ("input.0.content.1.type", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}]}),
    ("input.0.content.0.type", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}),
    ("input.0.content.0.text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input.0.content.0", {"input": [{"role": "user", "content": ["a"]}]}),
    ("input.1.call_id", {"input": [USER, {"type": "function_call", "name": "a", "arguments": "{}"}]}),
    ("input.1.arguments", {"input": [USER, {**called("a"), "arguments": {}}]}),
    ("input.0.output", {"input": [{"type": "function_call_output", "call_id": "a"}]}),
    ("input.0.output.0.type", {"input": [output("a", [IMAGE])]}),
    ("input.0.summary", {"input": [{"type": "reasoning", "summary": "a"}, USER]}),
    ("input.0.encrypted_content", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "a"}, USER]}),
    ("instructions", {"instructions": [USER]}),
    ("tools.0.type", {"tools": [{"type": "file_search"}]}),
    ("tools.1.type", {"tools": [ADD, {"type": "mcp", "server_label": "a"}]}),
    ("tools.0.name", {"tools": [{"type": "function"}]}),
    ("tools.0.name", {"tools": [{"type": "function", "name": "a b"}]}),
    ("tools.0.parameters", {"tools": [{"type": "function", "name": "a", "parameters": []}]}),
    ("tools.0.defer_loading", {"tools": [{**ADD, "defer_loading": True}]}),
    ("tool_choice", {"tools": [ADD], "tool_choice": "add"}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "web_search"}}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ADD]}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": FORM}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n", "schema": "a"}}}),
    ("text.format", {"text": {"format": {**WEATHER, "a": 1}}}),
    ("text.format", {"text": {"format": "json_object"}}),
    ("reasoning.context", {"reasoning": {"context": "all_turns"}}),
    ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ("reasoning.summary", {"reasoning": {"summary": "long"}}),
    ("reasoning.effort", {"reasoning": {"effort": 1}}),
    ("metadata.a", {"metadata": {"a": 1}}),
    ("user", {"user": "\ud800"}),
    ("metadata", {"metadata": {"a": "\ud800"}}),
    ("max_output_tokens", {"max_output_tokens": "5"}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda each: json.dumps(each)[:40])
def test_what_is_not_supported_is_refused(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        requested(**fields)
    assert caught.value.param == param
    assert str(caught.value).endswith((".", "..."))


def test_advice_is_only_given_for_refused_fields() -> None:
    assert ADVICE.keys() <= RESPONSES.keys()


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": -1.0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("top_k", {"top_k": "5"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools", {"tools": [ADD, ADD]}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": [USER, called("add")]}),
        ("text.format", {"text": {"format": WEATHER}, "guided_choice": ["a"]}),
        ("reasoning.effort", {"reasoning": {"effort": "low"}}),
    ],
)
async def test_errors_about_the_chat_request_name_the_fields_of_this_one(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        await prepared(requested(**fields), following_pair())
    if param == "text.format" and "guided_choice" in fields:
        assert str(caught.value).startswith("text.format and guided_choice")
    else:
        assert caught.value.param == param
    for name in ("max_completion_tokens", "response_format", "reasoning_effort"):
        assert name not in str(caught.value)


def test_params_are_mapped_back() -> None:
    names = {"messages.3.content": "input", "reasoning_effort": "reasoning.effort", "logprobs": "include"}
    names |= {"response_format.json_schema": "text.format", "tools.0": "tools.0", "stepspec.policy": "stepspec.policy"}
    for name, own in {**names, None: None}.items():
        with pytest.raises(RefusedError) as caught, requested().in_its_words():
            raise RefusedError(name, "It is wrong.")
        assert caught.value.param == own


def test_a_prompt_that_is_too_long_is_an_error_about_the_input() -> None:
    with pytest.raises(RefusedError) as caught, requested().in_its_words():
        raise ContextError("The prompt has 5 tokens.")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(NoSuchModelError), requested().in_its_words():
        raise NoSuchModelError("a", [])


NAMES = [
    *("type", "role", "content", "text", "refusal", "summary", "output", "call_id", "name", "arguments"),
    *("encrypted_content", "id", "status"),
]
WORDS = [
    *("message", "reasoning", "function_call", "function_call_output", "item_reference", "user", "assistant", "system"),
    *("input_text", "output_text", "refusal", "reasoning_text", "summary_text", "\ud800", "", "a"),
]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=10,
)
PART_LISTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(WORDS)}, optional={"text": VALUES, "refusal": VALUES}), max_size=2
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS[:5]) | VALUES},
    optional={
        "role": st.sampled_from(WORDS[5:8]) | VALUES,
        **dict.fromkeys(("content", "summary", "output"), PART_LISTS | VALUES),
        **dict.fromkeys(("call_id", "name", "arguments"), st.sampled_from(WORDS) | VALUES),
    },
)


@settings(max_examples=80, database=None)
@given(items=st.lists(ITEMS | VALUES, max_size=4) | VALUES)
def test_odd_input_is_refused(items: Any) -> None:
    try:
        (messages,) = ResponsesRequest.validated({"input": items}).questions()
    except RefusedError:
        return
    with suppress(UsageError):
        checked_messages(messages)


@settings(max_examples=60, database=None)
@given(
    name=st.sampled_from([*ResponsesRequest.model_fields, "store", "truncation"]),
    value=VALUES | st.lists(st.fixed_dictionaries({"type": st.just("function"), "name": VALUES}), max_size=2),
)
def test_odd_fields_are_refused(name: str, value: Any) -> None:
    try:
        request = ResponsesRequest.validated({"input": "How many?", name: value})
    except RefusedError:
        return
    json.dumps(ResponsesAnswer("target", "token", request, "mine", thinks=True).begin(), ensure_ascii=False)


# Clients


class Answer(BaseModel):
    """A format of answers."""

    a: int


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(following_pair(), "specreason") as base_url:
        yield base_url


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as found:
        yield found


async def test_openai_s_client_reads_responses(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="target", input="How many?")
    assert response.output_text == ANSWER
    parsed = await client.responses.parse(model="target", input="Give 4.", text_format=Answer)
    assert parsed.output_parsed == Answer(a=4)


async def test_errors_name_the_fields_of_the_route(client: AsyncOpenAI) -> None:
    for fields, param in (({"max_output_tokens": 0}, "max_output_tokens"), ({"store": True}, "store")):
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(model="target", input="How many?", **fields)
        assert caught.value.param == param
    with pytest.raises(NotFoundError):
        await client.responses.create(model="gpt-5", input="How many?")


async def test_openai_s_client_reads_streams(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="target", input="Give 4.", text_format=Answer) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Answer(a=4)
    own: Any = {"stepspec": {"events": True}}
    async with client.responses.stream(model="target", input=CALL_BOTH, tools=[ADD, SAY], extra_body=own) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    calls: list[Any] = [item for item in events[-1].response.output if item.type == "function_call"]
    assert snapshots[-1] == calls[-1].arguments


def test_a_stream_ends_with_its_last_event(address: str) -> None:
    found = httpx.post(f"{address}/responses", json={"input": "How many?", "stream": True})
    *_, last, end = found.text.split("\n\n")
    assert last.startswith("event: response.completed\n")
    assert end == ""


@pytest.mark.parametrize("version", ["responses/v1", "v1"])
async def test_langchain_s_chat_model_calls_tools(address: str, version: Any) -> None:
    model = ChatOpenAI(
        model="target",
        base_url=address,
        http_async_client=httpx.AsyncClient(),  # the one that is shared belongs to another event loop
        api_key="none",  # type: ignore[arg-type]
        use_responses_api=True,
        output_version=version,
    )
    bound = model.bind_tools([{"type": "function", "function": {"name": "add", "parameters": FORM}}])
    messages: list[Any] = [HumanMessage("Please add 4.")]
    whole = await bound.ainvoke(messages)
    total: Any = None
    async for chunk in bound.astream(messages):
        total = chunk if total is None else total + chunk
    for message in (whole, total):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("add", {"a": 4, "text": "word"})]
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0
        answer = await bound.ainvoke([*messages, message, ToolMessage("7", tool_call_id=message.tool_calls[0]["id"])])
        assert answer.text == "\n\nIt is 7."

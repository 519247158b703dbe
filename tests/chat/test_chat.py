"""`ChatStepSpec` beyond the standard suites: settings, composition with LangChain, and invalid input."""

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypedDict

import pytest
from following import TEMPLATE, THOUGHTS, FollowingEngine, asked_of, following_pair
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError
from scripted import Reply, ScriptedEngine, WordTokenizer

from stepspec import Pair, Policy
from stepspec.errors import ContextError, EngineError, ModelError, UsageError
from stepspec.langchain import ChatStepSpec, StepSpecRunnable
from stepspec.langchain.chat import PER_CALL

pytestmark = pytest.mark.anyio

ANSWER = "\n\nYou said 1 things, How many? among them."


@tool
def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


def new_chat(**settings: Any) -> ChatStepSpec:
    """Return a chat model with its own pair of scripted engines."""
    return ChatStepSpec(pair=following_pair(), **settings)


def calls(chat: ChatStepSpec) -> list[Any]:
    """Return the `generate` calls that the target received."""
    assert isinstance(chat.pair.target, FollowingEngine)
    return [call for call in chat.pair.target.calls if call.verb == "generate"]


# Results


async def test_response_metadata_reports_speculation() -> None:
    message = await new_chat(policy="specreason").ainvoke("How many?")
    about = message.response_metadata["stepspec"]
    assert (about["policy"], about["steps"], about["steps_accepted"]) == ("specreason", 2, 2)
    usage = message.usage_metadata
    assert usage is not None
    assert about["draft_tokens"] + about["target_tokens"] == usage["output_tokens"]
    assert message.response_metadata["finish_reason"] == "stop"


async def test_each_step_is_a_reasoning_block_and_the_content_is_a_string() -> None:
    message = await new_chat().ainvoke("How many?")
    assert message.content == ANSWER
    blocks: list[Any] = message.content_blocks
    assert [block["type"] for block in blocks] == ["reasoning", "reasoning", "text"]
    assert [block["index"] for block in blocks] == [1, 2, 0]
    assert tuple(block["reasoning"] for block in blocks[:2]) == THOUGHTS
    extras = blocks[0]["extras"]
    assert (extras["step"], extras["origin"], extras["tokens"]) == (0, "draft", extras["tokens_from_draft"])


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("question", ["How many?", "Please double 4."])
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("policy", ["specreason", "target"])
async def test_chunks_add_up_to_the_message(version: Any, question: str, thinks: bool, policy: str) -> None:
    pair = following_pair(thinks=thinks)
    model = ChatStepSpec(pair=pair, output_version=version, policy=policy).bind_tools([double])
    message = await model.ainvoke(question)
    total = await added(model.astream(question))
    assert total.text == message.text
    assert total.usage_metadata == message.usage_metadata
    strip = [{name: value for name, value in block.items() if name != "id"} for block in total.content_blocks]
    assert strip == [{name: value for name, value in block.items() if name != "id"} for block in message.content_blocks]


async def added(chunks: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    """Return the sum of the chunks, which have one id."""
    found = [chunk async for chunk in chunks]
    assert len({chunk.id for chunk in found}) == 1
    return sum(found[1:], found[0])


@pytest.mark.parametrize("version", ["v0", "v1"])
async def test_what_the_target_writes_is_streamed_by_tokens(version: Any) -> None:
    chat = new_chat(policy="target", output_version=version)
    chunks = [chunk async for chunk in chat.astream("How many?")]
    blocks: list[Any] = [block for chunk in chunks for block in chunk.content_blocks if block["type"] == "reasoning"]
    assert "".join(block["reasoning"] for block in blocks) == "".join(THOUGHTS)
    ends = [index for index, block in enumerate(blocks) if "extras" in block]
    assert [blocks[end]["index"] for end in ends] == [1, 2]
    assert all(block["index"] == 1 for block in blocks[: ends[0]])
    assert len(blocks) > 2 * len(THOUGHTS)
    texts = [
        block["reasoning"]
        async for chunk in new_chat(policy="specreason").astream("How many?")
        for block in chunk.content_blocks
        if block["type"] == "reasoning"
    ]
    assert texts == list(THOUGHTS), "a step of the draft is shown when it is accepted"


STEPS = "We add 4.\n\nThen 3.\n\nIt is 7."


def without_thinking(text: str, policy: str = "target", **settings: Any) -> ChatStepSpec:
    """Return a chat model whose target does not separate its thinking, and always answers the same."""
    tokenizer = WordTokenizer(TEMPLATE.replace("thinks", "false"), tags=False)
    target = ScriptedEngine(tokenizer, [Reply(f"{text}<|end|>", chunk_size=3)] * 9, name="target")
    return ChatStepSpec(pair=Pair(target, None), policy=policy, **settings)


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize(
    ("text", "stop", "blocks"),
    [
        (STEPS, None, ["We add 4.\n\n", "Then 3.\n\n", "It is 7."]),
        (STEPS, ["3"], ["We add 4.\n\n", "Then "]),
        (STEPS, ["\n\nIt is 8"], ["We add 4.\n\n", "Then 3.\n\n", "It is 7."]),
        (
            'I double it.\n\n<tool_call>\n{"name": "double", "arguments": {"n": 4}}\n</tool_call>\n\nAnd wait.',
            None,
            ["I double it.", "\n\nAnd wait."],
        ),
    ],
)
async def test_steps_that_are_the_answer_are_text_blocks(
    version: Any, text: str, stop: list[str] | None, blocks: list[str]
) -> None:
    model = without_thinking(text, output_version=version, stop=stop).bind_tools([double])
    for message in (await model.ainvoke("How many?"), await added(model.astream("How many?"))):
        found: list[Any] = [block for block in message.content_blocks if block["type"] == "text"]
        assert [block["text"] for block in found] == blocks
        assert message.text == "".join(blocks)
        assert [block["extras"]["step"] for block in found if "extras" in block] == [
            block["index"] for block in found if "extras" in block
        ]
        assert {block["extras"]["origin"] for block in found if "extras" in block} == {"target"}


async def test_steps_that_are_the_answer_go_back_as_one_text() -> None:
    pair = following_pair(thinks=False)
    for version in ("v0", "v1"):
        chat = ChatStepSpec(pair=pair, output_version=version)
        first = await chat.ainvoke("How many?")
        assert len(first.content_blocks) > 1
        await chat.ainvoke([HumanMessage("How many?"), first, HumanMessage("Sure?")])
        assert asked_of(pair.target)[1]["content"] == ANSWER
        assert await chat.with_structured_output(Sum).ainvoke("It is 7.") == Sum(total=7)


async def test_earlier_reasoning_goes_to_the_template() -> None:
    chat = new_chat()
    first = await chat.ainvoke("How many?")
    for earlier in (first, AIMessage(content=first.content_blocks)):  # type: ignore[arg-type]
        await chat.ainvoke([HumanMessage("How many?"), earlier, HumanMessage("Sure?")])
        seen = asked_of(chat.pair.target)[1]
        assert (seen["content"], seen["reasoning_content"]) == (ANSWER, "".join(THOUGHTS))


class Listener(AsyncCallbackHandler):
    """Collects the tokens and step events that callbacks receive."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.steps: list[Any] = []

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    async def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.steps.append((name, data["index"]))


async def test_callbacks_receive_every_token_once() -> None:
    listener = Listener()
    chunks = [chunk async for chunk in new_chat().astream("How many?", {"callbacks": [listener]})]
    assert "".join(listener.tokens) == "".join(str(chunk.content) for chunk in chunks) == ANSWER


async def test_in_a_chain_steps_are_custom_events() -> None:
    listener = Listener()
    await (new_chat() | StrOutputParser()).ainvoke("How many?", {"callbacks": [listener]})
    assert listener.steps == [("stepspec.step.committed", 0), ("stepspec.step.committed", 1)]


# Settings


async def test_settings_reach_both_models() -> None:
    chat = new_chat(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, seed=4, max_tokens=50)
    await chat.ainvoke("How many?")
    sampling = calls(chat)[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 5, 0.1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 4)
    assert calls(chat)[0].stop.max_tokens < 50


async def test_a_call_can_override_settings() -> None:
    chat = new_chat()
    await chat.ainvoke("How many?", temperature=0.5, seed=9, max_tokens=12, policy="target")
    (call,) = calls(chat)
    assert (call.sampling.temperature, call.sampling.seed, call.stop.max_tokens) == (0.5, 9, 12)
    message = await chat.ainvoke("How many?", max_thinking_tokens=0)
    assert message.response_metadata["stepspec"]["limit"] == "max_thinking_tokens"
    assert (await chat.ainvoke("How many?", stop=["things"])).text == "\n\nYou said 1 "
    assert (await chat.ainvoke("How many?", max_thinking_s=60, deadline_s=60)).text == ANSWER


async def test_without_a_seed_every_call_uses_a_new_one() -> None:
    chat = new_chat(temperature=1.0, policy="token")
    for _ in range(2):
        await chat.ainvoke("How many?")
    seeds = [call.sampling.seed for call in calls(chat)]
    assert len(set(seeds)) == 2


async def test_setting_names_of_other_chat_models_are_accepted() -> None:
    chat = ChatStepSpec(model_name="following:a", max_completion_tokens=9, request_timeout=3, stop_sequences=["x"])
    assert (chat.model, chat.max_tokens, chat.timeout, chat.stop) == ("following:a", 9, 3, ["x"])


async def test_engines_are_shared_between_chat_models() -> None:
    settings = {"model": "following:target", "draft": "following:draft"}
    one, other = ChatStepSpec(**settings), ChatStepSpec(**settings, temperature=0.3)
    for chat in (one, other, one):
        await chat.ainvoke("How many?")
    from stepspec.langchain import shared_models

    assert len(shared_models._pairs) == 1  # pyright: ignore[reportPrivateUsage]


async def test_fields_are_configurable() -> None:
    chat = new_chat(seed=1, policy="token").configurable_fields(temperature=ConfigurableField(id="heat"))
    await chat.with_config(configurable={"heat": 0.9}).ainvoke("How many?")  # type: ignore[arg-type]
    assert calls(chat.default)[0].sampling.temperature == 0.9  # type: ignore[attr-defined]


async def test_a_policy_may_be_a_value_or_a_file(tmp_path: Path) -> None:
    policy = Policy(version=1, summary="alone", family="target")
    assert (await new_chat(policy=policy).ainvoke("How many?")).response_metadata["stepspec"]["policy"] == "alone"


async def test_the_cache_of_langchain_is_used() -> None:
    chat = new_chat(cache=InMemoryCache(), policy="token")
    for _ in range(2):
        await chat.ainvoke("How many?")
    assert len(calls(chat)) == 1
    await chat.ainvoke("How many?", temperature=0.1, seed=3)
    assert len(calls(chat)) == 2


async def test_callbacks_receive_usage() -> None:
    counted = UsageMetadataCallbackHandler()
    message = await new_chat().ainvoke("How many?", {"callbacks": [counted]})
    assert counted.usage_metadata == {"target": message.usage_metadata}


# Structured output


class Sum(BaseModel):
    """A sum."""

    total: int


class SumDict(TypedDict):
    """A sum."""

    total: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("raw", [False, True])
async def test_all_methods_return_the_requested_structure(method: Any, raw: bool) -> None:
    model = new_chat().with_structured_output(Sum, method=method, include_raw=raw)
    found = await model.ainvoke("It is 7, as `total`.")
    parsed = found["parsed"] if raw else found
    assert parsed == Sum(total=7)
    assert not raw or isinstance(found["raw"], AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [SumDict, Sum.model_json_schema()])
async def test_a_typed_dict_or_json_schema_gives_a_dictionary(method: Any, schema: Any) -> None:
    assert await new_chat().with_structured_output(schema, method=method).ainvoke("It is 7.") == {"total": 7}


async def test_the_engine_receives_the_schema() -> None:
    chat = new_chat()
    await chat.with_structured_output(Sum).ainvoke("It is 7.")
    assert '"total"' in calls(chat)[-1].json_schema


async def test_structured_output_beside_tools() -> None:
    message = await new_chat().with_structured_output(Sum, include_raw=True, tools=[double]).ainvoke("It is 7.")
    assert [call["name"] for call in message["raw"].tool_calls] == ["double"]


# Failures


def failing_chat(error: Exception, *, times: int = 100, **settings: Any) -> ChatStepSpec:
    """Return a chat model whose target fails `times` times, then answers."""
    tokenizer = WordTokenizer()
    replies = [Reply(fails=error) for _ in range(times)]  # type: ignore[arg-type]
    target = ScriptedEngine(tokenizer, [*replies, "</think>So 9.<|end|>"], name="target")
    return ChatStepSpec(pair=Pair(target, None), policy="target", **settings)


async def test_an_engine_failure_is_both_a_langchain_and_a_stepspec_error() -> None:
    with pytest.raises(ModelAPIError, match="It broke") as caught:
        await failing_chat(EngineError("It broke.")).ainvoke("How many?")
    assert isinstance(caught.value, EngineError)
    assert caught.value.is_retryable


async def test_retries_and_fallbacks_compose() -> None:
    failing = failing_chat(EngineError("It broke."), times=1)
    assert (await failing.with_retry(stop_after_attempt=2).ainvoke("How many?")).text == "So 9."
    assert (await failing_chat(EngineError("It broke."), times=2, max_retries=2).ainvoke("How many?")).text == "So 9."
    broken = failing_chat(EngineError("It broke."))
    assert (await broken.with_fallbacks([new_chat()]).ainvoke("How many?")).text == ANSWER


async def test_a_call_times_out() -> None:
    pair = following_pair(hangs=True)
    with pytest.raises(ModelTimeoutError, match="exceeded its timeout"):
        await ChatStepSpec(pair=pair, timeout=0.05).ainvoke("How many?")
    assert pair.target.num_open == 0  # type: ignore[attr-defined]


async def test_closing_a_stream_frees_the_engines() -> None:
    pair = following_pair()
    stream = ChatStepSpec(pair=pair).astream("How many?")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert pair.target.num_open == pair.draft.num_open == 0  # type: ignore[union-attr]


def test_closing_a_synchronous_stream_frees_the_engines() -> None:
    pair = following_pair(delay_s=0.01)
    stream = ChatStepSpec(pair=pair).stream("How many?")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert ChatStepSpec(pair=pair).invoke("How many?").text == ANSWER


def test_a_synchronous_call_inside_the_shared_thread_fails_instead_of_blocking() -> None:
    class Calling(AsyncCallbackHandler):
        def __init__(self) -> None:
            self.errors: list[Exception] = []

        async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            try:
                new_chat().invoke("How many?")
            except UsageError as error:
                self.errors.append(error)

    calling = Calling()
    assert new_chat().batch(["How many?"], {"callbacks": [calling]})[0].text == ANSWER
    assert "ainvoke" in str(calling.errors[0])


async def test_structured_output_is_none_where_a_tool_is_called() -> None:
    assert await new_chat().with_structured_output(Sum, tools=[double]).ainvoke("It is 7.") is None


async def test_the_cache_distinguishes_stop_strings() -> None:
    cache, pair = InMemoryCache(), following_pair()
    assert (await ChatStepSpec(pair=pair, cache=cache).ainvoke("How many?")).text == ANSWER
    assert (await ChatStepSpec(pair=pair, cache=cache, stop=["things"]).ainvoke("How many?")).text == "\n\nYou said 1 "


async def test_text_blocks_are_joined() -> None:
    chat = new_chat()
    await chat.ainvoke([HumanMessage([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}])])
    assert asked_of(chat.pair.target)[0]["content"] == "Hello"


def test_the_environment_sets_base_url_unless_local_models_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSPEC_BASE_URL", "http://localhost:8000/v1")
    assert ChatStepSpec().base_url == ChatStepSpec(model="Qwen3-32B").base_url == "http://localhost:8000/v1"
    assert new_chat().base_url is None
    assert ChatStepSpec(model="torch:./x").base_url is None


# Invalid input

IMAGE = HumanMessage([{"type": "text", "text": "What is it?"}, {"type": "image", "url": "http://example.com/a.png"}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "empty"),
        ([HumanMessage("")], "question is empty"),
        ([IMAGE], "text"),
        ([HumanMessage("Hi"), AIMessage("Hello")], "assistant's own"),
    ],
)
async def test_unsupported_messages_are_rejected(messages: Any, error: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=error) as caught:
        await new_chat().ainvoke(messages)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"temperature": -1}, "between 0"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": [""]}, "empty"),
        ({"policy": "two-levle"}, "Did you mean 'two-level'"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "function"}]}, "Tool 1"),
        ({"deadline_s": -1}, "above 0"),
        ({"max_thinking_s": -1}, "above 0"),
        ({"tool_choice": "x"}, "no tool_choice 'x'"),
        ({"model": "nothing:x"}, "engine kind 'nothing'"),
        ({"draft": "following:x"}, "draft was named without a target"),
    ],
)
async def test_invalid_settings_of_a_call_are_rejected(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=error):
        await new_chat().ainvoke("How many?", **settings)


async def test_a_long_conversation_raises_the_overflow_error_of_langchain() -> None:
    with pytest.raises(ContextOverflowError) as caught:
        await ChatStepSpec(pair=following_pair(max_context=20)).ainvoke("How many?")
    assert isinstance(caught.value, ContextError)


async def test_an_unknown_pair_is_rejected() -> None:
    with pytest.raises(ModelInvalidRequestError, match=r"no pair 'embeded'\."):
        await ChatStepSpec(pair="embeded").ainvoke("How many?")


async def test_a_missing_model_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="no folder") as caught:
        await ChatStepSpec(model="torch:./nothing").ainvoke("How many?")
    assert isinstance(caught.value, ModelError)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"base_url": "http://localhost:8000/v1", "draft": "torch:x"}, "leave out draft"),
        ({"base_url": "http://localhost:8000/v1", "policy": Policy(version=1, summary="s", family="target")}, "name"),
        ({"pair": 3}, "name of a pair"),
        ({"pair": following_pair(), "model": "torch:x"}, "either"),
    ],
)
def test_contradictory_settings_are_rejected(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        ChatStepSpec(**settings)


@pytest.mark.parametrize("choice", ["triple", {"type": "function", "function": {"name": "triple"}}])
def test_a_choice_of_an_unknown_tool_is_rejected(choice: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match="triple"):
        new_chat().bind_tools([double], tool_choice=choice)


def test_a_tool_without_schema_is_rejected_by_langchain() -> None:
    with pytest.raises((ValueError, TypeError)):
        new_chat().bind_tools([3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"schema": None}, "needs a schema"),
        ({"schema": Sum, "method": "by hoping"}, "no method"),
        ({"schema": Sum, "method": "function_calling", "tools": [double]}, "leave out tools"),
    ],
)
def test_invalid_structured_output_arguments_are_rejected(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=error):
        new_chat().with_structured_output(**arguments)


def test_every_per_call_setting_is_a_field_or_concerns_tools() -> None:
    of_tools = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
    assert set(PER_CALL) - of_tools <= set(ChatStepSpec.model_fields)


# The runnable


async def test_the_runnable_accepts_the_inputs_of_chat_models() -> None:
    runnable = StepSpecRunnable(pair=following_pair())
    for question in ("How many?", [("user", "How many?")], [HumanMessage("How many?")]):
        assert (await runnable.ainvoke(question)).text == ANSWER
    assert (await runnable.ainvoke({"messages": [("user", "How many?")]}))["messages"][0].text == ANSWER
    assert runnable.invoke("How many?").text == ANSWER
    assert "".join(chunk.text for chunk in runnable.stream("How many?")) == ANSWER
    assert [each.text for each in runnable.batch(["How many?"] * 3)] == [ANSWER] * 3
    assert [each.text for each in await runnable.abatch(["How many?"] * 3)] == [ANSWER] * 3


async def test_the_runnable_emits_step_events_by_itself() -> None:
    runnable = StepSpecRunnable(pair=following_pair())
    events = [event async for event in runnable.astream_events("How many?", version="v2")]
    step_events = [event for event in events if event["event"] == "on_custom_event"]
    assert [event["name"].removeprefix("stepspec.step.") for event in step_events][:3] == [
        "proposed",
        "judged",
        "committed",
    ]
    assert step_events[2]["data"]["text"] == THOUGHTS[0]
    assert events[0]["event"] == "on_chain_start"


async def test_the_runnable_composes_in_chains() -> None:
    chain = StepSpecRunnable(pair=following_pair()) | StrOutputParser()
    assert await chain.ainvoke("How many?") == ANSWER
    assert "".join([chunk async for chunk in chain.astream("How many?")]) == ANSWER


async def test_the_runnable_accepts_per_call_settings() -> None:
    runnable = StepSpecRunnable(pair=following_pair())
    assert (await runnable.ainvoke("How many?", stop=["things"])).text == "\n\nYou said 1 "
    with pytest.raises(ModelInvalidRequestError, match="messages"):
        await runnable.ainvoke({"question": "How many?"})


async def test_a_system_message_is_a_separate_turn() -> None:
    chat = new_chat()
    await chat.ainvoke([SystemMessage("Be brief."), HumanMessage("How many?")])
    assert [turn["role"] for turn in asked_of(chat.pair.target)] == ["system", "user"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda chat: pickle.loads(pickle.dumps(chat))], ids=["copy", "pickle"]
)
def test_a_chat_model_can_be_copied_after_use(copied: Callable[[ChatStepSpec], ChatStepSpec]) -> None:
    chat = ChatStepSpec(model="following:target", draft="following:draft")
    said = chat.invoke("How many?").text
    assert chat.sessions
    twin = copied(chat)
    assert (twin, twin.sessions) == (chat, {})
    assert twin.invoke("How many?").text == said


def test_copies_of_a_chat_model_with_loaded_models_share_them() -> None:
    chat = ChatStepSpec(pair=following_pair())
    assert copy.deepcopy(StepSpecRunnable(chat)).chat.pair is chat.pair

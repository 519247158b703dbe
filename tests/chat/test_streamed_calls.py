"""Tool calls that are streamed in chunks, to LangChain and over the wire."""

import json
from typing import Any

import pytest
from following import following_pair
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from service import serving

from stepspec.api.session import StepSpec
from stepspec.chat.events import ToolCall, ToolCallDelta, ToolCalled
from stepspec.client import RemoteStepSpec
from stepspec.langchain import ChatStepSpec
from stepspec.langchain.messages import chunk_of
from stepspec.loop.step import Event

pytestmark = pytest.mark.anyio

FORM = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
ADD, SAY = ({"type": "function", "function": {"name": name, "parameters": FORM}} for name in ("add", "say"))
ASK = "Please add 4 and say 'two words and then some'."


@pytest.mark.parametrize("thinks", [True, False])
async def test_tool_call_chunks_have_the_form_of_other_chat_models(*, thinks: bool) -> None:
    model = ChatStepSpec(pair=following_pair(chunk_size=1, thinks=thinks)).bind_tools([ADD, SAY])
    chunks = [chunk async for chunk in model.astream(ASK)]
    call_chunks = [each for chunk in chunks for each in chunk.tool_call_chunks]  # type: ignore[attr-defined]
    assert [each["name"] for each in call_chunks if each["name"]] == ["add", "say"]
    assert len([each for each in call_chunks if each["id"]]) == 2
    assert len(call_chunks) > 6
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    arguments = {"a": 4, "text": "two words and then some"}
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [("add", arguments), ("say", arguments)]


@pytest.mark.parametrize("choice", ["auto", "any"])
async def test_a_call_cut_off_anywhere_is_invalid(choice: str) -> None:
    model = ChatStepSpec(pair=following_pair(chunk_size=1)).bind_tools([SAY], tool_choice=choice)
    seen = set[bool]()
    for most in range(20, 80, 2):
        total: Any = None
        async for chunk in model.astream("Please say 'two words and then some'.", max_tokens=most):
            total = chunk if total is None else total + chunk
        message: Any = await model.ainvoke("Please say 'two words and then some'.", max_tokens=most)
        assert [call["args"] for call in total.tool_calls] == [call["args"] for call in message.tool_calls]
        assert len(total.invalid_tool_calls) == len(message.invalid_tool_calls)
        if message.invalid_tool_calls:
            assert message.response_metadata["finish_reason"] == "length"
        seen |= {bool(call) for call in (message.tool_calls, message.invalid_tool_calls)}
    assert seen == {True, False}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]:, ', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text("ab", max_size=3), VALUES, max_size=3), cut=st.integers(0, 200))
def test_arguments_cut_off_anywhere_are_not_completed(arguments: dict[str, Any], cut: int) -> None:
    text = json.dumps(arguments)[:cut]
    call = ToolCall("abcdefghi", "say", text, "The call is incomplete.")
    total = AIMessageChunk(content="")
    for event in (ToolCallDelta(0, text, call.id, call.name), ToolCalled(0, call)):
        chunk = chunk_of(event)
        assert chunk is not None
        total = total + chunk
    assert total.tool_calls == []
    assert len(total.invalid_tool_calls) == 1
    assert str(total.invalid_tool_calls[0]["args"]).startswith(text)


async def test_the_events_are_the_same_remotely() -> None:
    def call_events(events: list[Event]) -> list[Any]:
        return [event for event in events if isinstance(event, ToolCallDelta | ToolCalled)]

    def without_id(event: ToolCallDelta | ToolCalled) -> Any:
        if isinstance(event, ToolCallDelta):
            return (event.index, event.name, event.arguments)
        return (event.index, event.call.name, event.call.arguments, event.call.problem)

    async with StepSpec(pair=following_pair()) as spec:
        local_events = call_events([event async for event in spec.stream(ASK, tools=[ADD, SAY])])
        local_cut = call_events([event async for event in spec.stream(ASK, tools=[ADD, SAY], max_tokens=40)])
    with serving(following_pair()) as address:
        async with RemoteStepSpec(address) as remote:
            remote_events = call_events([event async for event in remote.stream(ASK, tools=[ADD, SAY])])
            remote_cut = call_events([event async for event in remote.stream(ASK, tools=[ADD, SAY], max_tokens=40)])
    assert [without_id(event) for event in local_events] == [without_id(event) for event in remote_events]
    assert [without_id(event) for event in local_cut] == [without_id(event) for event in remote_cut]
    assert local_cut[-1].call.problem == "The call is incomplete."

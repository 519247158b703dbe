"""Tool calls that are streamed in chunks, to LangChain and over the wire."""

import json
from dataclasses import replace
from typing import Any

import pytest
from following import following_pair
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from service import serving

from stepspec.api.session import StepSpec
from stepspec.chat.events import ToolCall, ToolCalled
from stepspec.client import RemoteStepSpec
from stepspec.langchain import ChatStepSpec
from stepspec.langchain.messages import AnswerSteps, chunk_of
from stepspec.loop.result import Event

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
    assert len({each["id"] for each in call_chunks}) == len(call_chunks) == 2, "a call comes when it is complete"
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    arguments = {"a": 4, "text": "two words and then some"}
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [("add", arguments), ("say", arguments)]


@pytest.mark.parametrize("choice", ["auto", "any"])
async def test_a_call_cut_off_anywhere_is_no_call(choice: str) -> None:
    model = ChatStepSpec(pair=following_pair(chunk_size=1)).bind_tools([SAY], tool_choice=choice)
    seen = set[bool]()
    for most in range(20, 80, 2):
        total: Any = None
        async for chunk in model.astream("Please say 'two words and then some'.", max_tokens=most):
            total = chunk if total is None else total + chunk
        message: Any = await model.ainvoke("Please say 'two words and then some'.", max_tokens=most)
        assert [call["args"] for call in total.tool_calls] == [call["args"] for call in message.tool_calls]
        assert not total.invalid_tool_calls
        assert not message.invalid_tool_calls
        assert message.tool_calls or message.response_metadata["finish_reason"] == "length"
        seen.add(bool(message.tool_calls))
    assert seen == {True, False}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]:, ', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text("ab", max_size=3), VALUES, max_size=3), cut=st.integers(0, 200))
def test_the_arguments_of_an_invalid_call_are_not_completed(arguments: dict[str, Any], cut: int) -> None:
    text = json.dumps(arguments)[:cut]
    call = ToolCall("abcdefghi", "say", text, "The call is incomplete.")
    chunk = chunk_of(ToolCalled(0, call), AnswerSteps())
    assert chunk is not None
    total = AIMessageChunk(content=text) + chunk
    assert total.tool_calls == []
    assert len(total.invalid_tool_calls) == 1
    assert str(total.invalid_tool_calls[0]["args"]).endswith(text)


async def test_the_events_are_the_same_remotely() -> None:
    def call_events(events: list[Event]) -> list[Any]:
        return [(each.index, replace(each.call, id="")) for each in events if isinstance(each, ToolCalled)]

    async with StepSpec(pair=following_pair()) as spec:
        local = [event async for event in spec.stream(ASK, tools=[ADD, SAY])]
    with serving(following_pair()) as address:
        async with RemoteStepSpec(address) as remote:
            assert call_events([event async for event in remote.stream(ASK, tools=[ADD, SAY])]) == call_events(local)
            assert not call_events([event async for event in remote.stream(ASK, tools=[ADD, SAY], max_tokens=30)])

"""Half a tool call, or half a structured answer, is never acted on, over HTTP and in LangChain."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from following import following_pair
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from pydantic import BaseModel
from scripted import Reply, ScriptedEngine
from service import serving
from test_tools import TEMPLATES, tool_tokenizer

from stepspec import Pair, StepSpec
from stepspec.client import RemoteStepSpec
from stepspec.langchain import ChatStepSpec

pytestmark = pytest.mark.anyio

FORM = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
WRITE = {"type": "function", "function": {"name": "w", "parameters": FORM}}
TOOLS_OF_RESPONSES: Any = [{"type": "function", "name": "w", "parameters": FORM}]
ASK: list[Any] = [{"role": "user", "content": "Please write."}]
ARGUMENTS = {"path": "a.txt", "text": "long text\nwith </tool_call> in it"}
CALL = json.dumps({"name": "w", "arguments": ARGUMENTS})
ANSWERS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "llama": CALL.replace("arguments", "parameters"),
    "deepseek": f"<｜tool▁call▁begin｜>w<｜tool▁sep｜>{json.dumps(ARGUMENTS)}<｜tool▁call▁end｜>",
    "qwen-xml": "<tool_call>\n<function=w>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\nlong text\nwith "
    "</tool_call> in it\n</parameter>\n</function>\n</tool_call>",
    "fenced": f"```json\n{CALL}\n```",
    "forced": f"[{CALL}]",
}


def writing_pair(family: str) -> Pair:
    """Return a model that always answers with a call in this format."""
    tokenizer = tool_tokenizer(TEMPLATES.get(family, TEMPLATES["hermes"]))
    replies: Iterator[Reply] = (Reply(f"{ANSWERS[family]}<|end|>", chunk_size=3) for _ in itertools.count())
    return Pair(ScriptedEngine(tokenizer, replies, name="target"), None)


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.soak)])
def test_a_call_that_a_limit_cuts_is_no_call(family: str, every: int) -> None:
    pair = writing_pair(family)
    num_tokens = len(pair.target.tokenizer.encode(ANSWERS[family]))
    choice: Any = "required" if family == "forced" else "auto"
    request: Any = {"model": "target", "messages": ASK, "tools": [WRITE], "tool_choice": choice}
    written = list[int]()
    client: Any
    with serving(pair, "target") as address, openai.OpenAI(base_url=address, api_key="none") as client:
        for limit in [*range(1, num_tokens, every), num_tokens + 5]:
            found = client.chat.completions.create(**request, max_tokens=limit).choices[0]
            calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls or []]
            chunks = list(client.chat.completions.create(**request, max_tokens=limit, stream=True))
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert [(call.function.name, call.function.arguments) for call in deltas] == calls
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == found.message.content
            response = client.responses.create(
                model="target",
                input="Write.",
                max_output_tokens=limit,
                tools=TOOLS_OF_RESPONSES,
            )
            assert [item.type for item in response.output].count("function_call") <= len(calls) or family == "forced"
            assert [(name, json.loads(arguments)) for name, arguments in calls] in ([], [("w", ARGUMENTS)])
            assert calls or (found.finish_reason, chunks[-1].choices[0].finish_reason) == ("length", "length")
            written += [limit] * bool(calls)
    assert written[-1] == num_tokens + 5


@pytest.mark.parametrize("family", ANSWERS)
async def test_a_call_that_a_stop_string_cuts_is_no_call(family: str) -> None:
    options: Any = {"tools": [WRITE], "tool_choice": "required" if family == "forced" else "auto"}
    async with StepSpec(policy="target", pair=writing_pair(family)) as spec:
        for stop in ("long", "with"):
            result = await spec.generate("Write.", stop=[stop], **options)
            assert (result.tool_calls, result.finish_reason) == ((), "length")
        assert [call.name for call in (await spec.generate("Write.", **options)).tool_calls] == ["w"]


async def test_an_agent_does_not_act_on_half_a_call() -> None:
    files: dict[str, str] = {}

    @tool
    def w(path: str = "", text: str = "") -> str:
        """Write a file."""
        files[path] = text
        return "Written."

    tokens = writing_pair("qwen-xml").target.tokenizer.encode(ANSWERS["qwen-xml"])
    for limit in range(len(tokens) // 2, len(tokens), 5):
        settings: Any = {"pair": writing_pair("qwen-xml"), "policy": "target", "max_tokens": limit}
        agent: Any = create_agent(ChatStepSpec(**settings), [w])
        result = await agent.ainvoke({"messages": [("user", "Write.")]})
        assert result["messages"][-1].response_metadata["finish_reason"] == "length"
    assert files == {}


async def test_an_invalid_call_is_text_for_every_client() -> None:
    body = '{"name": "write", "arguments": {"path": "a.txt"}}'
    tokenizer = tool_tokenizer(TEMPLATES["hermes"])
    replies = (f"Well.<tool_call>{body}</tool_call><|end|>" for _ in itertools.count())
    pair = Pair(ScriptedEngine(tokenizer, replies, name="target"), None)
    with serving(pair, "target") as address, openai.OpenAI(base_url=address, api_key="none") as client:
        (found,) = client.chat.completions.create(model="target", messages=ASK, tools=[WRITE]).choices  # type: ignore
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == (f"Well.{body}", None, "stop")
        async with RemoteStepSpec(address) as remote:
            result = await remote.generate("Write.", tools=[WRITE])
        (call,) = result.tool_calls
        assert (result.answer, call.name, call.problem) == (f"Well.{body}", "write", "There is no tool 'write'.")
    model = ChatStepSpec(pair=pair, policy="target").bind_tools([WRITE])
    message: Any = await model.ainvoke("Write.")
    total: Any = None
    async for chunk in model.astream("Write."):
        total = chunk if total is None else total + chunk
    for each in (message, total):
        assert (each.content, each.tool_calls) == (f"Well.{body}", [])
        assert [call["name"] for call in each.invalid_tool_calls] == ["write"]


class Items(BaseModel):
    """Some items."""

    total: int
    items: list[str] = []


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Items, Items.model_json_schema()])
async def test_a_structured_answer_that_was_cut_raises(method: Any, schema: Any) -> None:
    ask, outcomes = "It is 1234567 of 'a', as `total`.", set[bool]()
    chat = ChatStepSpec(pair=following_pair(chunk_size=1))
    whole: Any = await chat.with_structured_output(schema, method=method).ainvoke(ask)
    for limit in range(13, 60, 3):
        model, raw = (
            chat.with_structured_output(schema, method=method, include_raw=each, max_tokens=limit)
            for each in (False, True)
        )
        found: Any = await raw.ainvoke(ask)
        is_whole = found["raw"].response_metadata["finish_reason"] != "length"
        outcomes.add(is_whole)
        if is_whole:
            assert (found["parsed"], found["parsing_error"]) == (whole, None)
            continue
        assert found["parsed"] is None
        assert isinstance(found["parsing_error"], OutputParserException)
        with pytest.raises(OutputParserException, match="cut off"):
            await model.ainvoke(ask)
        with pytest.raises(OutputParserException, match="cut off"):
            _ = [part async for part in model.astream(ask)]
    assert outcomes == {True, False}


async def test_a_structured_answer_that_a_stop_string_cut_raises() -> None:
    model = ChatStepSpec(pair=following_pair()).with_structured_output(Items, method="function_calling", stop=["45"])
    with pytest.raises(OutputParserException, match="cut off"):
        await model.ainvoke("It is 1234567 of 'a'.")

"""The real pair `qwen`, where it has been built: `stepspec pair build qwen` or `make qwen`."""

from collections.abc import AsyncIterator

import pytest
from langchain.agents import create_agent

from stepspec import Pair, RequestOptions, StepSpec
from stepspec.api.models import load_pair
from stepspec.api.pairs import find_pair
from stepspec.engines.protocol import Sampling
from stepspec.errors import ModelError
from stepspec.langchain import ChatStepSpec

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)

WORD = "Answer the user with this result, or call the next function."


def problem() -> str:
    """Return why the pair cannot be used; empty if it can."""
    try:
        find_pair("qwen")
    except ModelError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.skipif(bool(problem()), reason=problem())]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair(anyio_backend: str) -> AsyncIterator[Pair]:
    loaded = load_pair(pair="qwen")
    yield loaded
    await loaded.aclose()


async def test_both_models_have_the_tokenizer_and_the_end_tokens_of_the_files(pair: Pair) -> None:
    assert pair.draft is not None
    assert pair.one_vocabulary
    for model in (pair.target, pair.draft):
        tokenizer = model.tokenizer
        assert tokenizer.end_ids == set(map(model.tokenizer.encode("<|im_end|><|endoftext|>").__getitem__, (0, 1)))
        assert len(tokenizer.encode("<|im_start|><tool_call></tool_call>")) == 3
        assert model.max_context == 32_768


async def test_the_template_shows_tools_calls_and_their_results(pair: Pair) -> None:
    function = {"name": "multiply", "description": "Multiply.", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 12, "b": 17}}}
    turns = [
        {"role": "user", "content": "Multiply 12 and 17."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "204"},
    ]
    tools = [{"type": "function", "function": function}]
    text = pair.target.tokenizer.render(turns, add_generation_prompt=True, tools=tools)
    assert text.startswith("<|im_start|>system\n")
    assert '<tools>\n{"type": "function", "function": {"name": "multiply"' in text
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>' in text
    assert '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 17}}\n</tool_call><|im_end|>' in text
    assert text.endswith(f"<tool_response>\n204\n</tool_response>\n{WORD}<|im_end|>\n<|im_start|>assistant\n")


async def test_a_problem_is_solved_with_the_same_text_under_target_and_token(pair: Pair) -> None:
    texts = []
    for policy in ("target", "token"):
        async with StepSpec(pair=pair, policy=policy) as spec:
            result = await spec.generate(QUESTION, RequestOptions(sampling=Sampling(temperature=0.0), max_tokens=400))
        texts.append(result.answer)
    assert r"\boxed{72}" in texts[0]
    assert texts[0] == texts[1]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


QUESTIONS = {
    "Multiply 12 and 17.": 204,
    "Add 345 and 678.": 1023,
    "Multiply 23 and 45.": 1035,
    "Add 1234 and 4321.": 5555,
    "Multiply 99 and 101.": 9999,
    "What is 64 times 32?": 2048,
    "What is 987 plus 654?": 1641,
    "Multiply 31 and 6.": 186,
    "Add 15 and 27.": 42,
    "Multiply 256 and 13.": 3328,
}


async def test_an_agent_calls_its_tools_and_answers_with_their_results(pair: Pair) -> None:
    model = ChatStepSpec(pair=pair, policy="token", temperature=0.0, max_tokens=120)
    agent = create_agent(model, [multiply, add])
    for question, expected in QUESTIONS.items():
        turns = (await agent.ainvoke({"messages": [("user", question)]}, {"recursion_limit": 8}))["messages"]
        assert str(expected) in turns[-1].text.replace(",", ""), question
        assert any(turn.type == "tool" and turn.text == str(expected) for turn in turns), question

"""A draft that writes answers, tags, ends and tool calls smuggles no token into an answer, on every engine.

`test_in_process` has vLLM in this process, and `test_llama_cpp` llama.cpp.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest
from hostile_engines import RELAXED, SMUGGLED, Hostile, try_policies
from servers import needs_vllm, text_server

from evals.training.gsm_mini import load_split
from stepspec.engines.protocol import Engine
from stepspec.engines.remote import RemoteEngine
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

QUESTIONS = [problem.question for problem in islice(load_split("test"), 5)]  # one for each policy


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def torch_target() -> AsyncIterator[Engine]:
    engine = TorchEngine.load(str(WEIGHTS / "target"))
    yield engine
    await engine.aclose()


@asynccontextmanager
async def vllm_target(port: int) -> AsyncIterator[Engine]:
    engine = RemoteEngine.load(f"http://127.0.0.1:{port}/v1")
    yield engine
    await engine.aclose()


@pytest.fixture
async def draft() -> AsyncIterator[Hostile]:
    engine = TorchEngine.load(str(WEIGHTS / "draft"))
    yield Hostile(engine, 0)
    await engine.aclose()


async def test_no_token_of_an_answer_is_the_draft_s_alone(draft: Hostile) -> None:
    async with torch_target() as engine:
        await try_policies(engine, draft, QUESTIONS)


@needs_vllm
@pytest.mark.parametrize("target_of", [vllm_target, text_server], ids=["vLLM", "text alone"])
async def test_no_token_of_an_answer_is_the_draft_s_alone_on_a_server(
    target_of: Any, target_port: int, draft: Hostile
) -> None:
    async with target_of(target_port) as engine:
        await try_policies(engine, draft, QUESTIONS)


@needs_vllm
async def test_no_token_of_an_answer_is_relaxed_on_a_server(target_port: int, draft: Hostile) -> None:
    """The server drafts from the prompt, which has answers and tags."""
    smuggled = " ".join(f"{text} {text}" for text in SMUGGLED)
    async with vllm_target(target_port) as engine:
        await try_policies(engine, draft, [f"{question} {smuggled}" for question in QUESTIONS], RELAXED)

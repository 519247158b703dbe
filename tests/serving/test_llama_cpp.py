"""A real llama.cpp server with SmolLM2 as target and as draft. `make soak` compiles it into `.venv-llama`."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hostile_engines import Hostile, try_policies
from servers import running_server
from transformers import AutoTokenizer

from stepspec import Pair, StepSpec
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.engines.remote import RemoteEngine

LLAMA_ENVIRONMENT = Path(__file__).parents[2] / ".venv-llama"
LLAMA_SERVER = LLAMA_ENVIRONMENT / "bin" / "llama-cpp-server"
QUESTION = "Tom has 3 apples. Anna has 4 more apples than Tom. How many apples does Anna have?"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.skipif(not LLAMA_SERVER.exists(), reason="there is no .venv-llama; `make soak` creates it"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server, with a folder of the model's tokenizer. The model does not mark its thinking."""
    folder = tmp_path_factory.mktemp("llama")
    (weights,) = LLAMA_ENVIRONMENT.rglob("SmolLM2-135M-Instruct.Q4_1.gguf")
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder / "base")
    command = [str(LLAMA_SERVER), "--model", str(weights), "--ctx-size", "8192"]
    with running_server(command, folder / "server.log") as port:
        yield f"http://127.0.0.1:{port}/v1?timeout=300&thinking=none&tokenizer={folder / 'base'}"


@asynccontextmanager
async def loaded(address: str) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine.load(address)
    yield engine
    await engine.aclose()


async def test_what_it_can_do_is_found_by_asking(address: str) -> None:
    async with loaded(address) as engine:
        found = engine.server
        assert found.kind.startswith("llama.cpp")
        assert (found.takes_ids, found.gives_ids, found.num_logprobs, found.several_prompts) == (True, False, 20, True)
        assert (found.scores, found.schema_field) == (None, "json_schema")
        assert {"label logprobs", "json schema"} <= engine.abilities


async def test_a_text_goes_on_where_it_stopped_and_a_pass_chooses_the_next_token(address: str) -> None:
    async with loaded(address) as engine:
        ids = engine.tokenizer.encode_text("1, 2, 3, 4, 5, 6,")
        whole = await collect(engine.generate(Generate(TokenBuffer(ids), Sampling(), Stop(12))))
        assert engine.tokenizer.decode(whole.ids).startswith(" 7, 8, 9")
        rest = await collect(engine.generate(Generate(TokenBuffer([*ids, *whole.ids[:4]]), Sampling(), Stop(8))))
        assert rest.ids == whole.ids[4:]
        seen = await engine.verify(Verify(TokenBuffer(ids), whole.ids[:4], scores=False))
        assert seen.next_choice == whole.ids[4]


async def test_it_serves_both_models_of_a_pair(address: str) -> None:
    async with loaded(address) as target, loaded(address) as draft:
        result = await StepSpec(policy="specreason", pair=Pair(target, draft)).generate(QUESTION, max_tokens=300)
        assert result.counts.steps_judged > 0
        assert any(step.scores for step in result.steps), "ratings are read from log-probabilities of digits"
        assert result.finish_reason in ("stop", "length")


async def test_no_token_of_an_answer_is_the_draft_s_alone(address: str) -> None:
    async with loaded(address) as target, loaded(address) as draft:
        await try_policies(target, Hostile(draft, 0), [QUESTION] * 4)

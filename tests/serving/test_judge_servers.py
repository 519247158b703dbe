"""Judge models on servers: rewards of a real vLLM are those of the torch engine, and bad responses are errors."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from judge_folders import judge_folders
from proxy import Call, Fault, Proxy, serving
from servers import VllmForks, needs_vllm, vllm_server

from stepspec import StepSpec
from stepspec.engines.remote.judge import RemoteJudge
from stepspec.engines.torch_engine.judge import TorchJudge
from stepspec.errors import ContextError, EngineError, ModelError
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"
STEPS = ["Ann has 12 apples.\n\n", "Ben has 12 + 5 = 17 apples.\n\n", "So it is 17.\n\n"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.soak
@needs_vllm
async def test_rewards_of_a_vllm_server_are_those_of_the_torch_engine(vllm: VllmForks, tmp_path: Path) -> None:
    folder = judge_folders(tmp_path)["reward"]
    own = TorchJudge.load(str(folder))
    with vllm_server(vllm, "judge", tmp_path, "--runner", "pooling", weights=folder, context=256) as port:
        address = f"http://127.0.0.1:{port}/v1"
        served = RemoteJudge.load(address)
        assert served.abilities == {"reward", "forget"}
        for count in (1, 2, 3, 1):
            expected = await own.reward(QUESTION, STEPS[:count])
            assert await served.reward(QUESTION, STEPS[:count]) == pytest.approx(expected, abs=1e-4)
            await served.forget()
        with pytest.raises(ContextError):
            await served.reward(QUESTION, ["many words " * 300])
        await served.aclose()
        async with StepSpec(policy="rsd", judges={"reward": address}) as spec:
            result = await spec.generate(QUESTION)
        assert result.steps[0].scores["reward"] is not None
    await own.aclose()


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """Return a function that runs a server with scripted responses and returns its address."""

    def run(script: Callable[[Call], Any], owner: str = "vllm") -> str:
        card = {"id": "judge", "root": str(WEIGHTS / "target"), "owned_by": owner}

        def play(call: Call) -> Fault:
            found = {"data": [card]} if call.path.endswith("/models") else script(call)
            return Fault(status=404) if found is None else Fault(status=200, body=json.dumps(found).encode())

        return stack.enter_context(serving(Proxy(None, play))).url

    with ExitStack() as stack:
        yield run


def embeddings(*vectors: list[float]) -> Callable[[Call], Any]:
    """Return a script that embeds all texts as the same vectors, in reverse order."""

    def script(call: Call) -> Any:
        if not call.path.endswith("/embeddings"):
            return None
        count = len(call.fields["input"])
        found = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors[:count])]
        return {"data": found[::-1]}

    return script


def rewards(data: Any) -> Callable[[Call], Any]:
    """Return a script that answers every pooling request with the same data."""
    return lambda call: {"data": [{"index": 0, "data": data}]} if call.path.endswith("/pooling") else None


Server = Callable[..., str]


async def test_rewards_of_a_server_are_those_of_the_torch_engine(server: Server, tmp_path: Path) -> None:
    """The server runs the torch engine's model. `make soak` asks a real vLLM."""
    own = TorchJudge.load(str(judge_folders(tmp_path)["reward"]))

    def script(call: Call) -> Any:
        return (
            rewards([own._reward(tuple(call.fields["input"]), None)])(call) if call.path.endswith("/pooling") else None
        )

    address = server(script)
    served = RemoteJudge.load(address)
    assert served.abilities == {"reward", "forget"}
    for count in (1, 2, 3, 1):
        expected = await own.reward(QUESTION, STEPS[:count])
        assert await served.reward(QUESTION, STEPS[:count]) == pytest.approx(expected, abs=1e-4)
    await served.aclose()
    async with StepSpec(policy="rsd", judges={"reward": address}) as spec:
        result = await spec.generate(QUESTION, max_tokens=100)
    assert result.steps[0].scores["reward"] is not None
    await own.aclose()


async def test_embeddings_have_length_one_and_the_order_of_their_texts(server: Server) -> None:
    judge = RemoteJudge.load(server(embeddings([3.0, 4.0], [0.0, 2.0])))
    assert judge.abilities == {"embed", "forget"}
    assert await judge.embed(["one", "two"]) == [pytest.approx([0.6, 0.8]), pytest.approx([0.0, 1.0])]
    await judge.aclose()


@pytest.mark.parametrize(
    ("owner", "forgets", "takes_salt"), [("vllm", True, True), ("sglang", False, True), ("me", False, False)]
)
async def test_rewards_of_a_group_have_its_salt_and_session(
    server: Server, owner: str, forgets: bool, takes_salt: bool
) -> None:
    asked: list[Call] = []

    def script(call: Call) -> Any:
        asked.append(call)
        return rewards([0.5])(call)

    judge = RemoteJudge.load(server(script, owner))
    assert ("forget" in judge.abilities) is forgets
    asked.clear()
    for group in (None, "a", "a", "b"):
        await judge.reward(QUESTION, STEPS, group)
    await judge.forget()
    await judge.reward(QUESTION, STEPS, "a")
    none, one, again, other, later = ((call.fields.get("cache_salt"), call.headers["x-session-id"]) for call in asked)
    assert none[0] is None
    assert one == again
    assert len({none[0], one[0], other[0], later[0]}) == (4 if takes_salt else 1)
    assert len({none[1], one[1], other[1]}) == 3
    await judge.aclose()


@pytest.mark.parametrize(
    ("data", "reward"),
    [([0.25], 0.25), ([0.1, 0.9], 0.9), ([[0.5], [0.25]], 0.25), ([[0.5, 0.5], [0.25, 0.75]], 0.75)],
)
async def test_a_reward_is_the_last_value_of_the_last_token(server: Server, data: Any, reward: float) -> None:
    judge = RemoteJudge.load(server(rewards(data)))
    assert await judge.reward(QUESTION, STEPS) == reward
    await judge.aclose()


@pytest.mark.parametrize("script", [lambda call: None, rewards([0.1] * 500), rewards([]), rewards([[]])])
def test_a_server_without_rewards_and_embeddings_is_an_error(server: Server, script: Callable[[Call], Any]) -> None:
    with pytest.raises(ModelError, match=r"neither embeddings nor rewards. Serve it with vLLM's --runner pooling"):
        RemoteJudge.load(server(script))


@pytest.mark.parametrize(
    ("data", "message"),
    [([1.5], "a reward of 1.5"), (["x"], "an invalid reward"), ([float("nan")], "invalid reward|cannot be read")],
)
async def test_a_reward_that_is_none_is_an_error(server: Server, data: Any, message: str) -> None:
    later = rewards([0.5]), rewards(data)
    judge = RemoteJudge.load(server(lambda call: later[len(call.fields.get("input", "")) > 3](call)))
    with pytest.raises(EngineError, match=message):
        await judge.reward(QUESTION, STEPS)
    await judge.aclose()


@pytest.mark.parametrize("vectors", [([1.0],), ([0.0, 0.0], [1.0, 0.0])])
async def test_missing_and_zero_embeddings_are_errors(server: Server, vectors: tuple[list[float], ...]) -> None:
    judge = RemoteJudge.load(server(embeddings(*vectors)))
    with pytest.raises(EngineError, match=r"1 embeddings of 2 texts|an embedding of zeros"):
        await judge.embed(["one", "two"])
    await judge.aclose()

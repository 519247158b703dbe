"""Several servers of one model: affinity, failures, and recovery."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from proxy import Call, Fault, Proxy, ServerFixture, serving
from test_bad_servers import completion, events, healthy, response

from evals.training.gsm_mini import load_split
from stepspec import Pair, StepSpec
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.engines.remote import RemoteEngine, replicas
from stepspec.engines.remote.replicas import Replicas
from stepspec.errors import EngineError, ModelError, UsageError
from stepspec.loop.certificate import by_role

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Script:
    """A server of one-token texts that a test turns off and on."""

    def __init__(self, model: str = "target") -> None:
        self.is_on = True
        self.fault: Fault = response({"error": "on fire"}, 500)
        self.model = model
        self.models_delay_s = 0.0

    def __call__(self, call: Call) -> Fault:
        if not self.is_on:
            return self.fault
        if self.model != "target" and call.path.endswith("/models"):
            found = healthy(call)
            return Fault(status=200, body=found.body.replace(b'"target"', f'"{self.model}"'.encode()))
        if call.path.endswith("/models"):
            return replace(healthy(call), delay_s=self.models_delay_s)
        if call.fields.get("stream"):
            return events(completion(8, finish_reason="length"))
        return healthy(call)


@pytest.fixture
def two(server: ServerFixture, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Script], list[Proxy], Replicas]:
    monkeypatch.setattr(replicas, "MIN_REST_S", 0.1)
    scripts = [Script(), Script()]
    proxies = [server(script) for script in scripts]
    return scripts, proxies, load(*proxies)


def test_several_servers_are_the_engine_that_one_of_them_is(
    two: tuple[list[Script], list[Proxy], Replicas], server: ServerFixture
) -> None:
    alone = RemoteEngine.load(server(Script()).url)
    several, one = (by_role({"target": each.describe()})["engines"] for each in (two[2], alone))
    assert several == one


def load(*proxies: Proxy, options: str = "?retries=1") -> Replicas:
    found = Replicas.load(" ".join(proxy.url + options for proxy in proxies))
    assert isinstance(found, Replicas)
    return found


async def write(engine: Any, buffer: TokenBuffer, length: int = 4, **settings: Any) -> tuple[int, ...]:
    return (await collect(engine.generate(Generate(buffer, Sampling(), Stop(length), **settings)))).ids


def served(proxies: list[Proxy]) -> list[int]:
    """Return the number of texts that each server has written."""
    return [sum(bool(call.fields.get("stream")) for call in proxy.calls) for proxy in proxies]


async def test_requests_of_a_conversation_and_texts_with_a_common_beginning_go_to_one_server(two: Any) -> None:
    _, proxies, engine = two
    for number in range(8):
        await write(engine, TokenBuffer([5, 6 + number], "a conversation"))
    assert sorted(served(proxies)) == [0, 8]
    beginning = [7] * 100
    before = served(proxies)
    engine.max_context = 1_000
    for known in engine._replicas:
        known.engine.max_context = 1_000
    for number in range(8):
        await write(engine, TokenBuffer([*beginning, number]))
    before = served(proxies)
    for number in range(8):
        await write(engine, TokenBuffer([number] * 100, "another one"))
    assert sorted(new - old for new, old in zip(served(proxies), before, strict=True)) == [0, 8]
    assert sorted(new - old for new, old in zip(served(proxies), before, strict=True)) == [0, 8]


async def test_conversations_and_texts_of_two_groups_have_nothing_in_common(two: Any) -> None:
    _, proxies, engine = two
    engine.max_context = 1_000
    for known in engine._replicas:
        known.engine.max_context = 1_000
    long = [7] * 100
    first, second = engine._replicas
    await write(engine, TokenBuffer(long, "one", "a"))
    at = served(proxies).index(1)
    (first, second)[at].num_open = 1  # a text without a known place goes to the other one
    for buffer, goes_along in [
        (TokenBuffer([5], "one", "a"), True),
        (TokenBuffer(long, group="a"), True),
        (TokenBuffer([5], "one", "b"), False),
        (TokenBuffer([5], "one"), False),
        (TokenBuffer(long, group="c"), False),
        (TokenBuffer(long), False),
    ]:
        before = served(proxies)
        await write(engine, buffer)
        assert (served(proxies)[at] > before[at]) == goes_along


async def test_other_texts_go_to_the_server_with_the_fewest_calls_even_if_another_has_their_beginning(two: Any) -> None:
    _, proxies, engine = two
    first, second = engine._replicas
    first.num_open = 1
    await write(engine, TokenBuffer([5, 6], "one"))
    assert served(proxies) == [0, 1]
    first.num_open, second.num_open = 0, replicas.MAX_AHEAD
    await write(engine, TokenBuffer([5, 7], "one"))
    assert served(proxies) == [0, 2]
    second.num_open += 1
    await write(engine, TokenBuffer([5, 8], "one"))
    assert served(proxies) == [1, 2]


@pytest.mark.parametrize(
    "fault",
    [
        response({"error": "on fire"}, 500),
        response({"error": "full"}, 503),
        Fault(status=200, body=b"", reset=True),
        events(completion(8), done=False),
    ],
)
async def test_a_server_that_fails_is_left_out_and_comes_back(two: Any, fault: Fault) -> None:
    scripts, proxies, engine = two
    buffer = TokenBuffer([5, 6], "one")
    await write(engine, buffer)
    broken = served(proxies).index(1)
    scripts[broken].is_on, scripts[broken].fault = False, fault
    assert (await write(engine, buffer))[-1] == 8
    assert (await engine.verify(Verify(buffer, [6], scores=False))).next_choice == 9
    assert buffer.num_moves == engine.metrics().moves == 1
    is_full = b"full" in fault.body
    assert engine.states[proxies[broken].url] is is_full, "a server that is only full stays"
    scripts[broken].is_on = True
    async with asyncio.timeout(5):
        while not all(engine.states.values()):
            await write(engine, TokenBuffer([5, 6]))
            await asyncio.sleep(0.02)
    before = served(proxies)[broken]
    engine._replicas[1 - broken].num_open = 20
    await write(engine, TokenBuffer([5, 9]))
    assert served(proxies)[broken] == before + 1
    await engine.aclose()


async def test_if_all_servers_fail_the_error_comes_after_the_retries(two: Any) -> None:
    scripts, proxies, engine = two
    for script in scripts:
        script.is_on = False
    before = [len(proxy.calls) for proxy in proxies]
    with pytest.raises(EngineError, match="on fire"):
        await write(engine, TokenBuffer([5, 6]))
    sent = [len(proxy.calls) - old for proxy, old in zip(proxies, before, strict=True)]
    assert sum(sent) >= 4
    scripts[0].is_on = True
    assert await write(engine, TokenBuffer([5, 6])) == (8,)
    await engine.aclose()


async def test_a_rejected_call_is_not_sent_to_another_server(two: Any) -> None:
    scripts, proxies, engine = two
    for script in scripts:
        script.is_on, script.fault = False, response({"error": "bad"}, 400)
    before = sum(len(proxy.calls) for proxy in proxies)
    with pytest.raises(EngineError, match="rejected"):
        await write(engine, TokenBuffer([5, 6]))
    assert sum(len(proxy.calls) for proxy in proxies) == before + 1
    assert all(engine.states.values())


@pytest.mark.parametrize("settings", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}])
async def test_a_begun_text_with_penalties_does_not_go_on_elsewhere(two: Any, settings: Any) -> None:
    scripts, _, engine = two
    for script in scripts:
        script.is_on, script.fault = False, events(completion(8), done=False)
    call = Generate(TokenBuffer([5, 6]), Sampling(**settings), Stop(4))
    with pytest.raises(EngineError, match="before it was complete"):
        await collect(engine.generate(call))
    assert engine.metrics().moves == 0


async def test_a_server_may_be_down_at_the_start(server: ServerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MIN_REST_S", 0.1)
    scripts = [Script(), Script()]
    scripts[0].is_on = False
    proxies = [server(script) for script in scripts]
    engine = load(*proxies)
    assert list(engine.states.values()) == [False, True]
    assert await write(engine, TokenBuffer([5, 6])) == (8,)
    scripts[0].is_on = True
    async with asyncio.timeout(5):
        while not all(engine.states.values()):
            await write(engine, TokenBuffer([5, 6]))
            await asyncio.sleep(0.02)
    await engine.aclose()
    for script in scripts:
        script.is_on = False
    with pytest.raises(ModelError, match="on fire"):
        load(*proxies)


def test_addresses_of_different_models_or_the_same_server_are_refused(server: ServerFixture) -> None:
    target, other = server(Script()), server(Script("other"))
    with pytest.raises(UsageError, match=r"serves 'other', but .* serves 'target'"):
        load(target, other)
    with pytest.raises(UsageError, match="Name each server once"):
        load(target, target)
    assert isinstance(Replicas.load(target.url), RemoteEngine)


@pytest.mark.parametrize("policy", ["engine", "specreason"])
async def test_a_text_whose_server_dies_goes_on_at_another_one(policy: str, target_port: int, draft_port: int) -> None:
    """With a real vLLM behind both addresses."""
    question = next(iter(load_split("test"))).question
    cut = iter([0, 0, 1])

    def dies(call: Call) -> Fault:
        is_text = call.path.endswith("/completions") and call.fields.get("max_tokens", 1) > 1
        return Fault("cut", cut_after=2_000) if is_text and next(cut, 0) else Fault()

    with ExitStack() as stack:
        proxies = [stack.enter_context(serving(Proxy(target_port, fault))) for fault in (dies, lambda _: Fault())]
        draft = RemoteEngine.load(f"http://127.0.0.1:{draft_port}/v1")
        alone = RemoteEngine.load(f"http://127.0.0.1:{target_port}/v1")
        expected = await StepSpec(policy=policy, pair=Pair(alone, draft)).generate(question, max_tokens=120)
        engine = load(*proxies)
        spec = StepSpec(policy=policy, pair=Pair(engine, draft))
        found = [await spec.generate(question, max_tokens=120, session_id="one") for _ in range(4)]
        assert {(result.reasoning, result.answer) for result in found} == {(expected.reasoning, expected.answer)}
        moved = [result.note for result in found if result.note]
        assert len(moved) == proxies[0].met["cut"] == 1
        assert "went on at another one" in moved[0]
        await engine.aclose()


async def test_what_is_committed_before_a_server_dies_is_not_sent_twice(target_port: int) -> None:
    """With a real vLLM behind all addresses, and a prompt that grows with each chunk."""
    alone = RemoteEngine.load(f"http://127.0.0.1:{target_port}/v1")
    ids = alone.tokenizer.encode(next(iter(load_split("test"))).question)
    expected = await write(alone, TokenBuffer(ids), length=60)
    await alone.aclose()

    def dies(call: Call) -> Fault:
        return Fault("cut", cut_after=3_000) if call.fields.get("stream") else Fault()

    with ExitStack() as stack:
        proxies = [stack.enter_context(serving(Proxy(target_port, fault))) for fault in (dies, dies, lambda _: Fault())]
        engine, buffer = load(*proxies), TokenBuffer(ids)
        async for chunk in engine.generate(Generate(buffer, Sampling(), Stop(60))):
            buffer.append(chunk.ids)
        assert tuple(buffer.since(len(ids))) == expected
        assert sum(proxy.met["cut"] for proxy in proxies) > 0
        await engine.aclose()


async def test_the_round_trip_of_several_servers_is_that_of_the_farthest_that_works(two: Any) -> None:
    scripts, _, engine = two
    far_s = 0.05
    scripts[1].models_delay_s = far_s
    assert far_s <= await engine.round_trip_s() < far_s + 0.5
    scripts[1].is_on = False
    with pytest.raises(EngineError):
        await engine.round_trip_s()

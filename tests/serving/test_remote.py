"""The remote engine on real vLLM servers with the embedded pair, compared with the torch engine on the same weights."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import VllmForks, needs_vllm, text_server, transformers_server

from evals.bench import on_vllm
from evals.training.gsm_mini import load_split
from stepspec import Pair, StepSpec, load_pair
from stepspec.chat.prompts import encode_request
from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.protocol import (
    Acceptance,
    Drafting,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.remote import RemoteEngine
from stepspec.engines.remote.address import Address
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import EngineError, UsageError
from stepspec.loop.policy import Policy
from stepspec.mini import WEIGHTS

pytestmark = [pytest.mark.anyio, needs_vllm]

NUM_TEXTS = 3
MANY_TEXTS = pytest.param(12, marks=pytest.mark.soak)
BLOCK = 128
"""Number of tokens in a block of vLLM's prefix cache on a CPU."""

FIELD_BYTES = 600
"""Most bytes of a request besides the text, and a question about a step."""
ROUNDING = 2e-3
"""Difference of log-probs between two programs in float32."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def torch_engine() -> Iterator[TorchEngine]:
    engine = TorchEngine.load(str(WEIGHTS / "target"))
    yield engine
    engine._close()


@pytest.fixture(scope="module")
def remote(target_port: int) -> RemoteEngine:
    return RemoteEngine.load(f"http://127.0.0.1:{target_port}/v1#target")


@pytest.fixture(autouse=True)
async def _closed(remote: RemoteEngine) -> AsyncIterator[None]:
    yield
    await remote.aclose()


def prompts(tokenizer: HuggingFaceTokenizer, num_texts: int = NUM_TEXTS) -> list[list[int]]:
    return [encode_request(tokenizer, each.question) for each in islice(load_split("test"), num_texts)]


async def test_loading_detects_what_the_server_supports(remote: RemoteEngine) -> None:
    server = remote.server
    assert (server.takes_ids, server.gives_ids, server.extended) == (True, True, True)
    assert (server.num_logprobs, server.scores, remote.max_context) == (20, "prompt_logprobs", 1024)
    assert remote.describe()["device"] == f"vLLM 0.32.0 at {remote.address.base}"
    assert "forget" in remote.abilities


async def test_loading_detects_the_servers_own_speculation(target_port: int, draft_port: int) -> None:
    for port, own in ((target_port, "as its server was started"), (draft_port, "none")):
        engine = RemoteEngine.load(f"http://127.0.0.1:{port}/v1")
        assert engine.own_speculation == own
        await engine.aclose()


async def test_a_server_relaxes_tokens_by_the_rule_of_a_call(remote: RemoteEngine, torch_engine: TorchEngine) -> None:
    assert "relaxed acceptance" in remote.abilities
    loose = Drafting("engine", acceptance=Acceptance("ratio", 1e-6))
    num_relaxed = 0
    for ids in prompts(remote.tokenizer, 4):
        buffer, stop = TokenBuffer(ids), Stop(60)
        found = await collect(remote.generate(Generate(buffer, Sampling(), stop, loose)))
        own = await torch_engine.verify(Verify(buffer, found.ids))
        assert own.choices is not None
        differing = [place for place, id in enumerate(found.ids) if id != own.choices[place]]
        assert [*(found.relaxed or ())] == differing
        num_relaxed += len(differing)
        sampled = await collect(remote.generate(Generate(buffer, Sampling(1.0, seed=1), stop, loose)))
        assert sampled.relaxed == tuple(
            place for place, id in enumerate(sampled.ids) if not remote.tokenizer.is_special(id)
        )
    assert num_relaxed > 0


@pytest.mark.parametrize("num_texts", [2, MANY_TEXTS])
@pytest.mark.parametrize("stop", [Stop(60, ("\n\n",)), Stop(100), Stop(7)])
async def test_it_writes_what_the_torch_engine_writes(
    remote: RemoteEngine, torch_engine: TorchEngine, stop: Stop, num_texts: int
) -> None:
    for ids in prompts(remote.tokenizer, num_texts):
        call = Generate(TokenBuffer(ids), Sampling(), stop, logprobs=True)
        theirs, ours = [await collect(engine.generate(call)) for engine in (remote, torch_engine)]
        assert (theirs.ids, theirs.end) == (ours.ids, ours.end)
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=ROUNDING)
        assert theirs.entropies is None


async def test_it_continues_and_verifies_ids_that_are_not_committed(remote: RemoteEngine) -> None:
    ids = prompts(remote.tokenizer)[0]
    buffer, whole = TokenBuffer(ids), await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(), Stop(40))))
    for length in (10, 25, 0):
        after, rest = whole.ids[:length], whole.ids[length:]
        found = await collect(remote.generate(Generate(buffer, Sampling(), Stop(len(rest)), after=after)))
        assert (found.ids, len(buffer)) == (rest, len(ids))
        assert (await remote.verify(Verify(buffer, after, scores=False))).next_choice == rest[0]


async def test_a_stop_token_ends_a_text(remote: RemoteEngine, torch_engine: TorchEngine) -> None:
    (tag,) = remote.tokenizer.encode("</think>")
    stop = Stop(300, token_ids=frozenset({tag}))
    for ids in prompts(remote.tokenizer)[:2]:
        theirs = await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(), stop)))
        ours = await collect(torch_engine.generate(Generate(TokenBuffer(ids), Sampling(), stop)))
        assert theirs.ids == ours.ids
        assert theirs.ids[-1] == tag


async def test_a_text_follows_its_json_schema(remote: RemoteEngine) -> None:
    assert remote.server.schema_field == "structured_outputs"
    ids, schema = prompts(remote.tokenizer)[0], '{"enum": ["stepspec", "others"]}'
    written = await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(), Stop(60), json_schema=schema)))
    assert written.end == "token"
    assert json.loads(remote.tokenizer.decode(written.ids[:-1])) in ("stepspec", "others")


async def test_an_unsupported_schema_is_rejected_before_generation(remote: RemoteEngine) -> None:
    await remote.check_schema('{"type": "object"}')
    with pytest.raises(UsageError, match="The JSON schema is not supported"):
        await remote.check_schema('{"type": "strange"}')


async def test_it_verifies_like_the_torch_engine(remote: RemoteEngine, torch_engine: TorchEngine) -> None:
    tokenizer = remote.tokenizer
    labels = tuple(tokenizer.encode(str(digit))[-1] for digit in range(10))
    probes = [Probe(tuple(tokenizer.encode(text)), labels) for text in ("Rating: ", " so it is ")]
    for ids in prompts(tokenizer)[:2]:
        step = (await collect(torch_engine.generate(Generate(TokenBuffer(ids), Sampling(), Stop(60, ("\n\n",)))))).ids
        step = (*step[:4], step[2], *step[4:])  # differs from what the model would write
        theirs = await remote.verify(Verify(TokenBuffer(ids), step, probes))
        ours = await torch_engine.verify(Verify(TokenBuffer(ids), step, probes))
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=ROUNDING)
        assert (theirs.choices, theirs.next_choice) == (ours.choices, ours.next_choice)
        assert theirs.probe_choices == ours.probe_choices
        for distribution, own in zip(theirs.probe_logprobs, ours.probe_logprobs, strict=True):
            shown = [index for index, logprob in enumerate(distribution) if logprob > float("-inf")]
            assert [distribution[index] for index in shown] == pytest.approx(
                [own[index] for index in shown], abs=ROUNDING
            )
        unscored = await remote.verify(Verify(TokenBuffer(ids), step, scores=False))
        assert (unscored.logprobs, unscored.choices, unscored.next_choice) == (None, None, ours.next_choice)


async def test_the_server_samples_and_a_seed_makes_it_repeatable(draft_port: int) -> None:
    remote = RemoteEngine.load(f"http://127.0.0.1:{draft_port}/v1")
    ids = prompts(remote.tokenizer)[0]
    hot = Sampling(temperature=1.5, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=3)
    texts = [(await collect(remote.generate(Generate(TokenBuffer(ids), hot, Stop(40))))).ids for _ in range(2)]
    other = await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(temperature=1.5, seed=4), Stop(40))))
    assert texts[0] == texts[1] != other.ids
    biased = Sampling(logit_bias=((ids[0], 100.0),))
    assert set((await collect(remote.generate(Generate(TokenBuffer(ids), biased, Stop(3))))).ids) == {ids[0]}
    await remote.aclose()


async def test_unsupported_sampling_settings_are_an_error(remote: RemoteEngine) -> None:
    ids = prompts(remote.tokenizer)[0]
    with pytest.raises(EngineError, match=r"min_p and logit_bias .* not yet supported with speculative decoding"):
        await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(temperature=1.0, min_p=0.1), Stop(40))))
    allowed = frozenset(remote.tokenizer.encode("0123456789"))
    masked = await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(allowed=allowed), Stop(5))))
    assert set(masked.ids) <= allowed


async def test_a_growing_prompt_is_served_from_the_prefix_cache(remote: RemoteEngine) -> None:
    buffer = TokenBuffer(prompts(remote.tokenizer)[1] * 3)
    before = remote.metrics()
    for _ in range(4):
        chunk = await collect(remote.generate(Generate(buffer, Sampling(), Stop(24))))
        buffer.append(chunk.ids)
    done = remote.metrics() - before
    assert chunk.cached >= (len(buffer) - 24) // BLOCK * BLOCK > 0, "not all full blocks come from the cache"
    assert (done.requests, done.generated) == (4, 96)
    assert done.cached_tokens > 0
    assert done.bytes_sent > 0 < done.bytes_received


async def test_forget_clears_the_prefix_cache(remote: RemoteEngine) -> None:
    ids = prompts(remote.tokenizer)[0] * 3

    async def cached() -> int:
        return (await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(), Stop(8))))).cached

    assert [await cached() > 0 for _ in range(2)][1]
    await remote.forget()
    assert [await cached() > 0 for _ in range(2)] == [False, True]


async def test_groups_do_not_share_the_prefix_cache(remote: RemoteEngine) -> None:
    ids = [*prompts(remote.tokenizer)[0], *prompts(remote.tokenizer)[1]] * 2

    async def cached(group: str | None) -> int:
        return (await collect(remote.generate(Generate(TokenBuffer(ids, group=group), Sampling(), Stop(8))))).cached

    assert [await cached(group) > 0 for group in ("a", "a", "b", None, "b")] == [False, True, False, False, True]


async def test_the_server_s_own_speculation_is_counted(remote: RemoteEngine) -> None:
    ids = prompts(remote.tokenizer)[2]
    chunk = await collect(remote.generate(Generate(TokenBuffer(ids), Sampling(), Stop(150))))
    assert chunk.drafted >= chunk.accepted > 0
    assert chunk.passes < len(chunk.ids), "no message has several tokens"


async def test_closing_a_stream_aborts_it_at_the_server(remote: RemoteEngine, target_port: int) -> None:
    chunks = remote.generate(
        Generate(TokenBuffer(prompts(remote.tokenizer)[2]), Sampling(), Stop(600, token_ids=frozenset()))
    )
    await anext(chunks)
    await chunks.aclose()

    async def running() -> float:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{target_port}/metrics")).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running{")
        )

    for _ in range(100):
        if not await running():
            break
        await asyncio.sleep(0.1)
    assert not await running(), "the server still generates the text"


async def test_a_server_that_takes_only_text_writes_the_same(target_port: int, torch_engine: TorchEngine) -> None:
    async with text_server(target_port) as remote:
        server = remote.server
        assert (server.takes_ids, server.gives_ids) == (False, False)
        assert (server.scores, remote.abilities) == (None, {"label logprobs", "json schema", "forget"})
        (tag,) = remote.tokenizer.encode("</think>")
        for stop in (Stop(60, ("\n\n",)), Stop(200, token_ids=frozenset({tag}))):
            for ids in prompts(remote.tokenizer)[:2]:
                buffer = TokenBuffer(ids)
                theirs = await collect(remote.generate(Generate(buffer, Sampling(), stop)))
                ours = await collect(torch_engine.generate(Generate(buffer, Sampling(), stop)))
                assert remote.tokenizer.decode(theirs.ids) == remote.tokenizer.decode(ours.ids)
                assert theirs.end == ours.end
        seen = await remote.verify(Verify(buffer, ours.ids[:6], scores=False))
        own = await torch_engine.verify(Verify(buffer, ours.ids[:6]))
        assert seen.next_choice == own.next_choice


async def test_judge_scores_are_read_from_the_text_of_labels(target_port: int) -> None:
    async with text_server(target_port) as remote:
        pair = Pair(remote, TorchEngine.load(str(WEIGHTS / "draft")))
        result = await StepSpec(policy="specreason", pair=pair).generate(next(iter(load_split("test"))).question)
        assert result.counts.steps_judged > 0
        assert all(0 <= (score or 0) <= 9 for step in result.steps for score in step.scores.values())
        assert any(step.scores for step in result.steps)
        await pair.aclose()


async def test_transformers_serve_is_called_with_text(
    vllm: VllmForks, tmp_path: Path, torch_engine: TorchEngine
) -> None:
    with transformers_server(vllm, "target", tmp_path) as port:
        remote = RemoteEngine.load(f"http://127.0.0.1:{port}/v1#{WEIGHTS / 'target'}")
        server = remote.server
        assert (server.takes_ids, server.gives_ids, server.extended, server.num_logprobs) == (False, False, False, 0)
        assert remote.abilities == set()
        for ids in prompts(remote.tokenizer)[:1]:
            buffer, stop = TokenBuffer(ids), Stop(60, ("\n\n",))
            theirs = await collect(remote.generate(Generate(buffer, Sampling(), stop)))
            ours = await collect(torch_engine.generate(Generate(buffer, Sampling(), stop)))
            assert (remote.tokenizer.decode(theirs.ids), theirs.end) == (remote.tokenizer.decode(ours.ids), ours.end)
            with pytest.raises(UsageError, match="cannot sample with top_k, min_p"):
                await collect(remote.generate(Generate(buffer, Sampling(top_k=5, min_p=0.1), stop)))
            seen, own = [
                await each.verify(Verify(buffer, ours.ids[:5], scores=False)) for each in (remote, torch_engine)
            ]
            assert seen.next_choice == own.next_choice
        await remote.aclose()


STEADY = str(Path(__file__).parents[1] / "steady.toml")


@pytest.mark.parametrize("num_texts", [1, MANY_TEXTS])
@pytest.mark.parametrize("policy", ["engine", "specreason", STEADY], ids=["engine", "specreason", "steady"])
async def test_remote_and_torch_pairs_give_the_same_answers(
    policy: str, target_port: int, draft_port: int, num_texts: int
) -> None:
    questions = [each.question for each in islice(load_split("test"), num_texts)]
    served = f"http://127.0.0.1:{target_port}/v1#target", f"http://127.0.0.1:{draft_port}/v1#draft"
    reference = load_pair()
    expected = [await StepSpec(policy=policy, pair=reference).generate(each) for each in questions]
    await reference.aclose()
    for draft in (served[1], f"torch:{WEIGHTS / 'draft'}"):
        pair = load_pair(served[0], draft)
        assert pair.one_vocabulary
        found = [await StepSpec(policy=policy, pair=pair).generate(each) for each in questions]
        await pair.aclose()
        assert [each.answer for each in found] == [each.answer for each in expected]
        assert [each.reasoning for each in found] == [each.reasoning for each in expected]
        assert [[step.origin for step in each.steps] for each in found] == [
            [step.origin for step in each.steps] for each in expected
        ]


async def test_a_step_is_a_request_of_the_draft_and_one_of_the_target(target_port: int, draft_port: int) -> None:
    """So is a step that the target writes. Each has the text and little else, and a judgment has it twice.

    A tag that ends the thinking is one more of each, and the answer another one of the target.
    """
    for question in [each.question for each in islice(load_split("test"), NUM_TEXTS)]:
        target, draft = (
            RemoteEngine.load(f"http://127.0.0.1:{port}/v1#{name}")
            for port, name in ((target_port, "target"), (draft_port, "draft"))
        )
        result = await StepSpec(policy="specreason", pair=Pair(target, draft)).generate(question, sampling=Sampling())
        counts, text_bytes = result.counts, 5 * (result.num_prompt_tokens + result.counts.committed)
        asked, written = target.metrics(), draft.metrics()
        assert counts.steps_judged > 0
        assert counts.steps_proposed <= written.requests <= counts.steps_proposed + 1
        assert written.bytes_sent <= written.requests * (text_bytes + FIELD_BYTES)
        num_written = sum(step.origin != "draft" for step in result.steps)
        assert asked.requests <= counts.steps_judged + num_written + 2
        assert asked.bytes_sent <= counts.steps_judged * text_bytes + asked.requests * (text_bytes + FIELD_BYTES)
        await asyncio.gather(target.aclose(), draft.aclose())


async def test_relaxed_acceptance_is_rejected_for_a_server_without_speculation(draft_port: int) -> None:
    table = {"drafter": "auto", "acceptance": "ratio", "threshold": 0.1}
    policy = Policy.model_validate({"version": 1, "summary": "a test", "family": "target", "token": table})
    pair = Pair(RemoteEngine.load(f"http://127.0.0.1:{draft_port}/v1"), None)
    with pytest.raises(UsageError, match="by its own rule, not by 'ratio'"):
        StepSpec(policy=policy, pair=pair)
    drafting = Drafting("engine", acceptance=Acceptance("ratio", 0.1))
    with pytest.raises(UsageError, match="by its own rule, not by 'ratio'"):
        await collect(pair.target.generate(Generate(TokenBuffer([1]), Sampling(), Stop(1), drafting)))


@pytest.mark.usefixtures("anyio_backend")  # for the fixture that closes the engine
def test_procedures_on_vllm_are_measured_on_running_servers(target_port: int, draft_port: int) -> None:
    """What runs on each kind of servers, on a target that drafts n-grams."""
    target, draft = f"http://127.0.0.1:{target_port}/v1#target", f"http://127.0.0.1:{draft_port}/v1#draft"
    question, found = next(load_split("test")).question, dict[str, dict[str, Any]]()
    with asyncio.Runner() as runner:
        for kind in on_vllm.KINDS:
            with on_vllm.procedures(kind, target, draft, runner) as ways:
                for name, way in ways.items():
                    text, found[name] = runner.run(on_vllm.measured(way, Address.parsed(target), question, 200))
                    assert text
    for each in found.values():
        assert 0 < each["tokens"] <= 200
        assert each["cpu_s"] > 0
        assert each["seconds"] > 0
        assert each["drafted"] >= each["accepted"]
    published, ours, alone = (found[name] for name in (on_vllm.PUBLISHED, "specreason", "engine"))
    assert published["requests"] > ours["requests"] > 3
    assert alone["rounds"] > 0
    assert alone["requests"] <= 2

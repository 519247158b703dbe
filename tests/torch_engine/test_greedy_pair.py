"""On the embedded pair in float32, greedy speculation writes the same ids as `generate` of transformers."""

import asyncio
import itertools

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from evals.training.gsm_mini import load_split
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.protocol import (
    CALL_DRAFTERS,
    DrafterName,
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    collect,
)
from stepspec.engines.torch_engine import TorchEngine
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

NUM_NEW = 60


def load(role: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(WEIGHTS / role, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return four prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "target")
    questions = [problem.question for problem in itertools.islice(load_split("calibration"), 4)]
    ids = [tokenizer.encode(f"<|user|>{each}<|end|><|assistant|><think>") for each in questions]
    assert len({len(each) for each in ids}) > 1
    return ids


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected(prompts: list[list[int]]) -> list[list[int]]:
    network = load("target")
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
        written.append(output[0, len(prompt) :].tolist())
    return written


def draft_of(quality: str) -> LlamaForCausalLM:
    if quality == "a random model":
        torch.manual_seed(3)
        return LlamaForCausalLM(load("draft").config).eval()
    return load("draft" if quality == "the draft" else "target")


@pytest.mark.parametrize("quality", ["the draft", "a random model", "the target itself"])
async def test_a_ragged_batch_of_four_equals_transformers(prompts, expected, quality: str):
    target = load("target")
    tokenizer = load_tokenizer(str(WEIGHTS / "target"), target.config)
    engine = TorchEngine(checked_model(target, "target"), tokenizer, checked_model(draft_of(quality), "draft"))
    calls = [
        collect(engine.generate(Generate(TokenBuffer(prompt), Sampling(), Stop(NUM_NEW), Drafting("draft-model", 4))))
        for prompt in prompts
    ]
    chunks = await asyncio.gather(*calls)
    await engine.aclose()
    assert [list(chunk.ids) for chunk in chunks] == expected
    if quality == "the target itself":
        assert all(chunk.accepted == chunk.drafted for chunk in chunks)


@pytest.mark.parametrize("num_tokens", [4, None], ids=["4 drafted", "auto"])
@pytest.mark.parametrize("drafter", CALL_DRAFTERS)
async def test_every_drafter_leaves_the_pairs_text_unchanged(prompts, expected, drafter, num_tokens):
    draft = TorchEngine.load(str(WEIGHTS / "draft"))
    engine = TorchEngine.load(str(WEIGHTS / "target")).drafted_by(draft)
    drafting = Drafting(drafter, num_tokens)
    try:
        calls = (
            collect(engine.generate(Generate(TokenBuffer(prompt), Sampling(), Stop(NUM_NEW), drafting)))
            for prompt in prompts
        )
        chunks = await asyncio.gather(*calls)
        again = await collect(engine.generate(Generate(TokenBuffer(prompts[0]), Sampling(), Stop(NUM_NEW), drafting)))
    finally:
        await engine.aclose()
        await draft.aclose()
    assert [list(chunk.ids) for chunk in chunks] == expected
    assert list(again.ids) == expected[0]
    if num_tokens:
        assert sum(chunk.accepted for chunk in (*chunks, again)) > 0


@pytest.mark.parametrize("drafter", ["none", *CALL_DRAFTERS])
async def test_what_follows_ids_after_the_prompt_is_what_follows_the_longer_prompt(
    prompts, expected, drafter: DrafterName
) -> None:
    """Calls on one buffer overlap, as in a family that continues several uncommitted texts."""
    draft = TorchEngine.load(str(WEIGHTS / "draft"))
    engine = TorchEngine.load(str(WEIGHTS / "target")).drafted_by(draft)
    buffer, written = TokenBuffer(prompts[0]), expected[0]
    for _ in range(2):  # the second time from the cache
        calls = [
            Generate(buffer, Sampling(), Stop(20), Drafting(drafter), after=written[:length], logprobs=True)
            for length in (0, 7, 7, 30)
        ]
        chunks = await asyncio.gather(*(collect(engine.generate(call)) for call in calls))
        for call, chunk in zip(calls, chunks, strict=True):
            assert list(chunk.ids) == written[len(call.after) : len(call.after) + 20]
            assert len(chunk.logprobs or ()) == 20
    buffer.append(written[:30])
    longer = await collect(engine.generate(Generate(buffer, Sampling(), Stop(20), Drafting(drafter))))
    assert list(longer.ids) == written[30:50]
    assert longer.cached >= len(prompts[0]) + 29
    if drafter in ("none", "draft-model"):  # the others draft from past outputs, which changes sampled texts
        texts = [
            (await collect(engine.generate(Generate(prompt, how, Stop(20), Drafting(drafter, 3), after=after)))).ids
            for how, prompt, after in [
                (Sampling(1.0, seed=3), buffer, ()),
                (Sampling(1.0, seed=3), TokenBuffer(prompts[0]), written[:30]),
                (Sampling(1.0, seed=4), buffer, ()),
            ]
        ]
        assert texts[0] == texts[1] != texts[2]
    await engine.aclose()
    await draft.aclose()

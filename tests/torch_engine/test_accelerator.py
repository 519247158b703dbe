"""Greedy equality and the exact distribution on a CUDA device, and greedy choices up to rounding in bfloat16."""

import copy

import pytest
import torch
from distributions import FALSE_ALARM, conditional_distributions, joint_distribution, p_value, sample_texts
from tiny_models import (
    EXPERTS,
    FAMILIES,
    WINDOWS,
    generate,
    generate_all,
    llama_config,
    make_config,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import Drafting, Sampling, TokenBuffer, Verify
from stepspec.engines.torch_engine.drafters.draft_model import DraftModel
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.self_check import checked_model

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.anyio,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 1, 30)]
NUM_NEW = 24


@pytest.fixture(autouse=True)
def exact_float32():  # type: ignore[no-untyped-def]
    """TensorFloat-32 would round float32 products to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(network: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return copy.deepcopy(network).to("cuda", dtype)


def model_on_device(network: PreTrainedModel, dtype: torch.dtype = torch.float32) -> CausalModel:
    return checked_model(on_device(network, dtype), "tiny")


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWS, *EXPERTS, "bloom"])
@pytest.mark.parametrize("share", [0.08, 0.0, 3.0], ids=["a noisy copy", "the target itself", "mostly noise"])
async def test_four_concurrent_greedy_calls_equal_transformers_on_the_device(family: str, share: float) -> None:
    network = make_network(make_config(family))
    expected = [slow_greedy(on_device(network), prompt, NUM_NEW) for prompt in PROMPTS]
    async with serving(model_on_device(network), model_on_device(noisy_copy(network, share))) as engine:
        for drafting in (Drafting(), Drafting("draft-model", 1), Drafting("draft-model", 5)):
            chunks = await generate_all(engine, PROMPTS, NUM_NEW, drafting)
            assert [list(chunk.ids) for chunk in chunks] == expected
            if share == 0:
                assert all(chunk.accepted == chunk.drafted for chunk in chunks)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.85)], ids=str)
def test_three_tokens_from_speculation_have_the_targets_joint_distribution_on_the_device(sampling: Sampling) -> None:
    """A correct sampler fails for one in a million choices of the seeds (chi-square, `FALSE_ALARM`)."""
    prompt = [1, 4, 2]
    target = make_network(llama_config(vocab_size=5, num_hidden_layers=1, initializer_range=0.1), seed=3)
    joint = joint_distribution(conditional_distributions(on_device(target), prompt, 3, sampling))
    model, draft = model_on_device(target), model_on_device(noisy_copy(target, share=0.4))
    drafter = DraftModel(draft, model.vocab_size, 500)
    texts, accepted = sample_texts(model, drafter, prompt, sampling, 6000)
    assert 0.2 < accepted < 0.98
    assert p_value(texts, joint) > FALSE_ALARM
    texts, _ = sample_texts(draft, None, prompt, sampling, 6000)
    assert p_value(texts, joint) < FALSE_ALARM, "the test does not detect the draft's distribution"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "qwen3-moe", "deepseek-v3"])
async def test_in_bfloat16_every_greedy_choice_is_the_best_up_to_rounding(family: str) -> None:
    """A pass over several tokens rounds differently from a pass over one, so either token of a near tie may win."""
    network = make_network(make_config(family))
    half = on_device(network, torch.bfloat16)
    drafter = model_on_device(noisy_copy(network, 0.08), torch.bfloat16)
    async with serving(model_on_device(network, torch.bfloat16), drafter) as engine:
        chunks = await generate_all(engine, PROMPTS, NUM_NEW, Drafting("draft-model", 4))
    for prompt, chunk in zip(PROMPTS, chunks, strict=True):
        logits = slow_logits(half, [*prompt, *chunk.ids])[len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor([chunk.ids], device="cuda").T)[:, 0]
        assert (logits.max(-1).values - chosen).max() < 0.05 * logits.std()


async def test_small_passes_are_captured_at_load_and_no_attention_is_sent_to_cudnn() -> None:
    model = model_on_device(make_network(llama_config()))
    assert model.reads_slots
    async with serving(model) as engine:
        captured = model.slot_passes.num_captured
        assert captured > 0
        await generate_all(engine, PROMPTS, NUM_NEW)
        await engine.verify(Verify(TokenBuffer(PROMPTS[1]), random_ids(9, 2)))
        assert model.slot_passes.num_captured == captured
    query, mask = (
        torch.randn(1, 8, 96, 128, device="cuda", dtype=torch.bfloat16),
        torch.zeros(1, 1, 96, 96, device="cuda"),
    )
    chosen = torch._fused_sdp_choice(query, query, query, mask.bfloat16())
    assert chosen != torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value


async def test_a_verification_on_the_device_equals_a_plain_pass() -> None:
    network = make_network(llama_config())
    prompt, step = random_ids(20, 1), random_ids(9, 2)
    async with serving(model_on_device(network)) as engine:
        verification = await engine.verify(Verify(TokenBuffer(prompt), step))
        following = await generate(engine, [*prompt, *step], 1)
    logits = slow_logits(on_device(network), prompt + step)[len(prompt) - 1 :].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor([step], device="cuda").T)[:, 0].tolist()
    assert verification.logprobs == pytest.approx(expected, abs=1e-3)
    assert verification.next_choice == following.ids[0]

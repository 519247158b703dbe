"""Quantized models: their texts do not depend on speculation, and everything that names a data type names theirs."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    DRAFTED,
    attend_slowly,
    generate,
    generate_all,
    llama_config,
    make_config,
    make_network,
    make_tokenizer,
    noisy_copy,
    random_ids,
    serving,
    use_slots,
)
from transformers import PreTrainedModel

from evals.bench.hooks import own_network, read_bytes
from stepspec.api.model_facts import model_facts
from stepspec.engines.protocol import DrafterName, Drafting, Probe, TokenBuffer, Verify
from stepspec.engines.torch_engine import TorchEngine, engine, matrix, self_check
from stepspec.engines.torch_engine.attention import attend, even_span, packed_bias
from stepspec.engines.torch_engine.body import MULTIPLE
from stepspec.engines.torch_engine.matrix import Quantization, can_quantize
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.errors import ModelError, UsageError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="this CPU has no VNNI instructions"),
]

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "initializer_range": 0.15}
"""Those of the embedded pair's draft."""
PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 1, 30)]
NUM_NEW = 30
DRAFTERS: Sequence[DrafterName] = ("draft-model", "prompt-lookup", "suffix")


def layer_of(network: Any) -> Any:
    return network.base_model.layers[0]


def quantized(network: PreTrainedModel, quantize: Quantization, vocabulary: Sequence[int] | None = None) -> CausalModel:
    return checked_model(noisy_copy(network, 0.0), f"tiny {quantize}", vocabulary, quantize)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def network(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_network(llama_config(**SIZES)).to(request.param)


@pytest.fixture(scope="module")
def draft(network: PreTrainedModel) -> CausalModel:
    return quantized(noisy_copy(network, 0.1), "int4")


async def test_speculation_changes_no_text_of_an_int8_model(network: PreTrainedModel, draft: CausalModel) -> None:
    target = quantized(network, "int8")
    async with serving(target, draft) as made:
        plain = [(await generate(made, prompt, NUM_NEW)).ids for prompt in PROMPTS]
        together = await generate_all(made, PROMPTS, NUM_NEW)
        assert [chunk.ids for chunk in together] == plain
        for name in DRAFTERS:
            for count in (2, 7):
                chunks = await generate_all(made, PROMPTS, NUM_NEW, Drafting(name, count))
                assert [chunk.ids for chunk in chunks] == plain, (name, count)
            assert name == "suffix" or sum(chunk.accepted for chunk in chunks) > 0


@torch.inference_mode()
@pytest.mark.parametrize("length", [70, 520])
def test_logits_do_not_depend_on_the_passes_that_read_a_text(network: PreTrainedModel, length: int) -> None:
    """Not even in the last bits, as quantization would amplify a difference."""
    made, ids = quantized(network, "int8"), random_ids(length + 24, seed=length)
    made.max_context = 1024
    made.extend([0], [ids[:length]], keep=[[]])
    found: list[torch.Tensor] = []
    for width in (1, 3, 8, 24):
        made.rollback(0, length)
        rows = (ids[first : first + width] for first in range(length, length + 24, width))
        found.append(torch.cat([made.extend([0], [row])[0] for row in rows]))
    found.append(
        made.extend([1, 2, 3], [random_ids(7), ids, random_ids(3)], keep=[[0], range(length, length + 24), [0]])[1]
    )
    made.rollback(0, length)
    made.rollback(2, length)
    found.append(made.extend([2, 0], [ids[length:], ids[length:]])[1])
    for other in found[1:]:
        assert torch.equal(other, found[0])


async def test_judging_an_int8_model_follows_its_text(network: PreTrainedModel) -> None:
    async with serving(quantized(network, "int8")) as made:
        text = (await generate(made, PROMPTS[1], NUM_NEW)).ids
        judged = await made.verify(Verify(TokenBuffer(PROMPTS[1]), text, [Probe((1, 2), (3, 4))]))
    assert judged.choices == text


@torch.inference_mode()
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_the_network_with_the_weights_as_stored(family: str, quantize: Quantization) -> None:
    """They differ by the rounding of the rows in 8 bits, and in int4 by that of the products in bfloat16."""
    own = make_network(make_config(family, **SIZES))
    made = quantized(own, quantize)
    stored = own_network(made)
    ids = random_ids(12)
    for id in ids:
        (logits,) = made.extend([0], [[id]])
    reference = stored(input_ids=torch.tensor([ids])).logits[0, -1]
    assert (logits[-1] - reference).norm() < 0.1 * reference.norm()
    weights = [layer_of(network).mlp.up_proj.weight for network in (own, stored)]
    assert 0 < (weights[0] - weights[1]).norm() < 0.15 * weights[0].norm()


@pytest.mark.parametrize(("quantize", "most"), [("int8", 0.3), ("int4", 0.5)])
def test_plain_weights_are_freed_and_bytes_are_those_that_remain(quantize: Quantization, most: float) -> None:
    own = make_network(llama_config(**SIZES, vocab_size=48))
    made = quantized(own, quantize)
    embeddings: Any = made.network.get_input_embeddings()
    head: Any = made.network.get_output_embeddings()
    freed = layer_of(made.network).self_attn.q_proj, layer_of(made.network).mlp.down_proj, head
    assert all(each.weight.is_meta for each in freed)
    assert not embeddings.weight.is_meta
    plain = sum(parameter.nbytes for parameter in own.parameters())
    assert 0.2 * plain < made.weight_bytes < most * plain
    assert read_bytes(made) < made.weight_bytes


def test_large_packed_weights_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_onednn_is_faster", lambda *_: True)
    monkeypatch.setattr(matrix, "FEW_PRODUCTS", 96 * 48)
    own = make_network(llama_config(**SIZES))
    made = checked_model(noisy_copy(own, 0.0), "tiny")
    assert layer_of(made.network).mlp.up_proj.weight.is_meta
    assert made.weight_bytes == sum(parameter.nbytes for parameter in own.parameters())
    ids = torch.tensor([random_ids(9)])
    with torch.inference_mode():
        assert torch.equal(own_network(made)(input_ids=ids).logits, own(input_ids=ids).logits)


@torch.inference_mode()
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_draft_vocabulary_is_quantized_too(network: PreTrainedModel, quantize: Quantization) -> None:
    some = range(0, 48, 3)
    full, partial = quantized(network, quantize), quantized(network, quantize, some)
    logits = [each.extend([0], [[5]])[0][0] for each in (full, partial)]
    assert torch.allclose(logits[0][some], logits[1][some], rtol=1e-4, atol=1e-4)
    assert logits[1].isneginf().sum() == 48 - len(some)


async def test_an_int4_model_drafts_but_is_not_drafted_for(network: PreTrainedModel, draft: CausalModel) -> None:
    async with serving(draft.with_own_cache(), draft.with_own_cache()) as made:
        assert made.drafters == []
        assert len((await generate(made, PROMPTS[0], 5)).ids) == 5
        with pytest.raises(UsageError, match="tiny int4 has quantize=int4, which is for drafts"):
            await generate(made, PROMPTS[0], 5, drafting=DRAFTED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    make_network(llama_config(**SIZES)).save_pretrained(path)
    make_tokenizer().own.save_pretrained(path)
    return path


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_an_option_quantizes_and_the_description_names_it(folder: Path, quantize: str) -> None:
    made = TorchEngine.load(f"{folder}?quantize={quantize}", "cpu")
    assert made.describe()["dtype"] == model_facts(made).dtype == quantize
    assert made.model.network.dtype == torch.bfloat16
    asyncio.run(made.aclose())


def test_without_the_instructions_a_model_runs_in_bfloat16_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "can_quantize", lambda _: False)
    with caplog.at_level(logging.WARNING):
        made = TorchEngine.load(f"{folder}?quantize=int8", "cpu")
    asyncio.run(made.aclose())
    assert made.describe()["dtype"] == "bfloat16"
    assert "runs in bfloat16: quantize=int8 needs a CPU with VNNI instructions" in caplog.text
    assert not can_quantize(torch.device("cuda"))


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("quantize=int3", "quantize"),
        ("quantize=int8&dtype=float16", "quantize=int8 is a data type of its own. Leave out dtype=float16"),
    ],
)
def test_wrong_options_are_refused(query: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        TorchEngine.check_options(f"folder?{query}")


def test_other_families_are_refused() -> None:
    with pytest.raises(ModelError, match="tiny int8 cannot be quantized to int8: that needs a model of the family "):
        quantized(make_network(make_config("gpt-neox")), "int8")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_wrong_products_are_found_at_load(quantize: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose products overflow, for example, must not serve."""
    right = matrix.Int8Matrix.product
    monkeypatch.setattr(matrix.Int8Matrix, "product", lambda self, x: right(self, x).clamp(-1, 1))
    with pytest.raises(ModelError, match=f"weights stored as {quantize} are wrong on this machine"):
        quantized(make_network(llama_config(**SIZES)), quantize)
    assert self_check.QUANTIZED_TOLERANCE.keys() == {"int8", "int4", "fp8"}


def test_fp8_is_refused_without_a_gpu(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be quantized to fp8: .* on a GPU with fp8 products, such as H100"):
        TorchEngine.load(f"{folder}?quantize=fp8", "cpu")


async def test_an_fp8_model_reads_by_slot_and_judges_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch multiplies in fp8 on a CPU too, slowly."""
    monkeypatch.setattr(self_check, "can_quantize", lambda *_: True)
    own = make_network(llama_config(**SIZES)).bfloat16()
    made, drafter = quantized(own, "fp8"), quantized(noisy_copy(own, 0.1), "fp8")
    assert made.weight_bytes < 0.6 * sum(parameter.nbytes for parameter in own.parameters())
    for model in (made, drafter):
        use_slots(model, attend_slowly)
    async with serving(made, drafter) as running:
        chunk = await generate(running, PROMPTS[1], NUM_NEW, drafting=Drafting("draft-model", 4))
        judged = await running.verify(Verify(TokenBuffer(PROMPTS[1]), chunk.ids))
    assert chunk.accepted > 0
    assert sum(map(int.__eq__, judged.choices, chunk.ids)) > 0.9 * NUM_NEW, "but for near ties in bfloat16"


@pytest.mark.parametrize("size", [64, 128])
def test_attention_rounds_a_row_alike_in_passes_of_any_width(size: int) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 48, size, generator=random)
    key, value = (torch.randn(1, 2, 48, size, generator=random) for _ in range(2))
    expected = attend(query, key, value, None, multiple=MULTIPLE)
    for width in range(1, 48):
        found = attend(query[:, :, :width], key, value, None, multiple=MULTIPLE)
        assert torch.equal(found, expected[:, :width]), width


@pytest.mark.parametrize("size", [64, 128])
def test_attention_adds_alike_whatever_lies_behind_the_positions_that_it_sees(size: int) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 2, size, generator=random)
    key, value = (torch.randn(1, 2, 1600, size, generator=random) for _ in range(2))

    def attended(end: int, further: int) -> torch.Tensor:
        span = even_span(end + further, size)
        mask = (torch.arange(span) < end).expand(1, 1, 2, span)
        bias = packed_bias(mask, 3, torch.float32, MULTIPLE)
        return attend(query, key[:, :, :span], value[:, :, :span], bias, multiple=MULTIPLE)

    for end in range(1, 1200, 7):
        expected = attended(end, 0)
        for further in (1, 8, 30, 100, 200, 390):
            assert torch.equal(attended(end, further), expected), (end, further)

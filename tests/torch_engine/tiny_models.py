"""Random models with a few thousand weights, slow reference implementations, and engines that serve the models."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.protocol import (
    MAX_DRAFTED,
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    collect,
)
from stepspec.engines.torch_engine import graphs
from stepspec.engines.torch_engine.attention import SlotAttention, SlotRows
from stepspec.engines.torch_engine.body import has_alibi
from stepspec.engines.torch_engine.engine import MAX_SLOTS, TorchEngine
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.self_check import checked_model

VOCAB_SIZE = 48
CONTEXT = 512
DRAFTED = Drafting("draft-model", 4)

# Large enough that most choices are clear. Rounding decides between logits that nearly tie.
WEIGHT_SCALE = 0.3

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": WEIGHT_SCALE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}


def llama_config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**(GROUPED | changes))


def make_config(family: str, **changes: object) -> PreTrainedConfig:
    if family == "llama":
        return llama_config(**changes)
    if family == "qwen3":
        return Qwen3Config(**(GROUPED | {"head_dim": 8} | changes))
    if family == "mistral":
        return MistralConfig(**(GROUPED | {"sliding_window": None} | changes))
    if family == "gpt-neox":
        return GPTNeoXConfig(**(SHAPE | changes))
    if family in WINDOWS:
        kind, shape = WINDOWS[family]
        return kind(**(GROUPED | shape | changes))
    if family in EXPERTS:
        kind, shape = EXPERTS[family]
        return kind(**(GROUPED | shape | changes))
    if family == "bloom":
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 2, "n_head": 6}
        return BloomConfig(**(shape | ends | {"initializer_range": WEIGHT_SCALE} | changes))
    if family == "opt":
        return OPTConfig(**(SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": WEIGHT_SCALE} | changes))
    assert family == "gpt2", family
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    return GPT2Config(**(shape | ends | {"initializer_range": WEIGHT_SCALE} | changes))


EXPERTS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        },
    ),
}
"""Mixture-of-experts families and the settings that they add. Keys and values of DeepSeek-V3 also differ in size."""

HEADS = {"head_dim": 8}
SLIDES = {"sliding_window": 8}
BOTH = SLIDES | {"layer_types": ["sliding_attention", "full_attention"]}

WINDOWS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "mistral-window": (MistralConfig, SLIDES),
    "phi3-window": (Phi3Config, SLIDES),
    "starcoder2-window": (Starcoder2Config, SLIDES),
    "mixtral-window": (MixtralConfig, SLIDES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-window": (Qwen2Config, BOTH | {"use_sliding_window": True}),
    "qwen3-window": (Qwen3Config, BOTH | HEADS | {"use_sliding_window": True}),
    "gemma2": (Gemma2Config, BOTH | HEADS | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, BOTH | HEADS | {"query_pre_attn_scalar": 8}),
    "cohere2": (Cohere2Config, BOTH),
    "qwen2-moe-window": (
        Qwen2MoeConfig,
        BOTH
        | {"use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
    "olmo3": (Olmo3Config, BOTH),
    "gpt-oss": (GptOssConfig, BOTH | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Families with layers that see only the last 8 tokens, and the settings that they add. The attention scores of Gemma 2
are soft-capped, the attention of gpt-oss has sinks."""

FAMILIES = ["llama", "qwen3", "mistral", "gpt-neox"]


def make_network(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random network. The state of the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def noisy_copy(network: PreTrainedModel, share: float, seed: int = 1) -> PreTrainedModel:
    """Return a copy with noise of `share` standard deviations of each weight: a draft that is sometimes right."""
    copied = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += share * weight.std(correction=0) * noise
    return copied


def make_model(network: PreTrainedModel, name: str = "tiny", *, by_slot: bool = False) -> CausalModel:
    """Return a model with `extend`. It copies the network, which stays usable as a reference.

    `by_slot`: whether its passes are those of a GPU.
    """
    model = checked_model(copy.deepcopy(network), name)
    if by_slot and not has_alibi(network):
        use_slots(model, attend_slowly)
    return model


def use_slots(model: CausalModel, attention: SlotAttention) -> None:
    """Have a model read its cache by slot, and take its small passes from graphs, as on a GPU."""
    model.attend_in_slots_by(attention)
    model.cache.reserve(MAX_SLOTS, model.max_context + MAX_DRAFTED + 1)
    with patch.object(graphs, "GraphRecorder", FakeRecorder):
        model.capture(4)


class FakeRecorder:
    """Stands for `graphs.GraphRecorder` on a machine without a GPU: a replay runs the function again.

    Other passes' results are then worthless, as they share memory on a GPU.
    """

    def __init__(self) -> None:
        self._results = list[Tensor]()

    def record(self, run: Callable[..., Tensor], *inputs: Any) -> tuple[Callable[[], object], Tensor]:
        self._results.append(result := run(*inputs).clone())

        def replay() -> None:
            for each in self._results:
                each.fill_(torch.nan)
            result.copy_(run(*inputs))

        return replay, result


def attend_slowly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: SlotRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `slot_attention.attend_in_slots` does, from masks over whole slots."""
    slots, starts, firsts, lengths = rows.table.long()
    (branch, shift, trunk), ids, cells = rows.branches, torch.arange(len(query)), torch.arange(keys.shape[2])
    row = (ids[:, None] >= firsts + lengths).sum(1).clamp(max=len(slots) - 1)
    exists, start, first = ids < (firsts + lengths)[-1], starts[row][:, None], firsts[row][:, None]
    newest = start + ids[:, None] - first
    new = (cells >= start) & (cells <= newest)
    column = torch.where(new & exists[:, None], first + cells - start, 0)
    key_branch, key_shift = (torch.where(new, each[column], 0) for each in (branch, shift))
    in_trunk = (key_branch == 0) & (cells < start + trunk[:, None])
    sees = (cells <= newest) & (in_trunk | (key_branch == branch[:, None]))
    if window is not None:
        sees &= cells - key_shift > newest - shift[:, None] - window
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [N, H_kv, packed, D]
    scores = torch.einsum("nhpd,nhcd->nhpc", grouped, keys[slots[row]])
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~sees[:, None, None], -torch.inf).float()
    if sinks is not None:
        sink = sinks.float().view(1, keys.shape[1], -1, 1).expand(len(query), -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(cells)].to(values.dtype)
    return torch.einsum("nhpc,nhce->nhpe", weights, values[slots[row]]).flatten(1, 2) * exists[:, None, None]


def piece(token: int) -> str:
    """Return the text of a token: three characters, of which the middle one is unique to it."""
    return f"({chr(0x100 + token)})"


def make_tokenizer(size: int = VOCAB_SIZE, end_ids: frozenset[int] = frozenset()) -> HuggingFaceTokenizer:
    tokenizer = Tokenizer(WordLevel({piece(token): token for token in range(size)}, unk_token=piece(0)))
    tokenizer.decoder = decoders.Fuse()
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), end_ids)


@asynccontextmanager
async def serving(
    model: CausalModel,
    drafter: CausalModel | None = None,
    end_ids: frozenset[int] = frozenset(),
) -> AsyncIterator[TorchEngine]:
    """Yield an engine, close it after the block, and check the caches."""
    engine = TorchEngine(model, make_tokenizer(model.vocab_size, end_ids), drafter)
    engine.capture()
    try:
        yield engine
    finally:
        await engine.aclose()
        for used in (model, drafter):
            if used is not None:
                used.cache.check()


async def generate(
    engine: TorchEngine,
    prompt: Sequence[int] | TokenBuffer,
    num_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    drafting: Drafting = Drafting(),
    after: Sequence[int] = (),
) -> TokenChunk:
    """Run a complete `generate` call."""
    buffer = prompt if isinstance(prompt, TokenBuffer) else TokenBuffer(prompt)
    return await collect(engine.generate(Generate(buffer, sampling, Stop(num_tokens), drafting, after=after)))


async def generate_all(
    engine: TorchEngine, prompts: Sequence[Sequence[int]], num_tokens: int, drafting: Drafting = Drafting()
) -> list[TokenChunk]:
    """Run concurrent greedy calls, one per prompt."""
    return await asyncio.gather(*(generate(engine, prompt, num_tokens, drafting=drafting) for prompt in prompts))


def random_ids(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def slow_logits(network: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the network's own logits after every id, computed without a cache; [T, V]."""
    return network(input_ids=torch.tensor([list(ids)], device=network.device), use_cache=False).logits[0]


@torch.inference_mode()
def slow_greedy(network: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what transformers itself generates. The mask says that no id of the prompt is padding."""
    ids = torch.tensor([list(prompt)], device=network.device)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = network.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


class CountingModel(CausalModel):
    """A model that records how many ids each pass reads."""

    num_read: list[int]

    def read(self, positions, ids, branches=None):  # type: ignore[no-untyped-def]
        self.num_read.append(ids.numel())
        return super().read(positions, ids, branches)

    @classmethod
    def of(cls, network: PreTrainedModel) -> "CountingModel":
        counting = object.__new__(cls)
        counting.__dict__ = checked_model(copy.deepcopy(network), "counting").__dict__ | {"num_read": []}
        return counting

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Yield the number of ids that each pass inside the block reads."""
        self.num_read.clear()
        yield self.num_read

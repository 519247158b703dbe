"""Models of real shapes with random weights, to measure speed without the real weights.

Their text is meaningless. A target never accepts a draft's tokens: see `evals.bench.hooks.synthetic_acceptance`.
"""

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.errors import UsageError, unknown_name


class Shape(NamedTuple):
    """Architecture of a Qwen3 model (arXiv:2505.09388, table 1), or of a smaller one."""

    width: int
    feed_forward: int
    layers: int
    heads: int
    tied: bool = False
    kv_heads: int = 8
    head_size: int = 128
    vocab_size: int = 151_936


SHAPES = {
    "mini-draft": Shape(96, 256, 2, 4, tied=True, kv_heads=2, head_size=32, vocab_size=1024),
    "mini": Shape(192, 512, 10, 6, tied=True, kv_heads=2, head_size=32, vocab_size=1024),
    "0.6b": Shape(1024, 3072, 28, 16, tied=True),
    "1.7b": Shape(2048, 6144, 28, 16, tied=True),
    "4b": Shape(2560, 9728, 36, 32, tied=True),
    "8b": Shape(4096, 12288, 36, 32),
    "14b": Shape(5120, 17408, 40, 40),
    "32b": Shape(5120, 25600, 64, 64),
}
CONTEXT = 40_960


def random_network(name: str, dtype: str | None = None) -> PreTrainedModel:
    """Return a Qwen3 model with random weights, on a CUDA device if there is one.

    Args:
        name: a key of `SHAPES`.
        dtype: default bfloat16 on a CUDA device and float32 on a CPU.

    Raises:
        UsageError: there is no shape with this name.
    """
    if name not in SHAPES:
        raise UsageError(unknown_name("shape", name, SHAPES))
    shape = SHAPES[name]
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = dtype or ("float32" if device == "cpu" else "bfloat16")
    with torch.device(device):
        model: Any = AutoModelForCausalLM
        return model.from_config(config, dtype=getattr(torch, chosen)).eval()


def without_text() -> HuggingFaceTokenizer:
    """Return a tokenizer for random models: no token has a text, and none ends the text."""
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())), frozenset())

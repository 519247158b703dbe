"""Folders of tiny random judge models with the embedded pair's tokenizer."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, LlamaModel

from stepspec.mini import WEIGHTS


def judge_folders(root: Path) -> dict[str, Path]:
    """Make two folders: `reward`, a reward model, and `embedding`, an encoder. Both have a context of 256 tokens."""
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(WEIGHTS / "target")),
        hidden_size=64,  # heads of 32, the smallest of vLLM on a CPU
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_labels=1,
    )
    torch.manual_seed(0)
    found: dict[str, Path] = {}
    for name, kind in (("reward", LlamaForSequenceClassification), ("embedding", LlamaModel)):
        found[name] = root / name
        kind(config).save_pretrained(found[name])
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (WEIGHTS / "target" / file).exists():
                shutil.copy(WEIGHTS / "target" / file, found[name])
    return found

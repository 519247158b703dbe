"""Build the pair `smol` from the base model and the weights that ship with stepspec.

The build writes to a temporary folder next to the pair's final folder, and renames it when it is complete.

`python -m stepspec.mini.smol.build --base FOLDER` writes the untouched base as a model folder, to compare with.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from stepspec.api.pairs import MANIFEST, SMOL, SMOL_WEIGHTS, Manifest, built_folder, damage_of
from stepspec.api.scope import FILE as SCOPE_FILE
from stepspec.engines import draft_vocabulary
from stepspec.errors import ModelError, reason_of
from stepspec.mini.smol.base import CONTEXT, TAGS, find_base, load_base, load_tokenizer
from stepspec.mini.smol.lora import merge_file

NUM_BYTES = 1_200_000_000
"""Free space that a build requires, in bytes: twice the size of its files."""

UNFINISHED = ".unfinished-"
"""Prefix of temporary folders of unfinished builds."""


def build_smol(report: Callable[[str], None]) -> Path:
    """Build the pair if it is missing or damaged, and return its folder.

    A concurrent build waits for the first one.

    Args:
        report: receives progress messages.

    Raises:
        ModelError: the base is missing or damaged, or the folder cannot be written.
    """
    folder = built_folder("smol")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "smol.lock", report):
            if folder.exists() and damage_of(folder) is None:
                report("The pair is already built.")
            else:
                _build(folder, find_base())
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or reason_of(error)
        raise ModelError(
            f"The pair smol cannot be written to {folder.parent}: {reason}. Free up space or fix the "
            "permissions there, or choose another cache folder with the environment variable XDG_CACHE_HOME."
        ) from error
    return folder


@contextmanager
def _locked(file: Path, report: Callable[[str], None]) -> Generator[None]:
    """Hold the lock. The system releases it if the process is killed."""
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report("Another process is building the pair. Waiting for it to finish.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, base: Path) -> None:
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # left by killed builds, because only this build holds the lock
        shutil.rmtree(left)
    free = shutil.disk_usage(folder.parent).free
    if free < NUM_BYTES:
        raise ModelError(
            f"The pair smol needs {NUM_BYTES // 1_000_000} MB of free space in {folder.parent}; there are "
            f"{free // 1_000_000} MB."
        )
    work = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        write_pair(work, base, SMOL_WEIGHTS)
        (work / MANIFEST).write_text(Manifest.of(work).model_dump_json(indent=2) + "\n", "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_pair(folder: Path, base: Path, weights: Path) -> None:
    """Write `target`, `draft`, `reward` and `pair.json` to a folder.

    Args:
        folder: an existing folder.
        base: the GGUF file of the base.
        weights: the folder with the weights that ship with stepspec.
    """
    tokenizer = load_tokenizer(base)
    target = merged_target(base, sorted(weights.glob("adapter-*.safetensors")))
    write_model(folder / "target", target, tokenizer)
    write_model(folder / "draft", draft_of(target, weights / "draft.safetensors"), tokenizer)
    write_model(folder / "reward", reward_of(target, weights / "reward.safetensors"), tokenizer)
    for role in ("target", "draft", "reward"):
        shutil.copyfile(SMOL / "README.md", folder / role / "README.md")
    shutil.copyfile(weights / draft_vocabulary.FILE, folder / "draft" / draft_vocabulary.FILE)
    shutil.copyfile(weights / SCOPE_FILE, folder / SCOPE_FILE)


def merged_target(base: Path, adapters: list[Path]) -> LlamaForCausalLM:
    """Return the base with the adapters merged in order, in float32."""
    original: Any = load_base(base)
    tag_ids: Any = load_tokenizer(base).convert_tokens_to_ids([*TAGS.values()])
    for adapter in adapters:
        merge_file(adapter, original, tag_ids)
    return _in_new_model(original)


def draft_of(target: Any, file: Path) -> LlamaForCausalLM:
    """Return the draft, with its layers and last norm from a file and its embedding from the target."""
    trained = load_file(file)
    num_layers = len({name.split(".")[2] for name in trained if name.startswith("model.layers.")})
    draft = LlamaForCausalLM(_shaped(target.config, num_layers))
    embedding = {"model.embed_tokens.weight": target.model.embed_tokens.weight}
    embedding["lm_head.weight"] = embedding["model.embed_tokens.weight"]
    draft.load_state_dict({name: tensor.float() for name, tensor in trained.items()} | embedding)
    return draft


def reward_of(target: Any, file: Path) -> LlamaForSequenceClassification:
    """Return the reward model: the target with the head from a file."""
    config = _shaped(target.config, target.config.num_hidden_layers)
    config.num_labels = 1
    reward = LlamaForSequenceClassification(config)
    reward.model.load_state_dict(target.model.state_dict())
    reward.score.load_state_dict({"weight": load_file(file)["score.weight"]})
    return reward


def _in_new_model(original: Any) -> LlamaForCausalLM:
    """Return a copy of a model loaded from a GGUF, which itself cannot be saved in another format."""
    copied = LlamaForCausalLM(_shaped(original.config, original.config.num_hidden_layers))
    copied.load_state_dict(original.state_dict())
    return copied


def _shaped(config: Any, num_layers: int) -> LlamaConfig:
    """Return a configuration of the same shape, without the GGUF settings."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "eos_token_id")
    return LlamaConfig(
        **{name: getattr(config, name) for name in names}, num_hidden_layers=num_layers, bos_token_id=None
    )


def write_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face model folder in bfloat16."""
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.max_length = CONTEXT
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_base(folder: Path) -> None:
    """Write the untouched base as a model folder, with its own tokenizer and chat template."""
    from transformers import AutoTokenizer

    base = find_base()
    write_model(folder, _in_new_model(load_base(base)), AutoTokenizer.from_pretrained(base.parent, gguf_file=base.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="Write the untouched base to this folder.")
    write_base(parser.parse_args().base)


if __name__ == "__main__":
    main()

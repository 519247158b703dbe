"""GGUF files as models, and the build of the pair `qwen` from them, with files of a few kilobytes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from tiny_models import DRAFTED
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from stepspec.api.models import load_pair
from stepspec.api.pairs import QWEN, TEMPLATE_CHANGES, SourceFile, build_qwen, find_pair, pair_specs
from stepspec.base import files
from stepspec.base.files import file_hash
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.errors import ModelError, StepSpecError

WIDTH, MIDDLE, HEADS, LAYERS = 32, 64, 4, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*bytes_to_unicode().values(), "he", "Ġa", *CONTROL]
END = TOKENS.index("<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
) + "".join(f"{{# {published} #}}" for published in TEMPLATE_CHANGES)


def write_gguf(file: Path, seed: int = 0, architecture: str = "qwen2", without: str = "") -> Path:
    """Write a random model with a tokenizer of bytes. Its head is its embedding, a little less precise there."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL if token in CONTROL else gguf.TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["h e", "Ġ a"])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_chat_template(TEMPLATE)
    head = random.normal(0, 0.3, (len(TOKENS), WIDTH)).astype(np.float32)
    tensors = {"output.weight": head, "token_embd.weight": np.round(head, 1), "output_norm.weight": np.ones(WIDTH)}
    for layer in range(LAYERS):
        shapes = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "ffn_down.weight": (WIDTH, MIDDLE)}
        shapes |= {f"attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"attn_{name}.bias": (WIDTH,) for name in "qkv"}
        shapes |= {f"ffn_{name}.weight": (MIDDLE, WIDTH) for name in ("gate", "up")}
        tensors |= {f"blk.{layer}.{name}": random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != without:
            writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Files(NamedTuple):
    """Small files in place of those of the pair."""

    by_role: Mapping[str, Path]
    sources: Mapping[str, SourceFile]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("gguf")
    (vocabulary := folder / "vocabulary.json").write_text(
        json.dumps({"version": 1, "ids": [*range(len(TOKENS) - 9), END]})
    )
    by_role = {role: write_gguf(folder / f"{role}.gguf", seed) for seed, role in enumerate(QWEN)}
    sources = {
        role: SourceFile("of/tests", file.name, file.stat().st_size, file_hash(file), 1_000_000, vocabulary=each)
        for (role, file), each in zip(by_role.items(), (None, vocabulary), strict=True)
    }
    return Files(by_role, sources)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of stepspec. The Hub is not asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "stepspec"


def test_the_pair_is_built_once_from_files_in_any_order_and_runs(tiny: Files, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"has not been built on this machine\. Build it: stepspec pair build qwen"):
        find_pair("qwen")
    messages: list[str] = []
    folder = build_qwen([tiny.by_role["draft"], tiny.by_role["target"]], messages.append, tiny.sources)
    assert find_pair("qwen") == folder == cache / "qwen"
    assert not list(folder.glob(".*.unfinished"))
    build_qwen([], messages.append, tiny.sources)
    assert messages[-1] == "The pair is already built."
    pair = load_pair(pair="qwen?dtype=bfloat16")
    target = pair.target
    try:
        tokenizer = target.tokenizer
        assert tokenizer.end_ids == {END, TOKENS.index("<|endoftext|>")}
        assert tokenizer.encode("<|im_end|>he a") == [END, TOKENS.index("he"), TOKENS.index("Ġa")]
        prompt = tokenizer.render([{"role": "user", "content": "hé"}], add_generation_prompt=True)
        assert prompt == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(prompt)
        assert tokenizer.decode(ids) == prompt
        assert all(changed in tokenizer.own.chat_template for changed in TEMPLATE_CHANGES.values())
        assert pair.draft is not None
        assert pair.draft.model.vocabulary == (*range(len(TOKENS) - 9), END)
        assert target.model.vocabulary is None
        call = Generate(TokenBuffer(ids), Sampling(), stop=Stop(max_tokens=8), drafting=DRAFTED)
        assert len(asyncio.run(collect(target.generate(call))).ids) > 0
    finally:
        asyncio.run(pair.aclose())


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ("", "?quantize=int8", "?quantize=int4"),
        ("threads=2", "?threads=2&quantize=int8", "?threads=2&quantize=int4"),
        ("dtype=bfloat16", "?dtype=bfloat16", "?dtype=bfloat16"),
        ("threads=2&quantize=int8", "?threads=2&quantize=int8", "?threads=2&quantize=int8"),
    ],
)
def test_the_pair_is_quantized_unless_data_types_are_chosen(
    tiny: Files, cache: Path, options: str, target: str, draft: str
) -> None:
    folder = build_qwen([*tiny.by_role.values()], print, tiny.sources)
    assert pair_specs("qwen", options) == (f"torch:{folder}/target{target}", f"torch:{folder}/draft{draft}", folder)


def test_the_head_is_the_embedding_of_the_pair(tiny: Files) -> None:
    folder = build_qwen([*tiny.by_role.values()], print, tiny.sources)
    for role, file in tiny.by_role.items():
        network = AutoModelForCausalLM.from_pretrained(folder / role)
        assert network.config.tie_word_embeddings
        assert network.get_input_embeddings().weight is network.get_output_embeddings().weight
        head = next(each for each in gguf.GGUFReader(file).tensors if each.name == "output.weight").data
        assert torch.equal(network.lm_head.weight, torch.tensor(head).bfloat16())


def test_a_file_that_is_damaged_or_another_one_is_named_with_what_was_expected(tiny: Files, tmp_path: Path) -> None:
    damaged = tmp_path / "target.gguf"
    content = bytearray(tiny.by_role["target"].read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    source = tiny.sources["target"]
    with pytest.raises(ModelError, match=rf"is damaged or another file\. .*not {source.sha256} .*delete it and get it"):
        build_qwen([damaged, tiny.by_role["draft"]], print, tiny.sources)
    with pytest.raises(ModelError, match="No such file"):
        build_qwen([tmp_path / "none.gguf"], print, tiny.sources)
    with pytest.raises(ModelError, match="has not been built"):
        find_pair("qwen")


def test_a_file_that_is_not_given_is_downloaded(tiny: Files) -> None:
    with pytest.raises(ModelError, match=r"draft\.gguf of of/tests cannot be downloaded: .*name the file with --gguf"):
        build_qwen([tiny.by_role["target"]], print, tiny.sources)


def test_a_disk_without_space_is_found_before_anything_is_read(tiny: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 1_500_000

    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(StepSpecError, match=r"qwen needs 2 MB of free space, and its disk has 1 MB"):
        build_qwen([Path("never read")], print, tiny.sources)


def test_a_killed_build_continues_with_the_model_that_is_missing(tiny: Files, cache: Path, tmp_path: Path) -> None:
    """The build is killed while it writes the draft."""
    program = f"""
import time
from pathlib import Path, PosixPath
from stepspec.api.pairs import SourceFile, build_qwen
from stepspec.engines import gguf_file
write = gguf_file._write
def slow(file, folder, *others):
    write(file, folder, *others)
    time.sleep(600 * (folder.name == ".draft.unfinished"))
gguf_file._write = slow
build_qwen([Path({str(tiny.by_role["target"])!r}), Path({str(tiny.by_role["draft"])!r})], print, {tiny.sources!r})
"""
    unfinished = cache / "qwen" / ".draft.unfinished"
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        while not (unfinished / "model.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(ModelError, match="has not been built"):
        find_pair("qwen")
    messages: list[str] = []
    build_qwen([tiny.by_role["draft"]], messages.append, tiny.sources)  # the target needs no file anymore
    assert sum("Converting" in message for message in messages) == 1
    assert find_pair("qwen") == cache / "qwen"
    assert not unfinished.exists()


def test_a_gguf_file_is_a_model_and_is_converted_once(tiny: Files, cache: Path) -> None:
    file = tiny.by_role["target"]
    texts, times = [], []
    for _ in range(2):
        pair = load_pair(f"torch:{file}?dtype=float32", needs_draft=False)
        assert pair.target.name == "target.gguf"
        call = Generate(TokenBuffer(pair.target.tokenizer.encode("he a")), Sampling(), stop=Stop(max_tokens=8))
        texts.append(asyncio.run(collect(pair.target.generate(call))).ids)
        asyncio.run(pair.aclose())
        (folder,) = (each for each in (cache / "gguf").iterdir() if each.is_dir())
        times.append((folder / "model.safetensors").stat().st_mtime_ns)
    assert texts[0] == texts[1]
    assert times[0] == times[1]
    tensors = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    network = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in (("token_embd", network.get_input_embeddings()), ("output", network.get_output_embeddings())):
        assert torch.equal(weight.weight, torch.tensor(tensors[f"{name}.weight"]).bfloat16())


def test_files_that_are_no_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(file: Path) -> str:
        with pytest.raises(ModelError) as caught:
            load_pair(f"torch:{file}", needs_draft=False)
        return str(caught.value)

    assert "architecture rwkv6 is not supported" in refused(write_gguf(tmp_path / "a.gguf", architecture="rwkv6"))
    whole = write_gguf(tmp_path / "b.gguf")
    whole.write_bytes(whole.read_bytes()[:-10_000])
    assert "b.gguf cannot be read as a GGUF model" in refused(whole)
    assert "1 are missing" in refused(write_gguf(tmp_path / "c.gguf", without="blk.1.ffn_up.weight"))
    assert "There is no file" in refused(tmp_path / "d.gguf")
    (tmp_path / "e.gguf").write_text("no model")
    assert "e.gguf cannot be read as a GGUF model" in refused(tmp_path / "e.gguf")

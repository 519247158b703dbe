"""`stepspec models`: what models are to stepspec."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import stepspec
from thinking_families import FAMILIES, Family
from tiny_models import make_config, make_network, piece
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from stepspec.api.model_facts import PairFacts, pair_facts
from stepspec.api.models import load_pair
from stepspec.base.files import list_data_files
from stepspec.cli.models import lines_of

SIZE = 96


def save(folder: Path, config: str, family: Family) -> str:
    """Save a random model with the chat template of a family, and return its spec string."""
    make_network(make_config(config, vocab_size=SIZE)).save_pretrained(folder)
    tags = ["<|end|>", "<|turn|>", *family.special, *family.ends]
    words = {piece(token): token for token in range(48)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token=piece(0))))
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(tags)]})
    tokenizer.eos_token = family.ends[0]
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(folder)
    return f"torch:{folder}"


def facts_of(target: str | None, draft: str | None = None, pair: str | None = None) -> PairFacts:
    loaded = load_pair(target, draft, pair=pair, needs_draft=False, notes=False)
    try:
        return pair_facts(loaded)
    finally:
        asyncio.run(loaded.aclose())


@pytest.mark.parametrize(
    ("config", "family"), [("gemma3", "gemma4"), ("gpt-oss", "gpt-oss"), ("qwen3", "qwen3.5, small")]
)
def test_a_model_is_described(config: str, family: str, tmp_path: Path) -> None:
    facts = facts_of(save(tmp_path, config, FAMILIES[family]))
    thinking = facts.target.thinking
    assert thinking is not None
    assert thinking.format == FAMILIES[family].thinking
    assert thinking.starts_open
    assert facts.target.context == 512
    assert facts.draft is None
    assert facts.policies["target"] is None
    assert "draft" in (facts.policies["two-level"] or "")
    text = "\n".join(lines_of(facts, {}))
    assert facts.target.tool_calls[-1] == "json"
    assert f"{'; '.join(facts.target.tool_calls)}\n" in text
    assert f"format {thinking.format}; opened with {thinking.opening!r}" in text
    assert ("turned on with enable_thinking=true" in text) == FAMILIES[family].switches


def test_without_a_chat_template_no_policy_runs(tmp_path: Path) -> None:
    target = save(tmp_path / "bare", "gemma3", FAMILIES["gemma4"])
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    facts = facts_of(target)
    remedy = "has no chat template. Add chat_template.jinja beside its weights."
    assert all(problem == f"{tmp_path / 'bare'} {remedy}" for problem in facts.policies.values())
    assert "runs" not in "\n".join(lines_of(facts, {})).partition("Policies")[2]


def test_a_draft_of_another_family_fits_for_steps(tmp_path: Path) -> None:
    target = save(tmp_path / "target", "gpt-oss", FAMILIES["gpt-oss"])
    facts = facts_of(target, save(tmp_path / "draft", "qwen3", FAMILIES["qwen3"]))
    assert not facts.one_vocabulary
    assert facts.policies["two-level"] is None
    assert "harmony and think; steps pass as text" in "\n".join(lines_of(facts, {}))


def test_the_command_prints_the_embedded_pair(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    done = stepspec("models", "--pair", "embedded", "--json", str(file))
    assert done.returncode == 0, done.stderr
    for line in ("Target: embedded target", "Draft: embedded draft", "Together", "Policies"):
        assert line in done.stdout
    assert done.stdout.count(" tokens/s; a pass takes ") == 2
    facts = json.loads(file.read_text())
    assert facts["pass_s"].keys() == {"target", "draft"}
    for passes in facts["pass_s"].values():
        assert list(passes) == ["1", "8", "32", "64"]
        assert all(seconds > 0 for seconds in passes.values())
    assert facts["one_vocabulary"]
    assert facts["target"]["thinking"]["format"] == "think"
    assert facts["policies"].keys() == list_data_files("policies").keys()
    assert facts["policies"]["two-level"] is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("torch:/no/such/folder",), "There is no folder"),
        (("--pair", "embedded", "--draft", "torch:x"), "--pair names both models"),
        (("nothing",), "does not name a model"),
    ],
)
def test_a_wrong_model_is_an_error(arguments: Sequence[str], problem: str) -> None:
    done = stepspec("models", *arguments)
    assert done.returncode == 2
    assert problem in done.stderr

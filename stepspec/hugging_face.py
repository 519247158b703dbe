"""What engines need of a Hugging Face model besides its layers: its tokenizer, its context, a hash of its weights.

The tokenizer is as the controller wants it: no token added, none hidden, none merged behind our back.
"""

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils.chat_parsing import ResponseParser

from stepspec.errors import ModelError, UsageError, reason_of
from stepspec.prompts import THINK_END, THINK_OPEN

TRIAL_S = 60.0
"""What a trial of a chat template may take by the clock; its own bound is on the time that it computes."""


class HuggingFaceTokenizer:
    """Adapts a tokenizer, which is `own`; `piece` is the text of a single token, for finding delimiters.

    `end_ids` end a text. `end_id` is the one of them that the tokenizer itself puts there.
    """

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self.own = tokenizer
        self.end_ids = end_ids
        self.end_id: int | None = (
            tokenizer.eos_token_id if tokenizer.eos_token_id in end_ids else min(end_ids, default=None)
        )
        self.num_ids = len(tokenizer)
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        marks = {id for id, token in added.items() if token.special or token.content in (THINK_OPEN, THINK_END)}
        self._special_ids = end_ids | marks | set(tokenizer.all_special_ids)
        self.piece = lru_cache(maxsize=None)(self._piece)

    def _piece(self, token: int) -> str:
        return self.decode([token])

    def encode(self, text: str) -> list[int]:
        return self.own.encode(text, add_special_tokens=False)

    def encode_text(self, text: str) -> list[int]:
        return self.own.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self.own.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        if not self.own.chat_template:
            raise UsageError("The model has no chat template, so it cannot be asked in messages.")
        try:
            return self.own.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program of somebody else's
            raise UsageError(f"The model's chat template refuses these messages: {reason_of(error)}.") from error

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        return getattr(self.own, "response_template", None)

    def response_parser(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ResponseParser:
        return ResponseParser(dict(template), prefix="", tools=[dict(tool) for tool in tools])

    def same_vocabulary(self, other: "HuggingFaceTokenizer") -> bool:
        """Whether both give every token the same id."""
        return self.own.get_vocab() == other.own.get_vocab()


def load_tokenizer(name: str, config: Any = None) -> HuggingFaceTokenizer:
    """The tokenizer that comes with a model, by hub name or folder; `config` is the model's, if it is at hand.

    Raises:
        ModelError: there is none.
    """
    try:
        tokenizer: Any = _loaded(AutoTokenizer, name)
        config = config or _found(AutoConfig, name)
        ids = _as_set(tokenizer.eos_token_id)
        if config is not None:
            ids |= _as_set(config.get_text_config().eos_token_id)
        ids |= _as_set(getattr(_found(GenerationConfig, name), "eos_token_id", None))
        loaded = HuggingFaceTokenizer(tokenizer, frozenset(ids))
    except Exception as error:  # files of somebody else's, which fail in any way
        raise ModelError(f"Cannot load the tokenizer of {name!r}: {reason_of(error)}.") from error
    found: Any = tokenizer.chat_template
    templates: list[Any] = [*found.values()] if isinstance(found, Mapping) else [found]
    for template in templates:
        if template and (problem := template_problem(template)):
            raise ModelError(f"The chat template of {name!r} cannot be used: {problem}.")
    return loaded


@lru_cache(maxsize=16)
def template_problem(template: str) -> str | None:
    """Why a chat template is not to be rendered; None if it may be. Found out in a process that can be ended."""
    command = [sys.executable, "-I", str(Path(__file__).with_name("template_trial.py"))]
    try:
        trial = subprocess.run(
            command, input=template, capture_output=True, text=True, timeout=TRIAL_S, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return "it does not come to an end"
    if trial.returncode < 0:  # ended by the bound on its time
        return "it does not come to an end"
    return trial.stdout or None


def _as_set(ids: Any) -> set[int]:
    """End tokens, of which a configuration names none, one or several."""
    if ids is None:
        return set()
    found = {ids} if isinstance(ids, int) else set(ids)
    if not all(isinstance(id, int) and id >= 0 for id in found):
        raise ValueError(f"eos_token_id must be a token id or several, got {ids!r}")
    return found


def context_of(name: str) -> int | None:
    """The longest text that a model takes; None where its configuration is not at hand or does not say."""
    config = _found(AutoConfig, name)
    return config and getattr(config.get_text_config(), "max_position_embeddings", None)


def _found(kind: Any, name: str) -> Any:
    """A model's configuration of that kind; None where it has none."""
    try:
        return _loaded(kind, name)
    except Exception:
        return None


def _loaded(kind: Any, name: str) -> Any:
    """Never with code that comes along."""
    return kind.from_pretrained(name, trust_remote_code=False)


def weights_hash(name: str) -> str | None:
    """SHA-256 over the weight files of a model folder; None for a model that is not a folder."""
    files = sorted(Path(name).glob("model*.safetensors")) if Path(name).is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()

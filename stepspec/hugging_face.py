"""What engines need of a Hugging Face model besides its layers: its tokenizer, its context, a hash of its weights.

The tokenizer is as the controller wants it: no token added, none hidden, none merged behind our back.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils.chat_parsing import ResponseParser

from stepspec.errors import ModelError, UsageError
from stepspec.prompts import THINK_END, THINK_OPEN


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
        except (TemplateError, TypeError) as error:  # a template adds up what does not add up
            raise UsageError(f"The model's chat template refuses these messages: {error}.") from error

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
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"Cannot load the tokenizer of {name!r}: {first_line}") from error
    config = config or _found(AutoConfig, name)
    ids = _as_set(tokenizer.eos_token_id)
    if config is not None:
        ids |= _as_set(config.get_text_config().eos_token_id)
    ids |= _as_set(getattr(_found(GenerationConfig, name), "eos_token_id", None))
    return HuggingFaceTokenizer(tokenizer, frozenset(ids))


def _as_set(ids: Any) -> set[int]:
    """End tokens, of which a configuration names none, one or several."""
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def context_of(name: str) -> int | None:
    """The longest text that a model takes; None where its configuration is not at hand or does not say."""
    config = _found(AutoConfig, name)
    return config and getattr(config.get_text_config(), "max_position_embeddings", None)


def _found(kind: Any, name: str) -> Any:
    """A model's configuration of that kind; None where it has none."""
    try:
        return _loaded(kind, name)
    except (OSError, ValueError, KeyError):
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

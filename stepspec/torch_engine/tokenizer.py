"""A Hugging Face tokenizer as the controller wants it: no token added, none hidden, none merged behind our back."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from stepspec.errors import ModelError, UsageError


class HuggingFaceTokenizer:
    """Adapts a tokenizer; `piece` is the text of a single token, for finding delimiters."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.end_ids = end_ids
        self.piece = lru_cache(maxsize=None)(self._piece)

    def _piece(self, token: int) -> str:
        return self.decode([token])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise UsageError("The model has no chat template, so it cannot be asked in messages.")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise UsageError(f"The model's chat template refuses these messages: {error}.") from error

    def same_vocabulary(self, other: "HuggingFaceTokenizer") -> bool:
        """Whether both give every token the same id."""
        return self._tokenizer.get_vocab() == other._tokenizer.get_vocab()


def load_tokenizer(name: str, config: Any) -> HuggingFaceTokenizer:
    """The tokenizer that comes with a model.

    Raises:
        ModelError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"Cannot load the tokenizer of {name!r}: {first_line}") from error
    ends = config.get_text_config().eos_token_id
    ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return HuggingFaceTokenizer(tokenizer, frozenset(id for id in ids if id is not None))

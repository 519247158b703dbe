"""Prompts from a chat template in which no special token comes from the text of a request."""

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, cast

from stepspec.engines.protocol import Tokenizer

READ_BY_TEMPLATES = {
    *("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "return"),
    *("id", "arguments", "response", "content", "text", "string", "object", "array", "integer", "number", "boolean"),
}
"""Keys and types that templates look for, so they get no marks at their edges."""


class Marks:
    """Marks what could become special tokens in the strings that a template gets.

    The template does not see the tokens, and serializes the strings like any others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._key = str(secrets.randbits(64))  # which no filter of a template changes

    def put(self, value: Any) -> Any:
        """Return a JSON value with marks in every string, including keys."""
        return mapped(value, self._marked)

    def _marked(self, text: str) -> str:
        """Mark what reads as a special token, and edges that could be part of one with the text beside them."""
        key, parts, last = self._key, list[str](), 0
        for start, end in self._tokenizer.special_spans(text):
            parts += text[last:start], f"{key}0", text[start], f"{key}1", text[start + 1 : end], f"{key}2"
            last = end
        marked = "".join([*parts, text[last:]])
        core = marked.strip()  # templates strip texts
        if not core or text in READ_BY_TEMPLATES:
            return marked
        begins, ends = self._tokenizer.special_edges(text.strip())
        edged = f"{key}3{core}" if begins else core
        return marked.replace(core, f"{edged}{key}3" if ends else edged, 1)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of the text that the template made of marked strings."""
        key, ids = self._key, list[int]()
        for index, part in enumerate(re.split(f"{key}0(.*?){key}2", rendered, flags=re.DOTALL)):
            if index % 2:
                ids += self._tokenizer.encode_text(re.sub(f"{key}[13]", "", part))
            else:  # a template that cuts texts may leave a mark, which still parts what reads as a token
                ids += [id for text in re.split(f"{key}[012]", part) for id in self._encode_edges(text)]
        return ids

    def _encode_edges(self, text: str) -> list[int]:
        """Return the ids of a text with marks at edges, which it is encoded apart at only if that prevents a token."""
        texts = text.split(f"{self._key}3")
        ids = self._tokenizer.encode("".join(texts))
        if len(texts) == 1:
            return ids
        apart = [id for each in texts for id in self._tokenizer.encode(each)]
        special = self._tokenizer.is_special
        return ids if [*filter(special, ids)] == [*filter(special, apart)] else apart


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every string, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): mapped(each, change) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [mapped(each, change) for each in cast("list[Any]", value)]
    return value

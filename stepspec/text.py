"""Text of token ids as they come, for tokenizers whose tokens read differently at the start of a text."""

from collections.abc import Sequence

from stepspec.engine import TokenBuffer, Tokenizer

CONTEXT_IDS = 4
"""Ids decoded in front of new ones."""

MAX_HELD_IDS = 3
"""A character has up to four bytes, so no more ids than these can be the beginning of one."""


class TextReader:
    """Reads a growing buffer from `position` on; every piece of text is given once."""

    def __init__(self, tokenizer: Tokenizer, buffer: TokenBuffer, position: int = 0) -> None:
        self.position = position
        self._tokenizer = tokenizer
        self._buffer = buffer

    def read(self, end: int, *, to_the_end: bool) -> str:
        """Text of what lies before position `end` and was not given yet.

        The beginning of a character is held back until the rest of it has come, unless none will come.
        """
        start = max(0, self.position - CONTEXT_IDS)
        ids = self._buffer.since(start, end)
        num_before = len(self._tokenizer.decode(ids[: self.position - start]))
        text, num_held = "", 0
        for num_held in range(min(MAX_HELD_IDS, end - self.position) + 1):
            text = self._tokenizer.decode(ids[: len(ids) - num_held])[num_before:]
            if to_the_end or not text.endswith("\ufffd"):
                break
        self.position = end - num_held
        return text

    def rest(self, further: Sequence[int]) -> str:
        """Text of what was not given yet and of further ids behind the buffer, which stays as it is."""
        start = max(0, self.position - CONTEXT_IDS)
        ids = self._buffer.since(start)
        num_before = len(self._tokenizer.decode(ids[: self.position - start]))
        return self._tokenizer.decode([*ids, *further])[num_before:]

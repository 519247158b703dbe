"""Incremental decoding, for tokenizers that decode a token differently at the start of a text."""

from collections.abc import Callable, Sequence

from stepspec.engines.protocol import TokenBuffer, Tokenizer

CONTEXT_IDS = 4
"""Number of ids decoded before the new ones as context."""

MAX_HELD_IDS = 3
"""Maximum number of ids that can be an incomplete character, which has up to four bytes."""

MAX_SKIPPED = 64
"""Maximum number of ids to search backwards for the visible ids of the context."""


def visible_ids(tokenizer: Tokenizer, ids: Sequence[int], marks: str = "") -> list[int]:
    """Return the ids that are visible to the user: all except special tokens whose text is not in `marks`.

    Ordinary tokens that spell out the name of a special token are text.
    """
    return [id for id in ids if not tokenizer.is_special(id) or tokenizer.piece(id) in marks]


class TextReader:
    """Decodes a growing buffer from `position` on and returns each part of the text once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        buffer: TokenBuffer,
        position: int = 0,
        visible: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        """Create a reader. `visible` filters the ids to decode; by default all ids, including special tokens."""
        self.position = position
        self._visible = visible
        self._tokenizer = tokenizer
        self._buffer = buffer

    def read(self, end: int, *, to_the_end: bool) -> str:
        """Return the text up to position `end` that was not returned yet.

        An incomplete character is held back until the rest of it arrives, unless `to_the_end` is set.
        """
        before, new = self._context(), self._buffer.since(self.position, end)
        num_before, num_visible = len(self._tokenizer.decode(before)), len(self._visible(new))
        text, num_held = "", 0
        for count in range(len(new) + 1):
            shown = self._visible(new[: len(new) - count])
            if num_visible - len(shown) > MAX_HELD_IDS:
                break
            text, num_held = self._tokenizer.decode([*before, *shown])[num_before:], count
            if to_the_end or not text.endswith("\ufffd"):
                break
        self.position = end - num_held
        return text

    def rest(self, further: Sequence[int]) -> str:
        """Return the text not returned yet, followed by that of `further` ids. The reader does not advance."""
        before = self._context()
        ids = self._visible([*self._buffer.since(self.position), *further])
        return self._tokenizer.decode([*before, *ids])[len(self._tokenizer.decode(before)) :]

    def _context(self) -> Sequence[int]:
        """Return the last visible ids before the position.

        If there are none, return special tokens, since an empty context would mean the start of a text.
        """
        reach, found = CONTEXT_IDS, list[int]()
        while reach <= MAX_SKIPPED:
            found = list(self._visible(self._buffer.since(max(0, self.position - reach), self.position)))
            if len(found) >= CONTEXT_IDS or reach >= self.position:
                break
            reach *= 2
        return found[-CONTEXT_IDS:] or self._buffer.since(max(0, self.position - CONTEXT_IDS), self.position)

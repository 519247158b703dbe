"""Text of token ids as they come, for tokenizers whose tokens read differently at the start of a text."""

from collections.abc import Callable, Sequence

from stepspec.engines.protocol import TokenBuffer, Tokenizer

CONTEXT_IDS = 4
"""Ids decoded in front of new ones."""

MAX_HELD_IDS = 3
"""A character has up to four bytes, so no more ids than these can be the beginning of one."""


MOST_SKIPPED = 64
"""Ids that are looked through, backwards, for those few of which a user sees something."""


def visible_ids(tokenizer: Tokenizer, ids: Sequence[int], marks: str = "") -> list[int]:
    """The ids of which a user sees something: all but special tokens, of which those named in `marks` are kept.

    Text that spells the name of a special token in ordinary ones is text.
    """
    return [id for id in ids if not tokenizer.is_special(id) or tokenizer.piece(id) in marks]


class TextReader:
    """Reads a growing buffer from `position` on; every piece of text is given once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        buffer: TokenBuffer,
        position: int = 0,
        visible: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:
        """`visible` says which of some ids are read; all by default, special tokens written out."""
        self.position = position
        self._visible = visible
        self._tokenizer = tokenizer
        self._buffer = buffer

    def read(self, end: int, *, to_the_end: bool) -> str:
        """Text of what lies before position `end` and was not given yet.

        The beginning of a character is held back until the rest of it has come, unless none will come.
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
        """Text of what was not given yet and of further ids behind the buffer, which stays as it is."""
        before = self._context()
        ids = self._visible([*self._buffer.since(self.position), *further])
        return self._tokenizer.decode([*before, *ids])[len(self._tokenizer.decode(before)) :]

    def _context(self) -> Sequence[int]:
        """The last ids before the position that are visible, or else special ones: a text begins behind none."""
        reach, found = CONTEXT_IDS, list[int]()
        while reach <= MOST_SKIPPED:
            found = list(self._visible(self._buffer.since(max(0, self.position - reach), self.position)))
            if len(found) >= CONTEXT_IDS or reach >= self.position:
                break
            reach *= 2
        return found[-CONTEXT_IDS:] or self._buffer.since(max(0, self.position - CONTEXT_IDS), self.position)

"""Detects the end of a generation token by token: a delimiter, an end token, or the token limit."""

from collections.abc import Callable, Sequence

from stepspec.engines.protocol import ChunkEnd, Stop


class StopMatcher:
    """Watches one generation. A delimiter may be one token, part of a token, or span several tokens."""

    def __init__(self, stop: Stop, piece: Callable[[int], str], end_ids: frozenset[int]) -> None:
        """Watch for the ends in `stop` and for `end_ids`; `piece` returns the text of a token."""
        self._stop = stop
        self._piece = piece
        self._end_ids = end_ids | stop.token_ids
        self._reach = max((len(delimiter) for delimiter in stop.delimiters), default=1) - 1
        self.recent = stop.before
        """The last characters, which may be the beginning of a delimiter."""
        self._count = 0

    @property
    def remaining(self) -> int:
        """Tokens left before the limit."""
        return self._stop.max_tokens - self._count

    def feed(self, token: int) -> ChunkEnd | None:
        """Process the next token. Return why the generation ends with it, or None if it continues."""
        self._count += 1
        if token in self._end_ids:
            return "token"
        if self._stop.delimiters:
            text = self.recent + self._piece(token)
            self.recent = text[-self._reach :] if self._reach else ""
            for delimiter in self._stop.delimiters:
                if delimiter in text:
                    return "delimiter"
        return "length" if self.remaining <= 0 else None

    def feed_all(self, tokens: Sequence[int]) -> tuple[ChunkEnd | None, int]:
        """Process the next tokens. Return why the generation ends, or None, and how many of the tokens belong to it."""
        for count, token in enumerate(tokens, 1):
            if (end := self.feed(token)) is not None:
                return end, count
        return None, len(tokens)

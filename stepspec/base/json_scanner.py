"""Tells strings of a JSON text, read chunk by chunk, from what is outside of them."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class JsonScanner:
    """Where a JSON text has come to.

    Attributes:
        in_string: whether a string is open.
        escaped: whether the last character was a backslash that escapes the next one.
    """

    in_string: bool = False
    escaped: bool = False

    def outside(self, text: str) -> Iterator[tuple[int, str]]:
        """Read the next chunk, up to where the caller stops. Yield what is outside of strings, and the quotes that open
        them: the position after each character, and the character."""
        for position, letter in enumerate(text, 1):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped, self.in_string = letter == "\\", letter != '"'
            else:
                self.in_string = letter == '"'
                yield position, letter

"""Text from elsewhere for a terminal, a log or a table: names of models and policies, errors of servers, headers."""

import re

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that reorder text, and halves of surrogate pairs."""


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with its control characters escaped, as in `\x1b`, except those in `keep`.

    They could move the cursor, rename a terminal's window, or begin a false line of a log.
    """
    return _CONTROLS.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )

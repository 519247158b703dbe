"""Remove thinking from a text, because nothing in it is an answer, even in an unclosed block."""

import re

_OPEN = (
    *("<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]", "◁think▷"),
    *("<|begin_of_thought|>", "<|channel|>analysis"),
)
_CLOSE = (
    *("</think>", "</thinking>", "</thought>", "</reasoning>", "</seed:think>", "[/THINK]", "◁/think▷"),
    *("<|end_of_thought|>", "<|channel|>final<|message|>"),
)
_TAG = re.compile("|".join(map(re.escape, (*_CLOSE, *_OPEN))))


def without_thinking(text: str, max_chars: int) -> str:
    """Return the text outside think tags in the last `max_chars` characters.

    A closing tag without an opening tag ends thinking that the chat template opened before the text.
    """
    tail = text[-max_chars:]
    cut = max(0, len(text) - max_chars)
    thinking = _last_of(_OPEN, text, cut) > _last_of(_CLOSE, text, cut)
    outside: list[str] = []
    start = 0
    for tag in _TAG.finditer(tail):
        if tag.group() in _CLOSE:
            if not thinking:
                outside.clear()
            thinking, start = False, tag.end()
        elif not thinking:
            outside.append(tail[start : tag.start()])
            thinking = True
    if not thinking:
        outside.append(tail[start:])
    return "\n\n".join(outside)


def _last_of(tags: tuple[str, ...], text: str, end: int) -> int:
    # A tag that the cut splits counts as a tag before the cut.
    return max(text.rfind(tag, 0, end + len(tag) - 1) for tag in tags) if end else -1

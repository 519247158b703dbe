"""Takes the thinking out of a text: nothing in it is an answer, closed or not."""

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
    """What is outside of think tags in the last `max_chars` of a text.

    A closing tag whose opening is missing ends thinking that began before the text: chat templates open it.
    """
    tail = text[-max_chars:]
    cut = max(0, len(text) - max_chars)
    thinking = _last_of(_OPEN, text, cut) > _last_of(_CLOSE, text, cut)
    kept: list[str] = []
    start = 0
    for tag in _TAG.finditer(tail):
        if tag.group() in _CLOSE:
            if not thinking:
                kept.clear()
            thinking, start = False, tag.end()
        elif not thinking:
            kept.append(tail[start : tag.start()])
            thinking = True
    if not thinking:
        kept.append(tail[start:])
    return "\n\n".join(kept)


def _last_of(tags: tuple[str, ...], text: str, end: int) -> int:
    # A tag that the cut goes through counts as one before it.
    return max(text.rfind(tag, 0, end + len(tag) - 1) for tag in tags) if end else -1

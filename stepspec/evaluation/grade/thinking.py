"""Remove thinking from a text, because nothing in it is an answer, even in an unclosed block."""

import re

_OPEN = ["<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]", "◁think▷"]
_CLOSE = [f"{tag[0]}/{tag[1:]}" for tag in _OPEN] + ["<|end_of_thought|>", "<|channel|>final<|message|>"]
_OPEN += ["<|begin_of_thought|>", "<|channel|>analysis"]
_TAG = re.compile("|".join(map(re.escape, (*_CLOSE, *_OPEN))))


def without_thinking(text: str, max_chars: int) -> str:
    """Return the text outside think tags in the last `max_chars` characters.

    A closing tag without an opening tag ends thinking that the chat template opened before the text.
    """
    cut = max(0, len(text) - max_chars)
    # A tag that the cut splits counts as a tag before the cut.
    opened, closed = (
        max(text.rfind(tag, 0, cut + len(tag) - 1) for tag in tags) if cut else -1 for tags in (_OPEN, _CLOSE)
    )
    thinking, start = opened > closed, cut
    outside: list[str] = []
    for tag in _TAG.finditer(text, cut):
        if tag[0] in _CLOSE:
            if not thinking:
                outside.clear()
            thinking, start = False, tag.end()
        elif not thinking:
            outside.append(text[start : tag.start()])
            thinking = True
    return "\n\n".join([*outside, "" if thinking else text[start:]])

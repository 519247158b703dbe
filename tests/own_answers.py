"""Check that every token of an answer is one that the target wrote or confirmed, by the target's own record."""

import re
from collections.abc import Sequence
from typing import Protocol

from stepspec.engines.protocol import Tokenizer
from stepspec.engines.thinking import ThinkingTags
from stepspec.loop.request import Request
from stepspec.loop.result import Result

MARK = re.compile(r"\\boxed|####|\banswer\s*(?:is(?![^\W\d])|:|=)|\bfinal answer\b", re.IGNORECASE)


class Recorded(Protocol):
    """A target that records what it writes and confirms: for each token, the hash of the ids before it, and its id."""

    tokenizer: Tokenizer
    record: set[tuple[int, int]]


def check(result: Result, request: Request, target: Recorded) -> tuple[str, int]:
    """Check every token of the answer against the target's record.

    Returns:
        What the text was like, and the number of tokens that were checked.
    """
    result.counts.check(request.ledger.remaining + result.counts.committed)
    ids = request.transcript.buffer.since(0)
    start = len(request.prompt)
    if request.starts_thinking and request.tags is not None and request.tags.text:
        check_reasoning(result, ids[start:], request, target)
    own = [(hash((*ids[:at],)), id) in target.record for at, id in enumerate(ids)]
    places = [*answer_places(ids, start, request.tags, target), *plain_places(ids, start, result, request, target)]
    wrong = [at for at in places if not own[at]]
    tokenizer = target.tokenizer
    assert not wrong, f"{tokenizer.decode(ids[start:])!r} has {tokenizer.piece(ids[wrong[0]])!r} from the draft alone"
    foreign = sum(not each for each in own[start:])
    return f"{'thinks' if request.tags else 'plain'}, {'draft' if foreign else 'target'}", len(places)


def answer_places(ids: Sequence[int], start: int, tags: ThinkingTags | None, target: Recorded) -> list[int]:
    """Return the places outside the thinking of a text, and those of the tags that end the thinking."""
    if tags is None:
        return []
    if tags.text:
        return text_places(ids, start, tags, target)
    found, thinking, header = list[int](), True, list[int] | None
    header = None
    for at in range(start, len(ids)):
        id = ids[at]
        if header is not None:
            header.append(id)
            found.append(at)
            if id == tags.header_end:
                thinking, header = "analysis" in target.tokenizer.decode(header), None
        elif not thinking or id in tags.ends or id in target.tokenizer.end_ids:
            found.append(at)
            ends = id == tags.end if tags.header_end is not None else thinking
            header = [] if tags.header_end is not None and ends else None
            thinking = False
    return found


def text_places(ids: Sequence[int], start: int, tags: ThinkingTags, target: Recorded) -> list[int]:
    """Return the places of what ends the thinking, and of everything after it."""
    text, ends = "\n", tags.ends | target.tokenizer.end_ids
    for at, id in enumerate(ids[start:], start):
        text += target.tokenizer.piece(id)
        if id in ends:
            return [*range(at, len(ids))]
        if tags.text in text:
            rest = len(text) - text.index(tags.text) - len(tags.text) + len(tags.text.lstrip())
            while rest > 0:
                rest, at = rest - len(target.tokenizer.piece(ids[at])), at - 1
            return [*range(at + 1, len(ids))]
    return []


def check_reasoning(result: Result, ids: Sequence[int], request: Request, target: Recorded) -> None:
    """Check that the steps have the text before the one that ends the thinking, and nothing of that."""
    tags, text, seen = request.tags, "\n", list[int]()
    assert tags is not None
    mark = tags.text.lstrip()
    for id in ids:
        if id in tags.ends | target.tokenizer.end_ids:
            shown = target.tokenizer.decode(request.transcript.visible(seen))
            break
        seen, text = [*seen, id], text + target.tokenizer.piece(id)
        if tags.text in text:
            shown = target.tokenizer.decode(request.transcript.visible(seen)).rpartition(mark)[0]
            break
    else:  # a limit has cut it
        shown = target.tokenizer.decode(request.transcript.visible(seen))
        lead = tags.text.removesuffix(mark)
        begun = next(size for size in range(len(mark) - 1, -1, -1) if not size or text.endswith(lead + mark[:size]))
        shown = shown[: len(shown) - begun]
    assert result.reasoning.rstrip("\ufffd") == shown.rstrip("\ufffd"), (result.reasoning, shown)


def plain_places(ids: Sequence[int], start: int, result: Result, request: Request, target: Recorded) -> list[int]:
    """Return the places of a text without thinking that belong to its answer: from the mark of an answer to the end of
    its step, and the whole last step if the text ended with it."""
    if request.tags is not None:
        return []
    found, at, before, answered = list[int](), start, "", False
    for number, step in enumerate(result.steps, 1):
        texts = [target.tokenizer.decode(ids[at : at + count]) for count in range(1, step.num_tokens + 1)]
        marked = [count for count, text in enumerate(texts) if is_marked(before, text)]
        is_last = number == len(result.steps) and result.finish_reason == "stop"
        first = 0 if is_last or answered else marked[0] if marked else step.num_tokens
        answered |= bool(marked)
        found += range(at + first, at + step.num_tokens)
        at, before = at + step.num_tokens, step.text[-16:]
    return found


def is_marked(before: str, text: str) -> bool:
    return any(found.end() > len(before) for found in MARK.finditer(before + text))

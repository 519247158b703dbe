"""One round of generation for several rows: draft, verify in one pass, accept (arXiv:2211.17192, algorithm 1).

The last emitted token of a row is not in the cache yet: a pass of the target reads it together with the drafted
tokens, and its logits give the law at each drafted position and one beyond. A row's random numbers are its own, so
what it emits does not depend on the rows it shares a pass with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepspec.engine import ChunkEnd, Drafting, Sampling, TokenBuffer
from stepspec.torch_engine.model import CausalModel
from stepspec.torch_engine.sampling import Stream, accept, accept_greedy, law
from stepspec.torch_engine.slots import Slot
from stepspec.stops import StopWatch


@dataclass
class Row:
    """A generation in progress. `prompt_length` ids of the buffer came before what is in `generated`."""

    buffer: TokenBuffer
    prompt_length: int
    sampling: Sampling
    drafting: Drafting
    watch: StopWatch
    stream: Stream
    slot: Slot
    draft_slot: Slot | None = None
    generated: list[int] = field(default_factory=list)
    end: ChunkEnd | None = None
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def ids_from(self, position: int) -> list[int]:
        """The row's ids from a position of its text on."""
        beyond = max(0, position - self.prompt_length)
        return self.buffer.since(position)[: max(0, self.prompt_length - position)] + self.generated[beyond:]

    def emit(self, tokens: Sequence[int]) -> None:
        """Takes new tokens up to the one that ends the generation."""
        for token in tokens:
            self.generated.append(token)
            self.end = self.watch.feed(token)
            if self.end is not None:
                return


def decode_round(target: CausalModel, draft: CausalModel | None, rows: Sequence[Row]) -> None:
    """Advances every row by at least one token; rows must share their `drafting`."""
    num_drafted = min(rows[0].drafting.num_tokens, max(row.watch.remaining for row in rows) - 1)
    if draft is None or num_drafted < 1:
        plain_round(target, rows)
    else:
        speculative_round(target, draft, rows, num_drafted)


def plain_round(target: CausalModel, rows: Sequence[Row]) -> None:
    """One token for every row, from the target alone, after reading whatever it has not read of them."""
    logits = _read_unread(target, [row.slot for row in rows], rows)  # [B, V]
    for row, token in zip(rows, _choose(logits, rows, "resample")[1], strict=True):
        row.passes += 1
        row.emit([token])


def speculative_round(target: CausalModel, draft: CausalModel, rows: Sequence[Row], num_drafted: int) -> None:
    """Up to `num_drafted` + 1 tokens for every row from one pass of the target."""
    drafted, laws = draft_tokens(draft, rows, num_drafted)
    starts = [target.cache_length(row.slot.index) for row in rows]
    unread = [row.ids_from(start) for row, start in zip(rows, starts, strict=True)]
    assert all(len(ids) == 1 for ids in unread), "a row's prompt is read before its first round"
    logits = target.extend(
        [row.slot.index for row in rows], [[*ids, *tokens] for ids, tokens in zip(unread, drafted, strict=True)]
    )  # [B, K + 1, V]
    choices = logits.argmax(-1).tolist() if any(row.sampling.temperature == 0 for row in rows) else None
    for index, row in enumerate(rows):
        if row.sampling.temperature == 0:
            assert choices is not None
            num_accepted, following = accept_greedy(choices[index], drafted[index])
        else:
            p = law(logits[index], row.sampling)
            q = torch.stack([step[index] for step in laws])
            num_accepted, following = accept(p, q, torch.tensor(drafted[index], device=p.device), row.stream)
        _take(row, drafted[index], num_accepted, following)
        read = starts[index] + 1 + num_accepted
        target.rollback(row.slot.index, read)
        drafting = _drafting_slot(row).index
        draft.rollback(drafting, min(read, draft.cache_length(drafting)))


def _take(row: Row, drafted: Sequence[int], num_accepted: int, following: int) -> None:
    """Emits what a round came to, and counts of its drafted tokens only those that had a place before the end."""
    before = len(row.generated)
    room = row.watch.remaining
    row.emit([*drafted[:num_accepted], following])
    emitted = len(row.generated) - before
    row.passes += 1
    row.drafted += min(len(drafted), room)
    row.accepted += min(num_accepted, emitted)


def draft_tokens(
    draft: CausalModel, rows: Sequence[Row], num_drafted: int
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Drafts for every row: tokens [B][K], and the laws they were drawn from [K][B] unless all rows are greedy."""
    slots = [_drafting_slot(row) for row in rows]
    drafted: list[list[int]] = [[] for _ in rows]
    laws: list[list[Tensor]] = []
    logits = _read_unread(draft, slots, rows)
    while True:
        position_laws, tokens = _choose(logits, rows, "draft")
        laws.append(position_laws)
        for row_tokens, token in zip(drafted, tokens, strict=True):
            row_tokens.append(token)
        if len(laws) == num_drafted:  # the last drafted token is read in the next round, if it is accepted
            return drafted, laws
        logits = draft.extend([slot.index for slot in slots], [[token] for token in tokens])[:, -1]


def _drafting_slot(row: Row) -> Slot:
    assert row.draft_slot is not None
    return row.draft_slot


def _read_unread(model: CausalModel, slots: Sequence[Slot], rows: Sequence[Row]) -> Tensor:
    """Reads what each slot has not seen of its row, in one ragged pass; logits after the last id, [B, V]."""
    unread = [row.ids_from(model.cache_length(slot.index)) for row, slot in zip(rows, slots, strict=True)]
    last = [len(ids) - 1 for ids in unread]
    keep = [last[0]] if len(set(last)) == 1 else None
    logits = model.extend([slot.index for slot in slots], unread, keep=keep)
    if keep is not None:
        return logits[:, 0]
    return logits[torch.arange(len(last), device=logits.device), torch.tensor(last, device=logits.device)]


def _choose(logits: Tensor, rows: Sequence[Row], purpose: str) -> tuple[list[Tensor], list[int]]:
    """A token for every row from logits [B, V], with the laws they were drawn from; none if all rows are greedy."""
    if all(row.sampling.temperature == 0 for row in rows):
        return [], logits.argmax(-1).tolist()
    laws = [law(logits[index], row.sampling) for index, row in enumerate(rows)]
    return laws, [int(row.stream.draw(p, purpose)) for p, row in zip(laws, rows, strict=True)]

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
from stepspec.stops import StopWatch
from stepspec.torch_engine.model import CausalModel
from stepspec.torch_engine.sampling import Stream, accept, accept_greedy, law
from stepspec.torch_engine.slots import Slot


@dataclass(eq=False)  # a row is itself, whatever its fields say
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
    # A row's count is its own, or what it draws near its end would depend on its batch-mates.
    counts = [min(row.drafting.num_tokens, row.watch.remaining - 1) for row in rows]
    if draft is None or max(counts) < 1:
        plain_round(target, rows)
    else:
        speculative_round(target, draft, rows, counts)


def plain_round(target: CausalModel, rows: Sequence[Row]) -> None:
    """One token for every row, from the target alone, after reading whatever it has not read of them."""
    logits = _read_unread(target, [row.slot for row in rows], rows)  # [B, V]
    for row, token in zip(rows, _choose(logits, rows, "resample")[1], strict=True):
        row.passes += 1
        row.emit([token])


def read_prompt(model: CausalModel, slot: Slot, row: Row) -> None:
    """Reads what the slot has not seen of the row, but for its last id, which the first round reads."""
    unread = row.ids_from(model.cache_length(slot.index))[:-1]
    if unread:
        model.extend([slot.index], [unread], keep=[0])


def speculative_round(target: CausalModel, draft: CausalModel, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Up to `counts[b]` + 1 tokens for row b, for every row from one pass of the target."""
    drafted, laws = draft_tokens(draft, rows, counts, target.vocab_size)
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
            p = law(logits[index, : len(drafted[index]) + 1], row.sampling)
            q = torch.stack(laws[index]) if laws[index] else p[:0]
            tokens = torch.tensor(drafted[index], dtype=torch.long, device=p.device)
            num_accepted, following = accept(p, q, tokens, row.stream)
        _take(row, drafted[index], num_accepted, following)
        read = starts[index] + 1 + num_accepted
        target.rollback(row.slot.index, read)
        drafting = _drafting_slot(row).index
        draft.rollback(drafting, min(read, draft.cache_length(drafting)))


def _take(row: Row, drafted: Sequence[int], num_accepted: int, following: int) -> None:
    """Emits what a round came to, and counts as accepted only what was emitted."""
    before = len(row.generated)
    row.emit([*drafted[:num_accepted], following])
    row.passes += 1
    row.drafted += len(drafted)
    row.accepted += min(num_accepted, len(row.generated) - before)


def draft_tokens(
    draft: CausalModel, rows: Sequence[Row], counts: Sequence[int], vocab_size: int
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Drafts `counts[b]` tokens for row b; gives them, and the laws [V] they were drawn from unless all are greedy."""
    slots = [_drafting_slot(row) for row in rows]
    drafted: list[list[int]] = [[] for _ in rows]
    laws: list[list[Tensor]] = [[] for _ in rows]
    going = [index for index, count in enumerate(counts) if count > 0]
    logits = _read_unread(draft, [slots[index] for index in going], [rows[index] for index in going])
    while True:
        step_laws, tokens = _choose(_fitted(logits, vocab_size), [rows[index] for index in going], "draft")
        for index, token in zip(going, tokens, strict=True):
            drafted[index].append(token)
        for index, step_law in zip(going, step_laws, strict=bool(step_laws)):
            laws[index].append(step_law)
        going = [index for index in going if len(drafted[index]) < counts[index]]
        if not going:  # a row's last drafted token is read in the next round, if it is accepted
            return drafted, laws
        last = [drafted[index][-1:] for index in going]
        logits = draft.extend([slots[index].index for index in going], last)[:, -1]


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's ids: models of one family pad the same vocabulary to different sizes."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


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

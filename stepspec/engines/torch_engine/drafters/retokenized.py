"""Drafting by a model with another vocabulary: its text is encoded with the target's tokenizer (arXiv:2502.05202).

The target accepts a guess only as far as it would have written it, so the output is exact. Both models read the same
text, each in its own ids.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stepspec.engines.protocol import TokenBuffer, Tokenizer
from stepspec.engines.text import CONTEXT_IDS, TextReader
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts, certain
from stepspec.engines.torch_engine.model import PREFILL_CHUNK, CausalModel
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers
from stepspec.engines.torch_engine.slots import Slot, SlotTable


@dataclass
class _Committed:
    """The draft's ids of a buffer, and the reader of the target's."""

    reader: TextReader
    ids: TokenBuffer


@dataclass
class _DraftRow:
    """The draft's ids of a row: those of its buffer, then `after`, which stand for `num_beyond` of the target's."""

    slot: Slot
    committed: TokenBuffer
    num_committed: int
    after: list[int] = field(default_factory=list[int])
    num_beyond: int = 0
    unread: list[int] = field(default_factory=list[int])


class Retokenized(Drafter):
    """A draft model with its own tokenizer and cache."""

    by_token = True

    def __init__(self, model: CausalModel, own: Tokenizer, target: Tokenizer, max_slots: int) -> None:
        """
        Args:
            model: the draft model.
            own: its tokenizer.
            target: the target's tokenizer.
            max_slots: number of rows at a time.
        """
        self._model, self._own, self._target = model, own, target
        self._table = SlotTable(model, max_slots)
        self._rows: dict[BatchRow, _DraftRow] = {}
        self._buffers: weakref.WeakKeyDictionary[TokenBuffer, _Committed] = weakref.WeakKeyDictionary()

    @classmethod
    def made(cls, parts: Parts) -> Drafter:
        """See `Drafter.made`."""
        assert parts.draft is not None
        assert parts.tokenizers is not None
        return cls(parts.draft, *parts.tokenizers, parts.max_slots)

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        """See `Drafter.catch_up`. It leaves each row's last id, which `propose` reads."""
        found = [self._row(row) for row in dict.fromkeys(rows)]
        self._table.pack([each.slot for each in found])
        for each in found:
            each.unread = self._table.unread(each.slot, each.committed, each.num_committed, each.after)
        longest = self._model.max_context
        while behind := [each for each in found if len(each.unread) > 1 and len(each.slot.ids) < longest]:
            room = (min(PREFILL_CHUNK, longest - len(each.slot.ids)) for each in behind)
            chunks = [each.unread[:-1][:most] for each, most in zip(behind, room, strict=True)]
            self._model.extend([each.slot.index for each in behind], chunks, keep=[[]] * len(behind))
            for each, chunk in zip(behind, chunks, strict=True):
                each.slot.ids += chunk
                del each.unread[: len(chunk)]

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`. The draft is greedy. There is no guess where a row ends inside a character, or is
        longer than the draft's context."""
        drafting = [row for row in dict.fromkeys(rows) if self._may_draft(row, max(counts))]
        if not drafting:
            return None
        found = [self._rows[row] for row in drafting]
        slots, ids = [each.slot.index for each in found], [each.unread for each in found]
        written: dict[BatchRow, list[int]] = {row: [] for row in drafting}
        for _ in range(max(counts)):
            logits = self._model.extend(slots, ids, keep=[[len(each) - 1] for each in ids])
            for each, read in zip(found, ids, strict=True):
                each.slot.ids += read
            ids = [[id] for id in torch.cat(logits).argmax(-1).tolist()]
            for row, (id,) in zip(drafting, ids, strict=True):
                written[row].append(id)
        guesses = [
            self._guess(self._rows[row], written[row], count) if row in written else ()
            for row, count in zip(rows, counts, strict=True)
        ]
        draft = certain(guesses, self._model.device)
        return None if draft is None else draft._replace(passes=max(counts))

    def _may_draft(self, row: BatchRow, count: int) -> bool:
        found = self._rows[row]
        fits = found.num_committed + len(found.after) + count <= self._model.max_context
        return fits and found.num_beyond == len(row.beyond)

    def _guess(self, found: _DraftRow, written: Sequence[int], count: int) -> Sequence[int]:
        """Return what the draft has written, in the target's ids."""
        end = next((at for at, id in enumerate(written) if self._own.is_special(id)), len(written))
        before = [*found.committed.since(max(0, found.num_committed - CONTEXT_IDS)), *found.after][-CONTEXT_IDS:]
        text = _text_after(self._own, before, written[:end])
        return self._target.encode_text(text.rstrip("\ufffd"))[:count]

    def _row(self, row: BatchRow) -> _DraftRow:
        """Return the draft's ids of a row, with what was written since the last time."""
        if row not in self._rows:
            committed = self._committed(row)
            slot = self._table.acquire(committed.ids, len(committed.ids))
            assert slot is not None, "the draft model has as many slots as the target"
            self._rows[row] = _DraftRow(slot, committed.ids, len(committed.ids))
        found = self._rows[row]
        new = row.beyond[found.num_beyond :]
        if new:
            before = row.ids_from(max(0, row.length - len(new) - CONTEXT_IDS))[: -len(new)]
            text = _text_after(self._target, before, new)
            if not text.endswith("\ufffd"):
                found.after += self._own.encode(text)
                found.num_beyond = len(row.beyond)
        return found

    def _committed(self, row: BatchRow) -> _Committed:
        """Return the draft's ids of a row's buffer."""
        if row.buffer not in self._buffers:
            reader = TextReader(self._target, weakref.proxy(row.buffer))
            self._buffers[row.buffer] = _Committed(reader, TokenBuffer((), group=row.buffer.group))
        found = self._buffers[row.buffer]
        text = found.reader.read(max(found.reader.position, row.prompt_length), to_the_end=False)
        found.ids.append(self._own.encode(text))
        if not len(found.ids):  # a model needs something to continue
            found.ids.append([min(self._own.end_ids, default=0)])
        return found

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        if row in self._rows:
            found = self._rows.pop(row)
            self._model.rollback(found.slot.index, len(found.slot.ids))
            self._table.release(found.slot)

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._table.forget()


def _text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids that follow others."""
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]

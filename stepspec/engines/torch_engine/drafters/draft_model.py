"""Drafting by a smaller model of the same vocabulary (arXiv:2211.17192)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.body import PartialHead
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts
from stepspec.engines.torch_engine.drafters.retokenized import Retokenized
from stepspec.engines.torch_engine.drafters.suffix import Suffix
from stepspec.engines.torch_engine.model import PREFILL_CHUNK, CausalModel, Positions
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import DRAFT, Samplers
from stepspec.engines.torch_engine.slots import Slot, SlotTable

LOOKUP_LENGTH = 3
"""Tokens that a text repeats before what followed them is looked up instead of drafted."""


class DraftModel(Drafter):
    """A draft model with its own cache. It reads a row's text only when a draft is requested."""

    by_token = True

    def __init__(self, model: CausalModel, vocab_size: int, max_slots: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._table = SlotTable(model, max_slots)
        self._slots: dict[BatchRow, Slot] = {}
        self._suffix = self.lookup = Suffix(model.device, LOOKUP_LENGTH)

    @classmethod
    def missing(cls, parts: Parts) -> str | None:
        """See `Drafter.missing`."""
        return "The draft-model drafter needs a draft model. Pass one with --draft." if parts.draft is None else None

    @classmethod
    def made(cls, parts: Parts) -> Drafter:
        """See `Drafter.made`. A draft with another vocabulary drafts text."""
        target, draft = parts.target, parts.draft
        assert draft is not None
        if parts.tokenizers is not None:
            return Retokenized.made(parts)
        return cls(draft, target.vocab_size, parts.max_slots)

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        """See `Drafter.catch_up`. It leaves the last two ids, which `draft_loop` reads."""
        self._table.pack([self._slot(row) for row in rows])
        slots = [self._slot(row).index for row in rows]
        unread = {
            slot: row.ids_from(self._model.cache_length(slot))[:-2] for row, slot in zip(rows, slots, strict=True)
        }
        while behind := [slot for slot in unread if unread[slot]]:
            chunks = [unread[slot][:PREFILL_CHUNK] for slot in behind]
            self._model.extend(behind, chunks, keep=[[]] * len(behind))
            for slot in behind:
                del unread[slot][:PREFILL_CHUNK]

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft:
        """See `Drafter.propose`."""
        model, num_tokens = self._model, max(counts)
        slots = [self._slot(row).index for row in rows]
        table = [(slot, row.length - 1, *_last_two(row)) for slot, row in zip(slots, rows, strict=True)]
        positions, (before, last) = model.pass_inputs(table, num_tokens)
        tokens, distributions = draft_loop(model, positions, before, last, num_tokens, how, self._vocab_size)
        for slot, row in zip(slots, rows, strict=True):
            model.cache.lengths[slot] = row.length - 1 + num_tokens
        return Draft(tokens, counts, distributions, num_tokens)

    def _slot(self, row: BatchRow) -> Slot:
        if row not in self._slots:
            slot = self._table.acquire(row.buffer, row.prompt_length, row.beyond)
            assert slot is not None, "the draft model has as many slots as the target"
            self._table.unread(slot, row.buffer, row.prompt_length, row.beyond)
            self._slots[row] = slot
        return self._slots[row]

    def roll_back(self, rows: Sequence[BatchRow]) -> None:
        """See `Drafter.roll_back`."""
        for row in rows:
            if row in self._slots:
                slot = self._slots[row].index
                self._model.rollback(slot, min(self._model.cache_length(slot), row.length - 1))

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._suffix.release(row)
        if row in self._slots:
            slot = self._slots.pop(row)
            self._table.remember(slot, row.buffer, row.prompt_length, row.beyond)
            self._table.release(slot)

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._suffix.forget()
        self._table.forget()


def _last_two(row: BatchRow) -> list[int]:
    """Return the last two ids of the text; for a text of one id, that id twice."""
    ids = row.ids_from(max(0, row.length - 2))
    return [ids[0], ids[-1]]


def draft_loop(
    model: CausalModel,
    positions: Positions,
    before: Tensor,
    last: Tensor,
    num_tokens: int,
    how: Samplers,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Draft K tokens per row, one after the other.

    The first pass also reads the token before the last one. If the previous round accepted all drafted tokens, the
    model has not read that token yet. Reading it every time lets one pass shape serve both cases.

    Args:
        model: the draft model.
        positions: positions of each row's last token.
        before: the token before the last one, [B].
        last: each row's last token, [B].
        num_tokens: K.
        how: sampling settings of the rows.
        vocab_size: the target's V; models of one family pad the same vocabulary to different sizes.

    Returns:
        Tokens [B, K], and the distributions that they were sampled from, [B, K, V]; None if every row is greedy.
    """
    tokens = last.new_empty(len(last), 0)
    distributions: list[Tensor] = []
    for index in range(num_tokens):
        if index == 0:
            hidden = _read_two(model, positions, before, last)
        else:
            hidden = model.read(positions.further(index), tokens[:, -1:])
        place = positions.starts[:, None] + 1 + index
        if model.partial is not None and not how.edits and vocab_size >= model.vocab_size:
            token, distribution = _sampled_within(model.partial, hidden, place, how, vocab_size)
        else:
            seen = sampling.seen_along(how, tokens)
            seen = None if seen is None else seen.last()
            logits = _fitted(model.logits(hidden), vocab_size)
            logits = sampling.edited(logits, how, seen, partial=model.partial is not None)
            token, distribution = sampling.choose(logits, place, how, DRAFT)
        distributions.extend([] if distribution is None else [distribution])
        tokens = torch.cat([tokens, token], 1)
    return tokens, torch.cat(distributions, 1) if distributions else None


def _sampled_within(
    head: PartialHead, hidden: Tensor, positions: Tensor, how: Samplers, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """Return what `sampling.choose` does for logits of a draft vocabulary, with the distributions over all V tokens."""
    places, inner = sampling.choose(head.scored(hidden), positions, how, DRAFT)
    if inner is None:
        return head.named(places), None
    everywhere = inner.new_zeros(*inner.shape[:-1], vocab_size)
    return head.named(places), everywhere.index_copy_(-1, head.ids, inner)


def _read_two(model: CausalModel, positions: Positions, before: Tensor, last: Tensor) -> Tensor:
    """Read the last token together with the one before it, if any; return the last token's hidden states [B, 1, W]."""
    follows = (positions.starts > 0)[:, None]
    # A first token is read twice; the second copy is stale data.
    ids = torch.where(follows, torch.stack([before, last], 1), last[:, None])
    earlier = positions._replace(starts=(positions.starts - 1).clamp(min=0), span=max(1, positions.span - 1))
    hidden = model.read(earlier, ids)
    return torch.where(follows[..., None], hidden[:, 1:], hidden[:, :1])


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits padded or cut to the target's vocabulary."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

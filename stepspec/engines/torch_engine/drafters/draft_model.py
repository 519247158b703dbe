"""Drafting by a smaller model of the same vocabulary (arXiv:2211.17192), or by the first layers of the target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter
from stepspec.engines.torch_engine.graphs import captured, graph_inputs
from stepspec.engines.torch_engine.model import PIECE, CausalModel, Positions
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import DRAFT, Samplers
from stepspec.engines.torch_engine.slots import Slot, SlotTable


class DraftModel(Drafter):
    """A model with a cache of its own. It reads what the target has read when it is asked to draft, and not before."""

    by_token = True

    def __init__(self, model: CausalModel, vocab_size: int, max_slots: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._table = SlotTable(model, max_slots)
        self._slots: dict[BatchRow, Slot] = {}
        self._loop = captured(draft_loop, model.device)

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        """See `Drafter.catch_up`. The last two ids are left, which the loop reads."""
        self._table.pack([self._slot(row) for row in rows])
        slots = [self._slot(row).index for row in rows]
        unread = {
            slot: row.ids_from(self._model.cache_length(slot))[:-2] for row, slot in zip(rows, slots, strict=True)
        }
        while behind := [slot for slot in unread if unread[slot]]:
            pieces = [unread[slot][:PIECE] for slot in behind]
            self._model.extend(behind, pieces, keep=[[]] * len(behind))
            for slot in behind:
                del unread[slot][:PIECE]

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft:
        """See `Drafter.propose`."""
        model, num_tokens = self._model, max(counts)
        slots = [self._slot(row).index for row in rows]
        table = [(slot, row.length - 1, *_last_two(row)) for slot, row in zip(slots, rows, strict=True)]
        positions, (before, last) = graph_inputs(model, table, num_tokens)
        tokens, distributions = self._loop(model, positions, before, last, num_tokens, how, self._vocab_size)
        for slot, row in zip(slots, rows, strict=True):
            model.cache.lengths[slot] = row.length - 1 + num_tokens
        return Draft(tokens, counts, distributions, max(counts))

    def _slot(self, row: BatchRow) -> Slot:
        if row not in self._slots:
            slot = self._table.acquire(row.buffer)
            assert slot is not None, "there are as many slots as the target has"
            self._table.unread(slot, row.buffer, row.prompt_length)
            self._slots[row] = slot
        return self._slots[row]

    def observe(self, rows: Sequence[BatchRow], hidden: Tensor) -> None:
        """See `Drafter.observe`."""
        self._forget(rows)

    def _forget(self, rows: Sequence[BatchRow]) -> None:
        """Of what was drafted the cache keeps what was accepted."""
        for row in rows:
            if row in self._slots:
                slot = self._slots[row].index
                self._model.rollback(slot, min(self._model.cache_length(slot), row.length - 1))

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        if row in self._slots:
            slot = self._slots.pop(row)
            self._table.remember(slot, row.buffer, row.prompt_length, row.generated)
            self._table.release(slot)

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._table.forget()


class EarlyExit(Drafter):
    """The target's own first layers and its head (arXiv:2404.16710), over the target's cache, which they write to.

    What they write the target overwrites when it verifies.
    """

    by_token = True

    def __init__(self, target: CausalModel, num_layers: int) -> None:
        self._model = target.first_layers(num_layers)
        self._loop = captured(draft_loop, target.device)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft:
        """See `Drafter.propose`."""
        table = [(row.slot.index, row.length - 1, row.last) for row in rows]
        positions, (last,) = graph_inputs(self._model, table, max(counts))
        tokens, distributions = self._loop(self._model, positions, None, last, max(counts), how, self._model.vocab_size)
        return Draft(tokens, counts, distributions, max(counts))


def _last_two(row: BatchRow) -> list[int]:
    """The last two ids of the text; of a text of one id, that one twice."""
    ids = row.ids_from(max(0, row.length - 2))
    return [ids[0], ids[-1]]


def draft_loop(
    model: CausalModel,
    positions: Positions,
    before: Tensor | None,
    last: Tensor,
    num_tokens: int,
    how: Samplers,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Drafts K tokens a row, one after the other.

    The first pass reads the token before the last one again: after a round in which every drafted token was accepted
    the model has not read the last of them, and a pass of one shape serves both cases.

    Args:
        model: reads at `positions`.
        positions: of the last token of each row.
        before: the token before the last one, [B]; None if the model has read it for sure.
        last: [B].
        num_tokens: K.
        how: how the rows draw.
        vocab_size: the target's; models of one family pad the same vocabulary to different sizes.

    Returns:
        Tokens [B, K], and the distributions they were drawn from, [B, K, V], unless every row is greedy.
    """
    tokens = last.new_empty(len(last), 0)
    distributions: list[Tensor] = []
    for index in range(num_tokens):
        if index == 0 and before is not None:
            hidden = _read_two(model, positions, before, last)
        else:
            hidden = model.read(positions.further(index), tokens[:, -1:] if index else last[:, None])
        seen = sampling.seen_along(how, tokens)
        logits = _fitted(model.logits(hidden), vocab_size)
        seen = None if seen is None else seen[:, -1:]
        logits = sampling.edited(logits, how, seen, partial=model.vocabulary is not None)
        token, distribution = sampling.choose(logits, positions.starts[:, None] + 1 + index, how, DRAFT)
        distributions.extend([] if distribution is None else [distribution])
        tokens = torch.cat([tokens, token], 1)
    return tokens, torch.cat(distributions, 1) if distributions else None


def _read_two(model: CausalModel, positions: Positions, before: Tensor, last: Tensor) -> Tensor:
    """The hidden states [B, 1, W] of the last token, read with the one before it where there is one."""
    follows = (positions.starts > 0)[:, None]
    # What is read behind a first token is stale.
    ids = torch.where(follows, torch.stack([before, last], 1), last[:, None])
    earlier = positions if isinstance(positions.slots, Tensor) else positions._replace(span=max(1, positions.span - 1))
    hidden = model.read(earlier._replace(starts=(positions.starts - 1).clamp(min=0)), ids)
    return torch.where(follows[..., None], hidden[:, 1:], hidden[:, :1])


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over the target's ids."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

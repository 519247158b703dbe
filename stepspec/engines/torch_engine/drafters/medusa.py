"""Drafting by heads on the target's last hidden state (arXiv:2401.10774), verified exactly by rejection sampling.

Head i predicts the token i positions after the newest one, without seeing the predictions in between. Acceptance is
exact, unless `Drafting.acceptance` enables the paper's typical acceptance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts
from stepspec.engines.torch_engine.drafters.medusa_heads import FILE, MedusaHeads
from stepspec.engines.torch_engine.graphs import captured
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import DRAFT, Samplers


class Medusa(Drafter):
    """A drafter of Medusa heads. It stores the hidden state that each row's newest token was sampled from."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._hidden: dict[BatchRow, Tensor] = {}
        self._guess = captured(guess, heads.blocks.device)

    @classmethod
    def missing(cls, parts: Parts) -> str | None:
        """See `Drafter.missing`."""
        return (
            f"{parts.target.name} has no Medusa heads: {FILE} is missing from its folder."
            if parts.heads is None
            else None
        )

    @classmethod
    def made(cls, parts: Parts) -> Drafter:
        """See `Drafter.made`."""
        assert parts.heads is not None
        return cls(parts.heads)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`. A row gets no draft until `observe` has received a hidden state for it."""
        num_heads = len(self._heads.blocks)
        counts = [min(count, num_heads) if row in self._hidden else 0 for row, count in zip(rows, counts, strict=True)]
        if not any(counts):
            return None
        zeros = self._heads.blocks.new_zeros(self._heads.blocks.shape[1])
        hidden = torch.stack([self._hidden.get(row, zeros) for row in rows])
        firsts = torch.tensor([row.length for row in rows]).to(hidden.device)
        tokens, distributions = self._guess(self._heads, hidden, firsts, max(counts), how)
        return Draft(tokens, counts, distributions, 1)

    def observe(self, rows: Sequence[BatchRow], hidden: Tensor) -> None:
        """See `Drafter.observe`."""
        self._hidden.update(zip(rows, hidden.clone(), strict=False))  # a captured round overwrites `hidden`

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._hidden.pop(row, None)


def guess(
    heads: MedusaHeads, hidden: Tensor, firsts: Tensor, num_tokens: int, how: Samplers
) -> tuple[Tensor, Tensor | None]:
    """Return tokens [B, K] for positions from `firsts` [B] on, and their distributions; None if all rows are greedy."""
    logits = heads(hidden)[:, :num_tokens]  # [B, K, V]
    tokens = firsts.new_empty(len(firsts), 0)
    distributions: list[Tensor] = []
    for index in range(num_tokens):
        seen = sampling.seen_along(how, tokens)
        step_logits = sampling.edited(logits[:, index : index + 1], how, None if seen is None else seen.last())
        token, distribution = sampling.choose(step_logits, firsts[:, None] + index, how, DRAFT)
        tokens = torch.cat([tokens, token], 1)
        distributions.extend([] if distribution is None else [distribution])
    return tokens, torch.cat(distributions, 1) if distributions else None

"""What guesses tokens for a round, whatever it guesses them from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers


class Draft(NamedTuple):
    """Tokens guessed for each row of a round."""

    tokens: Tensor  # [B, K]
    counts: Sequence[int]  # how many of them each row has
    distributions: Tensor | None = None  # what they were drawn from, [B, K, V]; None if they are certain
    passes: int = 0  # forward passes that it took

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Draft":
        """No guess at all."""
        return cls(torch.zeros(num_rows, 0, dtype=torch.long, device=device), [0] * num_rows)

    def narrowed(self, num_tokens: int) -> "Draft":
        """At most so many tokens for each row; the passes that it took remain."""
        counts = [min(count, num_tokens) for count in self.counts]
        distributions = self.distributions[:, :num_tokens] if self.distributions is not None and num_tokens else None
        return self._replace(tokens=self.tokens[:, :num_tokens], counts=counts, distributions=distributions)


class Drafter(ABC):
    """Guesses what follows in the rows of a round. It may be wrong, and it may have nothing to say."""

    by_token: ClassVar[bool] = False
    """Whether it takes a pass for every token, so that two tokens cost twice as much as one."""

    @abstractmethod
    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """At most `counts[b]` tokens to follow row b; not every count is 0. None if nothing is known.

        `catch_up` was called for the same rows before.
        """

    def observe(self, rows: Sequence[BatchRow], hidden: Tensor) -> None:
        """Is told that rows have grown. `hidden` [B, W] is what the target's head read for each row's newest token."""

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        """Reads what rows have written since it was last asked to draft for them, if it has anything to read.

        Apart from `propose`, so that what a draft costs is known whatever happened in between.
        """

    def release(self, row: BatchRow) -> None:
        """Is told that a row has ended."""

    def forget(self) -> None:
        """Drops what it keeps of rows that have ended."""


def certain(guesses: Sequence[Sequence[int]], device: torch.device) -> Draft | None:
    """A draft of tokens that were found, not drawn; None if there are none."""
    counts = [len(guess) for guess in guesses]
    width = max(counts)
    if width == 0:
        return None
    padded = [[*guess, *[0] * (width - len(guess))] for guess in guesses]
    return Draft(torch.tensor(padded, device=device), counts)

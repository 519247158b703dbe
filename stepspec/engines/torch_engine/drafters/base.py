"""The drafter interface: a drafter proposes tokens for a round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stepspec.engines.protocol import Tokenizer
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers
from stepspec.engines.torch_engine.transfer import upload


class Draft(NamedTuple):
    """Tokens proposed for each row of a round."""

    tokens: Tensor  # [B, K]
    counts: Sequence[int]  # how many of them each row has
    distributions: Tensor | None = None  # what the tokens were sampled from, [B, K, V]; None if they were not sampled
    passes: int = 0  # forward passes to make the draft

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Draft":
        """Return a draft without tokens."""
        return cls(torch.zeros(num_rows, 0, dtype=torch.long, device=device), [0] * num_rows)

    def narrowed(self, num_tokens: int) -> "Draft":
        """Return the draft with at most `num_tokens` tokens per row. `passes` stays the same."""
        counts = [min(count, num_tokens) for count in self.counts]
        distributions = self.distributions[:, :num_tokens] if self.distributions is not None and num_tokens else None
        return self._replace(tokens=self.tokens[:, :num_tokens], counts=counts, distributions=distributions)


class Parts(NamedTuple):
    """What drafters of one target are made of."""

    target: CausalModel
    draft: CausalModel | None
    max_slots: int
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    """Those of the draft and of the target, if their vocabularies differ."""


class Drafter(ABC):
    """Proposes tokens that may follow the rows of a round. It may propose none."""

    by_token: ClassVar[bool] = False
    """Whether each token takes a pass, so that two tokens cost twice as much as one."""
    lookup: "Drafter | None" = None
    """A drafter without passes, whose guesses are used instead where they are worth more."""

    @classmethod
    def missing(cls, parts: Parts) -> str | None:
        """Return an error message if parts that the drafter needs are missing."""
        return None

    @classmethod
    @abstractmethod
    def made(cls, parts: Parts) -> "Drafter":
        """Return the drafter of a target, of which nothing is missing."""

    @abstractmethod
    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """Propose tokens for each row. `catch_up` is called for the same rows before.

        Args:
            rows: the B rows of the round.
            counts: maximum number of tokens for each row; at least one is greater than 0.
            how: sampling settings of the rows.

        Returns:
            At most `counts[b]` tokens for row b; None if there is no proposal.
        """

    def roll_back(self, rows: Sequence[BatchRow]) -> None:
        """Drop what the drafter has read of rejected tokens, after a round."""

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        """Read what the rows have written since the drafter last drafted for them, if the drafter reads at all.

        This is separate from `propose` so that the measured cost of a draft does not include it.
        """

    def release(self, row: BatchRow) -> None:
        """Release what the drafter holds for a row that has ended."""

    def forget(self) -> None:
        """Drop what the drafter keeps of rows that have ended."""


def certain(guesses: Sequence[Sequence[int]], device: torch.device) -> Draft | None:
    """Return a draft of tokens that were looked up, not sampled; None if there are none."""
    counts = [len(guess) for guess in guesses]
    width = max(counts)
    if width == 0:
        return None
    padded = [[*guess, *[0] * (width - len(guess))] for guess in guesses]
    return Draft(upload(padded, device), counts)

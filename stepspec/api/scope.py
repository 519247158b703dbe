"""The scope of a pair: a check that a question is similar to the pair's training data.

A model that was trained on one kind of text answers other questions with nonsense. Each pair that stepspec provides has
a file `pair.json` with a lower bound on the target's mean log-probability of a prompt's tokens. The check runs before
the answer, so that nobody waits for nonsense. Other models have no such file.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from stepspec.base.file_model import FileModel, Version
from stepspec.engines.protocol import Engine, TokenBuffer, Verify

FILE = "pair.json"

MAX_READ = 128
"""Number of a prompt's tokens that the check reads. A word problem is shorter, and a longer prompt costs no more."""
MAX_KNOWN = 1024
"""Prompts whose result is kept. All turns of a conversation begin with the same tokens, and are checked once."""


class PairScope(FileModel):
    """The description of a pair."""

    version: Version
    knows: str
    """One sentence for the user about the pair's training data and what to do with other questions."""
    least_logprob: float
    """Lower bound of the mean log-probability, in nats. Prompts below it are unlike the pair's training data."""
    measured: str
    """How the bound was measured."""
    _known: OrderedDict[Any, bool] = PrivateAttr(default_factory=OrderedDict[Any, bool])
    """By group and tokens, whether they are like the training data. The prompts used last are at the end."""

    @classmethod
    def load(cls, folder: Path) -> "PairScope":
        """Load the description from the folder of a pair."""
        return cls.model_validate_json((folder / FILE).read_bytes())

    async def note(self, target: Engine, prompt: Sequence[int], group: str | None = None) -> str | None:
        """Return `knows` for a prompt below the bound, else None.

        Args:
            target: that of the pair.
            prompt: ids of the prompt.
            group: see `TokenBuffer`.

        Raises:
            EngineError: the target failed.
        """
        read = group, tuple(prompt[:MAX_READ])
        if read not in self._known:
            mean = await mean_logprob(target, prompt, group)
            self._known[read] = mean is None or mean >= self.least_logprob
        self._known.move_to_end(read)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return None if self._known[read] else self.knows


async def mean_logprob(target: Engine, prompt: Sequence[int], group: str | None = None) -> float | None:
    """Compute the mean log-probability, in nats, of a prompt's tokens from the second to `MAX_READ`; None if the target
    does not support it.

    Raises:
        EngineError: the target failed.
    """
    ids = prompt[:MAX_READ]
    if len(ids) < 2 or "scores" not in target.abilities:
        return None
    # In a group of its own, so that requests find cached what requests have read, and not what this check has.
    alone = TokenBuffer(ids[:1], group=f"scope {group}")
    logprobs = (await target.verify(Verify(alone, ids[1:]))).logprobs
    return sum(logprobs) / len(logprobs) if logprobs else None

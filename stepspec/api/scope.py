"""The scope of a pair, and the target's surprise at prompts.

A model that was trained on one kind of text answers other questions with nonsense. Each pair that stepspec provides has
a file `pair.json` with a lower bound on the target's mean log-probability of a prompt's tokens. The check runs before
the answer, so that nobody waits for nonsense. Other models have no such file. Certificates have a bound of their own,
see `stepspec.loop.certificate`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from stepspec.base.file_model import FileModel, Version
from stepspec.engines.protocol import Engine, TokenBuffer, Verify

FILE = "pair.json"

MAX_READ = 128
"""Number of a prompt's tokens that are read. A word problem is shorter, and a longer prompt costs no more."""
MAX_KNOWN = 1024
"""Prompts whose result is kept. All turns of a conversation begin with the same tokens, and are read once."""


class PairScope(FileModel):
    """The description of a pair."""

    version: Version
    knows: str
    """One sentence for the user about the pair's training data and what to do with other questions."""
    least_logprob: float
    """Lower bound of the mean log-probability, in nats. Prompts below it are unlike the pair's training data."""
    measured: str
    """How the bound was measured."""

    @classmethod
    def load(cls, folder: Path) -> "PairScope":
        """Load the description from the folder of a pair."""
        return cls.model_validate_json((folder / FILE).read_bytes())

    @classmethod
    def find(cls, folder: Path | None) -> "PairScope | None":
        """Load the description from the folder of a pair; None if it has none."""
        return cls.load(folder) if folder is not None and (folder / FILE).exists() else None

    def note(self, mean_logprob: float | None) -> str | None:
        """Return `knows` for a prompt below the bound, else None. `mean_logprob`: see `PromptReader`."""
        return None if mean_logprob is None or mean_logprob >= self.least_logprob else self.knows


class PromptReader:
    """Computes how probable prompts are under a target. It keeps the results of the prompts used last.

    Args:
        target: the target.
    """

    def __init__(self, target: Engine) -> None:
        self._target = target
        self._known: OrderedDict[tuple[str | None, Sequence[int]], float | None] = OrderedDict()

    async def mean_logprob(self, prompt: Sequence[int], group: str | None = None) -> float | None:
        """Compute the mean log-probability, in nats, of a prompt's tokens from the second to `MAX_READ`; None if the
        target does not support it.

        Args:
            prompt: ids of the prompt.
            group: see `TokenBuffer`.

        Raises:
            EngineError: the target failed.
        """
        ids = tuple(prompt[:MAX_READ])
        if len(ids) < 2 or "scores" not in self._target.abilities:
            return None
        if (group, ids) not in self._known:
            # In a group of its own, so that requests find cached what requests have read, and not what this check has.
            alone = TokenBuffer(ids[:1], group=f"scope {group}")
            logprobs = (await self._target.verify(Verify(alone, ids[1:]))).logprobs
            self._known[group, ids] = sum(logprobs) / len(logprobs) if logprobs else None
        self._known.move_to_end((group, ids))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return self._known[group, ids]

"""The scope of a pair: a check that a question is similar to the pair's training data.

A model that was trained on one kind of text answers other questions with nonsense. Each pair that stepspec provides has
a file `pair.json` with a lower bound on the target's mean log-probability of a prompt's tokens. The check runs after
the answer, so it delays no token. Other models have no such file.
"""

from pathlib import Path

from stepspec.base.file_model import FileModel, Version
from stepspec.engines.protocol import Engine, TokenBuffer, Verify

FILE = "pair.json"

MAX_READ = 512
"""Number of a prompt's tokens that the check reads. They fill one pass, and of a long prompt they tell as much."""


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

    async def note(self, target: Engine, prompt: TokenBuffer) -> str | None:
        """Return `knows` for a prompt below the bound, else None.

        Raises:
            EngineError: the target failed.
        """
        mean = await mean_logprob(target, prompt)
        return None if mean is None or mean >= self.least_logprob else self.knows


async def mean_logprob(target: Engine, prompt: TokenBuffer) -> float | None:
    """Compute the mean log-probability, in nats, of a prompt's tokens from the second to `MAX_READ`; None if the target
    does not support it.

    Raises:
        EngineError: the target failed.
    """
    ids = prompt.since(0, min(MAX_READ, len(prompt)))
    if len(ids) < 2 or "scores" not in target.abilities:
        return None
    logprobs = (await target.verify(Verify(TokenBuffer(ids[:1]), ids[1:]))).logprobs
    return sum(logprobs) / len(logprobs) if logprobs else None

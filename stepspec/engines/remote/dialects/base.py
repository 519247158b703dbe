"""The interface of the dialects in which servers score a continuation."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from stepspec.engines.protocol import Ability, TokenBuffer, Verification
from stepspec.engines.remote.calls import ModelCalls
from stepspec.engines.remote.trials import Trials


class Scorer(ABC):
    """Scores continuations on one server."""

    abilities: ClassVar[frozenset[Ability]]
    """Those of an engine that scores so."""
    comes_first: ClassVar[bool] = False
    """Whether a continuation is scored before the probes that follow it are asked."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    @staticmethod
    @abstractmethod
    async def works(trials: Trials, model: str) -> bool:
        """Return whether a server scores a continuation like this."""

    @abstractmethod
    async def scored(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """Return the log-probabilities of a continuation, the argmax tokens at its places if the server returns them,
        and the `top` most likely tokens there.

        Raises:
            EngineError: the scores do not match the continuation.
        """

"""The interface of judge models: models that judges ask, beside target and draft."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

from stepspec.engines.marked import Marks
from stepspec.engines.protocol import Tokenizer
from stepspec.errors import ModelError, UsageError

MAX_QUESTIONS, MAX_STEPS = 256, 4096
"""Numbers of questions and of steps whose ids are kept."""

JudgeAbility = Literal["reward", "embed", "decide", "forget"]
"""What a judge model can do. `reward`: it gives a step a reward. `embed`: it embeds texts. `decide`: it answers
questions, see `stepspec.engines.decision_model`. `forget`: `forget` clears all caches, and groups are kept apart."""


class JudgeModel(Protocol):
    """A judge model. It has its own tokenizer and chat template, so all its inputs are texts."""

    @property
    def name(self) -> str:
        """Name of the model in results."""
        ...

    @property
    def abilities(self) -> frozenset[JudgeAbility]:
        """What the model can do."""
        ...

    async def reward(self, prompt: str, steps: Sequence[str], group: str | None = None) -> float:
        """Return the reward of the last step, from 0 to 1. Requires the ability `reward`.

        Args:
            prompt: the question.
            steps: the steps, each with the text that ends it.
            group: see `TokenBuffer`.

        Raises:
            ContextError: the text does not fit the model's context.
            EngineError: the model failed.
        """
        ...

    async def embed(self, texts: Sequence[str], group: str | None = None) -> list[list[float]]:
        """Return the embeddings of texts, each of length 1. Requires the ability `embed`. For `group` see `reward`.

        Raises:
            ContextError: a text does not fit the model's context.
            EngineError: the model failed.
        """
        ...

    def describe(self) -> dict[str, str | None]:
        """Describe the model for results: `name`, `weights` (a hash), `dtype`, `device`."""
        ...

    async def forget(self) -> None:
        """Clear all state of earlier calls."""
        ...

    async def aclose(self) -> None:
        """Free the model."""
        ...


class RewardIds:
    """Encodes questions and the steps of their answers for rewards, each text once: a step is encoded alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opening = lru_cache(MAX_QUESTIONS)(self._encode_opening)
        self._step = lru_cache(MAX_STEPS)(self._encode_step)

    def of(self, prompt: str, steps: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of a question in the chat template, and of the steps of its answer."""
        return (*self._opening(prompt), *(id for step in steps for id in self._step(step)))

    def _encode_step(self, step: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_text(step))

    def _encode_opening(self, prompt: str) -> tuple[int, ...]:
        marks = Marks(self._tokenizer)
        turn = {"role": "user", "content": marks.put(prompt)}
        return tuple(marks.encode(self._tokenizer.render([turn], add_generation_prompt=True)))


def check_reward_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    """Check that a reward model's tokenizer can render questions.

    Raises:
        ModelError: it has no chat template, or the template rejects a question.
    """
    try:
        RewardIds(tokenizer).of("?", ())
    except UsageError as error:
        raise ModelError(f"{name} cannot give rewards. {error}") from error

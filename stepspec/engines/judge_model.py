"""The interface of judge models: models that judges ask, beside target and draft."""

from collections.abc import Sequence
from typing import Literal, Protocol

from stepspec.engines.protocol import Tokenizer

JudgeAbility = Literal["reward", "embed"]
"""What a judge model can do. `reward`: it gives a step a reward. `embed`: it embeds texts."""


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

    async def reward(self, prompt: str, steps: Sequence[str]) -> float:
        """Return the reward of the last step, from 0 to 1. Requires the ability `reward`.

        Args:
            prompt: the question.
            steps: the steps, each with the text that ends it.

        Raises:
            ContextError: the text does not fit the model's context.
            EngineError: the model failed.
        """
        ...

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embeddings of texts, each of length 1. Requires the ability `embed`.

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


def reward_ids(tokenizer: Tokenizer, prompt: str, steps: Sequence[str]) -> list[int]:
    """Return the ids of a question in the chat template, and of the steps of its answer. Each step is encoded alone."""
    opening = tokenizer.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return [*tokenizer.encode(opening), *(id for step in steps for id in tokenizer.encode_text(step))]

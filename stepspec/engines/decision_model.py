"""Decision models as judge models: objects of LangChain's `BaseDecisionModel`, which answer a question with a
probability."""

import os
import sys
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar

from langchain_core.decisions import BaseDecisionModel, Noul, NoulAnswer

from stepspec.engines.judge_model import JudgeAbility
from stepspec.errors import EngineError, ModelError, reason_of

QUESTION = "question"
"""Key of the question and of its answer."""


class DecisionModel:
    """A decision model. One without an asynchronous method runs in a thread."""

    abilities: ClassVar[frozenset[JudgeAbility]] = frozenset({"decide"})

    def __init__(self, model: BaseDecisionModel) -> None:
        self.name, self._model = model.model, model

    @classmethod
    def load(cls, given: Any, title: str | None = None) -> "DecisionModel":
        """Load a decision model.

        Args:
            given: the model, a function without arguments that returns it, or the import path of either, MODULE:NAME.
            title: not used; results have the model's own name.

        Raises:
            ModelError: the import or the call failed, or there is no decision model.
        """
        model = cls.found(given)
        if callable(model) and not isinstance(model, BaseDecisionModel):
            try:
                model = model()
            except Exception as error:
                reason = f"{type(error).__name__}: {reason_of(error)}"
                raise ModelError(f"The judge model {given!r} cannot be made: {reason}.") from error
        if not isinstance(model, BaseDecisionModel):
            raise ModelError(
                f"The judge model {given!r} is of type {type(model).__name__!r}. Give a "
                "langchain_core.decisions.BaseDecisionModel, or a function that returns one."
            )
        return cls(model)

    @staticmethod
    def found(given: Any) -> Any:
        """Return the object at an import path, or what is given. The working directory comes last in the search.

        Raises:
            ModelError: the import failed.
        """
        if os.getcwd() not in sys.path:  # the program `stepspec` does not have it there
            sys.path.append(os.getcwd())
        try:
            return resolve_name(given) if isinstance(given, str) else given
        except Exception as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise ModelError(f"The judge model {given!r} cannot be imported: {reason}.") from error

    async def decide(self, instructions: str, state: Mapping[str, str]) -> float | None:
        """Return the probability that the answer to a question about a state is yes; None if the model abstains, which
        is a response without an answer.

        Raises:
            EngineError: the answer has another type. Errors of the model itself are passed on.
        """
        asked = {QUESTION: Noul(instructions=instructions)}
        answer = (await self._model.ainvoke({"state": state, "questions": asked})).answers.get(QUESTION)
        if not isinstance(answer, NoulAnswer | None):
            raise EngineError(f"{self.name} answers a {answer.type} to a question for yes or no.")
        return None if answer is None else answer.noul

    def describe(self) -> dict[str, str | None]:
        """See `JudgeModel.describe`."""
        return {"name": self.name, "weights": None, "dtype": None, "device": None}

    async def forget(self) -> None:
        """See `JudgeModel.forget`. A decision model has no cache that stepspec knows of."""

    async def aclose(self) -> None:
        """See `JudgeModel.aclose`. The decision model stays usable."""

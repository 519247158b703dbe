"""A decision model that prefers short steps. A useful one asks a classifier or a server."""

from langchain_core.decisions import BaseDecisionModel, ClassifierResponse, NoulAnswer


class ShortSteps(BaseDecisionModel):
    """Prefers short steps."""

    model: str = "short-steps"

    @property
    def _provider(self) -> str:
        return "mine"

    def _classify(self, state, questions):
        """Return an answer to each question. A question without one is an abstention."""
        answer = NoulAnswer(type="noul", noul=0.9 if len(state["step"]) < 200 else 0.2)
        return ClassifierResponse(model=self.model, answers=dict.fromkeys(questions, answer))

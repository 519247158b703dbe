"""Write a judge: it rejects a step that calculates with a number from nowhere, without asking the target.

The judge joins the likelihood judge in a cascade. Only steps whose numbers are known cost a pass of the target.
"""

import asyncio
import re
from typing import ClassVar, Literal

from stepspec import Policy, StepJudged, StepSpec
from stepspec.loop.judge import Decision, Evidence, Judge

QUESTION = (
    "This is about a few neighbors. Ella baked 25 muffins. Hugo baked 34 muffins. Jack baked as many muffins as Ella "
    "and Hugo together. Vera baked 16 fewer muffins than Jack. How many muffins did Vera bake?"
)


class KnownNumbersJudge(Judge):
    """Rejects a step with a number that is not in the question, not in an earlier step, and no result of its own."""

    asks_target: ClassVar[bool] = False

    kind: Literal["known-numbers"] = "known-numbers"

    async def score(self, evidence: Evidence) -> float:
        """Return the share of the step's numbers that are known. A number after an equal sign is a result."""
        text = " ".join([evidence.question, *(step.text for step in evidence.committed)])
        known = {*re.findall(r"\d+", text), *re.findall(r"= (\d+)", evidence.step)}
        numbers = re.findall(r"\d+", evidence.step)
        return sum(number in known for number in numbers) / len(numbers) if numbers else 1.0

    def decide(self, score: float) -> Decision:
        """Leave a step with known numbers to the next judge, because they do not make it right."""
        return "undecided" if score == 1.0 else "reject"


async def main() -> None:
    policy = Policy.model_validate(
        {
            "version": 1,
            "summary": "known numbers, then the likelihood",
            "family": "score",
            "judging": "cascade",
            "judges": [KnownNumbersJudge(), {"kind": "likelihood", "threshold": -3.05}],
        }
    )
    async with StepSpec(policy=policy) as spec:
        async for event in spec.stream(QUESTION):
            if isinstance(event, StepJudged) and event.scores:
                scores = ", ".join(f"{name} {score:.2f}" for name, score in event.scores.items() if score is not None)
                print(f"step {event.index}: {'accepted' if event.accepted else 'rejected'}, {scores}")


asyncio.run(main())

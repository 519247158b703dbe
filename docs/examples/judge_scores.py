"""Look at the scores that judges give to the draft's steps, as a first idea of thresholds.

The first policy accepts every step. Its events carry the scores of two judges: the log-probability of the step's least
probable token under the target, and the target's rating of the step from 0 to 9. The second policy has the threshold
that half of the steps reach. Whether it is a good one, only the accuracy on problems with answers can show.
"""

import asyncio
from statistics import median

from stepspec import Policy, StepJudged, StepSpec, load_pair

QUESTIONS = [
    "This is about a few neighbors. Ella baked 25 muffins. Hugo baked 34 muffins. Jack baked as many muffins as Ella "
    "and Hugo together. Vera baked 16 fewer muffins than Jack. How many muffins did Vera bake?",
    "It was a sunny day. Paul collected 38 shells. Cara collected 33 shells. Ben collected as many shells as Paul and "
    "Cara together. Sam collected 18 more shells than Ben. How many shells did Sam collect?",
    "This happened at school. Ben has 5 boxes of 7 balloons each. Mia has 17 fewer balloons than Ben. Kate has 2 more "
    "balloons than Mia. How many balloons does Kate have?",
]
LIKELIHOOD = {"kind": "likelihood", "statistic": "min", "threshold": -1000.0}
RATING = {"kind": "rating", "threshold": 0.0}


def policy_with(*judges: dict[str, object]) -> Policy:
    """A policy in which the draft proposes steps and these judges must accept them."""
    return Policy.model_validate({"version": 1, "summary": "custom", "family": "score", "judges": judges})


async def main() -> None:
    pair = load_pair()
    spec = StepSpec(policy=policy_with(LIKELIHOOD, RATING), pair=pair)
    scores: dict[str, list[float]] = {}
    for question in QUESTIONS:
        async for event in spec.stream(question):
            if isinstance(event, StepJudged):
                for judge, score in event.scores.items():
                    if score is not None:
                        scores.setdefault(judge, []).append(score)
    for judge, values in scores.items():
        print(f"{judge}: {len(values)} steps, from {min(values):.2f} to {max(values):.2f}, median {median(values):.2f}")

    threshold = median(scores["likelihood.min"])
    spec = StepSpec(policy=policy_with(LIKELIHOOD | {"threshold": threshold}), pair=pair)
    for question in QUESTIONS:
        result = await spec.generate(question)
        print(f"{result.counts.steps_accepted} of {result.counts.steps_judged} steps accepted: {result.answer.strip()}")
    await pair.aclose()


asyncio.run(main())

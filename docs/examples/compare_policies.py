"""Compare four policies on the same questions: time, tokens per second, steps accepted, answers equal to the target's.

For accuracy with confidence intervals, run `stepspec eval`. This script shows the Python API on the embedded pair.
"""

import asyncio

from stepspec import Result, StepSpec, load_pair

QUESTIONS = [
    "This is about a few neighbors. Ella baked 25 muffins. Hugo baked 34 muffins. Jack baked as many muffins as Ella "
    "and Hugo together. Vera baked 16 fewer muffins than Jack. How many muffins did Vera bake?",
    "It was a sunny day. Paul collected 38 shells. Cara collected 33 shells. Ben collected as many shells as Paul and "
    "Cara together. Sam collected 18 more shells than Ben. How many shells did Sam collect?",
    "This happened at school. Ben has 5 boxes of 7 balloons each. Mia has 17 fewer balloons than Ben. Kate has 2 more "
    "balloons than Mia. How many balloons does Kate have?",
]
POLICIES = ["target", "token", "specreason", "two-level"]


async def main() -> None:
    pair = load_pair()  # the models load once; all sessions share them
    results: dict[str, list[Result]] = {}
    for policy in POLICIES:
        spec = StepSpec(policy=policy, pair=pair)
        await spec.generate(QUESTIONS[0])  # warm up
        await spec.forget()  # every policy starts with empty caches
        results[policy] = [await spec.generate(question) for question in QUESTIONS]
    await pair.aclose()

    print(f"{'policy':12} {'seconds':>8} {'tokens/s':>9} {'accepted':>9}  answers equal to the target's")
    for policy, found in results.items():
        seconds = sum(result.times.wall for result in found)
        tokens = sum(result.counts.committed for result in found)
        judged = sum(result.counts.steps_judged for result in found)
        accepted = sum(result.counts.steps_accepted for result in found)
        same = sum(result.answer == target.answer for result, target in zip(found, results["target"], strict=True))
        share = f"{accepted}/{judged}" if judged else "-"
        print(f"{policy:12} {seconds:8.2f} {tokens / seconds:9.0f} {share:>9}  {same}/{len(found)}")


asyncio.run(main())

"""Run the vLLM engine in process on the embedded pair and write the results as JSON.

`test_in_process.py` runs this script with the Python of `.venv-vllm`.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile_engines import Hostile, try_policies

from stepspec.engines.protocol import (
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.vllm_engine import VllmEngine
from stepspec.errors import StepSpecError

OPTIONS = "devices=0&dtype=float32&max_model_len=1024&max_num_seqs=16&enforce_eager=true"


async def report(weights: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run the calls of the request and return their results."""
    drafting = {"method": "draft_model", "model": str(weights / "draft"), "num_speculative_tokens": 3}
    target = VllmEngine.load(f"{weights / 'target'}?{OPTIONS}&speculative_config={quote(json.dumps(drafting))}")
    found: dict[str, Any] = {"described": target.describe(), "abilities": sorted(target.abilities)}
    found["context"] = target.max_context

    async def write(ids: list[int]) -> tuple[Sequence[int], Sequence[float] | None]:
        stop = Stop(request["max_tokens"], tuple(request["delimiters"]))
        chunk = await collect(target.generate(Generate(TokenBuffer(ids), Sampling(), stop, logprobs=True)))
        return chunk.ids, chunk.logprobs

    found["texts"], found["logprobs"] = zip(*await asyncio.gather(*map(write, request["prompts"])), strict=True)
    first, text = TokenBuffer(request["prompts"][0]), found["texts"][0]
    rest = Stop(len(text) - 5)
    found["after"] = (await collect(target.generate(Generate(first, Sampling(), rest, after=text[:5])))).ids
    seen = []
    for ids, step in zip(request["prompts"], request["steps"], strict=True):
        probes = [Probe(tuple(probe), tuple(request["labels"])) for probe in request["probes"]]
        verification = await target.verify(Verify(TokenBuffer(ids), step, probes))
        unscored = await target.verify(Verify(TokenBuffer(ids), step, scores=False))
        seen.append(
            {
                "logprobs": verification.logprobs,
                "choices": verification.choices,
                "next": verification.next_choice,
                "probe_choices": verification.probe_choices,
                "distributions": [
                    [x if x > float("-inf") else None for x in distribution]
                    for distribution in verification.probe_logprobs
                ],
                "less": [unscored.logprobs, unscored.next_choice],
            }
        )
    found["seen"] = seen
    buffer = TokenBuffer(request["prompts"][0] * 3)
    cached = []
    for _ in range(3):
        chunk = await collect(target.generate(Generate(buffer, Sampling(), Stop(24))))
        buffer.append(chunk.ids)
        cached.append([chunk.cached, len(buffer)])
    found["cached"] = cached
    await target.forget()
    forgot = [(await collect(target.generate(Generate(buffer, Sampling(), Stop(24))))).cached for _ in range(2)]
    found["forgot"] = forgot
    found["groups"] = []
    for group in ("a", "a", "b", None, "a"):
        chunk = await collect(target.generate(Generate(TokenBuffer(buffer.since(0), group=group), Sampling(), Stop(4))))
        verification = await target.verify(Verify(TokenBuffer(buffer.since(0), group=group), [5], scores=False))
        found["groups"].append([chunk.cached > 0, verification.cached > 0])
    found["own speculation"] = target.own_speculation
    hot = Sampling(temperature=1.2, seed=3)
    found["hot"] = [
        (await collect(target.generate(Generate(TokenBuffer(request["prompts"][0]), hot, Stop(30))))).ids for _ in "ab"
    ]
    schema = json.dumps(request["schema"])
    constrained = target.generate(
        Generate(TokenBuffer(request["prompts"][0]), Sampling(), Stop(60), json_schema=schema)
    )
    found["held"] = target.tokenizer.decode((await collect(constrained)).ids[:-1])
    try:
        await target.check_schema('{"type": "strange"}')
    except StepSpecError as error:
        found["no schema"] = [type(error).__name__, str(error)]
    await target.check_schema(schema)
    closed_early = target.generate(Generate(TokenBuffer(request["prompts"][0]), Sampling(), Stop(500)))
    await anext(closed_early)
    await closed_early.aclose()
    metrics = target.metrics()
    found["metrics"] = {"drafts": metrics.drafts, "drafted": metrics.drafted, "accepted": metrics.accepted}
    found["from_other_loop"] = await asyncio.to_thread(lambda: asyncio.run(write(request["prompts"][0]))[0])
    errors = []
    for spec in (
        f"{weights / 'target'}?max_model_length=7",
        str(weights / "nothing"),
        f"{weights / 'target'}?dtype=int3",
        f"{weights / 'target'}?max_model_len=999999",
    ):
        try:
            VllmEngine.load(spec)
        except StepSpecError as error:
            errors.append([type(error).__name__, str(error)])
    found["errors"] = errors
    await try_policies(target, Hostile(target, 0), request["questions"])
    try:
        await target.verify(Verify(TokenBuffer([10**6]), [1]))
    except StepSpecError as error:
        found["wrong id"] = str(error)
    await target.aclose()
    try:
        await write(request["prompts"][0])
    except StepSpecError as error:
        found["closed"] = str(error)
    draft = VllmEngine.load(f"{weights / 'draft'}?{OPTIONS}")
    labels = request["many labels"]
    seen, rest = await asyncio.gather(
        draft.verify(Verify(first, (), [Probe((), labels), Probe((), labels[:2])], scores=False)),
        collect(draft.generate(Generate(first, Sampling(), Stop(4), logprobs=True))),
    )
    found["labels"], found["beside labels"] = seen.probe_logprobs, rest.logprobs
    await draft.aclose()
    return found


if __name__ == "__main__":
    folder, request_file, answer_file = map(Path, sys.argv[1:])
    answer_file.write_text(json.dumps(asyncio.run(report(folder, json.loads(request_file.read_text())))))

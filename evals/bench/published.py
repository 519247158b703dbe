"""SpecReason's published procedure as a client, for comparison: arXiv:2504.07891 and its code of July 2025.

The procedure uses the chat API with text. Each call lists the models, then sends the whole conversation, which the
server templates and encodes again. One request runs at a time. A step stops before a blank line, which is added back
however the step ended. The target rates each step in a chat of four messages. If the rating is below the threshold,
the target regenerates the step.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from pydantic import BaseModel, Field

from evals.bench.problems import BENCHMARK, problems
from evals.bench.speed import WireCost, WireCosts, wire_table
from stepspec.api.models import load_pair
from stepspec.api.session import StepSpec
from stepspec.chat.prompts import RATING_PROMPTS
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerModels, ServerUsage, validated
from stepspec.engines.remote.client import Traffic
from stepspec.engines.remote.limits import read_json
from stepspec.engines.remote.problems import nonsense, refused, unreachable
from stepspec.errors import UsageError
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.run.conditions import engine_records
from stepspec.evaluation.stats import ratio_of_sums

DELIMITER = "\n\n"
THINK_OPEN, THINK_END = "<think>", "</think>"
MAX_STEP_TOKENS = 512
NUM_LOGPROBS = 10
THRESHOLD = 7
ANSWERED = re.compile(r"boxed|Answer:|ANSWER:")


class _ChatMessage(BaseModel):
    content: str | None


class _ChatChoice(BaseModel):
    message: _ChatMessage


class _ChatAnswer(BaseModel):
    choices: list[_ChatChoice] = Field(min_length=1)
    usage: ServerUsage

    @property
    def text(self) -> str:
        """The generated text."""
        return self.choices[0].message.content or ""


@dataclass
class PublishedProcedure:
    """The published procedure on a pair of servers, with greedy decoding to compare it with greedy runs."""

    target: Address
    draft: Address
    max_tokens: int
    answers: bool = False
    """Whether the target goes on to an answer where the procedure ends without one, as it does if the models write
    their answers after the thinking."""
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._client = httpx.Client(timeout=max(self.target.timeout, self.draft.timeout))
        self.forget()
        self._rating = RATING_PROMPTS["specreason"]

    def forget(self) -> None:
        """Change the cache salt, so that later calls reuse no cached prefix of earlier ones."""
        self._salt = uuid.uuid4().hex

    def solve(self, question: str) -> str:
        """Return the reasoning and answer to a question as one text."""
        steps: list[str] = []
        num_tokens = 0
        while num_tokens < self.max_tokens:
            step, step_tokens = self._step(self.draft, question, steps)
            if self._rated(question, [*steps, step]) < THRESHOLD:
                step, step_tokens = self._step(self.target, question, steps)
            num_tokens += step_tokens
            if THINK_END in step and not ANSWERED.search(step):
                step = step.replace(THINK_END, "")
            steps.append(step)
            repeated = len(steps) > 2 and step == steps[-2]
            if repeated or ANSWERED.search(step):
                break
        if self.answers and num_tokens < self.max_tokens and not any(map(ANSWERED.search, steps)):
            steps = list(filter(None, steps))
            steps.append(self._written(self.target, question, steps, self.max_tokens - num_tokens).text)
        return DELIMITER.join(steps)

    def _step(self, address: Address, question: str, steps: list[str]) -> tuple[str, int]:
        """Return the next step of one model, and its number of tokens."""
        answer = self._written(address, question, steps, MAX_STEP_TOKENS, stop=[DELIMITER])
        return answer.text, answer.usage.completion_tokens

    def _written(
        self, address: Address, question: str, steps: list[str], max_tokens: int, **fields: list[str]
    ) -> "_ChatAnswer":
        """Return what a model writes after the steps."""
        thought = THINK_OPEN + "".join(step + DELIMITER for step in steps)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": thought}]
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "skip_special_tokens": False}
        return self._asked(address, {"messages": messages, **sampling, **fields})

    def _rated(self, question: str, steps: list[str]) -> int:
        """Return the target's rating of the last step, or 0 if it writes no digit."""
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": THINK_OPEN + DELIMITER.join(steps)},
            {"role": "user", "content": self._rating.user},
            {"role": "assistant", "content": self._rating.prefill},
        ]
        fields = {"messages": messages, "max_tokens": 1, "temperature": 0.0}
        answer = self._asked(self.target, fields | {"logprobs": True, "top_logprobs": NUM_LOGPROBS})
        written = answer.text.strip()
        return int(written) if written.isdigit() else 0

    def _asked(self, address: Address, fields: dict[str, Any]) -> "_ChatAnswer":
        """List the models, then make one chat call."""
        models = validated(ServerModels, address, self._sent("GET", address, "/models"), "list of models").data
        if not models:
            raise nonsense(address, "an empty list of models")
        fields = {"model": models[0].id, **fields, "continue_final_message": True, "add_generation_prompt": False}
        fields["cache_salt"] = self._salt
        return validated(_ChatAnswer, address, self._sent("POST", address, "/chat/completions", fields), "chat answer")

    def _sent(self, method: str, address: Address, path: str, fields: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, address.base + path, json=fields, headers=address.headers())
        except httpx.HTTPError as error:
            raise unreachable(address, error) from error
        if not response.is_success:
            raise refused(address, response.status_code, response.content)
        self.traffic.requests += 1
        self.traffic.bytes_sent += len(response.request.content)
        self.traffic.bytes_received += len(response.content)
        return read_json(address, response, response.content)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def prefix_counters(address: Address) -> tuple[float, float]:
    """Return how many prompt tokens vLLM has looked up in its prefix cache so far, and how many it found."""
    try:
        text = httpx.get(f"{address.root}/metrics", timeout=address.timeout).text
    except httpx.HTTPError as error:
        raise unreachable(address, error) from error
    found = [0.0, 0.0]
    for line in text.splitlines():
        for index, name in enumerate(("queries", "hits")):
            if line.startswith(f"vllm:prefix_cache_{name}_total"):
                found[index] += float(line.rpartition(" ")[2])
    return found[0], found[1]


@dataclass
class Measured:
    """A procedure and its measurements, with one entry for each problem."""

    name: str
    solve: Callable[[str], str]
    """Returns the text for a question."""
    forget: Callable[[], None]
    """Makes the servers ignore cached prefixes of earlier questions, so that one procedure cannot help the other."""
    traffic: Callable[[], Any]
    """Returns what went over the wire so far: `requests`, `bytes_sent` and `bytes_received`."""
    servers: Sequence[Address]
    texts: list[str] = field(default_factory=list[str])
    seconds: list[float] = field(default_factory=list[float])
    sent: list[Traffic] = field(default_factory=list[Traffic])
    looked_up: float = 0.0
    hits: float = 0.0

    def take(self, question: str) -> None:
        """Solve one problem and record its cost."""
        self.forget()
        before, old = [prefix_counters(server) for server in self.servers], self._sent()
        started = time.perf_counter()
        self.texts.append(self.solve(question))
        self.seconds.append(time.perf_counter() - started)
        self.sent.append(Traffic(*(new - each for new, each in zip(astuple(self._sent()), astuple(old), strict=True))))
        for (queries, hits), (old_queries, old_hits) in zip(map(prefix_counters, self.servers), before, strict=True):
            self.looked_up += queries - old_queries
            self.hits += hits - old_hits

    def _sent(self) -> Traffic:
        now = self.traffic()
        return Traffic(now.requests, now.bytes_sent, now.bytes_received)


def compare(contenders: Sequence[Measured], questions: Sequence[str]) -> None:
    """Measure procedures on the same problems, in alternating order. The first question also warms up."""
    for index, question in enumerate([questions[0], *questions]):
        for each in contenders if index % 2 else reversed(contenders):
            each.take(question)
    for each in contenders:
        del each.texts[0], each.seconds[0], each.sent[0]


def main(
    target: Annotated[str, typer.Option(help="vLLM server of the target, as http://HOST:PORT/v1#NAME.")],
    draft: Annotated[str, typer.Option(help="vLLM server of the draft.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeat it for several. Default: specreason.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum generated tokens for each problem.")] = 640,
    json_file: JsonOption = None,
) -> None:
    """Compare SpecReason's published procedure with policies on the same two vLLM servers."""
    asked, about = problems(limit), conditions()
    with asyncio.Runner() as runner, ExitStack() as clients:
        pair = load_pair(target, draft, notes=False)
        engines: list[Any] = [pair.target, pair.draft]
        if not all(hasattr(engine, "address") for engine in engines):
            raise UsageError("Both models must be on servers. Write http://HOST:PORT/v1#NAME.")
        servers: list[Any] = [engine.address for engine in engines]

        def published(name: str, *, answers: bool) -> Measured:
            procedure = clients.enter_context(closing(PublishedProcedure(servers[0], servers[1], max_tokens, answers)))
            return Measured(name, procedure.solve, procedure.forget, lambda: procedure.traffic, servers)

        def solve(spec: StepSpec, question: str) -> str:
            result = runner.run(spec.generate(question, max_tokens=max_tokens))
            return result.reasoning + result.answer

        def forget() -> None:
            runner.run(pair.forget())

        def traffic() -> EngineMetrics:
            return engines[0].metrics() + engines[1].metrics()

        specs = {name: StepSpec(policy=name, pair=pair) for name in policy or ("specreason",)}
        contenders = [
            published("published procedure", answers=False),
            published("published procedure, with an answer", answers=True),
        ]
        for name, spec in specs.items():
            contenders.append(Measured(Path(name).stem, partial(solve, spec), forget, traffic, servers))
        compare(contenders, [each.question for each in asked])
        used = engine_records(pair)
        runner.run(pair.aclose())
    judges = [["rating"], ["rating"], *([judge.name for judge in spec.policy.judges] for spec in specs.values())]
    results = _wire_costs(contenders, judges, [str(each.answer) for each in asked])
    described = {"target": servers[0].base, "draft": servers[1].base, "benchmark": BENCHMARK}
    found = {**about, **described, "problems": len(asked), "engines": used, "results": results}
    costs = WireCosts.model_validate(found)
    finish([wire_table(costs)], costs, json_file)


def _wire_costs(contenders: Sequence[Measured], judges: Sequence[list[str]], answers: Sequence[str]) -> list[WireCost]:
    count, results = len(answers), list[WireCost]()
    with Grading("number") as grading:
        correct = [
            sum(grading.grade(text, gold).status == "correct" for text, gold in zip(each.texts, answers, strict=True))
            for each in contenders
        ]
    for each, names, num_correct in zip(contenders, judges, correct, strict=True):
        (ratio, interval), (answered_ratio, answered_interval) = (
            ratio_of_sums(published.seconds, each.seconds, np.random.default_rng(0)) for published in contenders[:2]
        )
        results.append(
            WireCost(
                name=each.name,
                seconds=sum(each.seconds) / count,
                requests=sum(sent.requests for sent in each.sent) / count,
                bytes_sent=sum(sent.bytes_sent for sent in each.sent) / count,
                bytes_received=sum(sent.bytes_received for sent in each.sent) / count,
                prefix_hits=each.hits / each.looked_up if each.looked_up else 0.0,
                correct=num_correct / count,
                ratio=ratio,
                ratio_ci=interval,
                answered_ratio=answered_ratio,
                answered_ratio_ci=answered_interval,
                judges=names,
            )
        )
    return results

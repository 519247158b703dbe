"""SpecReason's published procedure as a client, to compare with: arXiv:2504.07891 and its released code of July 2025.

Everything goes through the chat API as text: the conversation is sent anew, put through the template and encoded again
at every call, the models are listed before each of them, and one request runs at a time. A step stops before a blank
line, which is put back whatever ended it. The target rates each step in a chat of four messages, and a step rated below
the threshold is dropped and written again by the target.
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, Field

from stepspec.chat.prompts import RATING_PROMPTS
from stepspec.engines.protocol import THINK_END, THINK_OPEN
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ModelList, Usage, validated
from stepspec.engines.remote.client import Traffic
from stepspec.engines.remote.limits import read_json
from stepspec.engines.remote.problems import nonsense, refused, unreachable

DELIMITER = "\n\n"
MAX_STEP_TOKENS = 512
NUM_LOGPROBS = 10
THRESHOLD = 7
ANSWERED = re.compile(r"\\boxed|Answer:|ANSWER:")


class _ChatMessage(BaseModel):
    content: str | None


class _ChatChoice(BaseModel):
    message: _ChatMessage


class _ChatAnswer(BaseModel):
    choices: list[_ChatChoice] = Field(min_length=1)
    usage: Usage

    @property
    def text(self) -> str:
        """What was written."""
        return self.choices[0].message.content or ""


@dataclass
class PublishedProcedure:
    """One pair of servers, asked as the published code asks them; greedily, to be compared with greedy runs."""

    target: Address
    draft: Address
    max_tokens: int
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._client = httpx.Client(timeout=max(self.target.timeout, self.draft.timeout))
        self.forget()
        self._rating = RATING_PROMPTS["specreason"]

    def forget(self) -> None:
        """Has calls from now on find no prefix of earlier ones at the servers."""
        self._salt = uuid.uuid4().hex

    def solve(self, question: str) -> str:
        """The text that comes of a question."""
        steps: list[str] = []
        num_tokens = 0
        while num_tokens < self.max_tokens:
            step, step_tokens = self._step(self.draft, question, steps)
            if self._rated(question, [*steps, step]) < THRESHOLD:
                step, step_tokens = self._step(self.target, question, steps)
            num_tokens += step_tokens
            if THINK_END in step and not ANSWERED.search(step):
                step = step.replace(THINK_END, "")
            finished = bool(ANSWERED.search(step)) or (bool(steps) and step == steps[-1])
            steps.append(step)
            if finished or not step:
                break
        return DELIMITER.join(steps)

    def _step(self, address: Address, question: str, steps: list[str]) -> tuple[str, int]:
        """The next step of one model, and its tokens."""
        thought = THINK_OPEN + "".join(step + DELIMITER for step in steps)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": thought}]
        fields = {"messages": messages, "max_tokens": MAX_STEP_TOKENS, "stop": [DELIMITER], "temperature": 0.0}
        answer = self._asked(address, fields | {"skip_special_tokens": False})
        return answer.text, answer.usage.completion_tokens

    def _rated(self, question: str, steps: list[str]) -> int:
        """The target's digit for the last step; 0 where it writes none."""
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
        """One call, after the list of models that comes before each."""
        models = validated(ModelList, address, self._sent("GET", address, "/models"), "list of models").data
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
        """Closes the connections."""
        self._client.close()


def prefix_counters(address: Address) -> tuple[float, float]:
    """Prompt tokens that vLLM has looked up in its prefix cache so far, and those it found there."""
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
    """One way of asking, over the same problems as another; one entry for each problem."""

    name: str
    solve: Callable[[str], str]
    """Gives the text that comes of a question."""
    forget: Callable[[], None]
    """Has the servers keep nothing of earlier questions, so that no way of asking helps the other."""
    traffic: Callable[[], Traffic]
    servers: Sequence[Address]
    texts: list[str] = field(default_factory=list[str])
    seconds: list[float] = field(default_factory=list[float])
    looked_up: float = 0.0
    hits: float = 0.0

    def take(self, question: str) -> None:
        """Solves one problem and notes what it took."""
        self.forget()
        before = [prefix_counters(server) for server in self.servers]
        started = time.perf_counter()
        self.texts.append(self.solve(question))
        self.seconds.append(time.perf_counter() - started)
        for (queries, hits), (old_queries, old_hits) in zip(map(prefix_counters, self.servers), before, strict=True):
            self.looked_up += queries - old_queries
            self.hits += hits - old_hits


def compare(ways: Sequence[Measured], questions: Sequence[str]) -> None:
    """Both ways over the same problems, problem by problem, each first in every other one; the first one warms up."""
    for index, question in enumerate([questions[0], *questions]):
        for way in ways if index % 2 else reversed(ways):
            way.take(question)
    for way in ways:
        del way.texts[0], way.seconds[0]

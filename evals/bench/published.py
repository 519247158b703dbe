"""SpecReason's published procedure as a client, for comparison: arXiv:2504.07891 and its code of July 2025.

The procedure uses the chat API with text. Each call lists the models, then sends the whole conversation, which the
server templates and encodes again. One request runs at a time. A step stops before a blank line, which is added back
however the step ended. The target rates each step in a chat of four messages. If the rating is below the threshold,
the target regenerates the step.
"""

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, Field

from stepspec.chat.prompts import RATING_PROMPT
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerModels, ServerUsage, validated
from stepspec.engines.remote.client import Traffic
from stepspec.engines.remote.limits import read_json
from stepspec.engines.remote.problems import nonsense, refused, unreachable

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
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._client = httpx.Client(timeout=max(self.target.timeout, self.draft.timeout))
        self.forget()

    def forget(self) -> None:
        """Change the cache salt, so that later calls reuse no cached prefix of earlier ones."""
        self._salt = uuid.uuid4().hex

    def solve(self, question: str, max_tokens: int) -> tuple[str, int]:
        """Return the reasoning and answer to a question as one text, and its number of tokens."""
        steps: list[str] = []
        num_tokens = 0
        while (room := max_tokens - num_tokens) > 0:
            step, step_tokens = self._step(self.draft, question, steps, room)
            if self._rated(question, [*steps, step]) < THRESHOLD:
                step, step_tokens = self._step(self.target, question, steps, room)
            num_tokens += step_tokens
            if THINK_END in step and not ANSWERED.search(step):
                step = step.replace(THINK_END, "")
            steps.append(step)
            repeated = len(steps) > 2 and step == steps[-2]
            if repeated or ANSWERED.search(step):
                break
        return DELIMITER.join(steps), num_tokens

    def _step(self, address: Address, question: str, steps: list[str], room: int) -> tuple[str, int]:
        """Return the next step of one model, of at most `room` tokens, and its number of tokens."""
        thought = THINK_OPEN + "".join(step + DELIMITER for step in steps)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": thought}]
        fields = {"messages": messages, "max_tokens": min(MAX_STEP_TOKENS, room), "stop": [DELIMITER]}
        answer = self._asked(address, {**fields, "temperature": 0.0, "skip_special_tokens": False})
        return answer.text, answer.usage.completion_tokens

    def _rated(self, question: str, steps: list[str]) -> int:
        """Return the target's rating of the last step, or 0 if it writes no digit."""
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": THINK_OPEN + DELIMITER.join(steps)},
            {"role": "user", "content": RATING_PROMPT.user},
            {"role": "assistant", "content": RATING_PROMPT.prefill},
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

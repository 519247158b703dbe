"""An engine that plays a script: it writes steps at given times, then a short answer, and accepts every step."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from evals.bench.controller import InstantEngine, embedded_tokenizer
from stepspec.api.models import Pair
from stepspec.engines.protocol import Generate, TokenChunk, Verification, Verify

ANSWER = "The answer is 12."
POLICY = "target"
"""The default policy. Others may stop to ask the draft while they run, which changes what a request costs."""


@dataclass(frozen=True)
class Script:
    """What the engine writes, and when.

    Attributes:
        num_steps: number of steps before the answer.
        first_s: seconds before the first step.
        step_s: seconds before each further step.
        varies: whether these seconds are means of exponential distributions, each delay sampled anew.
        slowdown: share by which each further running request makes a delay longer, as a batch does on a GPU.
    """

    num_steps: int = 2
    first_s: float = 0.0
    step_s: float = 0.0
    varies: bool = False
    slowdown: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a whole request that runs alone, on average."""
        return self.first_s + (self.num_steps - 1) * self.step_s

    def delay_s(self, part: int, running: int) -> float:
        """Return the seconds before a step, with so many running requests."""
        mean_s = (self.step_s if part else self.first_s) * (1 + self.slowdown * (running - 1))
        return random.expovariate(1 / mean_s) if self.varies and mean_s else mean_s


@dataclass
class ScriptedEngine(InstantEngine):
    """An engine that plays a script: steps, the end of the thinking, the answer. `num_steps` counts the parts written.

    A script has at most as many steps as `InstantEngine` has.
    """

    script: Script = field(default_factory=Script)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._running = 0
        self._answer = (*self.tokenizer.encode_text(ANSWER), min(self.tokenizer.end_ids))

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`: yields the next part of the script, or all the rest if no delimiter ends the call."""
        part, last = self.num_steps.get(call.prompt, 0), self.script.num_steps + 1
        while part < last:
            ids = (self._end,)
            if part < self.script.num_steps:
                self._running += 1
                try:
                    await asyncio.sleep(self.script.delay_s(part, self._running))
                finally:
                    self._running -= 1
                ids = self.steps[part]
            self.num_steps[call.prompt] = part = part + 1
            if call.stop.delimiters or ids[-1] in call.stop.token_ids:
                yield TokenChunk(ids, "token" if ids == (self._end,) else "delimiter", passes=1)
                return
            yield TokenChunk(ids)
        yield TokenChunk(self._answer, "token", passes=1)

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`: accepts every token."""
        ids = tuple(call.continuation)
        return Verification((-0.1,) * len(ids), ids, self._end if not ids else ids[0])


def scripted_pair(script: Script) -> Pair:
    """Return a pair of engines that play a script, with the tokenizer of the embedded pair."""
    tokenizer = embedded_tokenizer()
    draft = ScriptedEngine(tokenizer, script=script)
    return Pair(ScriptedEngine(tokenizer, num_steps=draft.num_steps, script=script, name="scripted"), draft)

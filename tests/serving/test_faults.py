"""Faults between stepspec and real servers: no wrong text is committed, failures are errors, and no call hangs."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from proxy import Call, Fault, Proxy, serving
from servers import needs_vllm

from evals.training.gsm_mini import load_split
from stepspec import Pair, StepSpec, load_pair
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Generate, TokenBuffer, TokenChunk, Verification, Verify
from stepspec.engines.remote import RemoteEngine
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import EngineError, TargetError
from stepspec.loop.breaker import Breaker
from stepspec.loop.policy import load_policy
from stepspec.loop.result import Result
from stepspec.mini import WEIGHTS

pytestmark = [pytest.mark.anyio, needs_vllm]

STEADY = str(Path(__file__).parents[1] / "steady.toml")
CONCURRENT = 8
DEADLINE_S = 60.0
ROUNDING = 2e-3
FAULTS = (
    Fault("late", delay_s=0.2),
    Fault("slow", slow=True),
    Fault("error", status=500),
    Fault("full", status=429, headers=(("Retry-After", "1"),)),
    Fault("refused", cut_after=0, reset=True),
    Fault("reset", cut_after=700, reset=True),
    Fault("half", cut_after=700),
    Fault("page", status=200, body=b"<html></html>", content_type="text/html"),
    Fault("garbage", status=200, body=b'{"choices": [{"te'),
    Fault("silent", hangs=True),
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class FaultCycle:
    """Return faults in random order, all of them before any repeats, so that few calls cover every fault."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._remaining: list[Fault] = []
        self._lock = threading.Lock()

    def next_fault(self) -> Fault:
        with self._lock:
            if not self._remaining:
                self._remaining = self._rng.sample(FAULTS, len(FAULTS))
            return self._remaining.pop()


class RandomFaults:
    """Inject a fault into a random share of the calls, once it is enabled."""

    def __init__(self, seed: int, share: float, faults: FaultCycle) -> None:
        self._rng = random.Random(seed)
        self._faults = faults
        self.share = share
        self.enabled = False

    def __call__(self, call: Call) -> Fault:
        return self._faults.next_fault() if self.enabled and self._rng.random() < self.share else Fault()


@pytest.fixture(scope="module")
def checker() -> Iterator[TorchEngine]:
    engine = TorchEngine.load(str(WEIGHTS / "target"))
    yield engine
    engine._close()


class RecordingEngine(RemoteEngine):
    """A remote engine that stores the token buffers of its requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffers: dict[TokenBuffer, int] = {}

    def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        self.buffers.setdefault(call.prompt, len(call.prompt))
        return super().generate(call)

    async def verify(self, call: Verify) -> Verification:
        self.buffers.setdefault(call.prompt, len(call.prompt))
        return await super().verify(call)

    def written_after(self, prompt: list[int]) -> list[int]:
        (written,) = (
            buffer.since(length) for buffer, length in self.buffers.items() if buffer.since(0)[: len(prompt)] == prompt
        )
        return written


async def assert_right(
    prompt: list[int], written: list[int], result: Result, checker: TorchEngine, threshold: float, bound: float
) -> None:
    """Assert that each step is the draft's and passes the threshold, or equals the target's own choices after a part of
    the draft's that passes the bound."""
    buffer = TokenBuffer(prompt)
    position = 0
    for step in result.steps:
        ids = written[position : position + step.num_tokens]
        position += step.num_tokens
        assert checker.tokenizer.decode(ids) == step.text
        seen = await checker.verify(Verify(buffer, ids))
        assert seen.logprobs is not None
        assert seen.choices is not None
        if step.origin == "draft":
            assert min(seen.logprobs) >= threshold - ROUNDING, step
        else:  # the draft's part of a salvaged step is at least probable under the target
            num = step.num_from_draft
            assert all(logprob >= bound - ROUNDING for logprob in seen.logprobs[:num]), step
            assert tuple(ids[num:]) == seen.choices[num:], step
        buffer.append(ids)
    if result.finish_reason == "stop":
        assert result.answer


# Under `engine` few calls are made for a request, and every fault must be among them.
@pytest.mark.parametrize(
    ("policy", "target_share", "draft_share", "num_requests", "max_tokens"),
    [
        ("engine", 0.5, 0.0, 20, 100),
        (STEADY, 0.06, 0.5, 8, 250),
        pytest.param("engine", 0.4, 0.0, 200, 400, marks=pytest.mark.soak),
        pytest.param(STEADY, 0.06, 0.2, 200, 400, marks=pytest.mark.soak),
    ],
)
async def test_under_faults_every_answer_is_right_or_an_error(
    policy: str,
    target_share: float,
    draft_share: float,
    num_requests: int,
    max_tokens: int,
    target_port: int,
    draft_port: int,
    checker: TorchEngine,
) -> None:
    problems = [each.question for each in islice(load_split("test"), num_requests)]
    cold = load_policy(policy)[0]
    threshold = min((getattr(judge, "threshold", 0) for judge in cold.judges), default=0)
    bound = 0.0 if cold.salvage is None else cold.salvage.min_logprob
    faults = FaultCycle(0)
    target_faults, draft_faults = RandomFaults(1, target_share, faults), RandomFaults(2, draft_share, faults)
    with serving(Proxy(target_port, target_faults)) as target, serving(Proxy(draft_port, draft_faults)) as draft:
        options = "?timeout=5&retries=3"
        served = RecordingEngine.load(target.url + options)
        assert isinstance(served, RecordingEngine)
        pair = Pair(served, RemoteEngine.load(draft.url + options))
        target_faults.enabled = draft_faults.enabled = True
        spec, semaphore = StepSpec(policy=policy, pair=pair), asyncio.Semaphore(CONCURRENT)

        async def answer(question: str) -> Result | TargetError:
            async with semaphore, asyncio.timeout(DEADLINE_S):
                try:
                    return await spec.generate(question, max_tokens=max_tokens)
                except TargetError as error:
                    return error

        outcomes = await asyncio.gather(*map(answer, problems))
        await pair.aclose()
    met = target.met + draft.met
    assert all(met[fault.name] for fault in FAULTS), met
    results = [
        (question, found) for question, found in zip(problems, outcomes, strict=True) if isinstance(found, Result)
    ]
    errors = [found for found in outcomes if isinstance(found, TargetError)]
    assert len(results) + len(errors) == len(problems)
    assert len(results) > len(problems) / 3, [str(error) for error in errors[:5]]
    assert all(target.url in str(error) for error in errors), "an error does not name the server"
    for question, result in results:
        prompt = encode_request(checker.tokenizer, question)
        await assert_right(prompt, served.written_after(prompt), result, checker, threshold, bound)


async def test_a_failing_draft_is_skipped_until_it_recovers(target_port: int, draft_port: int) -> None:
    question = next(iter(load_split("test"))).question
    down = False
    with serving(Proxy(draft_port, lambda call: Fault("error", status=500) if down else Fault())) as draft:
        target = RemoteEngine.load(f"http://127.0.0.1:{target_port}/v1")
        now = 0.0
        breaker = Breaker(max_failures=3, recovery_s=10, clock=lambda: now)
        pair = Pair(target, RemoteEngine.load(draft.url + "?retries=0"), breaker=breaker)
        spec = StepSpec(policy=STEADY, pair=pair)
        before = await spec.generate(question, max_tokens=60)
        alone = await StepSpec(policy="engine", pair=pair).generate(question, max_tokens=60)
        down = True
        calls_before = len(draft.calls)
        for _ in range(5):
            result = await spec.generate(question, max_tokens=60)
            assert (result.reasoning, result.answer) == (alone.reasoning, alone.answer)
        assert len(draft.calls) - calls_before == 3, "the breaker does not open after 3 failures"
        down, now = False, 10.0
        after = await spec.generate(question, max_tokens=60)
        assert [step.origin for step in after.steps] == [step.origin for step in before.steps]
        await pair.aclose()


async def test_a_draft_that_hangs_is_skipped_at_its_deadline(target_port: int, draft_port: int) -> None:
    question = next(iter(load_split("test"))).question
    hanging = False
    with serving(Proxy(draft_port, lambda call: Fault("silent", hangs=hanging))) as draft:
        pair = Pair(RemoteEngine.load(f"http://127.0.0.1:{target_port}/v1"), RemoteEngine.load(draft.url))
        policy, _ = load_policy("two-level")
        step = policy.step.model_copy(update={"draft_deadline_s": 0.5})
        spec = StepSpec(policy=policy.model_copy(update={"step": step}), pair=pair)
        hanging = True
        started = time.monotonic()
        result = await spec.generate(question)
        assert time.monotonic() - started < 30
        assert result.finish_reason == "stop"
        assert all(step.origin == "target" for step in result.steps)
        await pair.aclose()


async def test_a_target_failure_is_an_error_with_the_committed_text(target_port: int, draft_port: int) -> None:
    question = next(iter(load_split("test"))).question
    count, loaded = 0, False

    def dying(call: Call) -> Fault:
        nonlocal count
        count += 1
        return Fault("error", status=500) if loaded and count > 2 else Fault()

    with serving(Proxy(target_port, dying)) as target:
        draft = f"http://127.0.0.1:{draft_port}/v1"
        pair = load_pair(target.url + "?retries=0", draft)
        count, loaded = 0, True
        with pytest.raises(TargetError, match=r"made to fail.*Text committed before the failure") as caught:
            await StepSpec(policy=STEADY, pair=pair).generate(question)
        assert caught.value.committed.endswith("\n\n")
        assert isinstance(caught.value, EngineError)
        await pair.aclose()

"""The circuit breaker: it opens after consecutive failures and allows one trial after the recovery time."""

import asyncio

import pytest
from scripted import Reply, Stage

from stepspec.errors import EngineError
from stepspec.loop.breaker import Breaker
from stepspec.loop.draft import DraftWriter
from stepspec.loop.policy import load_policy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_after_failures_in_a_row_and_allows_one_trial_after_the_recovery_time() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=2, recovery_s=10, clock=clock)
    breaker.failed()
    breaker.worked()
    breaker.failed()
    assert breaker.allows(), "there were no two failures in a row"
    breaker.failed()
    assert not breaker.allows()
    clock.now = 9.9
    assert not breaker.allows()
    clock.now = 10.0
    assert breaker.allows()
    assert not breaker.allows(), "one request tries, and the others wait for its outcome"
    breaker.worked()
    assert breaker.allows()
    assert breaker.allows()


def test_a_failed_trial_keeps_it_open_for_another_recovery_time() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=1, recovery_s=10, clock=clock)
    breaker.failed()
    clock.now = 11.0
    assert breaker.allows()
    breaker.failed()
    clock.now = 20.0
    assert not breaker.allows()
    clock.now = 21.0
    assert breaker.allows()


def test_a_trial_without_an_outcome_does_not_keep_it_open_forever() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=1, recovery_s=10, clock=clock)
    breaker.failed()
    clock.now = 10.0
    assert breaker.allows()
    clock.now = 20.0
    assert breaker.allows()


SLOW = Reply("One step. " * 9, delay_s=0.0, gap_s=0.05, chunk_size=2)
DRAFTS = {
    "slow": (SLOW, True),
    "silent": (Reply(hangs=True), False),
    "failing": (Reply(fails=EngineError("It broke.")), False),
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", DRAFTS)
async def test_a_storm_of_requests_opens_it_if_the_draft_fails_and_not_if_it_is_slow(kind: str) -> None:
    reply, is_closed = DRAFTS[kind]
    policy = load_policy("specreason")[0]
    policy = policy.model_copy(update={"step": policy.step.model_copy(update={"draft_deadline_s": 0.12})})
    breaker = Breaker()

    async def ask() -> None:
        stage = Stage(policy, [reply])
        stage.request.breaker = breaker
        stop, ids = stage.request.transcript.rest_of_step(100), list[int]()
        assert await DraftWriter(stage.request).text(stop, ids) is None

    await asyncio.gather(*(ask() for _ in range(8)))
    assert breaker.is_closed == is_closed


@pytest.mark.anyio
async def test_requests_that_wait_while_the_draft_serves_others_do_not_open_it() -> None:
    policy = load_policy("specreason")[0]
    policy = policy.model_copy(update={"step": policy.step.model_copy(update={"draft_deadline_s": 0.12})})
    breaker = Breaker()

    async def ask(reply: Reply) -> bool:
        stage = Stage(policy, [reply])
        stage.request.breaker = breaker
        return await DraftWriter(stage.request).text(stage.request.transcript.rest_of_step(100), []) is not None

    waiting, served = [Reply(hangs=True)] * 8, [Reply("One.\n\n", delay_s=0.05)]
    assert await asyncio.gather(*map(ask, waiting + served)) == [False] * 8 + [True]
    assert breaker.is_closed

"""The circuit breaker: it opens after consecutive failures and allows one trial after the recovery time."""

from stepspec.loop.breaker import Breaker


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

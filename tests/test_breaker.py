"""The breaker: open after failures in a row, one trial when the time of recovery is over."""

from stepspec.loop.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_after_failures_in_a_row_and_lets_one_try_after_a_while() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=2, recovery_s=10, clock=clock)
    breaker.failed()
    breaker.worked()
    breaker.failed()
    assert breaker.allows(), "never two in a row"
    breaker.failed()
    assert not breaker.allows()
    clock.now = 9.9
    assert not breaker.allows()
    clock.now = 10.0
    assert breaker.allows()
    assert not breaker.allows(), "one tries, the others wait for what it finds"
    breaker.worked()
    assert breaker.allows()
    assert breaker.allows()


def test_a_trial_that_fails_keeps_it_open_for_as_long_once_more() -> None:
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


def test_a_trial_of_which_nothing_is_heard_does_not_keep_it_open_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(max_failures=1, recovery_s=10, clock=clock)
    breaker.failed()
    clock.now = 10.0
    assert breaker.allows()
    clock.now = 20.0
    assert breaker.allows()

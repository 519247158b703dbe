"""Speculation on steps under load: epochs of common throughput, trials, and what counts as load."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from stepspec.loop.load import EPOCH_S, FIRST_EPOCHS, LEAST_TOKENS, LoadChoice


@dataclass
class Load:
    """Requests that run beside each other, each asking and committing every tenth of a second."""

    choice: LoadChoice = field(init=False)
    now: float = 0.0
    tokens: float = 0.0
    speculated_s: float = 0.0

    def __post_init__(self) -> None:
        self.choice = LoadChoice(lambda: self.now)

    def run(self, num_requests: int, seconds: float, rates: dict[bool, int]) -> None:
        """Run for some seconds. `rates` are the tokens that all requests commit per second with and without steps."""
        with ExitStack() as stack:
            for request in range(num_requests):
                stack.enter_context(self.choice.request(request))
            for _ in range(round(10 * seconds)):
                modes = [self.choice.speculates(request) for request in range(num_requests)]
                self.now += 0.1
                for request, mode in enumerate(modes):
                    self.choice.committed(request, rates[mode] // (10 * num_requests))
                    self.tokens += rates[mode] / 10 / num_requests
                    self.speculated_s += 0.1 * mode / num_requests


@pytest.mark.parametrize("num_requests", [2, 4, 16])
@pytest.mark.parametrize("better", [True, False])
def test_requests_do_what_gives_all_of_them_more_tokens(num_requests: int, better: bool) -> None:
    load, rates = Load(), {better: 4000, not better: 3200}
    load.run(num_requests, 200, rates)
    assert load.tokens >= 0.98 * 4000 * 200
    assert (load.speculated_s > 100) == better


def test_a_change_is_noticed_by_a_trial() -> None:
    load = Load()
    load.run(4, 60, {True: 3200, False: 4000})
    load.tokens = load.speculated_s = 0.0
    load.run(4, 120, {True: 6000, False: 4000})
    assert load.speculated_s > 60


def test_each_level_of_load_has_its_own_choice() -> None:
    load = Load()
    for _ in range(10):
        load.run(4, 20, {True: 4000, False: 3200})
        load.run(16, 20, {True: 3200, False: 4000})
    load.speculated_s = 0.0
    load.run(4, 20, {True: 4000, False: 3200})
    assert load.speculated_s > 16
    load.speculated_s = 0.0
    load.run(16, 20, {True: 3200, False: 4000})
    assert load.speculated_s < 4


def test_a_request_that_is_alone_speculates() -> None:
    load = Load()
    load.run(4, 30, {True: 3200, False: 4000})
    load.speculated_s = 0.0
    load.run(1, 30, {True: 3200, False: 4000})
    assert load.speculated_s == pytest.approx(30)


def test_only_what_requests_did_after_all_of_them_changed_counts() -> None:
    now = 0.0
    choice = LoadChoice(lambda: now)
    with choice.request("a"), choice.request("b"):
        for _ in range(FIRST_EPOCHS):
            assert choice.speculates("a")
            now += EPOCH_S
            choice.committed("a", LEAST_TOKENS - 1)
            assert choice.speculates("a"), "too few tokens"
            choice.committed("b", 1)
            changed = not choice.speculates("b")
        assert changed
        assert choice._levels[1].found[True].rate == pytest.approx(LEAST_TOKENS / (2 * EPOCH_S))
        now += 1
        choice.committed("a", 10_000)  # of a step that it still speculated on
        assert not choice.speculates("a")
        now += 1
        choice.committed("b", 600)  # half of them in the second since then
        choice.committed("a", 300)
        assert (choice._num_tokens, choice._seconds) == pytest.approx((600, 2))


def test_a_great_load_is_decided_on_after_an_epoch_each() -> None:
    load = Load()
    load.run(64, 30, {True: 6400, False: 7680})
    assert load.speculated_s < 2.5

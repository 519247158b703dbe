"""Which way the requests of a session take: epochs of common throughput, trials, and what counts."""

import heapq
import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from stepspec.loop.choice import EPOCH_S, MIN_TOKENS, StepChoice


@dataclass
class Load:
    """Requests that run beside each other, each asking and committing every tenth of a second."""

    choice: StepChoice = field(init=False)
    now: float = 0.0
    tokens: float = 0.0
    speculated_s: float = 0.0

    def __post_init__(self) -> None:
        self.choice = StepChoice(0.02, lambda: self.now)

    def run(self, num_requests: int, seconds: float, rates: dict[bool, int]) -> None:
        """Run for some seconds. `rates` are the tokens that all requests commit per second with and without steps."""
        with ExitStack() as stack:
            for request in range(num_requests):
                stack.enter_context(self.choice.request(request))
            for _ in range(round(10 * seconds)):
                self.step(num_requests, rates)

    def step(self, num_requests: int, rates: dict[bool, int]) -> None:
        """Let each of the running requests ask and commit."""
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


def test_a_first_choice_that_was_wrong_is_soon_corrected() -> None:
    load = Load()
    load.run(4, 1.5, {True: 3200, False: 4000})
    assert not load.choice._speculating
    load.speculated_s = 0.0
    load.run(4, 30, {True: 4600, False: 4000})
    assert load.speculated_s > 15


def test_a_change_is_noticed_by_a_trial() -> None:
    load = Load()
    load.run(4, 60, {True: 3200, False: 4000})
    load.tokens = load.speculated_s = 0.0
    load.run(4, 120, {True: 6000, False: 4000})
    assert load.speculated_s > 60


def test_a_machine_that_slows_down_does_not_make_the_other_way_look_better() -> None:
    load = Load()
    load.run(4, 30, {True: 4000, False: 3600})
    load.speculated_s = 0.0
    load.run(4, 30, {True: 2800, False: 2520})
    assert load.speculated_s > 27


def test_requests_that_take_turns_are_one_load() -> None:
    load, rates = Load(), {True: 3200, False: 4000}
    running = [ExitStack(), ExitStack()]
    for request in 250 * [0, 1]:
        running[request].close()
        running[request].enter_context(load.choice.request(request))
        if load.choice.num_running == 2:
            load.step(2, rates)
            load.step(2, rates)
    assert load.speculated_s < 30


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


def test_a_burst_begins_with_what_is_known_of_its_own_level() -> None:
    load, bursts = Load(), [(32, False), (16, True), (8, False), (4, True), (2, False)]
    for num_requests, better in bursts:
        load.run(num_requests, 40, {better: 4000, not better: 3000})
    for num_requests, better in bursts:
        load.speculated_s = 0.0
        load.run(num_requests, 0.4, {True: 4000, False: 4000})
        assert load.speculated_s == pytest.approx(0.4 * better), num_requests


def test_an_epoch_does_not_go_on_after_a_burst() -> None:
    load = Load()
    load.run(4, 40, {True: 4000, False: 3000})
    with ExitStack() as staying, ExitStack() as leaving:
        for request in range(64):
            (staying if request < 5 else leaving).enter_context(load.choice.request(request))
        load.step(64, {True: 8000, False: 8000})
        assert load.choice._num_tokens
        leaving.close()
        assert not load.choice._num_tokens
        load.step(5, {True: 4000, False: 3000})
        assert load.choice._speculating


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.choice = StepChoice(0.02, lambda: self.now)

    def commit(self, request: str, num_tokens: int, after: float) -> bool:
        """Let a request commit after some seconds, and ask."""
        self.now += after
        self.choice.committed(request, num_tokens)
        return self.choice.speculates(request)

    def try_steps(self, *requests: str) -> str:
        """Let requests speculate until the first of them should not. Return it."""
        assert all(self.choice.speculates(request) for request in requests)
        return next(request for request in 20 * requests if not self.commit(request, MIN_TOKENS, EPOCH_S))

    @property
    def counted(self) -> tuple[float, float]:
        """Tokens and seconds of the present epoch."""
        return self.choice._num_tokens, self.choice._seconds


def test_only_what_requests_did_after_all_of_them_changed_counts() -> None:
    clock = Clock()
    with clock.choice.request("a"), clock.choice.request("b"):
        changed = clock.try_steps("a", "b")
        (other,) = {"a", "b"} - {changed}
        assert not clock.commit(other, 10_000, 1), "of a step that it still speculated on"
        clock.commit(changed, 300, 1)  # half of them in the second since then
        clock.commit(other, 150, 0)
        assert clock.counted == pytest.approx((300, 2))


def test_a_request_that_ends_or_no_longer_asks_is_not_waited_for() -> None:
    clock = Clock()
    with ExitStack() as stack:
        for request in "abc":
            stack.enter_context(clock.choice.request(request))
        with clock.choice.request("d"):
            clock.try_steps("d", "a", "b", "c")
            for request in "abc":
                clock.commit(request, 1, 0.1)
            assert clock.counted[1] == 0, "the last request has not asked"
        clock.commit("a", 120, 1)  # in 1.2 seconds
        assert clock.counted == pytest.approx((100, 1))


def test_what_the_draft_reads_first_after_a_change_does_not_count() -> None:
    clock = Clock()
    with clock.choice.request("a"), clock.choice.request("b"):
        clock.try_steps("a", "b")
        while not clock.choice._speculating:
            clock.commit("a", MIN_TOKENS, EPOCH_S)
            clock.commit("b", MIN_TOKENS, 0)
        clock.choice.speculates("a")
        clock.choice.speculates("b")
        for num_tokens, seconds in [(10, 5.0), (100, 1.0)]:
            clock.commit("a", num_tokens, seconds)
            clock.commit("b", num_tokens, 0)
        assert clock.counted == pytest.approx((200, 2))


def test_a_growing_load_does_not_make_a_way_look_better() -> None:
    load = Load()
    with ExitStack() as stack:
        for request in range(12):
            stack.enter_context(load.choice.request(request))
        while load.choice._speculating:
            load.step(12, {True: 4800, False: 4000})
        for request in range(12, 22):
            stack.enter_context(load.choice.request(request))
        load.speculated_s = 0.0
        for _ in range(200):
            load.step(22, {True: 8800, False: 7400})
    assert load.speculated_s > 14


def test_a_request_in_its_answer_delays_no_change() -> None:
    clock = Clock()
    with ExitStack() as stack:
        for request in "abc":
            stack.enter_context(clock.choice.request(request))
            clock.choice.speculates(request)
        clock.choice.stops_asking("c")
        changed = clock.try_steps("a", "b")
        (other,) = {"a", "b"} - {changed}
        clock.commit(other, 1, 0.1)
        clock.commit(changed, 120, 1.1)  # in 1.2 seconds
        assert clock.counted == pytest.approx((110, 1.1))


def test_what_a_request_writes_while_its_caller_does_not_read_says_nothing() -> None:
    clock = Clock()
    with clock.choice.request("a"), clock.choice.request("b"):
        clock.choice.pauses("a")
        clock.choice.speculates("b")
        clock.commit("a", 1000, 1)
        assert clock.counted == (0, 0)


def test_an_answer_does_not_count() -> None:
    clock = Clock()
    with clock.choice.request("a"):
        clock.commit("a", 10, 0.25)
        clock.choice.stops_asking("a")
        clock.choice.committed("a", 100)
    assert clock.counted == (10, 0.25)


def test_fewer_requests_do_not_make_a_way_look_better() -> None:
    load, rates = Load(), {True: 4000, False: 3600}
    with ExitStack() as staying, ExitStack() as leaving:
        for request in range(16):
            (staying if request < 12 else leaving).enter_context(load.choice.request(request))
        while load.choice._speculating:
            load.step(16, rates)
        leaving.close()
        load.speculated_s = 0.0
        for _ in range(300):
            load.step(12, rates)
    assert load.speculated_s > 20


def test_a_great_load_is_decided_on_after_an_epoch_each() -> None:
    load = Load()
    load.run(64, 30, {True: 6400, False: 7680})
    assert load.speculated_s < 2.5


def test_trials_are_seldom_where_steps_take_long() -> None:
    clock, speculated_s, ways = Clock(), 0.0, {True: (5.0, 100), False: (0.1, 5)}
    commits = [(0.0, request, 0) for request in range(16)]
    with ExitStack() as stack:
        for _, request, _ in commits:
            stack.enter_context(clock.choice.request(request))
        while clock.now < 400:
            clock.now, request, num_tokens = heapq.heappop(commits)
            clock.choice.committed(request, num_tokens)
            speculates = clock.choice.speculates(request)
            seconds, num_tokens = ways[speculates]
            speculated_s += seconds * speculates / 16
            heapq.heappush(commits, (clock.now + seconds, request, num_tokens))
    assert speculated_s < 0.1 * 400


FIRST_STEPS_S = 1.0
"""What the first trial may cost, as nothing is known before it."""


def play(factor: float, token_s: float, seed: int, hangs_s: float = 0.0) -> float:
    """Return what 300 requests one after the other take, without the first trial, over what the target alone takes.

    Problems and steps differ.

    Args:
        factor: what a step takes with speculation, over what it takes without it.
        token_s: seconds a token of the target.
        seed: of the problems.
        hangs_s: seconds in which the draft hangs in each step.
    """
    clock, rng, alone_s = Clock(), random.Random(seed), 0.0
    choice = clock.choice
    for request in range(300):
        hard, left = rng.lognormvariate(0, 0.3), int(170 * rng.lognormvariate(0, 0.4))
        with choice.request(request):
            while left > 0:
                num_tokens = min(left, rng.randint(10, 50))
                left -= num_tokens
                own_s = num_tokens * token_s * hard * rng.lognormvariate(0, 0.3)
                alone_s += own_s
                if choice.speculates(request):
                    choice.begins_chain(request)
                    patience_s = choice.patience_s(0, 64) or hangs_s
                    if hangs_s <= patience_s:
                        choice.costs.step_tokens.note(num_tokens)
                    clock.now += own_s * factor + min(hangs_s, patience_s)
                    choice.ends_chain(request)
                    choice.committed(request, num_tokens)
                    continue
                for _ in range(num_tokens):
                    clock.now += own_s / num_tokens
                    choice.committed(request, 1)
                    choice.speculates(request)
    return max(0.0, clock.now - FIRST_STEPS_S) / alone_s


@pytest.mark.parametrize("token_s", [0.001, 0.2])
@pytest.mark.parametrize(
    ("factor", "most"), [(0.5, 0.65), (0.8, 0.88), (1.1, 1.05), (1.35, 1.05), (2, 1.05), (20, 1.05)]
)
def test_a_request_that_is_alone_takes_the_faster_way(factor: float, most: float, token_s: float) -> None:
    assert statistics.fmean(play(factor, token_s, seed) for seed in range(3)) <= most


def test_a_draft_that_hangs_costs_a_few_steps() -> None:
    assert play(1.0, 0.2, 0, hangs_s=60.0) <= 1.05


def test_a_level_that_the_load_drifts_to_can_be_chosen_for() -> None:
    load = Load()
    with ExitStack() as two:
        for request in range(2):
            two.enter_context(load.choice.request(request))
        while load.choice._speculating:
            load.step(2, {True: 3200, False: 4000})
    for _ in range(20):
        load.run(1, 3, {True: 1600, False: 4000})
    assert load.choice._levels[0].is_known


def test_short_bursts_speculate_until_it_is_known_not_to_pay() -> None:
    load = Load()
    for _ in range(20):
        load.run(8, 0.2, {True: 8000, False: 4000})
    assert load.speculated_s > 0.95 * 20 * 0.2


def test_a_draft_that_is_stopped_in_every_step_is_soon_left_alone() -> None:
    """Its steps are never written: the target writes the rest of each text after the time for a step has passed."""
    clock, tried = Clock(), 0
    for request in map(str, range(100)):
        with clock.choice.request(request):
            if clock.choice.speculates(request):
                clock.now, tried = clock.now + 60.0, tried + 1
            for _ in range(40):
                clock.commit(request, 5, 0.05)
            clock.choice.stops_asking(request)
    assert tried <= 3


def test_one_caller_that_does_not_read_stops_no_measurement() -> None:
    clock = Clock()
    with clock.choice.request("a"), clock.choice.request("b"):
        for _ in range(40):
            clock.choice.pauses("b")
            clock.choice.speculates("a")
            clock.commit("a", 100, 0.1)
            clock.choice.committed("b", 5)
            clock.choice.speculates("b")
            if not clock.choice._speculating:
                break
    assert not clock.choice._speculating, "an epoch has ended"

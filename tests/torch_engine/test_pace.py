"""The `Pacer` chooses the number of drafted tokens that gives the most tokens per second.

A simulated machine gives the real `Pacer` round times with noise, spikes and wrong first timings. It accepts drafted
tokens at random.
"""

import math
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import llama_config, make_model, make_network, noisy_copy, piece, slow_greedy

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import Drafting, Sampling, Stop, TokenBuffer
from stepspec.engines.stops import StopMatcher
from stepspec.engines.torch_engine.decode import Rounds
from stepspec.engines.torch_engine.drafters import Draft
from stepspec.engines.torch_engine.drafters.draft_model import DraftModel
from stepspec.engines.torch_engine.model import CausalModel, Positions
from stepspec.engines.torch_engine.pace import (
    MARGIN,
    MAX_RUN,
    MAX_TOKENS,
    PRIOR_ACCEPTANCE,
    Pacer,
    Round,
    fastest,
)
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers
from stepspec.engines.torch_engine.slots import Slot

NUM_SEEDS = 100

NOISE, SPIKES, SPIKE = 0.2, 0.01, 10.0
MEAN_NOISE = math.exp(NOISE**2 / 2) * (1 + SPIKES * (SPIKE - 1))


def new_row() -> BatchRow:
    buffer = TokenBuffer([1])
    return BatchRow(buffer, 1, Sampling(), Drafting(), StopMatcher(Stop(9), str, frozenset()))


@dataclass(frozen=True)
class World:
    """Properties of a machine and a drafter. A round without drafting takes a second."""

    acceptance: float
    draft_s: float  # time to draft one token for all rows; any number of tokens if not `by_token`
    wide_s: float = 0.02  # time that each drafted token adds to verification
    pad_s: float = 0.0  # time that each further 8 rows of a pass add, as in kernels that pad them
    by_token: bool = True
    coverage: float = 1.0  # probability that a row gets a draft
    num_rows: int = 1
    catch_up_s: float = 0.0  # for each token written since the last call of the drafter

    def drafting_s(self, count: int) -> float:
        return self.draft_s * (count if self.by_token or not count else 1)

    def verifying_s(self, count: int) -> float:
        return self.wide_s * count + self.pad_s * (count // 8)

    def tokens_per_s(self, count: int) -> float:
        """Return the speed with a fixed number of drafted tokens."""
        tokens = 1 + self.coverage * sum(self.acceptance**index for index in range(1, count + 1))
        some = 1 - (1 - self.coverage) ** self.num_rows
        return self.num_rows * tokens / (1 + self.drafting_s(count) + some * self.verifying_s(count))

    def best_tokens_per_s(self) -> float:
        return max(map(self.tokens_per_s, range(MAX_TOKENS + 1)))


@dataclass
class Wrong:
    """An error of the first timings of one kind, by a factor."""

    kind: str = ""
    factor: float = 1.0
    times: int = 3


@dataclass
class Machine:
    """Runs rounds like `Rounds`, with a simulated clock and simulated acceptance."""

    world: World
    seed: int
    wrong: Wrong = field(default_factory=Wrong)
    tokens: int = 0
    seconds: float = 0.0
    lost_s: float = 0.0  # extra time compared with the same tokens without drafting, without noise
    counts: list[int] = field(default_factory=list)
    unread: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._timed = {"draft": 0, "verify": 0, "plain": 0}
        self.pacer = Pacer(by_token=self.world.by_token)
        self.rows = [new_row() for _ in range(self.world.num_rows)]

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._round()

    def _round(self) -> None:
        world, load = self.world, self.world.num_rows
        num_asked = self.pacer.count(self.rows, load)
        found = [num_asked if num_asked and self._random.random() < world.coverage else 0 for _ in self.rows]
        limit = self.pacer.worth_verifying(self.rows, found, load) if any(found) else 0
        drafted = [min(limit, each) for each in found]
        accepted = [self._accepted(each) for each in drafted]
        width = max(drafted)
        catch_up_s, draft_s = world.catch_up_s * self.unread if num_asked else 0.0, 0.0
        if num_asked:
            draft_s = self._timing("draft", world.drafting_s(num_asked))
        verify_s = self._timing("verify" if width else "plain", 1 + world.verifying_s(width))
        done = Round(num_asked, found, drafted, accepted, catch_up_s, draft_s, verify_s)
        self.pacer.note(self.rows, load, done)
        self.counts.append(num_asked)
        self.tokens += sum(accepted) + load
        gained = sum(accepted) / load
        self.unread = gained + 1 + (0.0 if num_asked else self.unread)
        self.seconds += catch_up_s
        self.lost_s += catch_up_s + world.drafting_s(num_asked) + world.verifying_s(width) - gained

    def _accepted(self, num_drafted: int) -> int:
        count = 0
        while count < num_drafted and self._random.random() < self.world.acceptance:
            count += 1
        return count

    def _timing(self, kind: str, mean: float) -> float:
        """Return a measured time: `mean` with noise, spikes and wrong first timings."""
        duration = mean * math.exp(self._random.gauss(0, NOISE)) * (SPIKE if self._random.random() < SPIKES else 1)
        self.seconds += duration
        self._timed[kind] += 1
        wrong = kind == self.wrong.kind and self._timed[kind] <= self.wrong.times
        return duration * self.wrong.factor if wrong else duration


def share_of_best(world: World, kind: str = "", factor: float = 1.0, times: int = 3) -> tuple[float, float]:
    """Return the speed relative to the best fixed count, and the time lost by drafting. Both are means over the seeds.

    The speed is that of rounds 200 to 400. The lost time is that of all 400 rounds, in rounds without drafting.
    """
    tokens, seconds, lost = 0, 0.0, 0.0
    for seed in range(NUM_SEEDS):
        machine = Machine(world, seed, Wrong(kind, factor, times))
        machine.run(200)
        tokens, seconds = tokens - machine.tokens, seconds - machine.seconds
        machine.run(200)
        tokens, seconds, lost = tokens + machine.tokens, seconds + machine.seconds, lost + machine.lost_s
    return tokens / seconds * MEAN_NOISE / world.best_tokens_per_s(), lost / NUM_SEEDS


@pytest.mark.parametrize(
    ("world", "kind", "factor"),
    [
        (World(0.8, 0.1), "draft", 10),
        (World(0.6, 0.1), "plain", 0.1),
        (World(0.0, 1.0), "draft", 0.1),
        (World(0.6, 0.01, by_token=False, coverage=0.3), "verify", 10),
    ],
    ids=str,
)
def test_wrong_first_timings_are_corrected(world: World, kind: str, factor: float) -> None:
    speed, lost = share_of_best(world, kind, factor)
    assert speed > 0.9
    assert lost < 30


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_wrong_first_timings_of_any_kind_are_corrected(acceptance: float, draft_s: float, times: int) -> None:
    for kind in ("draft", "verify", "plain"):
        for factor in (0.1, 0.4, 1, 2.5, 10):
            speed, lost = share_of_best(World(acceptance, draft_s), kind, factor, times)
            assert speed > 0.9, (kind, factor)
            assert lost < 30, (kind, factor)


@pytest.mark.soak
@pytest.mark.parametrize("factor", [0.1, 10])
@pytest.mark.parametrize("kind", ["draft", "verify", "plain"])
@pytest.mark.parametrize(
    "world",
    [
        *(World(0.8, 0.3, wide_s, num_rows=rows) for wide_s in (0.0, 0.1) for rows in (4, 16)),
        *(World(acceptance, 0.01, 0.05, False, share) for acceptance in (0.6, 0.9) for share in (0.1, 0.3, 0.7)),
        *(World(acceptance, 0.3, by_token=False) for acceptance in (0.0, 0.4, 0.7)),
        World(0.9, 0.1, catch_up_s=0.02),
    ],
    ids=str,
)
def test_wrong_first_timings_are_corrected_for_any_load_and_drafter(world: World, kind: str, factor: float) -> None:
    speed, lost = share_of_best(world, kind, factor)
    assert speed > 0.9
    assert lost < 30


@pytest.mark.parametrize(
    "world",
    [
        World(0.0, 0.02),
        World(0.0, 1.0),
        World(0.3, 0.6),
        World(0.0, 0.2, by_token=False, coverage=0.1),
        World(0.0, 0.3, catch_up_s=0.02),
        World(0.0, 0.3, num_rows=4),
    ],
    ids=str,
)
def test_a_useless_drafter_costs_few_rounds_at_first_and_a_small_share_later(world: World) -> None:
    machine = Machine(world, seed=1)
    machine.run(400)
    assert machine.lost_s < 30
    before, num_rounds = machine.lost_s, 19_600 if world == World(0.0, 1.0) else 4000
    machine.run(num_rounds)
    assert machine.lost_s - before < 0.02 * num_rounds


@pytest.mark.parametrize("draft_s", [0.02, 0.3])
def test_a_drafter_that_becomes_useful_is_used_again(draft_s: float) -> None:
    for seed in range(3):
        machine = Machine(World(0.0, draft_s), seed)
        machine.run(2000)
        machine.world = World(0.9, draft_s)
        machine.run(400)
        assert sum(map(bool, machine.counts[-MAX_RUN:])) > 0.8 * MAX_RUN


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_pacer_follows_costs_that_change(factor: float) -> None:
    """A drafter that becomes cheap is used, and one that becomes too expensive is not."""
    cheap, expensive = World(0.8, 0.15), World(0.8, 0.15 * 5)
    first, then = (expensive, cheap) if factor < 1 else (cheap, expensive)
    for seed in range(3):
        machine = Machine(first, seed)
        machine.run(1000)
        machine.world = then
        machine.run(1000)
        tokens, seconds = machine.tokens, machine.seconds
        machine.run(1000)
        speed = (machine.tokens - tokens) / (machine.seconds - seconds) * MEAN_NOISE
        assert speed > 0.85 * then.best_tokens_per_s()


def test_occasional_rounds_without_drafting_measure_their_cost() -> None:
    machine = Machine(World(0.95, 0.02), seed=0)
    machine.run(20 * (MAX_RUN + 1))
    plain = machine.counts[100:].count(0)
    assert 0 < plain < 2 * len(machine.counts) / MAX_RUN


shares = st.floats(0, 1)


@given(
    st.lists(st.tuples(shares, st.integers(1, MAX_TOKENS)), min_size=1, max_size=4),
    st.floats(1e-3, 1),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_the_count_gives_the_most_tokens_per_second(
    rows: list[tuple[float, int]], token_s: float, extra_s: float, coverage: float
) -> None:
    acceptances, limits = zip(*rows, strict=True)

    def speed(count: int) -> float:
        tokens = sum(
            1 + coverage * sum(acceptance**index for index in range(1, min(count, limit) + 1))
            for acceptance, limit in rows
        )
        return tokens / (1.0 + MARGIN * (round_s(count) - 1.0))

    def round_s(count: int) -> float:
        return 1.0 + (extra_s if count else 0.0) + count * token_s

    count, _ = fastest(acceptances, limits, round_s, coverage)
    assert speed(count) == pytest.approx(max(map(speed, range(MAX_TOKENS + 1))))


def evenly(token_s: float) -> Callable[[int], float]:
    """Return the time of a round of which each token takes the same."""
    return lambda count: 1.0 + token_s * count


@pytest.mark.parametrize("pad_s", [0.3, 0.6])
@pytest.mark.parametrize("draft_s", [0.12, 0.26])
@pytest.mark.parametrize("acceptance", [0.8, 0.94])
def test_rows_that_a_kernel_pads_are_used(acceptance: float, draft_s: float, pad_s: float) -> None:
    speed, lost = share_of_best(World(acceptance, draft_s, wide_s=0.0, pad_s=pad_s))
    assert speed > 0.9
    assert lost < 30


def test_the_count_is_best_for_all_rows_of_a_round_together() -> None:
    alone = fastest([0.9], [MAX_TOKENS], evenly(0.1))[0]
    assert fastest([0.9, 0.0], [MAX_TOKENS] * 2, evenly(0.1))[0] < alone
    assert fastest([0.9] + 15 * [0.0], [MAX_TOKENS] * 16, evenly(0.1))[0] == 0


def test_drafts_of_few_rows_in_a_large_batch_are_not_verified() -> None:
    assert fastest([0.8], [4], evenly(0.05))[0] == 4
    assert fastest([0.8] * 16, [4] * 16, evenly(0.05))[0] == 4
    assert fastest([0.8] * 16, [4] + 15 * [0], evenly(0.05))[0] == 0


def test_a_new_row_starts_with_the_acceptance_of_other_rows_until_forget() -> None:
    machine = Machine(World(0.0, 0.02), seed=0)
    assert machine.pacer.acceptance(new_row()) == pytest.approx(PRIOR_ACCEPTANCE)
    machine.run(1000)
    assert machine.pacer.acceptance(new_row()) < 0.1
    machine.pacer.forget()
    assert machine.pacer.acceptance(new_row()) == pytest.approx(PRIOR_ACCEPTANCE)
    assert machine.pacer.acceptance(machine.rows[0]) == pytest.approx(PRIOR_ACCEPTANCE)
    assert machine.pacer.count(machine.rows, 1) > 0, "the pacer forgot the costs of rounds"


class Clock:
    """A clock that advances only when a test adds to `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(CausalModel):
    """A model whose passes take a simulated second."""

    clock = Clock()

    def read(self, positions: Positions, ids: torch.Tensor, branches: torch.Tensor | None = None) -> torch.Tensor:
        self.clock.now += 1
        return super().read(positions, ids, branches)


class TimedDraft(DraftModel):
    """A draft model that takes 0.1 simulated seconds per token.

    The first three drafts take thirty times as long, and catching up before the first draft takes 50 seconds.
    """

    clock = Clock()
    num_drafts = 0

    def catch_up(self, rows: Sequence[BatchRow]) -> None:
        self.clock.now += 0.0 if self.num_drafts else 50.0
        super().catch_up(rows)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft:
        self.num_drafts += 1
        self.clock.now += 0.1 * max(counts) * (30 if self.num_drafts <= 3 else 1)
        return super().propose(rows, counts, how)


def timed_round(row: BatchRow, prompt: Sequence[int], models: tuple[TimedTarget, TimedDraft]) -> list[int]:
    """Write a row's text with simulated times. Return how many tokens each round drafted."""
    target, drafter = models
    clock = target.clock = drafter.clock = Clock()
    row.slot = Slot(0)
    target.extend([0], [[*prompt[:-1]]], keep=[[]])
    rounds, drafted = Rounds(target, EngineMetrics(), clock=clock), list[int]()
    while row.end is None:
        before = row.metrics.drafted
        rounds.run([row], drafter)
        drafted.append(row.metrics.drafted - before)
    return drafted


def timed_row(prompt: Sequence[int], num_tokens: int, fixed: int | None = None) -> BatchRow:
    watch = StopMatcher(Stop(num_tokens), piece, frozenset())
    return BatchRow(TokenBuffer(prompt), len(prompt), Sampling(), Drafting("draft-model", fixed), watch)


@torch.inference_mode()
def test_the_engine_drafts_again_after_wrong_first_timings() -> None:
    network, num_tokens, prompt = make_network(llama_config(max_position_embeddings=512)), 250, [1, 2, 3]
    drafter = TimedDraft(make_model(network), network.config.vocab_size, 1)
    row = timed_row(prompt, num_tokens)
    drafted = timed_round(row, prompt, (TimedTarget(deepcopy(network), "timed"), drafter))
    assert drafted[3:20].count(0) > 10, "the wrong first timings do not stop drafting at first"
    assert min(drafted[-5:-1]) > 8
    assert row.beyond == slow_greedy(network, prompt, num_tokens)


@torch.inference_mode()
def test_text_that_repeats_itself_takes_fewer_passes_of_both_models() -> None:
    """The text ends in a loop of nine tokens, as calls repeat arguments. The draft is a noisy copy of the target."""
    network = make_network(llama_config(max_position_embeddings=512, initializer_range=0.1), seed=3)
    prompt, num_tokens, passes = [1, 2, 3], 200, dict[str, dict[Any, int]]()
    for name, fixed in (("looked up", None), ("drafted", None), ("fixed", 4), ("fixed, without", 4)):
        drafter = TimedDraft(make_model(noisy_copy(network, 0.2)), network.config.vocab_size, 1)
        drafter.num_drafts = 4
        if name in ("drafted", "fixed, without"):
            drafter.lookup = None
        row = timed_row(prompt, num_tokens, fixed)
        timed_round(row, prompt, (TimedTarget(deepcopy(network), "timed"), drafter))
        assert row.beyond == slow_greedy(network, prompt, num_tokens)
        passes[name] = dict(row.metrics.passes)
    assert passes["looked up"]["verify"] < 0.7 * passes["drafted"]["verify"]
    assert passes["looked up"]["draft"] < 0.5 * passes["drafted"]["draft"]
    assert passes["fixed"] == passes["fixed, without"], "a fixed number of tokens is the draft model's"


def known(pacer: Pacer, row: BatchRow, num_accepted: int, *, num_rounds: int, looked_up: bool = False) -> None:
    """Add rounds of which each accepted so many of four tokens."""
    asked = 0 if looked_up else 4
    for _ in range(num_rounds):
        pacer.note([row], 1, Round(asked, [4], [4], [num_accepted], 0.0, 0.4, 1.0, looked_up=looked_up))


def test_tokens_are_looked_up_as_long_as_they_are_kept() -> None:
    pacer, row, other = Pacer(), new_row(), new_row()
    assert pacer.num_looked_up([row], [4], 1) == 0, "nothing is known of the costs"
    for _ in range(4):
        pacer.note([row], 1, Round(0, [0], [0], [0], 0.0, 0.0, 1.0))
    known(pacer, row, 2, num_rounds=20)
    before = pacer.acceptance(row)
    assert pacer.num_looked_up([row], [4], 1) == 4
    assert pacer.num_looked_up([row], [2], 1) == 2
    known(pacer, row, 4, num_rounds=5, looked_up=True)
    assert pacer.num_looked_up([row], [4], 1) == 4
    known(pacer, row, 0, num_rounds=30, looked_up=True)
    assert pacer.num_looked_up([row], [4], 1) == 0
    assert pacer.num_looked_up([other], [4], 1) == 4, "another text may repeat itself"
    assert pacer.acceptance(row) == before, "it says nothing about the draft model"
    pacer.forget()
    assert pacer.num_looked_up([row], [4], 1) == 4

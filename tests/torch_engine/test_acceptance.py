"""Relaxed acceptance: what each rule keeps, what follows a rejected token, and what is reported as relaxed."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given
from hypothesis import strategies as st
from tiny_models import (
    generate,
    llama_config,
    make_model,
    make_network,
    make_tokenizer,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)
from torch import Tensor

from stepspec.engines.protocol import (
    Acceptance,
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verify,
    collect,
)
from stepspec.engines.torch_engine import decode
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.relaxation import CONTROL, DIGIT, PLAIN, token_kinds
from stepspec.engines.torch_engine.sampling import (
    ACCEPT,
    RESAMPLE,
    Decision,
    distributions,
    residual,
    samplers,
    seed_key,
    uniform,
)
from stepspec.errors import UsageError

PROMPT = random_ids(12, seed=3)
CPU = torch.device("cpu")
SIZE = 6
NEAR = 1e-4  # values this near to a bound may be on either side by rounding
RULES = st.one_of(
    st.just(Acceptance()),
    st.builds(Acceptance, st.sampled_from(["ratio", "typical"]), st.floats(0.02, 0.9), exact_digits=st.booleans()),
    st.builds(
        Acceptance, st.just("fly"), window=st.integers(1, 4), entropy=st.floats(0, 0.9), exact_digits=st.booleans()
    ),
)
SAMPLINGS = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling,
        st.sampled_from([0.5, 1.0, 1.5]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 2, 4]),
        min_p=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 9999),
    ),
)
# Probabilities that are at least a fifth apart, so that few of them are near a bound, or 0.
WEIGHTS = st.lists(st.integers(-8, 8), min_size=SIZE, max_size=SIZE, unique=True).map(
    lambda powers: [1.25**power if power > -7 else 0.0 for power in powers]
)


@dataclass
class Row:
    """A row of a round: its settings, and for each drafted position the target's weights and the draft's."""

    rule: Acceptance
    sampling: Sampling
    target: list[list[float]]  # one position beyond the drafted ones
    draft: list[list[float]]
    tokens: list[int]


@st.composite
def rounds(draw: st.DrawFn) -> list[Row]:
    """Return the rows of a round of up to 5 drafted tokens."""
    rows = list[Row]()
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 5))
        target = [draw(WEIGHTS) for _ in range(count + 1)]
        # Most drafted tokens are likely ones, so that runs of accepted tokens are long.
        orders = [sorted(range(SIZE), key=lambda token, weights=weights: -weights[token]) for weights in target]
        tokens = [order[draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5]))] for order in orders[:count]]
        rows.append(Row(draw(RULES), draw(SAMPLINGS), target, [draw(WEIGHTS) for _ in range(count)], tokens))
    return rows


def decided(rows: Sequence[Row], kinds: Sequence[int], *, sampled: bool) -> Decision:
    """Return what `decide` says. `sampled`: whether the draft has distributions."""
    width = max(len(row.tokens) for row in rows)
    blank = [1.0] * SIZE
    logits = torch.tensor([[*row.target, *[blank] * (width + 1 - len(row.target))] for row in rows]).log()
    q = torch.tensor([[*row.draft, *[blank] * (width - len(row.draft))] for row in rows]).reshape(
        len(rows), width, SIZE
    )
    tokens = torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows], dtype=torch.long)
    counts = [len(row.tokens) for row in rows]
    draft = Draft(tokens.reshape(len(rows), width), counts, q / q.sum(-1, keepdim=True) if sampled and width else None)
    settings = [row.sampling for row in rows]
    how = samplers(settings, SIZE, CPU, [row.rule for row in rows], torch.tensor(kinds, dtype=torch.int8))
    first = torch.full((len(rows),), 7)
    return decode.decide(logits, draft, torch.tensor(counts), first, how)


def normalized(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def slow_keeps(row: Row, place: int, accepted: Sequence[bool], kinds: Sequence[int], p: Sequence[float]) -> bool:
    """Return whether the row's rule keeps a drafted token that the exact rule rejects, by the words of `Acceptance`.

    `p`: the distribution that the target samples from.
    """
    rule, token, chances = row.rule, row.tokens[place], normalized(row.target[place])
    favorite = chances.index(max(chances))
    never = {kind for kind in (DIGIT, CONTROL) if kind == CONTROL or rule.exact_digits}
    impossible = chances[token] == 0 or (row.sampling.temperature > 0 and p[token] == 0)
    if impossible or {kinds[token], kinds[favorite]} & never:
        return False
    if rule.rule == "ratio":
        return above(chances[token] / max(chances), rule.threshold)
    if rule.rule == "typical":
        assert rule.threshold is not None
        entropy = entropy_of(chances)
        return above(chances[token], min(rule.threshold, rule.threshold**0.5 * math.exp(-entropy)))
    if rule.rule == "fly":
        assert rule.window is not None
        following = accepted[place + 1 : place + 1 + rule.window]
        undecided = above(entropy_of(sorted(chances)[-3:]), rule.entropy)
        return undecided and len(following) == rule.window and all(following)
    return False


def entropy_of(chances: Sequence[float]) -> float:
    return -sum(chance * math.log(chance) for chance in chances if chance > 0)


def above(value: float, bound: float | None) -> bool:
    assert bound is not None
    if currently_in_test_context():
        assume(abs(value - bound) > NEAR)
    return value >= bound


def slow_decision(row: Row, kinds: Sequence[int], *, sampled: bool) -> tuple[int, int, list[bool]]:
    """Return how many tokens stand, the following token and which of those that stand are relaxed, for a row alone."""
    count = len(row.tokens)
    how = samplers([row.sampling], SIZE, CPU)
    p = distributions(torch.tensor([row.target]).log(), how)[0]
    positions = torch.arange(7, 8 + count)[None]
    key = torch.tensor([seed_key(row.sampling.seed)])
    noise, resample_noise = (uniform(key, positions, purpose)[0].tolist() for purpose in (ACCEPT, RESAMPLE))

    def pick(distribution: Tensor, number: float) -> int:
        reached = distribution.double().cumsum(0)
        assume(bool(((reached - number).abs() > NEAR).all()))
        return int((reached <= number).sum())

    greedy = row.sampling.temperature == 0
    own = [int(p[place].argmax()) if greedy else pick(p[place], resample_noise[place]) for place in range(count + 1)]
    accepted, q = list[bool](), [torch.tensor(normalized(weights)) for weights in row.draft]
    for place, token in enumerate(row.tokens):
        if sampled and not greedy:
            product = noise[place] * float(q[place][token])
            assume(abs(product - float(p[place][token])) > NEAR)
            accepted.append(product < float(p[place][token]))
        else:
            accepted.append(token == own[place])
    kept = [exact or slow_keeps(row, place, accepted, kinds, p[place].tolist()) for place, exact in enumerate(accepted)]
    num_kept = kept.index(False) if False in kept else count
    following = own[num_kept]
    if sampled and not greedy and num_kept < count:
        following = pick(residual(p[num_kept], q[num_kept]), resample_noise[num_kept])
    return num_kept, following, [not exact for exact in accepted[:num_kept]]


@given(rounds(), st.lists(st.sampled_from([PLAIN, PLAIN, PLAIN, DIGIT, CONTROL]), min_size=SIZE, max_size=SIZE))
def test_rows_of_all_rules_are_decided_as_in_words(rows: list[Row], kinds: list[int]) -> None:
    """Each row alone, one token at a time, by the rules' definition and the same random numbers."""
    greedy_only = all(row.sampling.temperature == 0 for row in rows)
    for sampled in (False,) if greedy_only else (False, True):
        # A greedy row of a sampled draft has distributions of one token.
        drafts = [
            replace(row, draft=[[1e-9 + (token == each) for token in range(SIZE)] for each in row.tokens])
            if row.sampling.temperature == 0
            else row
            for row in rows
        ]
        found = decided(drafts, kinds, sampled=sampled)
        for index, row in enumerate(drafts):
            num_kept, following, relaxed = slow_decision(row, kinds, sampled=sampled)
            assert (int(found.num_kept[index]), int(found.following[index])) == (num_kept, following)
            flags = [False] * num_kept if found.relaxed is None else found.relaxed[index, :num_kept].tolist()
            assert flags == relaxed
            if found.relaxed is not None:
                assert not found.relaxed[index, num_kept:][:1].any(), "no token is relaxed where one is rejected"


def test_fly_looks_at_the_window_behind_each_token_and_at_nothing_else() -> None:
    """All patterns of agreement of up to five tokens, with every window."""
    weights = [4.0, 3.0, 2.0, 1.0, 0.0, 0.0]
    cases = [
        (agreed, window)
        for count in range(1, 6)
        for agreed in product([True, False], repeat=count)
        for window in range(1, 6)
    ]
    rows = [
        Row(
            Acceptance("fly", window=window, entropy=0.9),
            Sampling(),
            [weights] * (len(agreed) + 1),
            [[1.0] * SIZE] * len(agreed),
            [0 if each else 1 for each in agreed],
        )
        for agreed, window in cases
    ]
    found = decided(rows, [PLAIN] * SIZE, sampled=False)
    assert found.relaxed is not None
    for index, (agreed, window) in enumerate(cases):
        kept = [
            each or (place + window < len(agreed) and all(agreed[place + 1 : place + 1 + window]))
            for place, each in enumerate(agreed)
        ]
        num_kept = [*kept, False].index(False)
        assert int(found.num_kept[index]) == num_kept
        assert found.relaxed[index, :num_kept].tolist() == [not each for each in agreed[:num_kept]]


GRID = 400


def enumerated(row: Row, kinds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the distribution of the first token of a round, and which drafted tokens are relaxed, by enumeration.

    The first drafted token takes each value, and its random numbers every value of a grid. The tokens behind it always
    agree with the target.
    """
    spread = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    outcome, relaxed = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.bool)
    for token, chance in enumerate(normalized(row.draft[0])):
        each = replace(row, tokens=[token, *row.tokens[1:]])
        for vary in (ACCEPT, RESAMPLE):
            # Where the token is rejected, its replacement depends on the other number alone.
            def numbers(keys: Tensor, positions: Tensor, purpose: int, vary: int = vary) -> Tensor:
                found = torch.full((GRID, positions.shape[-1]), 1e-9, dtype=torch.float64)
                found[:, 0] = spread if purpose == vary else 1 - 2**-53
                return found

            with patch.object(decode, "uniform", numbers):
                found = decided([each] * GRID, kinds, sampled=True)
            stands = found.num_kept > 0
            if vary == ACCEPT:
                kept = float(stands.double().mean())
                outcome[token] += chance * kept
                relaxed[token] = found.relaxed is not None and bool(found.relaxed[:, 0].any())
            elif kept < 1:
                assert not stands.any()
                outcome += chance * (1 - kept) * torch.bincount(found.following, minlength=SIZE) / GRID
    return outcome, relaxed


TRUNCATIONS = [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.7), Sampling(1.3, min_p=0.4)]


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=["plain", "cold", "top-k", "top-p", "min-p"])
@pytest.mark.parametrize(
    "rule",
    [
        Acceptance(),
        Acceptance("ratio", 0.3),
        Acceptance("typical", 0.15, exact_digits=True),
        Acceptance("fly", window=2, entropy=0.8),
    ],
    ids=lambda rule: rule.rule,
)
def test_a_distribution_differs_from_the_target_s_by_what_is_relaxed(rule: Acceptance, sampling: Sampling) -> None:
    """The distance is the sum of (q - p)+ over what is relaxed; all else is as under the exact rule."""
    target, draft = [9.0, 5.0, 4.0, 2.0, 1.0, 0.2], [1.0, 7.0, 4.0, 6.0, 3.0, 1.0]
    sure = [1e-9, 1.0, 1e-9, 1e-9, 1e-9, 1e-9]
    row = Row(rule, sampling, [target, sure, sure, sure], [draft, sure, sure], [0, 1, 1])
    kinds = [PLAIN, PLAIN, CONTROL, PLAIN, DIGIT, PLAIN]
    p = distributions(torch.tensor([[target]]).log(), samplers([sampling], SIZE, CPU))[0, 0].double()
    q = torch.tensor(normalized(draft), dtype=torch.float64)
    outcome, relaxed = enumerated(row, kinds)
    expected = torch.tensor(
        [
            float(q[token] > p[token])
            and slow_keeps(replace(row, tokens=[token, 1, 1]), 0, [False, True, True], kinds, p.tolist())
            for token in range(SIZE)
        ]
    ).bool()
    assert relaxed.tolist() == expected.tolist()
    excess = (q - p).clamp(min=0)
    accepted = torch.minimum(p, q)
    exact = accepted + excess * expected + (excess * ~expected).sum() * residual(p, q)
    assert (outcome - exact).abs().max() < 2 * SIZE / GRID
    distance = 0.5 * (exact - p).abs().sum()
    assert float(distance) == pytest.approx(float((excess * expected).sum()), abs=1e-6)
    assert bool(expected.any()) != rule.is_exact


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.anyio
async def test_relaxed_tokens_are_those_that_the_target_would_not_write(drafter: str, sampling: Sampling) -> None:
    network = make_network(llama_config())
    prompt = PROMPT + PROMPT + PROMPT[:6]
    exact, loose = Drafting(drafter, 4), Drafting(drafter, 4, Acceptance("ratio", 1e-3))
    async with serving(make_model(network), make_model(noisy_copy(network, 0.3))) as engine:
        plain = await generate(engine, prompt, 60, sampling=sampling, drafting=exact)
        found = await generate(engine, prompt, 60, sampling=sampling, drafting=loose)
        check = await engine.verify(Verify(TokenBuffer(prompt), found.ids, sampling=sampling))
        ends = {found.ids[place - 1] for place in (found.relaxed or ())[-6:]}  # often in the middle of a draft
        stops = [Stop(60, token_ids=frozenset({id})) for id in ends]
        cut = [await collect(engine.generate(Generate(TokenBuffer(prompt), sampling, each, loose))) for each in stops]
    assert found.relaxed
    assert plain.relaxed == ()
    assert found.accepted / found.drafted > plain.accepted / plain.drafted
    assert sampling.temperature > 0 or list(plain.ids) == slow_greedy(network, prompt, 60)
    assert check.choices is not None
    if sampling.temperature == 0 or drafter == "prompt-lookup":  # else the exact rule accepts other tokens, too
        differing = [place for place, id in enumerate(found.ids) if id != check.choices[place]]
        assert list(found.relaxed) == differing
    for each in cut:  # no token behind the end is reported
        assert each.ids == found.ids[: len(each.ids)]
        assert each.relaxed == tuple(place for place in found.relaxed if place < len(each.ids))


@pytest.mark.anyio
async def test_a_relaxed_token_is_as_likely_as_the_rule_says() -> None:
    network = make_network(llama_config())
    drafting = Drafting("draft-model", 4, Acceptance("ratio", 0.5))
    async with serving(make_model(network), make_model(noisy_copy(network, 0.2))) as engine:
        found = await generate(engine, PROMPT, 80, drafting=drafting)
    assert found.relaxed
    logits = slow_logits(network, [*PROMPT, *found.ids])[len(PROMPT) - 1 :]
    for place, id in enumerate(found.ids):
        share = float((logits[place, id] - logits[place].max()).exp())
        assert share >= 0.5 - 1e-3
        assert (share == 1) == (place not in found.relaxed)


@pytest.mark.anyio
async def test_rows_with_different_rules_write_the_same_alone_and_together() -> None:
    rules = [Acceptance(), Acceptance("ratio", 0.1), Acceptance("typical", 0.1), Acceptance("fly", window=1, entropy=0)]
    calls = [
        (random_ids(12, seed=number), Sampling(temperature, seed=number), Drafting("draft-model", 4, rule))
        for number, (rule, temperature) in enumerate((rule, heat) for rule in rules for heat in (0.0, 1.0))
    ]
    network = make_network(llama_config())
    async with serving(make_model(network), make_model(noisy_copy(network, 0.2))) as engine:

        async def run(prompt: list[int], sampling: Sampling, drafting: Drafting) -> TokenChunk:
            return await generate(engine, prompt, 30, sampling=sampling, drafting=drafting)

        alone = [await run(*call) for call in calls]
        together = await asyncio.gather(*(run(*call) for call in calls))
    assert [(each.ids, each.relaxed) for each in alone] == [(each.ids, each.relaxed) for each in together]
    assert [bool(each.relaxed) for each in together] == [False] * 2 + [True] * 6


@pytest.mark.anyio
async def test_special_tokens_are_never_relaxed() -> None:
    network = make_network(llama_config())
    drafting = Drafting("draft-model", 4, Acceptance("ratio", 1e-6))
    ends = frozenset(range(100, 130))
    async with serving(make_model(network), make_model(noisy_copy(network, 0.5)), ends) as engine:
        texts = [await generate(engine, random_ids(12, seed=seed), 40, drafting=drafting) for seed in range(4)]
    assert any(each.relaxed for each in texts)
    assert all(each.ids[place] not in ends for each in texts for place in each.relaxed or ())


def test_kinds_of_tokens_are_read_from_the_tokenizer() -> None:
    tokenizer = make_tokenizer(8, frozenset({2}))
    tokenizer.piece = lambda id: {3: " 12", 4: "x²", 5: "½"}.get(id, "a")  # type: ignore[method-assign]
    assert token_kinds(tokenizer, 10, CPU).tolist() == [0, 0, CONTROL, DIGIT, DIGIT, 0, 0, 0, CONTROL, CONTROL]


def test_exact_rows_have_no_rules_on_the_device() -> None:
    assert samplers([Sampling()], 4, CPU, [Acceptance()], torch.zeros(4, dtype=torch.int8)).relaxation is None
    mixed = samplers([Sampling()] * 2, 4, CPU, [Acceptance(), Acceptance("ratio", 0.1)], torch.zeros(4).char())
    assert mixed.relaxation is not None
    assert (mixed.relaxation.typical, mixed.relaxation.fly) == (None, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_tokens": 65}, "between 0 and 64"),
        ({"acceptance": Acceptance("fly", window=4, entropy=0.3), "num_tokens": 4}, "more than 4 drafted tokens"),
        ({"acceptance": Acceptance("ratio", 0.1), "drafter": "none"}, "'ratio' needs a drafter"),
    ],
    ids=["number", "window", "no drafter"],
)
def test_a_drafting_without_effect_or_out_of_range_is_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Drafting(**{"drafter": "draft-model"} | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "ratio", "threshold": 0.0}, "above 0"),
        ({"rule": "typical", "threshold": 1.5}, "at most 1"),
        ({"rule": "ratio"}, "needs threshold"),
        ({"rule": "fly", "window": 0, "entropy": 0.3}, "between 1 and 63"),
        ({"rule": "fly", "window": 6, "entropy": math.inf}, "at least 0"),
        ({"rule": "fly", "window": 6, "entropy": 0.3, "threshold": 0.1}, "does not use threshold"),
        ({"exact_digits": True}, "relaxes no token"),
    ],
    ids=str,
)
def test_a_rule_with_wrong_settings_is_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Acceptance(**values)  # type: ignore[arg-type]

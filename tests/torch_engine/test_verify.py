"""`verify` equals plain passes of the model and leaves the cache right for the next call."""

from collections.abc import Sequence

import pytest
from tiny_models import (
    CONTEXT,
    DRAFTED,
    FAMILIES,
    CountingModel,
    generate,
    make_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import Probe, Sampling, TokenBuffer, Verification, Verify
from stepspec.errors import ContextError, UsageError

pytestmark = pytest.mark.anyio

ROUNDING = 2e-4
PROMPT, STEP = random_ids(12, 1), random_ids(9, 2)
PROBES = [
    Probe(tuple(random_ids(4, 3)), (0, 7, 21)),
    Probe(tuple(random_ids(1, 4)), (5,)),
    Probe(tuple(random_ids(6, 5)), tuple(range(10, 20))),
]
EARLIER = [Probe(tuple(random_ids(3, 6)), (1, 2), 0), Probe((), (3,), 4), Probe(tuple(random_ids(2, 7)), (4,), 7)]
"""Probes that leave the step before its end."""


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_network(make_config(request.param))


def slow_verification(
    network: PreTrainedModel, prompt: Sequence[int], step: Sequence[int], probes: Sequence[Probe]
) -> Verification:
    """Compute a verification with one plain pass for the step and one for each probe."""
    rows = slow_logits(network, [*prompt, *step])[len(prompt) - 1 :].log_softmax(-1)
    ends = [slow_logits(network, [*prompt, *probe.after(step)])[-1].log_softmax(-1) for probe in probes]
    return Verification(
        logprobs=tuple(rows[index, token].item() for index, token in enumerate(step)),
        choices=tuple(row.argmax().item() for row in rows[:-1]),
        next_choice=int(rows[-1].argmax()),
        probe_logprobs=tuple(
            tuple(end[label].item() for label in probe.labels) for end, probe in zip(ends, probes, strict=True)
        ),
        probe_choices=tuple(int(end.argmax()) for end in ends),
    )


def assert_same(actual: Verification, expected: Verification) -> None:
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)
    assert (actual.choices, actual.next_choice) == (expected.choices, expected.next_choice)
    assert actual.probe_choices == expected.probe_choices
    assert len(actual.probe_logprobs) == len(expected.probe_logprobs)
    for mine, theirs in zip(actual.probe_logprobs, expected.probe_logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=ROUNDING)


@pytest.mark.parametrize("probes", [PROBES, PROBES[:1], []], ids=["three probes", "a probe", "no probe"])
@pytest.mark.parametrize("step", [STEP, STEP[:1], []], ids=["a step", "a token", "nothing"])
async def test_a_verification_equals_plain_passes_of_the_model(
    network: PreTrainedModel, step: list[int], probes: list[Probe]
) -> None:
    async with serving(make_model(network)) as engine:
        actual = await engine.verify(Verify(TokenBuffer(PROMPT), step, probes))
    assert_same(actual, slow_verification(network, PROMPT, step, probes))
    assert actual.passes == 1


async def test_a_prompt_of_one_token_can_be_verified(network: PreTrainedModel) -> None:
    async with serving(make_model(network)) as engine:
        actual = await engine.verify(Verify(TokenBuffer([3]), STEP, PROBES))
    assert_same(actual, slow_verification(network, [3], STEP, PROBES))


async def test_without_scores_a_continuation_that_was_written_is_not_read_again(network: PreTrainedModel) -> None:
    """As for a question about steps that are not committed."""
    async with serving(make_model(network)) as engine:
        buffer = TokenBuffer(PROMPT)
        written = [*(await generate(engine, buffer, 9)).ids]
        expected = slow_verification(network, PROMPT, written, PROBES)
        for probes in (PROBES, EARLIER):
            actual = await engine.verify(Verify(buffer, written, probes, scores=False))
            again = slow_verification(network, PROMPT, written, probes)
            assert (actual.logprobs, actual.choices, actual.next_choice) == (None, None, expected.next_choice)
            assert actual.probe_choices == again.probe_choices
        assert (await engine.verify(Verify(buffer, written, PROBES, scores=False))).cached == len(PROMPT) + 8


async def test_probes_can_be_anywhere_in_a_step(network: PreTrainedModel) -> None:
    probes = [EARLIER[0], PROBES[0], *EARLIER[1:]]
    async with serving(make_model(network)) as engine:
        actual = await engine.verify(Verify(TokenBuffer(PROMPT), STEP, probes))
    assert_same(actual, slow_verification(network, PROMPT, STEP, probes))
    assert actual.passes == 1


async def test_probes_together_equal_each_probe_alone(network: PreTrainedModel) -> None:
    async with serving(make_model(network)) as engine:
        together = await engine.verify(Verify(TokenBuffer(PROMPT), STEP, PROBES))
        for index, probe in enumerate(PROBES):
            alone = await engine.verify(Verify(TokenBuffer(PROMPT), STEP, [probe]))
            assert alone.probe_choices == together.probe_choices[index : index + 1]
            assert alone.probe_logprobs[0] == pytest.approx(together.probe_logprobs[index], abs=ROUNDING)


async def test_an_empty_probe_gives_the_distribution_after_the_continuation(network: PreTrainedModel) -> None:
    probes = [PROBES[0], Probe((), (1, 2)), PROBES[1], Probe((), (3,))]
    async with serving(make_model(network)) as engine:
        actual = await engine.verify(Verify(TokenBuffer(PROMPT), STEP, probes))
    assert_same(actual, slow_verification(network, PROMPT, STEP, probes))
    assert actual.probe_choices[1] == actual.next_choice


async def test_an_accepted_step_is_not_read_again_by_a_verification(network: PreTrainedModel) -> None:
    model, buffer = CountingModel.of(network), TokenBuffer(PROMPT)
    async with serving(model) as engine:
        with model.counted() as reads:
            await engine.verify(Verify(buffer, STEP, PROBES))
        assert reads == [len(PROMPT) + len(STEP) + sum(len(probe.ids) for probe in PROBES)]
        buffer.append(STEP)
        following = random_ids(5, 6)
        with model.counted() as reads:
            actual = await engine.verify(Verify(buffer, following))
        assert reads == [1 + len(following)], (
            "the pass must read the new ids and, for the next distribution, the last id"
        )
    assert_same(actual, slow_verification(network, PROMPT + STEP, following, []))


@pytest.mark.parametrize("drafted", [False, True])
async def test_an_accepted_step_is_not_read_again_by_a_generation(network: PreTrainedModel, drafted: bool) -> None:
    model, buffer = CountingModel.of(network), TokenBuffer(PROMPT)
    drafting = {"drafting": DRAFTED} if drafted else {}
    async with serving(model, make_model(noisy_copy(network, 0.1))) as engine:
        await engine.verify(Verify(buffer, STEP, PROBES))
        buffer.append(STEP)
        with model.counted() as reads:
            chunk = await generate(engine, buffer, 10, **drafting)
        assert sum(reads) == chunk.passes + chunk.drafted
    assert list(chunk.ids) == slow_greedy(network, PROMPT + STEP, 10)


async def test_a_generated_step_is_not_read_again_by_a_verification(network: PreTrainedModel) -> None:
    model, buffer = CountingModel.of(network), TokenBuffer(PROMPT)
    async with serving(model, make_model(noisy_copy(network, 0.1))) as engine:
        chunk = await generate(engine, buffer, 10, drafting=DRAFTED)
        buffer.append(chunk.ids)
        with model.counted() as reads:
            actual = await engine.verify(Verify(buffer, STEP))
        assert reads == [1 + len(STEP)]
    assert_same(actual, slow_verification(network, [*PROMPT, *chunk.ids], STEP, []))


async def test_a_rejected_step_is_dropped_except_for_its_committed_prefix(network: PreTrainedModel) -> None:
    model, buffer = CountingModel.of(network), TokenBuffer(PROMPT)
    async with serving(model) as engine:
        await engine.verify(Verify(buffer, STEP, PROBES))
        with model.counted() as reads:
            rejected = await engine.verify(Verify(buffer, STEP[::-1]))
        assert reads == [1 + len(STEP)]
        assert_same(rejected, slow_verification(network, PROMPT, STEP[::-1], []))

        await engine.verify(Verify(buffer, STEP))
        other = [(token + 1) % 48 for token in STEP[4:6]]
        buffer.append([*STEP[:4], *other])
        with model.counted() as reads:
            chunk = await generate(engine, buffer, 8)
        assert reads[0] == len(other)
    assert list(chunk.ids) == slow_greedy(network, [*PROMPT, *STEP[:4], *other], 8)


async def test_a_long_text_of_steps_is_read_once(network: PreTrainedModel) -> None:
    """The number of ids that a call reads does not grow with the text."""
    model, buffer = CountingModel.of(network), TokenBuffer(PROMPT)
    async with serving(model, make_model(noisy_copy(network, 0.1))) as engine:
        for number in range(12):
            step = random_ids(6, 100 + number)
            with model.counted() as reads:
                await engine.verify(Verify(buffer, step, PROBES[:1]))
            assert reads[0] <= 1 + len(step) + len(PROBES[0].ids) or number == 0
            if number % 3 == 0:
                step = list((await generate(engine, buffer, 5, drafting=DRAFTED)).ids)
            buffer.append(step)
            model.cache.check()
        last = await engine.verify(Verify(buffer, STEP))
    assert_same(last, slow_verification(network, buffer.since(0), STEP, []))


async def test_prompt_and_continuation_and_probes_must_fit_the_context() -> None:
    network = make_network(make_config("llama"))
    room = CONTEXT - len(PROMPT) - len(PROBES[0].ids)
    async with serving(make_model(network)) as engine:
        fits = random_ids(room, 8)
        assert_same(
            await engine.verify(Verify(TokenBuffer(PROMPT), fits, PROBES[:1])),
            slow_verification(network, PROMPT, fits, PROBES[:1]),
        )
        with pytest.raises(ContextError, match="context of 512"):
            await engine.verify(Verify(TokenBuffer(PROMPT), [*fits, 0], PROBES[:1]))
        with pytest.raises(ContextError, match="Shorten the prompt"):
            await generate(engine, random_ids(CONTEXT), 1)
        assert len((await generate(engine, random_ids(CONTEXT - 1), 1)).ids) == 1


async def test_an_empty_prompt_is_rejected() -> None:
    async with serving(make_model(make_network(make_config("llama")))) as engine:
        with pytest.raises(UsageError, match="prompt is empty"):
            await engine.verify(Verify(TokenBuffer([]), STEP))
        with pytest.raises(UsageError, match="prompt is empty"):
            await generate(engine, [], 3)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=3),
        Sampling(0.8, top_p=0.9, seed=4),
        Sampling(1.0, top_k=5, allowed=frozenset(range(40)), seed=5),
        Sampling(logit_bias=((5, 3.0), (7, 2.0))),
    ],
    ids=["plain", "top-p", "allowed", "biased"],
)
@pytest.mark.parametrize("scores", [True, False])
async def test_sampled_choices_are_what_generate_writes(
    network: PreTrainedModel, sampling: Sampling, scores: bool
) -> None:
    async with serving(make_model(network)) as engine:
        written = (await generate(engine, PROMPT, 12, sampling=sampling)).ids
        actual = await engine.verify(Verify(TokenBuffer(PROMPT), written[:-1], PROBES[:1], scores, sampling))
        greedy = await engine.verify(Verify(TokenBuffer(PROMPT), written[:-1], PROBES[:1], scores))
    assert actual.next_choice == written[-1]
    assert actual.choices == (written[:-1] if scores else None)
    assert actual.probe_choices == greedy.probe_choices, "a probe is answered by the most likely token"
    assert actual.logprobs == greedy.logprobs

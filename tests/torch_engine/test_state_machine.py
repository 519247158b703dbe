"""Random sequences of calls on a few texts, compared with a model without a cache."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tiny_models import llama_config, make_model, make_network, make_tokenizer, noisy_copy, slow_logits

from stepspec.engines.protocol import (
    Drafting,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verification,
    Verify,
    collect,
)
from stepspec.engines.torch_engine import cache, slots
from stepspec.engines.torch_engine.engine import TorchEngine

T = TypeVar("T")

NETWORK = make_network(llama_config())
DRAFT = noisy_copy(NETWORK, 0.1)
SEEN: dict[tuple[int, ...], torch.Tensor] = {}

IDS = st.integers(0, 5)  # few ids, so that texts share prefixes
DRAFTINGS = st.builds(
    Drafting,
    st.sampled_from(["none", "draft-model", "prompt-lookup", "suffix"]),
    st.sampled_from([None, 1, 3, 5]),
)


def logits_after(ids: list[int]) -> torch.Tensor:
    """Return the network's own logits after a text, [V]. Results are cached."""
    if tuple(ids) not in SEEN:
        for length, row in enumerate(slow_logits(NETWORK, ids), 1):
            SEEN[tuple(ids[:length])] = row
    return SEEN[tuple(ids)]


def greedy_after(ids: list[int], num_tokens: int) -> list[int]:
    """Return the greedy text of the network alone."""
    text = list(ids)
    for _ in range(num_tokens):
        text.append(int(logits_after(text).argmax()))
    return text[len(ids) :]


class Histories(RuleBasedStateMachine):
    """Texts that grow, fork and end on one engine."""

    texts = Bundle("texts")
    by_slot = False

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model, self.drafter = (make_model(network, by_slot=self.by_slot) for network in (NETWORK, DRAFT))
        self.loop = asyncio.new_event_loop()
        self.engine = TorchEngine(self.model, make_tokenizer(), self.drafter)

    def teardown(self) -> None:
        self.wait(self.engine.aclose())
        self.loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def generation(self, text: TokenBuffer, num_tokens: int, drafting: Drafting) -> Coroutine[Any, Any, TokenChunk]:
        return collect(self.engine.generate(Generate(text, Sampling(), Stop(num_tokens), drafting)))

    @rule(target=texts, ids=st.lists(IDS, min_size=1, max_size=40))
    def join(self, ids: list[int]) -> TokenBuffer:
        return TokenBuffer(ids)

    @rule(target=texts, text=texts, more=st.lists(IDS, max_size=3))
    def fork(self, text: TokenBuffer, more: list[int]) -> TokenBuffer:
        return TokenBuffer([*text.since(0), *more])

    @rule(text=consumes(texts))
    def finish(self, text: TokenBuffer) -> None:
        """Nobody holds the text any more."""

    @rule(text=texts, num_tokens=st.integers(1, 12), drafting=DRAFTINGS, share=st.floats(0, 1))
    def generate(self, text: TokenBuffer, num_tokens: int, drafting: Drafting, share: float) -> None:
        """Some of what is written is committed, the rest rejected."""
        chunk = self.wait(self.generation(text, num_tokens, drafting))
        assert list(chunk.ids) == greedy_after(text.since(0), num_tokens)
        text.append(chunk.ids[: round(share * num_tokens)])

    @rule(several=st.lists(texts, min_size=2, max_size=5), num_tokens=st.integers(1, 8), drafting=DRAFTINGS)
    def generate_together(self, several: list[TokenBuffer], num_tokens: int, drafting: Drafting) -> None:
        async def together() -> list[TokenChunk]:
            return await asyncio.gather(*(self.generation(text, num_tokens, drafting) for text in several))

        for text, chunk in zip(several, self.wait(together()), strict=True):
            assert list(chunk.ids) == greedy_after(text.since(0), num_tokens)

    @rule(text=texts, num_tokens=st.integers(1, 6), drafting=DRAFTINGS, ids=st.lists(IDS, min_size=1, max_size=9))
    def grow_while_calls_wait(self, text: TokenBuffer, num_tokens: int, drafting: Drafting, ids: list[int]) -> None:
        """Calls answer for the text as it was when they were made."""
        before = text.since(0)

        async def together() -> tuple[TokenChunk, Verification]:
            calls = asyncio.gather(self.generation(text, num_tokens, drafting), self.engine.verify(Verify(text, ids)))
            await asyncio.sleep(0)  # the calls are made
            text.append(ids)
            return await calls

        chunk, verification = self.wait(together())
        assert list(chunk.ids) == greedy_after(before, num_tokens)
        assert verification.next_choice == int(logits_after([*before, *ids]).argmax())

    @rule(text=texts, step=st.lists(IDS, max_size=9), probe=st.lists(IDS, max_size=4), accepted=st.booleans())
    def verify(self, text: TokenBuffer, step: list[int], probe: list[int], accepted: bool) -> None:
        ids = text.since(0)
        probes = (Probe((), (1, 2)), Probe(tuple(probe), (0, 3)))
        verification = self.wait(self.engine.verify(Verify(text, step, probes)))
        distributions = [logits_after([*ids, *step[:length]]).log_softmax(-1) for length in range(len(step) + 1)]
        expected = [float(distribution[token]) for distribution, token in zip(distributions, step, strict=False)]
        assert verification.logprobs == pytest.approx(expected, abs=1e-3)
        assert [*verification.choices, verification.next_choice] == [
            int(distribution.argmax()) for distribution in distributions
        ]
        ends = distributions[-1], logits_after([*ids, *step, *probe]).log_softmax(-1)
        for each, found, distribution in zip(probes, verification.probe_logprobs, ends, strict=True):
            assert found == pytest.approx([float(distribution[label]) for label in each.labels], abs=1e-3)
        if accepted:
            text.append(step)

    @rule(text=texts, drafting=DRAFTINGS, is_read=st.booleans())
    def cancel(self, text: TokenBuffer, drafting: Drafting, is_read: bool) -> None:
        async def begin() -> None:
            chunks = self.engine.generate(Generate(text, Sampling(), Stop(200), drafting))
            if is_read:
                await anext(chunks)
                await chunks.aclose()
                return
            task = asyncio.create_task(collect(chunks))
            await asyncio.sleep(0)
            task.cancel()

        self.wait(begin())

    @invariant()
    def caches_hold_what_they_say(self) -> None:
        def check(_: object) -> None:
            self.model.cache.check()
            self.drafter.cache.check()

        # A call that was cancelled may still be in a pass.
        self.wait(asyncio.to_thread(self.engine._between_turns(check).result))


class HistoriesInLittleMemory(Histories):
    """The same in caches that have room for few texts."""

    capacity = 4

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for module in (cache, slots):
            self.patch.setattr(module, "FIRST_CAPACITY", self.capacity)
        super().__init__()
        self.engine.make_room(3 * 32 * sum(model.position_bytes for model in (self.model, self.drafter)))

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


class HistoriesBySlot(Histories):
    """The same with the passes of a GPU."""

    by_slot = True


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=12)
TestHistoriesInLittleMemory = HistoriesInLittleMemory.TestCase
TestHistoriesInLittleMemory.settings = settings(max_examples=60, stateful_step_count=20)
TestHistoriesBySlot = HistoriesBySlot.TestCase
TestHistoriesBySlot.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.soak
class TestMoreHistories(Histories.TestCase):
    """Longer sequences, different in every run."""

    settings = settings(max_examples=5000, stateful_step_count=30)

"""The slot table: a call reads only what its slot has not read, and slots are reused in the right order."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import llama_config, make_model, make_network, make_tokenizer, noisy_copy, random_ids, slow_logits

from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, collect, group_of
from stepspec.engines.torch_engine.drafters.suffix import MAX_GROUPS
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.engines.torch_engine.slots import Slot, SlotTable, common_prefix


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(make_model(make_network(llama_config())), max_slots=2)


@torch.inference_mode()
def use(table: SlotTable, buffer: TokenBuffer, beyond: list[int] | None = None) -> tuple[Slot, list[int]]:
    """Run one call that reads the unread ids and then `beyond`. Return its slot and the ids that it read."""
    slot = table.acquire(buffer, len(buffer))
    assert slot is not None
    read = table.unread(slot, buffer, len(buffer)) + (beyond or [])
    table.model.extend([slot.index], [read])
    table.remember(slot, buffer, len(buffer), beyond or [])
    table.release(slot)
    table.model.cache.check()
    table.check()
    return slot, read


def test_a_second_call_reads_the_last_id_and_what_is_new(table: SlotTable) -> None:
    buffer = TokenBuffer([1, 2, 3])
    assert use(table, buffer)[1] == [1, 2, 3]
    buffer.append([4, 5])
    assert use(table, buffer)[1] == [4, 5]
    assert use(table, buffer)[1] == [5]


def test_ids_read_beyond_the_buffer_are_not_read_again_once_committed(table: SlotTable) -> None:
    buffer = TokenBuffer([1, 2, 3])
    use(table, buffer, beyond=[4, 5, 6])
    buffer.append([4, 5, 6, 7])
    assert use(table, buffer)[1] == [7]


def test_ids_read_beyond_the_buffer_are_reused_as_far_as_they_are_committed(table: SlotTable) -> None:
    buffer = TokenBuffer([1, 2, 3])
    use(table, buffer, beyond=[4, 5, 6])
    buffer.append([4, 9, 6])
    slot, read = use(table, buffer)
    assert read == [9, 6]
    assert table.model.cache_length(slot.index) == 6


@torch.inference_mode()
def test_of_the_slots_that_follow_a_buffer_the_one_with_most_of_the_text_is_chosen(table: SlotTable) -> None:
    buffer = TokenBuffer([1, 2, 3])
    slots = [table.acquire(buffer, 3) for _ in range(2)]
    for slot, after in zip(slots, ([4, 5], [6, 7]), strict=True):
        assert slot is not None
        table.model.extend([slot.index], [table.unread(slot, buffer, 3, after)])
        table.remember(slot, buffer, 3, after)
        table.release(slot)
    buffer.append([6, 7, 8])
    assert use(table, buffer) == (slots[1], [8])


def test_ids_read_beyond_the_buffer_are_dropped_when_rejected(table: SlotTable) -> None:
    buffer = TokenBuffer([1, 2, 3])
    use(table, buffer, beyond=[4, 5, 6])
    slot, read = use(table, buffer)
    assert read == [3]
    assert table.model.cache_length(slot.index) == 3


def test_the_least_recently_used_slot_is_reused_first(table: SlotTable) -> None:
    first, second, third = (TokenBuffer(random_ids(5, seed)) for seed in range(3))
    use(table, first)
    use(table, second)
    use(table, first)
    slot, read = use(table, third)
    assert read == third.since(0)
    assert use(table, first)[1] == first.since(4), "the first buffer lost its recently used slot"
    again, read = use(table, second)
    assert (again.index, read) == (slot.index, second.since(0))


def test_slots_of_deleted_texts_are_reused_first(table: SlotTable) -> None:
    alive = TokenBuffer(random_ids(5, 9))
    slot = use(table, alive)[0]
    used = [use(table, TokenBuffer(random_ids(5, seed)))[0].index for seed in range(3)]
    gc.collect()
    assert used == [1 - slot.index] * 3
    assert use(table, alive)[1] == alive.since(4)


def test_a_new_text_continues_from_the_longest_prefix_in_any_slot(table: SlotTable) -> None:
    prompt = random_ids(40)
    first = TokenBuffer(prompt)
    slot, _ = use(table, first, beyond=[1, 2, 3])
    second = TokenBuffer([*prompt, 1, 2, 9, 9])
    other, read = use(table, second)
    assert other.index != slot.index, "the first text may continue, so its slot must be copied and not taken over"
    assert read == [9, 9]
    first.append([1, 2, 3, 4])
    assert use(table, first)[1] == [4]


def test_the_slot_of_a_deleted_text_is_taken_over_and_not_copied(table: SlotTable) -> None:
    prompt = random_ids(40)
    slot, _ = use(table, TokenBuffer(prompt))
    gc.collect()
    other, read = use(table, TokenBuffer([*prompt[:30], 47, 46]))
    assert (other.index, read) == (slot.index, [47, 46])


def test_a_copied_prefix_gives_the_same_logits_as_reading_it(table: SlotTable) -> None:
    prompt = random_ids(40)
    first, second = TokenBuffer(prompt), TokenBuffer([*prompt, 5])
    use(table, first)
    slot = table.acquire(second, len(second))
    assert slot is not None
    unread = table.unread(slot, second, len(second))
    with torch.inference_mode():
        (copied,) = table.model.extend([slot.index], [unread])
        fresh = table.model.with_own_cache()
        (expected,) = fresh.extend([0], [second.since(0)], keep=[[40]])
    assert torch.allclose(copied[-1:], expected, atol=1e-5)


def test_a_short_shared_prefix_is_read_again(table: SlotTable) -> None:
    use(table, TokenBuffer([1, 2, 3, 4]))
    assert use(table, TokenBuffer([1, 2, 3, 5]))[1] == [1, 2, 3, 5]


def test_a_busy_slot_is_never_reused(table: SlotTable) -> None:
    buffers = [TokenBuffer([1]), TokenBuffer([2]), TokenBuffer([3])]
    slots = [table.acquire(buffer, len(buffer)) for buffer in buffers]
    assert slots[2] is None
    assert slots[0] is not None
    assert slots[1] is not None
    table.release(slots[1])
    free = table.acquire(buffers[0], len(buffers[0]))
    assert free is slots[1], "a buffer whose own slot is busy does not get the free slot"


def test_an_equal_buffer_is_another_buffer(table: SlotTable) -> None:
    first, second = TokenBuffer([1, 2, 3]), TokenBuffer([1, 2, 3])
    assert use(table, first)[0] is not use(table, second)[0]


@torch.inference_mode()
def test_packed_slots_are_adjacent_and_keep_their_contents(table: SlotTable) -> None:
    table = SlotTable(table.model, max_slots=6)
    buffers = [TokenBuffer(random_ids(9 + index, seed=index)) for index in range(5)]
    slots = [use(table, buffer)[0] for buffer in buffers]
    for chosen in ([0, 1, 2], [0, 4, 2], [3, 1], [4], [2, 3, 0, 1, 4]):
        table.pack([slots[index] for index in chosen])
        indices = [slots[index].index for index in chosen]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert sorted(slot.index for slot in slots) == sorted({slot.index for slot in slots})
        table.model.cache.check()
        table.check()
    for buffer, slot in zip(buffers, slots, strict=True):
        assert use(table, buffer) == (slot, buffer.since(len(buffer) - 1)), "ids are read again"
        table.model.rollback(slot.index, len(buffer) - 1)
        logits = table.model.extend([slot.index], [buffer.since(len(buffer) - 1)])[0]
        expected = slow_logits(make_network(llama_config()), buffer.since(0))[-1:]
        assert torch.allclose(logits, expected, atol=1e-5)


@torch.inference_mode()
def test_packing_after_one_row_ends_moves_one_slot() -> None:
    table = SlotTable(make_model(make_network(llama_config())), max_slots=8)
    slots = [use(table, TokenBuffer(random_ids(5, seed=index)))[0] for index in range(6)]
    running = [slots[0], slots[5], slots[2], slots[3], slots[4]]  # the last row replaces the one that ended
    table.pack(running)
    assert [slot.index for slot in running] == [0, 1, 2, 3, 4]
    assert slots[1].index == 5


def test_forgotten_slots_are_read_again(table: SlotTable) -> None:
    buffer = TokenBuffer(random_ids(30, seed=1))
    use(table, buffer)
    table.forget()
    table.check()
    assert use(table, buffer)[1] == buffer.since(0)


def limited(max_positions: int) -> SlotTable:
    table = SlotTable(make_model(make_network(llama_config())), max_slots=16)
    table.model.cache.max_positions = max_positions
    return table


def num_positions(table: SlotTable) -> int:
    """Return how many positions memory is allocated for."""
    return table.model.cache.num_slots * table.model.cache.capacity


def test_a_long_text_takes_the_memory_of_texts_that_have_ended() -> None:
    """A slot of 256 positions takes as much memory as two of 128, and all slots have the same number."""
    table = limited(8 * 256)
    buffers = [TokenBuffer(random_ids(20, seed=number)) for number in range(12)]
    for buffer in buffers:
        use(table, buffer)
        assert num_positions(table) <= 8 * 256
    assert [use(table, buffer)[1] for buffer in buffers[-3:]] == [buffer.since(19) for buffer in buffers[-3:]]
    long = TokenBuffer(random_ids(500, seed=20))
    use(table, long)
    assert num_positions(table) <= 8 * 256
    assert use(table, long)[1] == long.since(499)


@torch.inference_mode()
def test_after_a_long_text_as_many_short_ones_as_before_run_together() -> None:
    table = limited(4 * 256)
    use(table, TokenBuffer(random_ids(400, seed=1)))
    assert table.model.cache.capacity == 400
    buffers = [TokenBuffer(random_ids(20, seed=number)) for number in range(6)]
    slots: list[Slot] = []
    for number, buffer in enumerate(buffers):
        assert table.has_room(20) == (number < 4)
        if number < 4:
            slot = table.acquire(buffer, 20)
            assert slot is not None
            table.model.extend([slot.index], [table.unread(slot, buffer, 20)])
            slots.append(slot)
    assert num_positions(table) <= 4 * 256
    assert not table.has_room(300), "the others would be as long"
    for slot, buffer in zip(slots, buffers, strict=False):
        table.remember(slot, buffer, 20, [])
        table.release(slot)
    assert table.has_room(300)
    table.check()


@torch.inference_mode()
def test_a_text_that_runs_in_the_last_slot_keeps_no_others() -> None:
    table = limited(16 * 256)
    buffers = [TokenBuffer(random_ids(20, seed=number)) for number in range(16)]
    slots = [table.acquire(buffer, 20) for buffer in buffers]
    for slot, buffer in zip(slots, buffers, strict=True):
        assert slot is not None
        table.model.extend([slot.index], [table.unread(slot, buffer, 20)])
        table.remember(slot, buffer, 20, [])
    for slot in slots[:-1]:
        assert slot is not None
        table.release(slot)
    assert slots[-1] is not None
    assert slots[-1].index == 15
    use(table, TokenBuffer(random_ids(500, seed=20)))
    assert num_positions(table) <= 16 * 256
    assert slots[-1].index == 0
    assert use(table, buffers[-2])[1] == buffers[-2].since(19), "live texts stay, the last used first"


@torch.inference_mode()
def test_texts_that_grow_while_they_run_keep_their_contents_and_drop_those_that_have_ended() -> None:
    table = limited(4 * 256)
    idle, running = TokenBuffer(random_ids(30, seed=1)), TokenBuffer(random_ids(30, seed=2))
    for buffer in (TokenBuffer(random_ids(9, seed=3)), idle):
        use(table, buffer)
    slot = table.acquire(running, 30)
    assert slot is not None
    ids = [*running.since(0), *random_ids(400, seed=4)]
    logits = []
    for start in range(0, len(ids), 43):
        table.pack([slot])
        assert num_positions(table) <= 4 * 256
        logits += table.model.extend([slot.index], [ids[start : start + 43]])[0]
    assert torch.allclose(torch.stack(logits), slow_logits(make_network(llama_config()), ids), atol=1e-4)


@torch.inference_mode()
def test_texts_that_take_more_memory_than_they_may_are_not_copied_for_each_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, copies = limited(8 * 256), list[int]()
    shrink = table.model.cache.shrink
    monkeypatch.setattr(table.model.cache, "shrink", lambda *size: (copies.append(size[0]), shrink(*size)))
    buffers = [TokenBuffer(random_ids(20, seed=number)) for number in range(8)]
    running = [slot for buffer in buffers if (slot := table.acquire(buffer, 20)) is not None]
    table.model.extend([slot.index for slot in running], [buffer.since(0) for buffer in buffers])
    table.model.extend([running[0].index], [random_ids(300, seed=9)])
    while len(running) > 1:
        table.pack(running)
        table.release(running.pop())
    assert copies == [5, 4]
    assert num_positions(table) <= 8 * 256


NETWORK = make_network(llama_config())
GROWING = SlotTable(make_model(NETWORK), max_slots=2)
IDS = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=120)
@given(st.lists(IDS, min_size=2, max_size=2), st.lists(st.tuples(st.integers(0, 1), IDS, IDS, IDS), max_size=8))
@torch.inference_mode()
def test_a_call_reads_its_own_prompt_however_its_buffer_has_grown_since(
    texts: list[list[int]], calls: list[tuple[int, list[int], list[int], list[int]]]
) -> None:
    """A call on either buffer, and on ids after it, is made; then the buffer grows; then the call reads."""
    buffers = [TokenBuffer([5, *ids]) for ids in texts]
    for which, grown, after, beyond in calls:
        buffer = buffers[which]
        prompt = buffer.since(0)
        buffer.append(grown)
        slot = GROWING.acquire(buffer, len(prompt), after)
        assert slot is not None
        read = GROWING.unread(slot, buffer, len(prompt), after)
        assert read == [*prompt, *after][GROWING.model.cache_length(slot.index) :] != []
        logits = GROWING.model.extend([slot.index], [[*read, *beyond]])[0]
        assert torch.allclose(logits, slow_logits(NETWORK, [*prompt, *after, *beyond])[-len(logits) :], atol=1e-4)
        GROWING.remember(slot, buffer, len(prompt), [*after, *beyond])
        GROWING.release(slot)
        GROWING.check()


BASE = random_ids(20, seed=5)
TEXTS = st.builds(lambda cut, tail: [*BASE[:cut], *tail], st.integers(1, 20), st.lists(st.integers(0, 2), max_size=20))
GROUPS = st.sampled_from([None, "a", "b"])


@settings(max_examples=60)
@given(st.lists(st.tuples(GROUPS, TEXTS, IDS, st.booleans()), max_size=8))
@torch.inference_mode()
def test_a_call_finds_no_more_in_the_cache_than_the_texts_of_its_own_group_have(
    calls: list[tuple[str | None, list[int], list[int], bool]],
) -> None:
    table, alive = SlotTable(GROWING.model, max_slots=2), list[TokenBuffer]()
    for slot in range(2):
        table.model.rollback(slot, 0)
    texts: dict[str | None, list[list[int]]] = {None: [], "a": [], "b": []}
    for group, ids, beyond, is_kept in calls:
        buffer = TokenBuffer(ids, group=group)
        if is_kept:
            alive.append(buffer)
        slot, read = use(table, buffer, beyond)
        found = len(ids) + len(beyond) - len(read)
        assert found <= max((common_prefix(ids, text) for text in texts[group]), default=0)
        texts[group].append([*ids, *beyond])
        logits = table.model.with_own_cache().extend([0], [[*ids, *beyond]])[0]
        table.model.rollback(slot.index, len(slot.ids) - 1)
        again = table.model.extend([slot.index], [slot.ids[-1:]])[0]
        assert torch.allclose(again[-1], logits[-1], atol=1e-4), "what the slot held before shows through"


class Engines:
    """Two engines of one model, with suffix drafts: of one, all groups use the same; of the other, one at a time."""

    def __init__(self) -> None:
        draft = noisy_copy(NETWORK, 0.1)
        self.loop = asyncio.new_event_loop()
        self.shared, self.apart = (
            TorchEngine(make_model(NETWORK), make_tokenizer(), make_model(draft)) for _ in range(2)
        )

    def run(
        self, engine: TorchEngine, calls: Sequence[tuple[str | None, list[int], Drafting]]
    ) -> list[tuple[Any, ...]]:
        """Return what a client can see of its calls: ids, cached tokens, passes, drafted and accepted tokens."""

        async def run() -> list[tuple[Any, ...]]:
            await engine.forget()
            # All stay alive: whether a slot is taken over or copied would depend on when the engine's thread drops one.
            prompts = [TokenBuffer(ids, group=group) for group, ids, _ in calls]
            chunks = [
                await collect(engine.generate(Generate(prompt, Sampling(), Stop(8), how)))
                for prompt, (_, _, how) in zip(prompts, calls, strict=True)
            ]
            return [(each.ids, each.cached, each.passes, each.drafted, each.accepted) for each in chunks]

        return self.loop.run_until_complete(run())


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    for engine in (found.shared, found.apart):
        found.loop.run_until_complete(engine.aclose())
    found.loop.close()


DRAFTINGS = st.sampled_from([Drafting(), Drafting("suffix", 3), Drafting("draft-model", 3)])


@settings(max_examples=20)
@given(st.lists(st.tuples(GROUPS, st.sampled_from([BASE, BASE[:18], [*BASE, 1]]), DRAFTINGS), min_size=2, max_size=6))
def test_what_a_client_sees_does_not_depend_on_the_texts_of_other_groups(
    engines: Engines, calls: list[tuple[str | None, list[int], Drafting]]
) -> None:
    together = engines.run(engines.shared, calls)
    for group in (None, "a", "b"):
        own = [call for call in calls if call[0] == group]
        seen = [each for each, call in zip(together, calls, strict=True) if call[0] == group]
        assert engines.run(engines.apart, own) == seen


def test_the_number_of_collections_of_past_outputs_is_bounded(engines: Engines) -> None:
    """Clients choose their salts, so they choose the number of groups."""
    suffix: Any = engines.shared._drafters.get("suffix")
    engines.run(engines.shared, [(str(number), BASE, Drafting("suffix", 3)) for number in range(MAX_GROUPS + 9)])
    assert len(suffix._past) == MAX_GROUPS


def test_a_client_with_many_salts_drops_its_own_past_outputs_alone(engines: Engines) -> None:
    suffix: Any = engines.shared._drafters.get("suffix")
    other = group_of("b", None)
    salted = [(group_of("a", str(number)), BASE, Drafting("suffix", 3)) for number in range(MAX_GROUPS + 9)]
    engines.run(engines.shared, [(other, BASE, Drafting("suffix", 3)), *salted])
    assert len(suffix._past) == MAX_GROUPS
    assert other in suffix._past

"""The scheduler of the engine's thread. Each turn admits calls, reads a chunk of prompts and steps, and runs a round.

Calls join and leave between turns. Long prompts are read in chunks, so they delay generating calls by one chunk at a
time. Chunks of several calls share a pass, both prompts and steps to be judged.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import DrafterName
from stepspec.engines.torch_engine.calls import EngineCall, GenerateCall, Scoring, engine_error, read_verification
from stepspec.engines.torch_engine.decode import Reading, Rounds
from stepspec.engines.torch_engine.drafters import Drafter, Drafters
from stepspec.engines.torch_engine.model import PREFILL_CHUNK, CausalModel
from stepspec.engines.torch_engine.slots import Slot, SlotTable
from stepspec.errors import EngineError, UsageError

FLUSH_S = 0.05
"""Seconds between two chunks of a call, often enough for a reader. The chunks of all calls are sent together, because
the callers' work on them delays the next round."""

C = TypeVar("C", bound=EngineCall)


class Scheduler:
    """Schedules the calls of one engine, in order of arrival."""

    def __init__(self, model: CausalModel, drafters: Drafters, max_slots: int, metrics: EngineMetrics) -> None:
        self._model = model
        self._metrics = metrics
        self._drafters = drafters
        self._slots = SlotTable(model, max_slots)
        self._rounds = Rounds(model, metrics)
        self._waiting: list[EngineCall] = []
        self._reading: list[EngineCall] = []
        self._running: list[GenerateCall] = []
        self._flushed_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._reading or self._running)

    def add(self, call: EngineCall) -> None:
        """Add a new call."""
        self._waiting.append(call)

    def turn(self) -> None:
        """Advance every call that can advance."""
        self._drop_cancelled()
        self._admit()
        readers = self._next_readers()
        sharing = self._sharing() if readers else None
        if sharing is None:
            self._read(readers)
            self._decode()
        else:
            self._decode(sharing, readers)

    def forget(self) -> None:
        """Drop cached data of calls that have ended, and what was learned from them about drafters."""
        self._drop_cancelled()
        self._slots.forget()
        self._drafters.forget()
        self._rounds.forget()

    def fail_all(self, error: EngineError) -> None:
        """Fail all calls, so that no caller waits forever."""
        for call in [*self._waiting, *self._reading, *self._running]:
            call.fail(error)

    def _drop_cancelled(self) -> None:
        self._waiting = [call for call in self._waiting if not call.cancelled]
        for call in [call for call in (*self._reading, *self._running) if call.cancelled]:
            self._leave(call)

    def _admit(self) -> None:
        """Give slots to waiting calls, first come, first served."""
        while self._waiting:
            call = self._waiting[0]
            after = call.after
            length = call.prompt_length + max(len(after), call.num_beyond)
            if not self._slots.has_room(length):
                return
            slot = self._slots.acquire(call.prompt, call.prompt_length, after)
            if slot is None:
                return
            slot.num_expected = length
            del self._waiting[0]
            call.queue_s = time.perf_counter() - call.asked_at
            unread = self._slots.unread(slot, call.prompt, call.prompt_length, after)
            call.slot = slot
            for each in (self._metrics, call.metrics):
                each.prompt_tokens += call.prompt_length + len(after)
                each.cached_tokens += call.prompt_length + len(after) - len(unread)
            if isinstance(call, Scoring):
                further = () if after else call.continuation
                call.pending = [*unread, *further, *(id for probe in call.probes for id in probe.ids)]
            elif isinstance(call, GenerateCall):
                call.row.slot = slot
                call.pending = unread if call.starts and len(unread) > 1 else unread[:-1]
            self._reading.append(call)

    def _read(self, calls: Sequence[EngineCall]) -> None:
        """Run one pass over the next chunks to read. Fully read calls start to generate or get their result."""
        if calls:
            self._run_or_fail(calls, self._read_chunks)
        self._begin()

    def _begin(self) -> None:
        """Let fully read calls generate."""
        for call in [call for call in self._reading if isinstance(call, GenerateCall) and not call.pending]:
            self._reading.remove(call)
            self._running.append(call)

    def _next_readers(self) -> list[EngineCall]:
        """Return the calls whose next chunks share a pass, in order of arrival, with at most half of it padding if the
        model pads rows of different lengths."""
        readers: list[EngineCall] = []
        total = widest = 0
        for call in self._reading:
            size = self._chunk_size(call)
            total, widest = total + size, max(widest, size)
            padded = not self._model.reads_ragged and widest * (len(readers) + 1) > 2 * total
            if readers and (total > PREFILL_CHUNK or padded):
                break
            if size:
                readers.append(call)
        return readers

    def _chunk_size(self, call: EngineCall) -> int:
        """Return how many pending ids a call reads next: a chunk of the prompt, or all that is left."""
        num_prompt = len(call.pending) - call.num_beyond
        return PREFILL_CHUNK if num_prompt > PREFILL_CHUNK else len(call.pending)

    def _read_chunks(self, calls: Sequence[EngineCall]) -> None:
        reading = self._chunks(calls)
        with self._rounds.watch.time("read", [call.metrics for call in calls]):
            logits = self._model.extend(reading.slots, reading.ids, keep=reading.keep, branches=reading.branches)
        self._metrics.passes["read"] += 1
        self._have_read(calls, reading.ids, logits)

    def _chunks(self, calls: Sequence[EngineCall]) -> Reading:
        """Return the next chunks of calls."""
        chunks = [call.pending[: self._chunk_size(call)] for call in calls]
        last = [len(chunk) == len(call.pending) for call, chunk in zip(calls, chunks, strict=True)]
        for call in calls:
            self._model.rollback(slot_of(call).index, call.num_read)
        return Reading(
            slots=[slot_of(call).index for call in calls],
            starts=[self._model.cache_length(slot_of(call).index) for call in calls],
            ids=chunks,
            keep=[
                [len(chunk) - 1 - call.num_beyond + column for column in call.keep] if end else []
                for call, chunk, end in zip(calls, chunks, last, strict=True)
            ],
            branches=[call.branches if end else [] for call, end in zip(calls, last, strict=True)],
        )

    def _have_read(
        self, calls: Sequence[EngineCall], chunks: Sequence[list[int]], logits: Sequence[torch.Tensor]
    ) -> None:
        """Go on after a pass over chunks. `logits` are those of the columns in `EngineCall.keep`, [C, V] per call."""
        last = [len(chunk) == len(call.pending) for call, chunk in zip(calls, chunks, strict=True)]
        read = [(call, rows) for call, rows, end in zip(calls, logits, last, strict=True) if end]
        starting = [(call.row, rows) for call, rows in read if isinstance(call, GenerateCall) and call.starts]
        if starting:
            self._rounds.start([row for row, _ in starting], torch.cat([rows for _, rows in starting]))
        for call, chunk in zip(calls, chunks, strict=True):
            if isinstance(call, GenerateCall):
                slot_of(call).ids.extend(chunk)  # for calls on the same text that begin before this one ends
            del call.pending[: len(chunk)]
            call.metrics.passes["read"] += 1
        judged = [(call, rows) for call, rows in read if isinstance(call, Scoring)]
        partial_vocabulary = self._model.vocabulary is not None
        found = [read_verification(rows, call, partial=partial_vocabulary) for call, rows in judged]
        if judged:  # their pass has ended; times of other passes are known after the next round
            self._rounds.watch.settle()
        for (call, _), verification in zip(judged, found, strict=True):
            call.settle(verification)
            self._leave(call)

    def _groups(self) -> Mapping[DrafterName, Sequence[GenerateCall]]:
        """Return the generating calls by drafter. Calls with the same drafter share passes."""
        groups: dict[DrafterName, list[GenerateCall]] = {}
        for call in self._running:
            if call.row.end is None:
                groups.setdefault(call.row.drafting.drafter, []).append(call)
        return groups

    def _sharing(self) -> DrafterName | None:
        """Return the drafter whose calls generate in a pass that also reads; None if there should be two passes."""
        for name, calls in self._groups().items():
            if self._rounds.may_share([call.row for call in calls], self._drafters.get(name)):
                return name
        return None

    def _decode(self, sharing: DrafterName | None = None, readers: Sequence[EngineCall] = ()) -> None:
        """Run a round for every generating call. The round of the drafter `sharing` also reads chunks of `readers`."""
        for name, calls in self._groups().items():
            drafter = self._drafters.get(name)
            if name != sharing or not self._read_beside(drafter, calls, readers):
                self._run_or_fail(calls, partial(self._run_round, drafter))
        self._begin()
        now = time.perf_counter()
        flush = now - self._flushed_at > FLUSH_S
        if flush:
            self._flushed_at = now
        for call in list(self._running):
            if call.problem is not None:
                self._leave(call)
                call.fail(UsageError(call.problem))
                continue
            if flush or call.row.end is not None or call.num_sent == 0:
                call.send()
            if call.row.end is not None:
                self._leave(call)

    def _run_round(self, drafter: Drafter | None, calls: Sequence[GenerateCall]) -> None:
        self._slots.pack([call.row.slot for call in calls])
        self._rounds.run([call.row for call in calls], drafter)

    def _read_beside(
        self, drafter: Drafter | None, calls: Sequence[GenerateCall], readers: Sequence[EngineCall]
    ) -> bool:
        """Run a round whose pass also reads chunks. If the round fails, return False; chunks that are not read then
        have a pass of their own."""
        self._slots.pack([call.row.slot for call in calls])
        ran = False
        try:
            reading = self._chunks(readers)
            self._rounds.run([call.row for call in calls], drafter, reading)
            ran = True
            assert reading.hidden is not None
            lengths = [len(chunk) for chunk in reading.ids]
            for call, start, length in zip(readers, reading.starts, lengths, strict=True):
                self._model.cache.lengths[slot_of(call).index] = start + length
            logits = self._model.kept_logits(reading.hidden, lengths, reading.keep)
            self._have_read(readers, reading.ids, logits)
        except Exception:
            unread = [call for call in readers if call in self._reading and call.pending]
            if unread:
                self._run_or_fail(unread, self._read_chunks)
        return ran

    def _run_or_fail(self, calls: Sequence[C], work: Callable[[Sequence[C]], None]) -> None:
        """Run `work` for all calls. If it fails, run it for each call alone, so that only the faulty calls fail."""
        try:
            work(calls)
        except Exception as error:
            if len(calls) > 1:
                for call in calls:
                    self._run_or_fail([call], work)
            else:
                self._leave(calls[0])
                calls[0].fail(engine_error(self._model.name, error))

    def _leave(self, call: EngineCall) -> None:
        """Remove an admitted call. Its slot keeps what was read."""
        if isinstance(call, GenerateCall) and call in self._running:
            last = self._running.pop()  # fills the gap, so that all other calls keep their index
            if last is not call:
                self._running[self._running.index(call)] = last
        else:
            self._reading.remove(call)
        slot = slot_of(call)
        beyond: Sequence[int] = ()
        if isinstance(call, Scoring):
            beyond = call.continuation
        elif isinstance(call, GenerateCall):
            beyond = call.row.beyond
            self._drafters.release(call.row)
        self._slots.remember(slot, call.prompt, call.prompt_length, beyond)
        self._slots.release(slot)


def slot_of(call: EngineCall) -> Slot:
    """Return the slot of an admitted call."""
    assert call.slot is not None
    return call.slot

"""The torch engine: an unmodified Hugging Face model behind the `Engine` protocol.

One thread owns the model and the caches. Between rounds it takes in new calls; the rows of all running `generate`
calls advance together, a `verify` is one pass of its own. It knows token ids, not steps, judges or policies.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import torch

from stepspec.engine import Chunk, Drafting, Probe, Sampling, Stop, TokenBuffer, Verification
from stepspec.errors import ContextError, EngineError, ModelError, UsageError
from stepspec.stops import StopWatch
from stepspec.torch_engine.calls import Generation, Scoring, engine_error, fail, next_chunk, read_verification
from stepspec.torch_engine.decode import Row, decode_round, plain_round, read_prompt
from stepspec.torch_engine.model import SMALL_MODEL, CausalModel, load_network, weights_hash
from stepspec.torch_engine.sampling import Stream
from stepspec.torch_engine.slots import SlotTable
from stepspec.torch_engine.tokenizer import HuggingFaceTokenizer, load_tokenizer

MAX_SLOTS = 64
FLUSH_S = 0.02
"""Seconds between two chunks of a call: often enough for an eye, seldom enough not to hold up the next round."""


class TorchEngine:
    """Serves one model. With a `drafter`, `generate` can speculate on tokens inside a call, exactly."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: HuggingFaceTokenizer,
        drafter: CausalModel | None = None,
        weights: str | None = None,
    ) -> None:
        self.name = model.name
        self.tokenizer = tokenizer
        self.max_context = min(model.max_context, drafter.max_context if drafter else model.max_context)
        self._model = model
        self._drafter = drafter
        self._weights = weights
        self._slots = SlotTable(model, MAX_SLOTS)
        self._draft_slots = SlotTable(drafter, MAX_SLOTS) if drafter else None
        self._calls: queue.SimpleQueue[Generation | Scoring | None] = queue.SimpleQueue()
        self._waiting: list[Generation | Scoring] = []
        self._running: list[Generation] = []
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"torch engine {self.name}", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls, name: str, device: str | None = None, dtype: torch.dtype | None = None, title: str | None = None
    ) -> "TorchEngine":
        """Loads a model by hub name or folder; results call it by `title`, else by its own name.

        Raises:
            ModelError: it cannot be loaded, or the engine cannot serve it.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        network = load_network(name, device, dtype)
        tokenizer = load_tokenizer(name, network.config)
        title = title or (Path(name).resolve().name if Path(name).is_dir() else name)
        return cls(CausalModel(network, title), tokenizer, weights=weights_hash(name))

    def drafted_by(self, draft: "TorchEngine") -> "TorchEngine":
        """The same model with `draft`'s as its token-level drafter; ends this engine, not the draft.

        Raises:
            ModelError: the two do not share one vocabulary.
        """
        if not self.tokenizer.same_vocabulary(draft.tokenizer):
            raise ModelError(
                f"The draft {draft.name} has another vocabulary than the target {self.name}; "
                "choose a draft of the same model family."
            )
        self._close()
        self._thread.join()
        return TorchEngine(self._model, self.tokenizer, draft._model.with_own_cache(), self._weights)

    def describe(self) -> dict[str, str | None]:
        """What results say of the model."""
        dtype = str(self._model.network.dtype).removeprefix("torch.")
        return {"name": self.name, "weights": self._weights, "dtype": dtype, "device": str(self._model.device)}

    async def generate(
        self, prompt: TokenBuffer, sampling: Sampling, stop: Stop, drafting: Drafting = Drafting()
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        self._check_room(len(prompt), 1)
        if drafting.drafter == "draft-model" and self._drafter is None:
            raise UsageError("Token-level speculation needs a draft model; name one with --draft.")
        room = self.max_context - len(prompt)
        stop = Stop(min(stop.max_tokens, room), stop.delimiters, stop.token_ids)
        loop = asyncio.get_running_loop()
        call = Generation(prompt, sampling, stop, drafting, loop, asyncio.Queue(), time.perf_counter())
        self._submit(call)
        try:
            while True:
                message = await call.chunks.get()
                if isinstance(message, EngineError):
                    raise message
                yield message
                if message.end is not None:
                    return
        finally:
            call.cancelled = True

    async def verify(
        self, prompt: TokenBuffer, continuation: Sequence[int], probes: Sequence[Probe] = ()
    ) -> Verification:
        """See `Engine.verify`."""
        self._check_room(len(prompt), len(continuation) + sum(len(probe.ids) for probe in probes))
        loop = asyncio.get_running_loop()
        call = Scoring(prompt, continuation, probes, loop, loop.create_future(), time.perf_counter())
        self._submit(call)
        return await call.outcome

    async def aclose(self) -> None:
        """Ends the thread; calls still running fail."""
        self._close()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, call: Generation | Scoring) -> None:
        with self._closing:
            if self._closed:
                raise self._closed_error()
            self._calls.put(call)

    def _close(self) -> None:
        """Lets no further call in; the thread ends after its round."""
        with self._closing:
            self._closed = True
            self._calls.put(None)

    def _closed_error(self) -> EngineError:
        return EngineError(f"The engine of {self.name} was closed.")

    def _check_room(self, prompt_length: int, wanted: int) -> None:
        if prompt_length == 0:
            raise UsageError("The prompt is empty; a model needs at least one token to continue.")
        if prompt_length + wanted > self.max_context:
            raise ContextError(
                f"The prompt has {prompt_length} tokens and {wanted} more are wanted, but {self.name} has a context "
                f"of {self.max_context}. Shorten the prompt or choose a model with a longer context."
            )

    # What follows runs in the engine's own thread.

    @torch.inference_mode()
    def _work(self) -> None:
        if self._model.device.type == "cpu" and self._model.num_parameters < SMALL_MODEL:
            torch.set_num_threads(1)
        failure = self._closed_error()
        try:
            while self._take_calls():
                self._admit()
                self._advance()
                self._send_chunks()
        except Exception as error:  # a mistake of ours: no caller is left waiting for ever
            failure = engine_error(self.name, error)
        self._close()
        while self._take_calls():
            pass
        for call in [*self._running, *self._waiting]:
            fail(call, failure)

    def _take_calls(self) -> bool:
        """Moves new calls to those waiting, sleeping if there is nothing else to do; False when closed."""
        while True:
            try:
                call = self._calls.get(block=not (self._running or self._waiting))
            except queue.Empty:
                return True
            if call is None:
                return False
            self._waiting.append(call)

    def _admit(self) -> None:
        """Starts waiting calls, in order, as far as there are free slots."""
        while self._waiting:
            call = self._waiting[0]
            try:
                if call.cancelled:
                    started = True
                else:
                    started = self._score(call) if isinstance(call, Scoring) else self._start(call)
            except Exception as error:
                fail(call, engine_error(self.name, error))
                started = True
            if not started:
                return
            del self._waiting[0]

    def _start(self, call: Generation) -> bool:
        """Gives a generation its slots and reads its prompt; False if all slots are busy."""
        slot = self._slots.acquire(call.prompt)
        if slot is None:
            return False
        position = len(call.prompt)
        row = Row(
            call.prompt,
            position,
            call.sampling,
            call.drafting,
            StopWatch(call.stop, self.tokenizer.piece, self.tokenizer.end_ids),
            Stream(call.sampling.seed, position, self._model.device),
            slot,
        )
        if call.drafting.drafter == "draft-model":
            assert self._draft_slots is not None
            row.draft_slot = self._draft_slots.acquire(call.prompt)
            assert row.draft_slot is not None, "both tables have as many slots"
            self._draft_slots.unread(row.draft_slot, call.prompt, at_most=position - 1)
        call.row = row
        call.sent_at = time.perf_counter()
        call.queue_s = call.sent_at - call.asked_at
        unread = self._slots.unread(slot, call.prompt, at_most=position - 1)
        try:
            if row.draft_slot is not None and self._drafter is not None:
                read_prompt(self._drafter, row.draft_slot, row)
            if len(unread) > 1:
                plain_round(self._model, [row])
        except Exception:
            self._release(row)
            raise
        self._running.append(call)
        return True

    def _advance(self) -> None:
        """One round for every running row; rows that draft alike share passes."""
        groups: dict[Drafting, list[Row]] = {}
        for call in self._running:
            assert call.row is not None
            if call.row.end is None and not call.cancelled:
                groups.setdefault(call.row.drafting, []).append(call.row)
        for drafting, rows in groups.items():
            drafter = self._drafter if drafting.drafter == "draft-model" else None
            try:
                decode_round(self._model, drafter, rows)
            except Exception as error:
                failure = engine_error(self.name, error)
                for call in [call for call in self._running if call.row in rows]:
                    self._running.remove(call)
                    self._release(call.row)
                    fail(call, failure)

    def _send_chunks(self) -> None:
        """Sends what is due, and lets go of rows that have ended or were cancelled."""
        now = time.perf_counter()
        for call in list(self._running):
            row = call.row
            assert row is not None
            if not call.cancelled and (row.end is not None or now - call.sent_at > FLUSH_S):
                call.send(next_chunk(call, row))
                call.num_sent, call.sent_at = len(row.generated), now
            if call.cancelled or row.end is not None:
                self._running.remove(call)
                self._release(row)

    def _release(self, row: Row | None) -> None:
        assert row is not None
        self._slots.remember(row.slot, row.prompt_length, row.generated)
        self._slots.release(row.slot)
        if row.draft_slot is not None and self._draft_slots is not None:
            self._draft_slots.remember(row.draft_slot, row.prompt_length, row.generated)
            self._draft_slots.release(row.draft_slot)

    def _score(self, call: Scoring) -> bool:
        """Runs a `verify` in one pass; False if all slots are busy."""
        slot = self._slots.acquire(call.prompt)
        if slot is None:
            return False
        try:
            queue_s = time.perf_counter() - call.asked_at
            length = len(call.prompt)
            unread = self._slots.unread(slot, call.prompt, at_most=length - 1)
            ids = [*unread, *call.continuation]
            branches = [len(probe.ids) for probe in call.probes]
            ends = [len(ids) + sum(branches[: index + 1]) - 1 for index in range(len(branches))]
            ends = [end if branch else len(ids) - 1 for end, branch in zip(ends, branches, strict=True)]
            keep = [*range(len(unread) - 1, len(ids)), *ends]
            everything = [*ids, *(id for probe in call.probes for id in probe.ids)]
            logits = self._model.extend([slot.index], [everything], keep=keep, branches=branches)[0]
            self._slots.remember(slot, length, list(call.continuation))
            call.settle(read_verification(logits.float().log_softmax(-1), call, queue_s))
        finally:
            self._slots.release(slot)
        return True

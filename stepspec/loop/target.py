"""What the target writes and reads."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

from stepspec.engines.protocol import Drafting, Generate, Probe, Stop, TokenChunk, Verification, Verify, collect
from stepspec.errors import ContextError, EngineError
from stepspec.loop.judge import Answer
from stepspec.loop.limits import cut_off, has_passed
from stepspec.loop.record import Fate
from stepspec.loop.request import Request
from stepspec.loop.step import Proposal
from stepspec.loop.transcript import MAX_HEADER


class TargetWriter:
    """Reads as the target, and writes as the target, or as the draft where the policy names it alone."""

    def __init__(self, request: Request) -> None:
        self._request = request

    # Reading

    async def read(self, ids: Sequence[int], probes: Sequence[Probe] = (), *, scores: bool = True) -> Verification:
        """Return the target's pass over ids after the text, see `Verify`.

        Raises:
            TimeoutError: the deadline was reached.
        """
        request, record, costs = self._request, self._request.record, self._request.choice.costs
        is_argmax = request.sampling.temperature == 0 and not request.is_edited
        sampling = request.sampling if request.samples and not is_argmax else None
        call = Verify(request.transcript.buffer, ids, probes, scores, sampling)
        with record.time("judge"):
            async with asyncio.timeout_at(request.limits.deadline):
                since = time.perf_counter()
                found = await request.target.verify(call)
        seconds = time.perf_counter() - since
        num_asked = sum(len(probe.ids) for probe in probes)
        costs.read(max(1, len(request.transcript.buffer) - found.cached + len(ids) + num_asked), seconds)
        record.verified(found)
        return found

    async def ask(self, after: Sequence[int], probe: Probe) -> Answer:
        """Ask the target a question after uncommitted ids."""
        with self._request.record.time("judge"):
            found = await self._request.target.verify(
                Verify(self._request.transcript.buffer, after, [probe], scores=False)
            )
        self._request.record.verified(found, first=False)
        return Answer(found.probe_choices[0], found.probe_logprobs[0] if found.probe_logprobs else ())

    async def measure(self) -> None:
        """Measure the target's speed, by a token that is not committed."""
        request, since = self._request, time.perf_counter()
        call = Generate(request.transcript.buffer, request.sampling, Stop(1))
        with request.record.time("target"):
            async with cut_off(request.limits.deadline):
                chunk = await collect(request.target.generate(call))
                request.record.called(chunk)
                request.record.generated(len(chunk.ids))
                request.record.discarded(len(chunk.ids))
                request.choice.first_token_s = time.perf_counter() - since

    async def wait_for_reader(self) -> float:
        """Wait while the caller has too many events to read. Return the seconds."""
        request = self._request
        if not request.record.is_full:
            return 0.0
        request.choice.pauses(request)
        return await request.record.wait_for_reader(request.limits.end)

    # Writing a step

    async def step_ahead(self, room: int, ids: list[int], after: Sequence[int] = ()) -> Proposal:
        """Return a step of the target after uncommitted ids. Its ids, which `ids` receives as they arrive, are not
        counted.

        Raises:
            ContextError: there is no room in the target's context.
            TimeoutError: the deadline was reached.
            EngineError: the target failed.
        """
        request, transcript = self._request, self._request.transcript
        stop, drafting = transcript.rest_of_step(room, after), request.policy.token.drafting
        call = Generate(transcript.buffer, request.sampling, stop, drafting, after=after)
        with request.record.time("target"):
            async with asyncio.timeout_at(request.limits.deadline):
                chunk = await collect(request.target.generate(call), ids)
        request.record.called(chunk, first=not after)
        return target_step(request, chunk, after)

    async def rest_of_step(self, fate: Fate, num_tokens: int | None = None) -> float:
        """Finish the open step, or write `num_tokens` of it.

        Returns:
            The seconds in which it waited for the caller to read. The engine may have gone on meanwhile, so what it
            took is then not known.
        """
        request, transcript, record = self._request, self._request.transcript, self._request.record
        record.begins_writing()
        if transcript.step_is_over or request.limits.room <= 0 or request.answer.stopped:
            return 0.0
        room = request.limits.room if num_tokens is None else min(request.limits.room, num_tokens)
        stop, drafting = transcript.rest_of_step(room), request.policy.token.exact_drafting
        call = Generate(transcript.buffer, request.sampling, stop, drafting)
        num_before, waited_s = len(transcript.open_ids), 0.0
        try:
            async with aclosing(self.chunks(call)) as chunks:
                async for chunk in chunks:
                    record.generated(len(chunk.ids))
                    transcript.extend(chunk.ids)
                    record.emit(transcript.emit())
                    waited_s += await self.wait_for_reader()
                    if request.answer.stopped:
                        break
        except ContextError:
            if not transcript.open_ids:  # else salvaged tokens fill the context, so they are the entire step
                raise
        record.written(len(transcript.open_ids) - num_before, fate)
        return waited_s

    # Writing without speculation on steps

    async def header(self) -> None:
        """Write the header of a message, which decides whether the thinking goes on."""
        request = self._request
        assert request.thinking.header_end is not None
        if request.limits.allow_more():
            ends = request.answer_ends | {request.thinking.header_end}
            await self._write(Stop(min(request.limits.room, MAX_HEADER), token_ids=ends))

    async def rest(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Let a single writer finish the text: the draft if the policy names it alone, else the target.

        Args:
            until: is asked after every chunk of the thinking, and may stop the writer, in the middle of a step too.

        Returns:
            Whether it was not stopped.
        """
        request, transcript, limits = self._request, self._request.transcript, self._request.limits
        separate = limits.separate_answer and not request.thinking.steps_are_answer
        thinking_alone = replace(transcript.end_of_thinking, max_tokens=max(1, limits.room))
        if separate and transcript.thinking and limits.allow_more() and not await self._write(thinking_alone, until):
            return False
        thought = transcript.in_header or (transcript.thinking and not limits.allow_more())
        if separate and thought and not has_passed(limits.end):
            self._end_thinking()
        goes_on = not transcript.ended and limits.allow_more()
        stop = Stop(limits.room, token_ids=request.answer_ends) if goes_on else None
        return stop is None or await self._write(stop, until, limits.json_schema)

    def _end_thinking(self) -> None:
        """Commit what is missing of the tags that end the thinking, in place of the target."""
        request = self._request
        ids = request.transcript.rest_of_ending[: max(0, request.ledger.remaining)]
        request.record.generated(len(ids), "forced")
        request.record.emit(request.transcript.end_thinking("target", len(ids)))

    async def _write(
        self, stop: Stop, until: Callable[[], bool] = lambda: False, json_schema: str | None = None
    ) -> bool:
        """Let a single writer write up to `stop`. Return False if `until` stopped it, which may leave a step open."""
        request, transcript, record = self._request, self._request.transcript, self._request.record
        writer: Literal["draft", "target"] = "draft" if request.policy.family == "draft" and request.draft else "target"
        drafting = Drafting() if writer == "draft" else request.policy.token.exact_drafting
        call = Generate(transcript.buffer, request.sampling, stop, drafting, json_schema=json_schema)
        record.begins_writing(alone=True)
        async with aclosing(self.chunks(call, writer)) as chunks:
            async for chunk in chunks:
                if writer == "draft":
                    record.drafted(len(chunk.ids))
                    record.accepted(len(chunk.ids))
                else:
                    record.generated(len(chunk.ids), "forced")
                record.emit(transcript.write_on(chunk.ids, writer))
                request.tell_committed()
                await self.wait_for_reader()
                if not transcript.thinking:
                    request.choice.stops_asking(request)
                elif chunk.end is None and until():
                    return False
                if transcript.ended:
                    break
        record.emit(transcript.finish(writer))
        return True

    async def chunks(self, call: Generate, writer: Literal["draft", "target"] = "target") -> AsyncGenerator[TokenChunk]:
        """Yield the chunks of a call until it ends, or until the deadline. Count the time and the costs of the call.

        Raises:
            ContextError: there is no room in the writer's context.
            EngineError: the writer failed.
        """
        request, record, last = self._request, self._request.record, TokenChunk(())
        engine, deadline = (writer == "draft" and request.draft) or request.target, request.limits.deadline
        try:
            async with aclosing(engine.generate(call)) as chunks:
                while last.end is None and not has_passed(deadline):
                    chunk = None
                    async with cut_off(deadline) as limit:
                        with record.time(writer):
                            chunk = await anext(chunks, None)
                    if limit.expired():
                        return
                    if chunk is None:
                        raise EngineError("The engine ended a generation without a reason.")
                    last = chunk
                    yield chunk
        finally:
            if writer == "draft":
                record.draft_waited(last.queue_s)
            else:
                record.called(last)


def target_step(request: Request, chunk: TokenChunk, after: Sequence[int]) -> Proposal:
    """Return a step that the target has written after uncommitted ids."""
    count = request.transcript.num_before_ending(chunk.written, after, whole=True)
    text = request.tokenizer.decode(request.transcript.visible(chunk.ids[:count]))
    return replace(Proposal.of(chunk, text), num_written=count)

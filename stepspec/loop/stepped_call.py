"""A call of the target that writes all thinking, whose steps are taken one by one."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from stepspec.engines.protocol import Generate, Stop, TokenChunk
from stepspec.engines.stops import StopMatcher
from stepspec.errors import ContextError
from stepspec.loop.request import Request
from stepspec.loop.step import Proposal
from stepspec.loop.target import TargetWriter, target_step


class SteppedCall:
    """Cuts what one call of the target writes into steps, so that no step costs a call of its own."""

    def __init__(self, request: Request, target: TargetWriter) -> None:
        self._request, self._target = request, target
        self._num_before = len(request.transcript.buffer)
        self._ids, self._relaxed = list[int](), list[int]()
        self._num_taken = 0
        """How many of the ids are in steps."""
        self._watch: StopMatcher | None = None

    async def steps(self) -> AsyncGenerator[Proposal]:
        """Yield steps until the thinking, the text or the room ends, or until the deadline.

        The caller commits each step as it is before it takes the next one, or holds one until it has the next. It
        closes the generator where the thinking ends. Tokens that are in none of the steps count as discarded.

        Raises:
            EngineError: the target failed.
        """
        request, since = self._request, time.time_ns()
        # The text that ends the thinking is not among what ends the call: a server would not stream it then.
        stop = Stop(request.limits.room, token_ids=request.ends)
        call = Generate(request.transcript.buffer, request.sampling, stop, request.policy.token.drafting)
        try:
            async with aclosing(self._target.chunks(call)) as chunks:
                async for chunk in chunks:
                    request.record.generated(len(chunk.ids))
                    for step, after in self._steps_in(chunk):
                        index = len(request.transcript.steps) + bool(after)
                        request.record.generated_ahead(since, index, len(step.ids))
                        yield target_step(request, step, after)
                        since = time.time_ns()
        except ContextError:
            return
        finally:
            request.record.discarded(len(self._ids) - self._num_taken)

    def _steps_in(self, chunk: TokenChunk) -> Iterator[tuple[TokenChunk, Sequence[int]]]:
        """Yield the steps that end in a chunk, each with the ids before it that are not committed."""
        request, transcript, new = self._request, self._request.transcript, chunk.ids
        self._relaxed += (len(self._ids) + place for place in chunk.relaxed or ())
        self._ids += new
        while (start := self._num_taken) < len(self._ids):
            after = self._ids[len(transcript.buffer) - self._num_before : start]
            if self._watch is None:
                stop = transcript.rest_of_step(request.limits.room - len(after), after)
                self._watch = StopMatcher(stop, request.tokenizer.piece, request.tokenizer.end_ids)
            end, count = self._watch.feed_all(new)
            new, end = new[count:], end or chunk.end
            if end is None:
                return
            self._num_taken, self._watch = len(self._ids) - len(new), None
            relaxed = tuple(place - start for place in self._relaxed if place < self._num_taken)
            self._relaxed = self._relaxed[len(relaxed) :]
            yield TokenChunk(tuple(self._ids[start : self._num_taken]), end, relaxed=relaxed), after

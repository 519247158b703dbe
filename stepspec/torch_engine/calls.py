"""Calls of the torch engine on their way: what was asked, and how the answer gets back to the caller's event loop."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from stepspec.engine import Chunk, Drafting, Probe, Sampling, Stop, TokenBuffer, Verification
from stepspec.errors import EngineError
from stepspec.torch_engine.decode import Row


@dataclass
class Generation:
    """A `generate` call on its way: what was asked, and where its chunks go."""

    prompt: TokenBuffer
    sampling: Sampling
    stop: Stop
    drafting: Drafting
    loop: asyncio.AbstractEventLoop
    chunks: "asyncio.Queue[Chunk | EngineError]"
    asked_at: float
    row: Row | None = None
    queue_s: float = 0.0
    num_sent: int = 0
    sent_at: float = 0.0
    cancelled: bool = False

    def send(self, message: Chunk | EngineError) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.chunks.put_nowait, message)


@dataclass
class Scoring:
    """A `verify` call on its way."""

    prompt: TokenBuffer
    continuation: Sequence[int]
    probes: Sequence[Probe]
    loop: asyncio.AbstractEventLoop
    outcome: "asyncio.Future[Verification]"
    asked_at: float

    @property
    def cancelled(self) -> bool:
        return self.outcome.cancelled()

    def settle(self, result: Verification | EngineError) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self._settle, result)

    def _settle(self, result: Verification | EngineError) -> None:
        if self.outcome.done():
            return
        if isinstance(result, EngineError):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


def read_verification(logprobs: torch.Tensor, call: Scoring, queue_s: float) -> Verification:
    """Reads a verification from log-probabilities [n + 1 + number of probes, V]."""
    count = len(call.continuation)
    body = logprobs[:count]
    chosen = body.gather(1, torch.tensor([call.continuation], device=body.device).T)[:, 0] if count else body[:, 0]
    own = logprobs.argmax(-1).tolist()
    entropies = -(body.exp() * body).nan_to_num().sum(-1)
    labels = [
        tuple(logprobs[count + 1 + index, list(probe.labels)].tolist()) for index, probe in enumerate(call.probes)
    ]
    return Verification(
        logprobs=tuple(chosen.tolist()),
        choices=tuple(own[:count]),
        entropies=tuple(entropies.tolist()),
        next_choice=own[count],
        probe_logprobs=tuple(labels),
        probe_choices=tuple(own[count + 1 :]),
        queue_s=queue_s,
    )


def next_chunk(call: Generation, row: Row) -> Chunk:
    """What is new since the last chunk; the costs go with the last one."""
    ids = tuple(row.generated[call.num_sent :])
    if row.end is None:
        return Chunk(ids)
    return Chunk(ids, row.end, call.queue_s, row.passes, row.drafted, row.accepted)


def engine_error(name: str, error: Exception) -> EngineError:
    """What went wrong in a pass of the model called `name`, as an error of ours."""
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(f"The GPU ran out of memory while {name} worked. Lower the concurrency or the context.")
    failure = EngineError(f"{name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def fail(call: Generation | Scoring, error: EngineError) -> None:
    """Tells the caller of either kind that the call has failed."""
    if isinstance(call, Scoring):
        call.settle(error)
    else:
        call.send(error)

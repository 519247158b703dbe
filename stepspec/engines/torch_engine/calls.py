"""Calls of the torch engine on their way: what was asked, and how the answer gets back to the caller's event loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import Chunk, Probe, TokenBuffer, Verification
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.slots import Slot
from stepspec.errors import EngineError


@dataclass(eq=False, kw_only=True)
class Call(ABC):
    """What calls of both kinds have: a prompt, a slot once they are admitted, and ids that are still to be read."""

    prompt: TokenBuffer
    prompt_length: int
    loop: asyncio.AbstractEventLoop
    asked_at: float
    cancelled: bool = False
    queue_s: float = 0.0
    slot: Slot | None = None
    pending: list[int] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def keep(self) -> list[int]:
        """Whose logits are wanted, counted from the prompt's last id; of the pass that reads it and all behind."""
        return [0]

    @property
    def branches(self) -> list[int]:
        """Lengths of the branches that are read last."""
        return []

    @property
    def num_beyond(self) -> int:
        """How many ids are read beyond the prompt; -1 if all but its last one are."""
        return 0

    @property
    def num_read(self) -> int:
        """How many of the ids up to the last pending one have been read."""
        return self.prompt_length + self.num_beyond - len(self.pending)

    @abstractmethod
    def fail(self, error: EngineError) -> None:
        """Tells the caller that the call has failed."""

    def _later(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            self.loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]


@dataclass(eq=False, kw_only=True)
class Generation(Call):
    """A `generate` call."""

    row: BatchRow
    chunks: "asyncio.Queue[Chunk | EngineError]"
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.row.metrics = self.metrics

    @property
    def starts(self) -> bool:
        """Whether the pass over the prompt gives the first token.

        Where tokens are drafted and drawn a round gives it, as all others: a prompt that is held already has no such
        pass, and what a seed writes must not depend on that.
        """
        return self.row.sampling.temperature == 0 or self.row.drafting.drafter == "none"

    @property
    def keep(self) -> list[int]:
        return [0] if self.starts else []

    @property
    def num_beyond(self) -> int:
        return 0 if self.starts else -1

    @property
    def problem(self) -> str | None:
        """Why the call cannot go on, or its text is not what was asked for."""
        return self.row.constraint and self.row.constraint.problem

    def send(self) -> None:
        """Sends what is new since the last chunk; the costs go with the last one."""
        row = self.row
        ids = tuple(row.generated[self.num_sent :])
        self.num_sent += len(ids)
        chunk = Chunk(ids)
        if row.end is not None:
            done = self.metrics
            counts = done.target_passes, done.drafted, done.accepted, done.cached_tokens
            chunk = Chunk(ids, row.end, self.queue_s, *counts, done)
        self._later(self.chunks.put_nowait, chunk)

    def fail(self, error: EngineError) -> None:
        self._later(self.chunks.put_nowait, error)


@dataclass(eq=False, kw_only=True)
class Scoring(Call):
    """A `verify` call."""

    continuation: Sequence[int]
    probes: Sequence[Probe]
    outcome: "asyncio.Future[Verification]"

    @property
    def branches(self) -> list[int]:
        return [len(probe.ids) for probe in self.probes]

    @property
    def num_beyond(self) -> int:
        return len(self.continuation) + sum(self.branches)

    @property
    def keep(self) -> list[int]:
        trunk = len(self.continuation)
        ends, column = [], trunk
        for length in self.branches:
            column += length
            ends.append(column if length else trunk)
        return [*range(trunk + 1), *ends]

    def settle(self, logits: torch.Tensor) -> None:
        """Answers with what the logits [n + 1 + number of probes, V] of `keep` say."""
        verification = read_verification(logits.float().log_softmax(-1), self)
        self._later(self._settle, verification)

    def _settle(self, verification: Verification) -> None:
        if not self.outcome.done():
            self.outcome.set_result(verification)

    def fail(self, error: EngineError) -> None:
        self._later(self._fail, error)

    def _fail(self, error: EngineError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def read_verification(logprobs: torch.Tensor, call: Scoring) -> Verification:
    """Reads a verification from log-probabilities [n + 1 + number of probes, V]."""
    count = len(call.continuation)
    body = logprobs[:count]
    chosen = body.gather(1, torch.tensor([call.continuation], device=body.device).T)[:, 0] if count else body[:, 0]
    own = logprobs.argmax(-1).tolist()
    labels = [
        tuple(logprobs[count + 1 + index, list(probe.labels)].tolist()) for index, probe in enumerate(call.probes)
    ]
    return Verification(
        logprobs=tuple(chosen.tolist()),
        choices=tuple(own[:count]),
        next_choice=own[count],
        probe_logprobs=tuple(labels),
        probe_choices=tuple(own[count + 1 :]),
        queue_s=call.queue_s,
        passes=call.metrics.target_passes,
        cached=call.metrics.cached_tokens,
    )


def engine_error(name: str, error: Exception) -> EngineError:
    """What went wrong in a pass of the model called `name`, as an error of ours."""
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(f"The GPU ran out of memory while {name} worked. Lower the concurrency or the context.")
    failure = EngineError(f"{name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

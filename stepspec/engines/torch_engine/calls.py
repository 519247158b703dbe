"""Calls in progress in the torch engine: the request, and how its result returns to the caller's event loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import Probe, Sampling, TokenBuffer, TokenChunk, Verification
from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.model import Branch
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.slots import Slot
from stepspec.engines.torch_engine.transfer import download, upload
from stepspec.errors import EngineError, StepSpecError


@dataclass(eq=False, kw_only=True)
class EngineCall(ABC):
    """A call of either kind: its prompt, its slot once admitted, and the ids that the model has not read yet."""

    prompt: TokenBuffer
    prompt_length: int
    loop: asyncio.AbstractEventLoop
    asked_at: float
    cancelled: bool = False
    queue_s: float = 0.0
    slot: Slot | None = None
    pending: list[int] = field(default_factory=list)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    @property
    def after(self) -> Sequence[int]:
        """Ids after the prompt that need no logits of their own, so that they may be cached too."""
        return ()

    @property
    def keep(self) -> list[int]:
        """Columns whose logits the call needs from its last pass; column 0 is the prompt's last id."""
        return [0]

    @property
    def branches(self) -> list[Branch]:
        """The branches at the end of the pending ids."""
        return []

    @property
    def num_beyond(self) -> int:
        """How many ids to read beyond the prompt; -1 to leave out the prompt's last id."""
        return 0

    @property
    def num_read(self) -> int:
        """How many ids the model has read, out of the prompt and the ids beyond it."""
        return self.prompt_length + self.num_beyond - len(self.pending)

    @abstractmethod
    def fail(self, error: StepSpecError) -> None:
        """Report the error to the caller."""

    def _call_soon(self, function: object, *arguments: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self.loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]


@dataclass(eq=False, kw_only=True)
class GenerateCall(EngineCall):
    """A `generate` call."""

    row: BatchRow
    chunks: "asyncio.Queue[TokenChunk | StepSpecError]"
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.row.metrics = self.metrics

    @property
    def after(self) -> Sequence[int]:
        return self.row.beyond[: self.row.num_after]

    @property
    def starts(self) -> bool:
        """Whether the pass over the prompt yields the first token.

        If tokens are both drafted and sampled, a round yields the first token, like every other. A cached prompt has no
        pass of its own, and the text of a seed must not depend on the cache.
        """
        return self.row.sampling.temperature == 0 or self.row.drafting.drafter == "none"

    @property
    def keep(self) -> list[int]:
        return [self.row.num_after] if self.starts else []

    @property
    def num_beyond(self) -> int:
        return self.row.num_after - (not self.starts)

    @property
    def problem(self) -> str | None:
        """Why the call fails: its text no longer conforms to its constraint. None if all is well."""
        return self.row.constraint and self.row.constraint.problem

    def send(self) -> None:
        """Send the ids that are new since the last chunk, and the costs so far."""
        row, costs = self.row, self.metrics
        start, details = row.num_after + self.num_sent, row.details
        ids = tuple(row.beyond[start:])
        chunk = TokenChunk(
            ids,
            row.end,
            self.queue_s,
            costs.target_passes,
            costs.drafted,
            costs.accepted,
            costs.cached_tokens,
            costs.copied(),
            relaxed=tuple(place - start for place in row.relaxed if place < len(row.beyond)),
        )
        row.relaxed.clear()
        if details is not None:
            columns = [tuple(column) for column in zip(*details[self.num_sent :], strict=True)] or [()] * 2
            chunk = replace(chunk, logprobs=columns[0], entropies=columns[1])
        self.num_sent += len(ids)
        self._call_soon(self.chunks.put_nowait, chunk)

    def fail(self, error: StepSpecError) -> None:
        self._call_soon(self.chunks.put_nowait, error)


@dataclass(eq=False, kw_only=True)
class Scoring(EngineCall):
    """A `verify` call."""

    continuation: Sequence[int]
    probes: Sequence[Probe]
    scores: bool
    outcome: "asyncio.Future[Verification]"
    sampling: Sampling | None = None
    top: int = 0

    @property
    def after(self) -> Sequence[int]:
        only_asks = not self.scores and self.probes and all(probe.place is None for probe in self.probes)
        return self.continuation if only_asks else ()

    @property
    def branches(self) -> list[Branch]:
        return [Branch(len(probe.ids), len(self.continuation) - self._place(probe)) for probe in self.probes]

    def _place(self, probe: Probe) -> int:
        return len(self.continuation) if probe.place is None else probe.place

    @property
    def num_beyond(self) -> int:
        return len(self.continuation) + sum(len(probe.ids) for probe in self.probes)

    @property
    def keep(self) -> list[int]:
        trunk = column = len(self.continuation)
        ends = list[int]()
        for probe in self.probes:
            column += len(probe.ids)
            ends.append(column if probe.ids else self._place(probe))
        return [*range(trunk + 1), *ends] if self.scores else [trunk, *ends]

    def settle(self, verification: Verification) -> None:
        """Set the result."""
        self._call_soon(self._settle, verification)

    def _settle(self, verification: Verification) -> None:
        if not self.outcome.done():
            self.outcome.set_result(verification)

    def fail(self, error: StepSpecError) -> None:
        self._call_soon(self._fail, error)

    def _fail(self, error: StepSpecError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def read_verification(logits: torch.Tensor, call: Scoring, *, partial: bool = False) -> Verification:
    """Return the verification that the logits of the columns in `keep` describe.

    Those are [n + 1 + number of probes, V], or [1 + number of probes, V] without scores. For `partial` see
    `sampling.edited`.
    """
    count = len(call.continuation) if call.scores else 0
    logprobs = logits.float().log_softmax(-1)
    choices = logprobs.argmax(-1)
    if call.sampling is not None:
        first = call.prompt_length + len(call.continuation) - count
        own_choices = _sampled(logits[: count + 1], call.sampling, first, partial=partial)
        choices = torch.cat([own_choices, choices[count + 1 :]])
    scored = list(enumerate(call.continuation[:count]))
    asked = [(count + 1 + index, label) for index, probe in enumerate(call.probes) for label in probe.labels]
    rows, ids = upload([*zip(*scored, *asked, strict=True)] or [(), ()], logits.device, torch.long)
    values, tokens = logprobs[:count].topk(call.top if call.scores else 0)
    chosen, found, values, tokens = download(choices, logprobs[rows, ids], values, tokens)
    chosen = [int(token) for token in chosen]
    best = list(zip(map(int, tokens), values, strict=True))
    labels = iter(found[len(scored) :])
    return Verification(
        logprobs=tuple(found[:count]) if call.scores else None,
        choices=tuple(chosen[:count]) if call.scores else None,
        next_choice=chosen[count],
        probe_logprobs=tuple(tuple(islice(labels, len(probe.labels))) for probe in call.probes),
        probe_choices=tuple(chosen[count + 1 :]),
        queue_s=call.queue_s,
        passes=call.metrics.target_passes,
        cached=call.metrics.cached_tokens,
        top=tuple(tuple(best[place : place + call.top]) for place in range(0, len(best), call.top or 1)),
    )


def _sampled(logits: torch.Tensor, how: Sampling, first: int, *, partial: bool) -> torch.Tensor:
    """Return the tokens [T] that `generate` would write from logits [T, V], the first one at the position `first`."""
    row = sampling.samplers([how], logits.shape[-1], logits.device)
    positions = torch.arange(first, first + len(logits), device=logits.device)[None]
    edited = sampling.edited(logits[None], row, None, partial=partial)
    return sampling.choose(edited, positions, row, sampling.RESAMPLE)[0][0]


def engine_error(name: str, error: Exception) -> EngineError:
    """Return an `EngineError` for an exception in a pass of the model called `name`."""
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(
            f"The GPU ran out of memory while running {name}. Reduce the concurrency or the context length."
        )
    failure = EngineError(f"{name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

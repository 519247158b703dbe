"""Seconds of passes, booked for the engine and for the calls that took part in them."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stepspec.engines.metrics import Metrics, PassKind


@dataclass
class Timing:
    """How long something took; 0 until the stopwatch has settled."""

    seconds: float = 0.0


class Stopwatch:
    """On a CUDA device seconds are the device's own, and known once it has been waited for."""

    def __init__(self, total: Metrics, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total = total
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._pending: list[tuple[PassKind, Sequence[Metrics], Timing, Any, Any]] = []

    @contextmanager
    def time(self, kind: PassKind, calls: Sequence[Metrics]) -> Generator[Timing]:
        """Books what is done inside."""
        timing = Timing()
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield timing
            end.record()
            self._pending.append((kind, calls, timing, begin, end))
        else:
            started = self._clock()
            yield timing
            self._book(kind, calls, timing, self._clock() - started)

    def settle(self) -> None:
        """Books what was timed on a device that has been waited for since."""
        for kind, calls, timing, begin, end in self._pending:
            self._book(kind, calls, timing, begin.elapsed_time(end) / 1000)
        self._pending.clear()

    def _book(self, kind: PassKind, calls: Sequence[Metrics], timing: Timing, seconds: float) -> None:
        timing.seconds = seconds
        for each in (self._total, *calls):
            each.seconds[kind] = each.seconds.get(kind, 0.0) + seconds

"""Times passes in seconds, and adds them to the metrics of the engine and of the calls in each pass."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stepspec.engines.metrics import EngineMetrics, PassKind


@dataclass
class Timing:
    """A measured time; 0 until it is recorded, on a CUDA device until `Stopwatch.settle`."""

    seconds: float = 0.0


class Stopwatch:
    """Times passes. On a CUDA device, times come from CUDA events and are recorded after synchronization."""

    def __init__(
        self, total: EngineMetrics, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total = total
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._pending: list[tuple[PassKind, Sequence[EngineMetrics], Timing, Any, Any]] = []

    @contextmanager
    def time(self, kind: PassKind, calls: Sequence[EngineMetrics]) -> Generator[Timing]:
        """Time the body of the `with` block."""
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
            self._record(kind, calls, timing, self._clock() - started)

    def settle(self) -> None:
        """Record the pending times. Call it after the device has been synchronized."""
        for kind, calls, timing, begin, end in self._pending:
            end.synchronize()  # it may have been recorded after what was waited for
            self._record(kind, calls, timing, begin.elapsed_time(end) / 1000)
        self._pending.clear()

    def _record(self, kind: PassKind, calls: Sequence[EngineMetrics], timing: Timing, seconds: float) -> None:
        timing.seconds = seconds
        for each in (self._total, *calls):
            each.seconds[kind] = each.seconds.get(kind, 0.0) + seconds

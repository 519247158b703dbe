"""Seconds of passes, booked for the engine and for the calls that took part in them."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stepspec.metrics import Metrics, PassKind


class Stopwatch:
    """On a CUDA device seconds are the device's own, and known once it has been waited for."""

    def __init__(self, total: Metrics, device: torch.device) -> None:
        self._total = total
        self._cuda = device.type == "cuda"
        self._pending: list[tuple[PassKind, Sequence[Metrics], Any, Any]] = []

    @contextmanager
    def time(self, kind: PassKind, calls: Sequence[Metrics]) -> Generator[None]:
        """Books what is done inside."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._pending.append((kind, calls, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._book(kind, calls, time.perf_counter() - started)

    def settle(self) -> None:
        """Books what was timed on a device that has been waited for since."""
        for kind, calls, begin, end in self._pending:
            self._book(kind, calls, begin.elapsed_time(end) / 1000)
        self._pending.clear()

    def _book(self, kind: PassKind, calls: Sequence[Metrics], seconds: float) -> None:
        for each in (self._total, *calls):
            each.seconds[kind] = each.seconds.get(kind, 0.0) + seconds

"""A circuit breaker: a draft that keeps failing is left alone for a while, so that no request waits for it in vain.

Closed, everything goes through. After a few failures in a row it opens; when the time of recovery is over a single
request may try, and closes it again or keeps it open for as long once more.
"""

import time
from collections.abc import Callable


class Breaker:
    """Counts failures in a row. The states are those of Nygard, Release It!, 2nd edition, chapter 5."""

    def __init__(
        self, max_failures: int = 3, recovery_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._recovery_s = recovery_s
        self._clock = clock
        self._num_failures = 0
        self._next_try: float = 0.0

    def allows(self) -> bool:
        """Whether a request may try now; where it is open and the time has come, the first to ask is the one."""
        if self._num_failures < self._max_failures:
            return True
        if self._clock() < self._next_try:
            return False
        self._next_try = self._clock() + self._recovery_s  # the others wait for what this one finds
        return True

    def worked(self) -> None:
        """Takes a success: everything goes through again."""
        self._num_failures = 0

    def failed(self) -> None:
        """Takes a failure."""
        self._num_failures += 1
        self._next_try = self._clock() + self._recovery_s

"""A circuit breaker: after repeated failures the draft is skipped for a while, so that requests do not wait for it.

While it is closed, every request may use the draft. It opens after several failures in a row. After the recovery time,
one request may try the draft: success closes the breaker, failure keeps it open for another recovery time.
"""

import time
from collections.abc import Callable


class Breaker:
    """Circuit breaker that counts failures in a row (Nygard, Release It!, 2nd edition, chapter 5)."""

    def __init__(
        self, max_failures: int = 3, recovery_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._recovery_s = recovery_s
        self._clock = clock
        self._num_failures = 0
        self._next_try: float = 0.0
        self.num_worked = 0
        """Number of successes so far. A call that saw others succeed while it waited did not meet a failure."""

    def allows(self) -> bool:
        """Whether a request may try now. After the recovery time, only the first caller gets True."""
        if self.is_closed:
            return True
        if self._clock() < self._next_try:
            return False
        self._next_try = self._clock() + self._recovery_s  # other requests wait for the result of this one
        return True

    @property
    def is_closed(self) -> bool:
        """Whether every request may try."""
        return self._num_failures < self._max_failures

    def worked(self) -> None:
        """Record a success and close the breaker."""
        self._num_failures = 0
        self.num_worked += 1

    def failed(self) -> None:
        """Record a failure and restart the recovery time."""
        self._num_failures += 1
        self._next_try = self._clock() + self._recovery_s

"""How fast the target writes in a call."""

import time
from collections.abc import Callable, Sequence

from stepspec.loop.pace import StepPace

TOLD_TOKENS = 16
"""Tokens of the target after which their time counts, before its call ends."""

BUNDLE_S = 1e-4
"""Longest wait for a chunk that came together with the one before."""


class WritingWatch:
    """Times what the target writes in a call after its first chunk, which waits for the prompt to be read.

    Chunks that need no waiting came together with the one before: a server may send many tokens at a time. Where most
    of a text came at a time, the whole call is timed. In the first call of a request, which reads the prompt, this says
    nothing about the target's speed.

    Args:
        reads_prompt: whether the call is the first one of its request.
        control: see `StepPace.generated`.
        clock: returns the time in seconds.
    """

    def __init__(self, *, reads_prompt: bool, control: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reads_prompt, self._began_as_control, self._control = reads_prompt, control, control
        self._clock = clock
        self._began = self._asked_at = clock()
        self._bundles: list[tuple[float, int]] = []  # of chunks that came together: when, and how many tokens
        self._told = False

    def asks(self) -> None:
        """Note that the next chunk is asked for."""
        self._asked_at = self._clock()

    def got(self, num_tokens: int) -> None:
        """Note a chunk."""
        now = self._clock()
        if self._bundles and now - self._asked_at < BUNDLE_S:
            now, num_before = self._bundles.pop()
            num_tokens += num_before
        self._bundles.append((now, num_tokens))

    def tell(self, pace: StepPace) -> None:
        """Pass on what was timed since the last time, if it is enough. More may belong to the latest chunks."""
        if sum(count for _, count in self._bundles[1:-1]) >= TOLD_TOKENS:
            self._pass_on(pace, self._bundles[:-1])

    def thinking_ended(self, pace: StepPace) -> None:
        """Pass on what was timed before. The answer that follows is no control, as answers are easy."""
        if self._control:
            self._pass_on(pace, self._bundles[:-1])
            self._control = False

    def pause(self, pace: StepPace) -> None:
        """Leave out a wait for the caller, and the next chunk, which the engine may have written meanwhile."""
        self._pass_on(pace, self._bundles)
        self._bundles, self._told = [], True

    def end(self, pace: StepPace) -> None:
        """Pass on the rest at the end of the call."""
        num_tokens = sum(count for _, count in self._bundles)
        if not num_tokens:  # a server may send an empty text
            return
        num_first = self._bundles[0][1]
        seconds = self._bundles[-1][0] - self._began
        if self._told or num_tokens > 2 * num_first:
            self._pass_on(pace, self._bundles)
        elif self._reads_prompt:
            pace.generated_at_unknown_speed(seconds)
        else:
            pace.generated(num_tokens, seconds, control=self._began_as_control)

    def _pass_on(self, pace: StepPace, bundles: Sequence[tuple[float, int]]) -> None:
        """Pass on what these bundles have after the first of them."""
        num_tokens = sum(count for _, count in bundles[1:])
        if num_tokens:
            pace.generated(num_tokens, bundles[-1][0] - bundles[0][0], control=self._control)
            self._bundles, self._told = self._bundles[len(bundles) - 1 :], True

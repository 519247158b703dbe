"""What is known about speculation on steps at one level of load."""

import math
from dataclasses import dataclass, field

from stepspec.loop.costs import Mean

NOISE = 24.0
"""Variance of the logarithm of the ratio of two epochs, times their tokens: that of 1,024 tokens varies by 15%."""
FIRST_TOKENS = 2048
"""Committed tokens, older ones weighted less, that are compared before one way is chosen."""
CERTAIN = 1.5
"""Gain or loss of speculation, in standard errors, at which a way is chosen before that. A smaller loss is no reason to
leave what the policy asks for."""
MIN_REST, MAX_REST = 4, 64
"""Time between two trials of the slower way, in times of the last one. It grows with the square of the evidence, as a
first choice may be wrong, and is longer where a trial loses more than the policy allows."""
MEMORY = 0.95
"""What a comparison counts after others of 1,024 tokens. A loss of less than 5% is then no evidence."""


def level_of(num_running: float) -> int:
    """Return the level of a load: the binary logarithm of a number of requests, rounded."""
    return round(math.log2(max(1.0, num_running)))


@dataclass
class Epoch:
    """What the requests committed in an epoch."""

    num_running: float
    """Mean number of running requests."""
    speculating: bool
    num_tokens: float
    rate: float
    """Tokens per second."""

    @property
    def load(self) -> int:
        """Level of load."""
        return level_of(self.num_running)


@dataclass
class Level:
    """What is known about a level of load.

    Only epochs that follow each other are compared: a machine is not equally fast at all times.
    """

    gain: float = 0.0
    """Mean of the logarithms of the throughput with speculation over that without it."""
    weight: float = 0.0
    """Tokens that the mean is of."""
    rested_s: float = 0.0
    took_s: dict[bool, float] = field(default_factory=dict[bool, float])
    """Seconds of the last epoch after a change to speculation and to none, with the change, which takes long under a
    great load."""
    target_s: Mean = field(default_factory=Mean)
    """Seconds a token of a request while the target writes alone."""

    @property
    def is_known(self) -> bool:
        """Whether one way was chosen. Until then the two ways take turns."""
        return self.weight >= FIRST_TOKENS or abs(self.evidence) >= CERTAIN

    @property
    def evidence(self) -> float:
        """The gain of speculation in standard errors."""
        return self.gain * math.sqrt(self.weight / NOISE)

    @property
    def best(self) -> bool:
        """Whether to speculate: unless that is known to be slower."""
        return self.evidence > -CERTAIN

    def compare(self, one: Epoch, other: Epoch) -> None:
        """Add what two epochs say, one with speculation and one without it. If the number of requests has changed, the
        throughput may have changed as much for that reason, so they say less."""
        gain = math.log(one.rate / other.rate) * (1 if one.speculating else -1)
        changed = math.log(one.num_running / other.num_running)
        num_tokens = 1 / (1 / min(one.num_tokens, other.num_tokens) + changed**2 / NOISE)
        kept = MEMORY ** (num_tokens / 1024) * self.weight
        self.weight = kept + num_tokens
        self.gain = (kept * self.gain + num_tokens * gain) / self.weight

    def next(self, speculating: bool, seconds: float, max_overhead: float, *, changed: bool) -> bool:
        """Return whether to speculate in the epoch after one with speculation or without it. It took some seconds, with
        those of the change to it if the way had changed."""
        if changed or speculating not in self.took_s:
            self.took_s[speculating] = seconds
        if not self.is_known:
            return not speculating
        best = self.best
        self.rested_s = self.rested_s + seconds if speculating == best else 0.0
        lost = 1 - math.exp(-abs(self.gain))
        rest = min(max(MIN_REST, MIN_REST * self.evidence**2), MAX_REST)
        rest = max(rest, lost / max_overhead if max_overhead else math.inf)
        if self.rested_s <= rest * self.took_s.get(not best, seconds):
            return best
        self.rested_s = 0.0
        return not best

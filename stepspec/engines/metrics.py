"""Metrics of one call or of an engine: forward passes, tokens and seconds by kind."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

PassKind = Literal["read", "draft", "verify"]
"""Kind of a forward pass.

`read`: the target reads prompts and steps to judge. `draft`: a drafter drafts. `verify`: the target verifies drafts.
"""


@dataclass
class EngineMetrics:
    """Counts and seconds of one call, or totals over all calls of an engine.

    The seconds of a call include all passes that it took part in, also those shared with other calls.
    """

    rounds: int = 0
    """Rounds, counted for each call: one pass over three calls is three rounds."""
    drafts: int = 0
    """Rounds with at least one drafted token."""
    drafted: int = 0
    accepted: int = 0
    accepted_whole: int = 0
    """Rounds with drafted tokens, all of which were accepted."""
    accepted_at: Counter[int] = field(default_factory=Counter[int])
    """Number of accepted tokens by position in the draft, from 0."""
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    passes: Counter[PassKind] = field(default_factory=Counter[PassKind])
    seconds: dict[PassKind, float] = field(default_factory=dict[PassKind, float])
    requests: int = 0
    """HTTP requests to a server."""
    moves: int = 0
    """Calls that went on at another server, because the one before had failed."""
    bytes_sent: int = 0
    bytes_received: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of weights and caches, by model."""

    @property
    def target_passes(self) -> int:
        """Forward passes of the target, without those of its drafter."""
        return self.passes["read"] + self.passes["verify"]

    @property
    def acceptance(self) -> float | None:
        """Share of accepted tokens among the verified ones, up to each first rejection; None without drafts."""
        verified = self.accepted + self.drafts - self.accepted_whole
        return self.accepted / verified if verified else None

    def note_round(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Add the result of one round of one call."""
        self.rounds += 1
        self.generated += num_emitted
        if num_drafted:
            self.drafts += 1
            self.drafted += num_drafted
            self.accepted += num_accepted
            self.accepted_whole += num_drafted == num_accepted
            self.accepted_at.update(range(num_accepted))

    def __sub__(self, before: "EngineMetrics") -> "EngineMetrics":
        """Return the difference to earlier metrics; memory is the current value."""
        return self._with(before, -1)

    def __add__(self, other: "EngineMetrics") -> "EngineMetrics":
        """Return the sum of both; memory is the value of the left operand."""
        return self._with(other, 1)

    def _with(self, other: "EngineMetrics", sign: int) -> "EngineMetrics":
        result = self.copied()
        for name, value in vars(other).items():
            mine: Any = getattr(result, name)
            if isinstance(value, int):
                setattr(result, name, mine + sign * value)
            elif name != "memory_bytes":
                for key, amount in value.items():
                    mine[key] = mine.get(key, 0) + sign * amount
        return result

    def copied(self) -> "EngineMetrics":
        """Return a copy. Each field is copied in one operation, since another thread may update it."""
        values: dict[str, Any] = {
            name: value if isinstance(value, int) else value.copy() for name, value in vars(self).items()
        }
        return EngineMetrics(**values)

"""What a model has done for one call, or for all of them: passes, tokens and seconds by kind."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

CallPart = Literal["network", "queue", "compute"]
PassKind = Literal["read", "draft", "verify"]
"""Of the target over prompts and steps to be judged; of a drafter; of the target over what a round has drafted."""


@dataclass
class Metrics:
    """Counts and seconds of one call, or of all calls of an engine together.

    A call's seconds are those of all passes that it took part in, shared or not.
    """

    rounds: int = 0
    """Of one call each: a pass over three calls is three rounds."""
    drafts: int = 0
    """Rounds with at least one drafted token."""
    drafted: int = 0
    accepted: int = 0
    accepted_whole: int = 0
    """Drafts of which every token was accepted."""
    accepted_at: Counter[int] = field(default_factory=Counter[int])
    """How often the drafted token of that place, from 0 on, was accepted."""
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts' tokens those that did not have to be read again."""
    passes: Counter[PassKind] = field(default_factory=Counter[PassKind])
    seconds: dict[PassKind, float] = field(default_factory=dict[PassKind, float])
    call_seconds: dict[CallPart, float] = field(default_factory=dict[CallPart, float])
    """Of the calls whose engine says where their time went; on a server's side those that come in one piece."""
    requests: int = 0
    """To a server, as are the bytes."""
    bytes_sent: int = 0
    bytes_received: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Of weights and caches, by model."""

    @property
    def target_passes(self) -> int:
        """Forward passes of the model itself, not of what drafts for it."""
        return self.passes["read"] + self.passes["verify"]

    @property
    def acceptance(self) -> float | None:
        """Share of accepted tokens among those that were looked at, up to the first refused one of each draft."""
        looked_at = self.accepted + self.drafts - self.accepted_whole
        return self.accepted / looked_at if looked_at else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round with drafted tokens emits, the one behind them included; None without such rounds."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def draft_overhead(self) -> float | None:
        """Memory of the draft's weights and cache over the target's; None without a draft."""
        if "draft weights" not in self.memory_bytes:
            return None
        drafts = sum(size for name, size in self.memory_bytes.items() if name.startswith("draft"))
        return drafts / (sum(self.memory_bytes.values()) - drafts)

    def note_round(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Takes what came of one row's round."""
        self.rounds += 1
        self.generated += num_emitted
        if num_drafted:
            self.drafts += 1
            self.drafted += num_drafted
            self.accepted += num_accepted
            self.accepted_whole += num_drafted == num_accepted
            self.accepted_at.update(range(num_accepted))

    def note_call(self, queue_s: float, compute_s: float, whole_s: float | None = None) -> None:
        """Takes where a call's time went; of `whole_s`, if it went over a network, what is left is the network's."""
        parts: dict[CallPart, float] = {"queue": queue_s, "compute": compute_s}
        if whole_s is not None:
            parts["network"] = max(0.0, whole_s - queue_s - compute_s)
        for part, seconds in parts.items():
            self.call_seconds[part] = self.call_seconds.get(part, 0.0) + seconds

    def __sub__(self, before: "Metrics") -> "Metrics":
        """What was done since then; memory as it is now."""
        return self._with(before, -1)

    def __add__(self, other: "Metrics") -> "Metrics":
        """What both have done; memory as it is here."""
        return self._with(other, 1)

    def _with(self, other: "Metrics", sign: int) -> "Metrics":
        result = self.copied()
        for name, value in vars(other).items():
            mine: Any = getattr(result, name)
            if isinstance(value, int):
                setattr(result, name, mine + sign * value)
            elif name != "memory_bytes":
                for key, amount in value.items():
                    mine[key] = mine.get(key, 0) + sign * amount
        return result

    def copied(self) -> "Metrics":
        """As they are now. Another thread may be adding to them: each field is copied in one go."""
        values: dict[str, Any] = {
            name: value if isinstance(value, int) else value.copy() for name, value in vars(self).items()
        }
        return Metrics(**values)

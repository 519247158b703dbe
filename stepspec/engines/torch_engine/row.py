"""The state of a generation in progress, owned by the engine's thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import ChunkEnd, Drafting, Sampling, TokenBuffer
from stepspec.engines.stops import StopMatcher
from stepspec.engines.torch_engine.constraint import Constraint
from stepspec.engines.torch_engine.sampling import Seen
from stepspec.engines.torch_engine.slots import Slot


@dataclass(eq=False)  # rows are compared by identity
class BatchRow:
    """A generation in progress. Its text is the buffer's first `prompt_length` ids, then `beyond`.

    `beyond` holds the ids of the call after its prompt, then those generated.
    """

    buffer: TokenBuffer
    prompt_length: int
    sampling: Sampling
    drafting: Drafting
    watch: StopMatcher
    constraint: Constraint | None = None
    beyond: list[int] = field(default_factory=list)
    num_after: int = 0
    """Number of ids in `beyond` that were not generated."""
    end: ChunkEnd | None = None
    slot: Slot = field(init=False)  # set when the call is admitted
    seen: Seen | None = None  # the tokens in the first `num_seen` ids, [V]; set if there is a penalty
    num_seen: int = 0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    details: list[Sequence[float]] | None = None
    """Log-probability and entropy of each generated token; None if the call does not return them."""
    relaxed: list[int] = field(default_factory=list[int])
    """Positions in `beyond` of relaxed tokens that were not sent yet; also of those behind the end of the text."""
    kinds: Tensor | None = None  # see `relaxation.token_kinds`; set if the call relaxes tokens

    @property
    def length(self) -> int:
        """Number of tokens of the text so far."""
        return self.prompt_length + len(self.beyond)

    def num_wanted(self, chosen: int) -> int:
        """Return how many tokens to draft: the call's own number if it sets one, else `chosen`."""
        fixed = self.drafting.num_tokens
        return min(chosen if fixed is None else fixed, self.watch.remaining - 1)

    @property
    def last(self) -> int:
        """The newest token. It is not in any cache yet."""
        return self.ids_from(self.length - 1)[0]

    def ids_from(self, position: int) -> list[int]:
        """Return the ids of the row's text from `position` on."""
        beyond = max(0, position - self.prompt_length)
        return self.buffer.since(position, self.prompt_length) + self.beyond[beyond:]

    def emit(self, tokens: Sequence[int], num_drafted: int, details: Sequence[Sequence[float]] | None = None) -> int:
        """Append tokens up to the one that ends the text; return how many of the first `num_drafted` were appended.

        Args:
            tokens: the tokens.
            num_drafted: how many of them were drafted.
            details: log-probability and entropy of each token, if the row returns them.
        """
        self.end, count = self.watch.feed_all(tokens)
        self.beyond += tokens[:count]
        if self.details is not None and details is not None:
            self.details += details[:count]
        if self.constraint is not None:
            ended = self.end == "token"
            self.constraint.consume(tokens[: count - ended], ended=ended)
        return min(num_drafted, count)

"""A generation in progress, as the engine's thread keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import ChunkEnd, Drafting, Sampling, TokenBuffer
from stepspec.engines.stops import StopWatch
from stepspec.engines.torch_engine.constraint import Constraint
from stepspec.engines.torch_engine.slots import Slot


@dataclass(eq=False)  # a row is itself, whatever its fields say
class BatchRow:
    """A generation in progress. `prompt_length` ids of the buffer came before what is in `generated`."""

    buffer: TokenBuffer
    prompt_length: int
    sampling: Sampling
    drafting: Drafting
    watch: StopWatch
    hint: Sequence[int] = ()
    constraint: Constraint | None = None
    generated: list[int] = field(default_factory=list)
    end: ChunkEnd | None = None
    slot: Slot = field(init=False)  # once the call is admitted
    seen: Tensor | None = None  # bool [V], which tokens the text has, up to `num_seen`; if a penalty asks
    num_seen: int = 0
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self.prompt_length + len(self.generated)

    def num_wanted(self, chosen: int) -> int:
        """How many tokens to draft: as many as were `chosen` if the call leaves that open."""
        fixed = self.drafting.num_tokens
        return min(chosen if fixed is None else fixed, self.watch.remaining - 1)

    @property
    def last(self) -> int:
        """The newest token, which no cache has read yet."""
        return self.ids_from(self.length - 1)[0]

    def ids_from(self, position: int) -> list[int]:
        """The row's ids from a position of its text on."""
        beyond = max(0, position - self.prompt_length)
        return self.buffer.since(position, self.prompt_length) + self.generated[beyond:]

    def emit(self, tokens: Sequence[int], num_drafted: int) -> int:
        """Takes new tokens up to the one that ends the generation; says how many of the first `num_drafted` it took."""
        before = len(self.generated)
        for token in tokens:
            self.generated.append(token)
            self.end = self.watch.feed(token)
            if self.end is not None:
                break
        if self.constraint is not None:
            ended = self.end == "token"
            self.constraint.consume(self.generated[before : len(self.generated) - ended], ended=ended)
        return min(num_drafted, len(self.generated) - before)

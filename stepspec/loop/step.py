"""Steps, verdicts on them, and their events, as immutable values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from stepspec.engines.protocol import ChunkEnd, TokenChunk

Origin = Literal["draft", "salvaged", "target"]
"""Who wrote a committed step: the draft, both models, or the target. Family `score` salvages the draft's beginning of a
rejected step; in family `route` either model may begin."""

StepEnd = Literal["delimiter", "cap", "thinking", "text"]
"""What ended a step: the delimiter, the token cap, the end-of-thinking tag, or the end of the text."""


@dataclass(frozen=True)
class Proposal:
    """A step that the draft has written. `ids` holds all drafted tokens, including an end tag."""

    ids: tuple[int, ...]
    text: str
    num_written: int
    """Number of leading tokens that form the step, without the tag that ends the thinking or the text."""
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities of the draft's own tokens, without the tag; None unless a judge needs them."""
    entropies: tuple[float, ...] | None = None
    """Entropies of the draft's distributions, like `logprobs`."""
    end: ChunkEnd = "length"
    """How it ended. Only a step that ended with a delimiter or a tag is complete."""
    aborted: bool = False
    """Whether the draft repeated itself."""
    seconds: float = 0.0
    """Seconds in which the draft wrote it."""
    relaxed: tuple[int, ...] = ()
    """Positions in `ids` of the target's relaxed tokens."""

    @classmethod
    def of(cls, chunk: TokenChunk, text: str) -> "Proposal":
        """Return the step of a finished call, with its text. The details of the tag that ends it are left out."""
        count = len(chunk.written)
        logprobs, entropies = (None if each is None else each[:count] for each in (chunk.logprobs, chunk.entropies))
        end, relaxed = chunk.end or "length", chunk.relaxed or ()
        return cls(chunk.ids, text, count, logprobs, entropies, end, relaxed=relaxed)

    @property
    def written(self) -> tuple[int, ...]:
        """Its ids without the tag that ends the thinking or the text."""
        return self.ids[: self.num_written]

    def followed_by(self, rest: "Proposal") -> "Proposal":
        """Return the step with what the draft has written after it."""
        values = {
            name: (*(getattr(self, name) or ()), *found)
            for name in ("logprobs", "entropies")
            if (found := getattr(rest, name)) is not None
        }
        written = self.num_written + rest.num_written
        seconds = self.seconds + rest.seconds
        ids, text = (*self.ids, *rest.ids), self.text + rest.text
        return replace(rest, ids=ids, text=text, num_written=written, seconds=seconds, **values)

    @property
    def tag(self) -> int | None:
        """The end tag that the draft has written, or None."""
        return self.ids[-1] if self.num_written < len(self.ids) else None


@dataclass(frozen=True)
class Verdict:
    """The judges' verdict on a proposal. `scores` maps each judge to its score, or None if it has none."""

    accepted: bool
    scores: Mapping[str, float | None]
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why judges failed, by their names."""


@dataclass(frozen=True)
class Step:
    """A committed step."""

    index: int
    origin: Origin
    text: str
    num_tokens: int
    num_from_draft: int
    end: StepEnd
    scores: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain values: the payload of `stepspec.step.committed`. The service sends the same without
        the text."""
        return asdict(self)


@dataclass(frozen=True)
class JudgedStep:
    """What was seen of a step that the draft proposed, to decide about it again under another policy.

    The values by token are of the step without the tag that ends it. They are None where nobody computed them.
    """

    index: int
    """Number of steps committed before it."""
    text: str
    num_tokens: int
    accepted: bool
    asked: bool
    """Whether the judges were asked. Empty and repeated steps are rejected without asking."""
    scores: Mapping[str, float | None]
    target_logprobs: tuple[float, ...] | None
    own_choices: tuple[bool, ...] | None
    """Whether each token is the target's own choice."""
    draft_logprobs: tuple[float, ...] | None
    num_salvaged: int
    """Tokens kept of a rejected step."""
    draft_s: float
    """Seconds in which the draft wrote it."""
    judge_s: float
    """Seconds in which it was judged."""
    write_s: float
    """Seconds in which the target wrote the rest of a rejected step."""


@dataclass(frozen=True)
class Noted:
    """The question is unlike the training data of a pair that stepspec provides. It comes before all other events."""

    text: str
    """The sentence for the user, which is also in the result's `note`."""
    type: Literal["note"] = "note"


@dataclass(frozen=True)
class StepProposed:
    """The draft has written a step, which is not judged yet. Do not show it as output."""

    index: int
    text: str
    num_tokens: int
    type: Literal["step.proposed"] = "step.proposed"


@dataclass(frozen=True)
class StepJudged:
    """A proposed step has been judged."""

    index: int
    accepted: bool
    scores: Mapping[str, float | None]
    type: Literal["step.judged"] = "step.judged"


@dataclass(frozen=True)
class StepDelta:
    """The next chunk of a step that is being written.

    It will not change. The option `step_deltas` turns these events on.
    """

    index: int
    text: str
    type: Literal["step.delta"] = "step.delta"


@dataclass(frozen=True)
class StepCommitted:
    """A step has been committed and will not change."""

    step: Step
    in_answer: bool = False
    """Whether the answer has its text, too, as the model does not separate its thinking."""
    num_shown: int = 0
    """Characters of its text that came as `StepDelta`."""
    type: Literal["step.committed"] = "step.committed"

    @property
    def rest(self) -> str:
        """Its text without what came as `StepDelta`."""
        return self.step.text[self.num_shown :]

"""A request as data: what was asked, the models, the limits, the text and the record. It calls no engine.

The draft never ends the thinking or the text by itself: the target's own choice at that position decides. Token-level
speculation inside the target's own writing is exact; the engine does it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from stepspec.chat.answer import AnswerReader
from stepspec.engines.judge_model import JudgeModel
from stepspec.engines.protocol import Distant, Engine, Sampling, Stop
from stepspec.engines.thinking import ThinkingTags
from stepspec.loop.breaker import Breaker
from stepspec.loop.choice import StepChoice
from stepspec.loop.judge import Panel
from stepspec.loop.ledger import Ledger
from stepspec.loop.limits import Limits
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy_tables import PolicyTables
from stepspec.loop.record import RequestRecord
from stepspec.loop.result import NotProposed
from stepspec.loop.step import JudgedStep
from stepspec.loop.thinking import thinking_of
from stepspec.loop.tracing import Spans
from stepspec.loop.transcript import Transcript


@dataclass(eq=False)
class Request:
    """One request under one policy.

    Its text is in `transcript`, and what has happened in it, with the events for the caller, in `record`.
    """

    policy: PolicyTables
    target: Engine
    draft: Engine | None
    panel: Panel
    tags: ThinkingTags | None
    sampling: Sampling
    ledger: Ledger
    prompt: Sequence[int]
    question: str = ""
    """Text of the last user turn, for the judges."""
    breaker: Breaker = field(default_factory=Breaker)
    """The draft's circuit breaker, shared by all requests."""
    choice: StepChoice = field(default_factory=StepChoice)
    """Chooses whether steps are speculated on. Requests of one session share it."""
    options: RequestOptions = RequestOptions()
    json_schema: InitVar[str | None] = None
    """See `Limits`, also for `call_opener`."""
    call_opener: InitVar[re.Pattern[str] | None] = None
    answer: AnswerReader = field(default_factory=AnswerReader)
    spans: Spans = field(default_factory=Spans)
    judges: Mapping[str, JudgeModel] = field(default_factory=dict[str, JudgeModel])
    """Judge models by name."""
    starts_thinking: bool = True
    """Whether the text begins with thinking, or without tags, with steps. Else the target writes an answer."""
    judged_steps: list[JudgedStep] | None = None
    """Receives the draft's steps with what was seen of them; None to record nothing."""

    def __post_init__(self, json_schema: str | None, call_opener: re.Pattern[str] | None) -> None:
        self.tokenizer, stop_ids = self.target.tokenizer, frozenset(self.options.stop_token_ids)
        self.thinking = thinking_of(self.tags)
        self.answer_ends = self.tokenizer.end_ids | stop_ids
        self.ends = self.thinking.step_ends(self.tokenizer.end_ids, stop_ids)
        """Tokens that end a step."""
        table = self.policy.step
        self.transcript = Transcript(
            self.prompt,
            self.tokenizer,
            Stop(table.max_step_tokens, (table.delimiter,), self.ends),
            self.thinking,
            self.answer,
            stop_ids,
            thinks=self.starts_thinking,
            session=self.options.session_id,
            group=self.options.cache_salt,
        )
        self.transcript.answer_is_apart = json_schema is not None
        self.transcript.shows_deltas = self.options.step_deltas
        self.limits = Limits(self.options, self.ledger, self.transcript, json_schema, call_opener)
        self.record = RequestRecord(self.ledger, self.spans)
        self.draft_is_far = isinstance(self.draft, Distant)
        """Whether the draft is on a server, so that each call of it takes a round trip."""
        self.only_target = False
        """Whether a tool call has begun, which only the target writes."""
        self.not_proposed: NotProposed | None = None
        """Why the draft was not asked for its next step, or did not write it; None if it did."""
        self._num_told = 0

    @property
    def num_written(self) -> int:
        """Number of tokens after the prompt, counted in the text itself."""
        return len(self.transcript.buffer) - len(self.prompt)

    @property
    def open_text(self) -> str:
        """Text of the open step."""
        ids = self.transcript.open_ids
        return self.tokenizer.decode(self.transcript.visible(ids)) if ids else ""

    @property
    def step_is_over(self) -> bool:
        """Whether nothing more is written to the open step."""
        return self.transcript.step_is_over or self.answer.stopped

    def room_after(self, ids: Sequence[int]) -> int:
        """Return how many tokens may follow uncommitted ids."""
        return max(0, min(self.limits.room, self.target.max_context - len(self.transcript.buffer)) - len(ids))

    @property
    def samples(self) -> bool:
        """Whether passes over draft steps say what the target would write, under the request's sampling."""
        return "samples" in self.target.abilities and not self.sampling.depends_on_text

    @property
    def is_edited(self) -> bool:
        """Whether the sampling changes logits."""
        return self.sampling.is_edited

    @property
    def is_own_text(self) -> bool:
        """Whether the target's choices in a pass over a text are what it would write there."""
        return self.samples or (self.sampling.temperature == 0 and not self.is_edited)

    @property
    def reads_scores(self) -> bool:
        """Whether passes over steps return the log-probs of their tokens, for the policy or for a recording."""
        recorded = self.judged_steps is not None and "scores" in self.target.abilities
        return self.policy.needs_scores or recorded

    def target_has(self, ids: Sequence[int]) -> bool:
        """Whether the target has these tokens, as far as its vocabulary is known. A draft may have further ones."""
        return self.tokenizer.num_ids is None or max(ids, default=0) < self.tokenizer.num_ids

    def has_control_token(self, ids: Sequence[int]) -> bool:
        """Whether a draft's text has tokens that only the target may write, such as those that open a message."""
        return any(map(self.tokenizer.is_special, ids))

    def tell_committed(self) -> None:
        """Tell the session how much was committed since the last time."""
        self.choice.committed(self, self.num_written - self._num_told)
        self._num_told = self.num_written

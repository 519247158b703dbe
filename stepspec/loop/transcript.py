"""The growing text of one request: token ids, committed steps, then the answer.

Ids are only appended and never encoded again, so the work per step does not grow with the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from stepspec.chat.answer import AnswerReader
from stepspec.chat.events import AnswerEvent
from stepspec.engines.protocol import Stop, TokenBuffer, Tokenizer
from stepspec.engines.stops import StopWatch
from stepspec.engines.text import TextReader, visible_ids
from stepspec.loop.step import Origin, Step, StepCommitted, StepEnd


class Transcript:
    """The text of a request. `thinking` is true until the end-of-thinking tag; the answer follows until `ended`.

    A model without thinking tags has only steps, and their text is also the answer.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        step_stop: Stop,
        think_end: int | None,
        answer: AnswerReader | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`stop_token_ids` end the answer like the tokenizer's own end tokens."""
        self.buffer = TokenBuffer(prompt)
        self.steps: list[Step] = []
        self.answer = answer or AnswerReader()
        self.num_thought = 0
        """Tokens of the closed steps."""
        self.thinking = True
        self.ended = False
        self.open_ids: list[int] = []
        """Ids of the open step."""
        self.open_text = ""
        """Text of the open step that has been emitted."""
        self.visible = partial(visible_ids, tokenizer, marks=self.answer.marks)
        """Filters ids down to those that are visible to the user."""
        self._reader = TextReader(tokenizer, self.buffer, len(prompt), self.visible)
        self._tokenizer = tokenizer
        self._step_stop = step_stop
        self._answer_ends = tokenizer.end_ids | stop_token_ids
        self._think_end = think_end
        self._watch = self._new_watch()
        self._step_end: StepEnd | None = None

    def _new_watch(self) -> StopWatch:
        return StopWatch(self._step_stop, self._tokenizer.piece, self._tokenizer.end_ids)

    @property
    def last_text(self) -> str:
        """Text of the last step."""
        return self.steps[-1].text if self.steps else ""

    @property
    def step_is_over(self) -> bool:
        """Whether the open step is complete and can be closed."""
        return self._step_end is not None

    @property
    def has_end_tag(self) -> bool:
        """Whether the open step ends with the tag that ends the thinking or the text."""
        return self._step_end in ("thinking", "text")

    def rest_of_step(self, remaining: int) -> Stop:
        """Return where the writer of the open step must stop, with `remaining` tokens left in the budget."""
        room = self._step_stop.max_tokens - len(self.open_ids)
        own, before = self._step_stop, self._watch.recent
        return Stop(max(1, min(room, remaining)), own.delimiters, own.token_ids, before)

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids to the open step."""
        self.buffer.append(ids)
        for id in ids:
            self.open_ids.append(id)
            self._step_end = self._end_of(id)

    def _end_of(self, id: int) -> StepEnd | None:
        end = self._watch.feed(id)
        if end == "token":
            return "thinking" if id == self._think_end else "text"
        return "cap" if end == "length" else end

    def close_step(
        self, origin: Origin, num_from_draft: int = 0, scores: Mapping[str, float | None] | None = None
    ) -> Iterator[StepCommitted | AnswerEvent]:
        """Commit the open step. An end tag ends the thinking or the text and is not part of the step."""
        end = self._step_end or "cap"
        ids = self.open_ids[:-1] if end in ("thinking", "text") else self.open_ids
        if ids:
            rest = self._reader.read(len(self.buffer) - len(self.open_ids) + len(ids), to_the_end=end != "cap")
            text = self.open_text + rest
            step = Step(len(self.steps), origin, text, len(ids), min(num_from_draft, len(ids)), end, scores or {})
            self.steps.append(step)
            self.num_thought += len(ids)
            yield StepCommitted(step)
            if self._think_end is None:
                yield from self.answer.feed(rest)
        self.thinking = end not in ("thinking", "text") and not self.answer.stopped
        self.ended = end == "text" or self.answer.stopped
        if not self.thinking:
            self._reader.position = len(self.buffer)
        self.open_ids, self.open_text, self._watch, self._step_end = [], "", self._new_watch(), None

    def emit(self) -> Iterator[AnswerEvent]:
        """Emit the open step's text so far, if steps are the answer. Emitted text cannot be withdrawn."""
        if self._think_end is None and self.open_ids and not self.step_is_over:
            text = self._reader.read(len(self.buffer), to_the_end=False)
            self.open_text += text
            yield from self.answer.feed(text)

    def end_thinking(self, origin: Origin) -> Iterator[StepCommitted | AnswerEvent]:
        """Close the open step with `origin` and append the end-of-thinking tag."""
        assert self._think_end is not None
        yield from self.finish(origin)
        self.extend([self._think_end])
        yield from self.close_step(origin)

    def write_on(self, ids: Sequence[int], origin: Origin) -> Iterator[StepCommitted | AnswerEvent]:
        """Append ids of a single writer. Close each step that ends; after the thinking, emit the answer."""
        for index, id in enumerate(ids):
            if self.ended:  # by a stop string: the tokens after it are kept in the buffer but not emitted
                self.buffer.append(ids[index:])
                return
            if not self.thinking:
                yield from self._answer(ids[index:])
                return
            self.extend([id])
            if self.step_is_over:
                yield from self.finish(origin)
        yield from self.emit()
        if self.answer.stopped:
            yield from self.finish(origin)

    def finish(self, origin: Origin) -> Iterator[StepCommitted | AnswerEvent]:
        """Close the step that the last writer has left open."""
        if self.open_ids:
            yield from self.close_step(origin, len(self.open_ids) if origin == "draft" else 0)

    def _answer(self, ids: Sequence[int]) -> Iterator[AnswerEvent]:
        self.buffer.append(ids)
        ended = ids[-1] in self._answer_ends
        text = self._reader.read(len(self.buffer) - ended, to_the_end=ended)
        yield from self.answer.feed(text)
        self.ended = ended or self.answer.stopped

"""The growing text of one request: token ids, committed steps, then the answer.

Ids are only appended and never encoded again, so the work per step does not grow with the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from stepspec.chat.answer import AnswerReader, beginning
from stepspec.chat.events import AnswerEvent
from stepspec.engines.protocol import Stop, TokenBuffer, Tokenizer
from stepspec.engines.stops import StopMatcher
from stepspec.engines.text import TextReader, visible_ids
from stepspec.loop.step import Origin, Step, StepCommitted, StepDelta, StepEnd
from stepspec.loop.thinking import ThinkingBoundary

MAX_HEADER = 32
"""Most tokens of the header of a message."""


class Transcript:
    """The text of a request. `thinking` is true until the tag or text that ends it; the answer follows until `ended`.

    A model without thinking tags has only steps, and their text is also the answer. In a format of messages, the header
    of a message follows the tag, and may open further thinking.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        step_stop: Stop,
        thinking: ThinkingBoundary,
        answer: AnswerReader | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        thinks: bool = True,
        session: str | None = None,
        group: str | None = None,
    ) -> None:
        """
        Args:
            prompt: ids before the text.
            tokenizer: the tokenizer.
            step_stop: what ends a step.
            thinking: what separates the thinking from the answer.
            answer: reads the answer.
            stop_token_ids: ids that end the answer like the tokenizer's own end tokens.
            thinks: whether the text begins with thinking, or for a model without tags, with steps.
            session: see `TokenBuffer`, also for `group`.
        """
        self.buffer = TokenBuffer(prompt, session, group)
        self.steps: list[Step] = []
        self.answer = answer or AnswerReader()
        self.num_thought = 0
        """Tokens of the closed steps."""
        self.thinking = thinks
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
        self._format = thinking
        self._ending = thinking.text
        if self._ending:
            self._step_stop = replace(step_stop, delimiters=(*step_stop.delimiters, self._ending))
        self._header: list[int] | None = None
        self._watch = self._new_watch("\n")  # a text begins at the beginning of a line
        self._after_ending: str | None = None
        """What the last token of an ending that is text has after it; None before the ending."""
        self.answer_is_apart = False
        """Whether the answer begins with the first token after the ending, as under a schema."""
        self.shows_deltas = False
        """Whether the text of an open step is emitted if it is thinking."""
        self._step_end: StepEnd | None = None

    def _new_watch(self, before: str) -> StopMatcher:
        """Return a watch of a step after a text, in which the text that ends the thinking may have begun."""
        max_tokens = max(1, self._step_stop.max_tokens - len(self.open_ids))
        stop = replace(self._step_stop, max_tokens=max_tokens, before=self._begun(before))
        return StopMatcher(stop, self._tokenizer.piece, self._tokenizer.end_ids)

    def _begun(self, text: str) -> str:
        """Return what a text has at its end of the text that ends the thinking."""
        return text[len(text) - beginning(text, (self._ending,)) :]

    @property
    def last_text(self) -> str:
        """Text of the last step."""
        return self.steps[-1].text if self.steps else ""

    @property
    def is_stuck(self) -> bool:
        """Whether the last two steps are equal."""
        texts = [step.text.strip() for step in self.steps[-2:]]
        return len(texts) == 2 and texts[0] == texts[1]

    @property
    def last_id(self) -> int:
        """The last id of the text, or of the prompt."""
        return self.buffer.since(len(self.buffer) - 1)[0]

    @property
    def step_is_over(self) -> bool:
        """Whether the open step is complete and can be closed."""
        return self._step_end is not None

    @property
    def has_end_tag(self) -> bool:
        """Whether the open step ends with the tag that ends the thinking or the text."""
        return self._step_end in ("thinking", "text")

    @property
    def in_header(self) -> bool:
        """Whether the header of a message is open, which decides whether thinking or an answer follows."""
        return self._header is not None

    def rest_of_step(self, remaining: int, after: Sequence[int] = ()) -> Stop:
        """Return where the writer of the open step must stop, with `remaining` tokens left in the budget. After
        uncommitted steps with the ids `after`, it is that of the next step."""
        own, room = self._step_stop, self._step_stop.max_tokens - len(self.open_ids)
        before = self._begun(self._watch.recent + self._text_of(after)) if after else self._watch.recent
        return Stop(max(1, min(room, remaining)), own.delimiters, own.token_ids, before)

    @property
    def end_of_thinking(self) -> Stop:
        """Where a writer of the thinking alone must stop, without a limit of tokens."""
        endings = (self._ending,) if self._ending else ()
        return replace(self.rest_of_step(1), delimiters=endings)

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids to the open step."""
        self.buffer.append(ids)
        for id in ids:
            self.open_ids.append(id)
            self._step_end = self._end_of(id)

    def _end_of(self, id: int) -> StepEnd | None:
        before = self._watch.recent
        end = self._watch.feed(id)
        if end == "delimiter" and self._ending:
            _, ended, after = (before + self._tokenizer.piece(id)).partition(self._ending)
            if ended:
                self._after_ending = after
                return "thinking"
        if end == "token":
            return self._format.end_of(id)
        return "cap" if end == "length" else end

    def close_step(
        self, origin: Origin, num_from_draft: int = 0, scores: Mapping[str, float | None] | None = None
    ) -> Iterator[StepCommitted | AnswerEvent]:
        """Commit the open step. An end tag ends the thinking or the text and is not part of the step.

        A step never ends within the text that ends the thinking: what has begun of it stays open.
        """
        end = self._step_end or "cap"
        ids, rest = self._read_step(end)
        if ids:
            text = self.open_text + rest
            step = Step(len(self.steps), origin, text, len(ids), min(num_from_draft, len(ids)), end, scores or {})
            self._format.close(text, self.last_text)
            self.steps.append(step)
            self.num_thought += len(ids)
            in_answer = self._format.steps_are_answer
            yield StepCommitted(step, in_answer, 0 if in_answer else len(self.open_text))
            if in_answer:
                yield from self.answer.feed(rest)
        self.thinking = end not in ("thinking", "text") and not self.answer.stopped
        self.ended = end == "text" or self.answer.stopped
        last = self.open_ids[-1] if self.open_ids else None
        self.open_ids = self.open_ids[len(ids) :] if self.thinking else []
        self.open_text, self._watch, self._step_end = "", self._new_watch(self._watch.recent), None
        if not self.thinking:
            self._reader.position = len(self.buffer)
        if self._after_ending is not None:
            yield from self.answer.feed("" if self.answer_is_apart else self._after_ending)
            self._after_ending = None
        elif end == "thinking":
            if last in self._format.implicit_ends:  # it is the beginning of the answer
                self._reader.position -= 1
                yield from self.answer.feed(self._reader.read(len(self.buffer), to_the_end=False))
            elif self._format.header_end is not None:
                self._header = []

    def _read_step(self, end: StepEnd) -> tuple[Sequence[int], str]:
        """Return the ids of the open step without those of what ends the text or the thinking, and their text."""
        ids = self.open_ids
        if self._after_ending is not None:
            ends = self._character_ends(ids)
            mark = self._ending.lstrip() + self._after_ending
            count = sum(start < ends[-1] - len(mark) for start in (0, *ends[:-1]))
            return ids[:count], self._reader.read(len(self.buffer), to_the_end=True).removesuffix(mark)
        if end in ("thinking", "text"):
            ids = ids[:-1]
        else:
            ids = self._before_ending(ids)
        position = len(self.buffer) + len(ids) - len(self.open_ids)
        return ids, self._reader.read(position, to_the_end=end != "cap") if ids else ""

    def _before_ending(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the open ids without what has begun of the text that ends the thinking."""
        begun = self._begun(self._watch.recent).lstrip()
        ends = self._character_ends(ids) if begun else []
        return ids[: sum(place <= ends[-1] - len(begun) for place in ends)] if begun else ids

    def num_before_ending(self, ids: Sequence[int], after: Sequence[int] = (), *, whole: bool = False) -> int:
        """Return how many leading ids come before the text that ends the thinking; all of them if there is none.

        Args:
            ids: ids that go on with the open step.
            after: uncommitted ids before them.
            whole: whether only the whole ending counts. Else its beginning at the end of the ids counts too.
        """
        if not self._ending:
            return len(ids)
        before = self._watch.recent + self._text_of(after)
        text = before + self._text_of(ids)
        start = text.find(self._ending)
        if start < 0:
            start = len(text) - (0 if whole else len(self._begun(text)))
        start += len(self._ending) - len(self._ending.lstrip())  # a line break alone is no ending
        count = sum(len(before) + end <= start for end in self._character_ends(ids))
        # What is left may end with another beginning, as that of `</think<` does.
        return count if whole or count == len(ids) else self.num_before_ending(ids[:count], after)

    def _text_of(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.piece, ids))

    def _character_ends(self, ids: Sequence[int]) -> list[int]:
        return [*accumulate(len(self._tokenizer.piece(id)) for id in ids)]

    def emit(self) -> Iterator[StepDelta | AnswerEvent]:
        """Emit the open step's text so far, if steps are the answer or the caller wants deltas. Emitted text cannot be
        withdrawn."""
        in_answer = self._format.steps_are_answer
        if not self.open_ids or self.step_is_over or not (in_answer or self.shows_deltas):
            return
        num_held = len(self.open_ids) - len(self._before_ending(self.open_ids))
        text = self._reader.read(len(self.buffer) - num_held, to_the_end=False)
        self.open_text += text
        if in_answer:
            yield from self.answer.feed(text)
        elif text:
            yield StepDelta(len(self.steps), text)

    @property
    def rest_of_ending(self) -> Sequence[int]:
        """The ids that end the thinking, without those that are already there."""
        if begun := self._begun(self._watch.recent):
            return self._tokenizer.encode_text(self._ending.removeprefix(begun))
        return self._format.ending if self._header is None else self._format.ending[1 + len(self._header) :]

    def end_thinking(self, origin: Origin, room: int) -> Iterator[StepDelta | StepCommitted | AnswerEvent]:
        """Close the open step with `origin` and append `rest_of_ending`, at most `room` ids of it."""
        yield from self.finish(origin)
        yield from self.write_on(self.rest_of_ending[:room], origin)

    def write_on(self, ids: Sequence[int], origin: Origin) -> Iterator[StepDelta | StepCommitted | AnswerEvent]:
        """Append ids of a single writer. Close each step that ends; after the thinking, emit the answer."""
        start = 0
        while start < len(ids):
            if self.ended:  # by a stop string: the tokens after it are kept in the buffer but not emitted
                self.buffer.append(ids[start:])
                return
            end = start + 1
            if self._header is not None:
                yield from self._extend_header(ids[start])
            elif self.thinking:
                self.extend(ids[start:end])
                if self.step_is_over:
                    yield from self.finish(origin)
            else:
                end = self._end_of_message(ids, start)
                yield from self._answer(ids[start:end])
            start = end
        yield from self.emit()
        if self.answer.stopped:
            yield from self.finish(origin)

    def finish(self, origin: Origin) -> Iterator[StepCommitted | AnswerEvent]:
        """Close the step that the last writer has left open."""
        if self.open_ids:
            yield from self.close_step(origin, len(self.open_ids) if origin == "draft" else 0)

    def _end_of_message(self, ids: Sequence[int], start: int) -> int:
        """Return where the message of the answer ends that goes on at `start`, with the tag that ends it."""
        end = self._format.end
        if self._format.header_end is None or end is None or end not in ids[start:]:
            return len(ids)
        return ids.index(end, start) + 1

    def _answer(self, ids: Sequence[int]) -> Iterator[AnswerEvent]:
        self.buffer.append(ids)
        is_over = self._format.header_end is not None and ids[-1] == self._format.end
        ended = ids[-1] in self._answer_ends
        text = self._reader.read(len(self.buffer) - (ended or is_over), to_the_end=ended or is_over)
        yield from self.answer.feed(text)
        self.ended = ended or self.answer.stopped
        self._header = [] if is_over and not self.ended else None

    def _extend_header(self, id: int) -> Iterator[AnswerEvent]:
        """Append an id to the header of a message. Its end begins the message."""
        assert self._header is not None
        self.buffer.append([id])
        self._header.append(id)
        self.ended = id in self._answer_ends
        if not self.ended and id != self._format.header_end and len(self._header) < MAX_HEADER:
            return
        header, self._header = self._header, None
        is_whole, text = id == self._format.header_end, self._tokenizer.decode(header)
        self.thinking = is_whole and self._format.thinking_header in text
        self._reader.position = len(self.buffer)
        if not (is_whole or self.ended):  # it is none
            self._reader.position -= len(header)
            yield from self.answer.feed(self._reader.read(len(self.buffer), to_the_end=False))
        elif is_whole and len(self.visible(header)) > len(visible_ids(self._tokenizer, header)):
            yield from self.answer.feed(text)  # the format of tool calls reads it

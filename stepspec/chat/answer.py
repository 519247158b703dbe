"""The visible answer of a stream: text up to the first stop string, separated from tool calls."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from stepspec.chat.calls import CallReader, Found
from stepspec.chat.events import AnswerDelta, AnswerEvent, ToolCall, ToolCalled


class AnswerReader:
    """Turns chunks of text into answer events. Text that may begin a stop string or a tool call is held back."""

    def __init__(
        self,
        stops: Sequence[str] = (),
        calls: CallReader | None = None,
        *,
        only_call: bool = False,
        marks: str = "",
        opening: str = "",
    ) -> None:
        """
        Args:
            stops: strings that end the text.
            calls: reads tool calls.
            only_call: whether the first valid tool call ends the text.
            opening: text that the answer may begin with and that is not a part of it.
            marks: text that contains the special tokens of tool calls. Only these special tokens stay visible.
        """
        self.marks = marks
        self.stopped = False
        """Whether a stop string, or the first tool call under `only_call`, has ended the text."""
        self.stop_string: str | None = None
        """The stop string that has ended the text."""
        self._only_call = only_call
        self.calls: list[ToolCall] = []
        self.incomplete = False
        """Whether the text was cut within a tool call, known at the end."""
        self._stops = stops
        self._opening = opening
        self._reader = calls
        self._held: str = ""
        self._chunks: list[str] = []

    @property
    def has_call(self) -> bool:
        """Whether a valid tool call has been emitted."""
        return any(call.problem is None for call in self.calls)

    @property
    def text(self) -> str:
        """The text emitted so far."""
        return "".join(self._chunks)

    def feed(self, text: str) -> Iterator[AnswerEvent]:
        """Read the next chunk. Yield the events that later text cannot change."""
        if self.stopped:
            return
        text = self._held + text
        if self._opening:
            begun = text.lstrip()
            if begun != self._opening and self._opening.startswith(begun):
                self._held = text
                return
            text = begun.removeprefix(self._opening) if begun.startswith(self._opening) else text
            self._opening = ""
        found = {start: stop for stop in reversed(self._stops) if (start := text.find(stop)) >= 0}
        end = min(found) if found else len(text) - beginning(text, self._stops)
        self.stopped, self.stop_string = bool(found), found.get(end)
        text, self._held = text[:end], "" if found else text[end:]
        yield from self._events(self._reader.feed(text) if self._reader else [text])

    def finish(self, *, cut: bool = False) -> Iterator[AnswerEvent]:
        """Yield the events of the held-back text at the end of the stream. `cut`: whether a limit ended the text."""
        cut |= self.stopped
        held, self._held = self._held, ""
        if self._reader is None:
            yield from self._events([held])
        else:
            yield from self._events([*self._reader.feed(held), *self._reader.finish(cut=cut)])
            self.incomplete = self._reader.incomplete and not (self._only_call and self.has_call)

    def _events(self, found: Sequence[Found]) -> Iterator[AnswerEvent]:
        for is_text, group in groupby(found, lambda each: isinstance(each, str)):
            for each in ["".join(cast("Iterator[str]", group))] if is_text else group:
                if self._only_call and self.has_call:
                    return
                if isinstance(each, ToolCall):
                    self.calls.append(each)
                    self.stopped |= self._only_call and self.has_call
                    yield ToolCalled(len(self.calls) - 1, each)
                elif each:
                    self._chunks.append(each)
                    yield AnswerDelta(each)


def beginning(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a stop string."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    lengths = range(longest, 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)

"""The answer as a user sees it, while it is written: up to the first stop string, without tool calls."""

from collections.abc import Iterator, Sequence

from stepspec.chat.calls import CallPiece, CallReader, Found
from stepspec.chat.events import AnswerDelta, AnswerEvent, ToolCall, ToolCallDelta, ToolCalled


class AnswerReader:
    """Takes the answer's text piece by piece. What may be the beginning of a stop string or a call is held back."""

    def __init__(
        self,
        stops: Sequence[str] = (),
        calls: CallReader | None = None,
        *,
        only_call: bool = False,
        marks: str = "",
    ) -> None:
        """
        Args:
            stops: strings that end the text.
            calls: reads tool calls.
            only_call: whether the first tool call ends the text.
            marks: where the special tokens are named by which calls are found; no others are shown.
        """
        self.marks = marks
        self.stopped = False
        """Whether something has come that ends the text, a stop string for one."""
        self._only_call = only_call
        self.calls: list[ToolCall] = []
        self._stops = stops
        self._reader = calls
        self._held: str = ""
        self._pieces: list[str] = []
        self._calling = False
        """Whether pieces of a call are out, and the call is not."""

    @property
    def text(self) -> str:
        """All that was given so far."""
        return "".join(self._pieces)

    def feed(self, text: str) -> Iterator[AnswerEvent]:
        """Takes a further piece, and gives what is now certain to be seen."""
        if self.stopped:
            return
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped |= bool(found)
        end = min(found) if found else len(text) - _beginning(text, self._stops)
        text, self._held = text[:end], "" if found else text[end:]
        yield from self._told(self._reader.feed(text) if self._reader else [text])

    def finish(self) -> Iterator[AnswerEvent]:
        """Gives what was held back, as no more will come."""
        held, self._held = self._held, ""
        if self._reader is None:
            yield from self._told([held])
        else:
            yield from self._told([*self._reader.feed(held), *self._reader.finish()])

    def _told(self, found: Sequence[Found]) -> Iterator[AnswerEvent]:
        for each in found:
            if self._only_call and self.calls:
                return
            if isinstance(each, ToolCall):
                if not self._calling:
                    yield self._piece(each)
                self._calling = False
                self.calls.append(each)
                self.stopped |= self._only_call
                yield ToolCalled(len(self.calls) - 1, each)
            elif isinstance(each, CallPiece):
                yield self._piece(each)
            elif each:
                self._pieces.append(each)
                yield AnswerDelta(each)

    def _piece(self, call: CallPiece | ToolCall) -> ToolCallDelta:
        """A piece of a call; of one that is told at once, all of it."""
        id, name = (None, None) if self._calling else (call.id, call.name)
        self._calling = True
        return ToolCallDelta(len(self.calls), call.arguments, id, name)


def _beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    lengths = range(longest, 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)

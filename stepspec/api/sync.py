"""The synchronous Python API. It also works where an event loop is running, as in notebooks.

with SyncStepSpec() as spec:
    result = spec.generate(
        "Some friends met. Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
    )
    print(result.answer)
"""

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

from stepspec.api.models import JudgeSpecs, Pair
from stepspec.api.session import StepSpec, check_open
from stepspec.base.keywords import known_options
from stepspec.base.loop_thread import LoopThread
from stepspec.chat.prompts import Message
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy
from stepspec.loop.result import Event, Result


class SyncStepSpec:
    """The synchronous version of `StepSpec`, with the same arguments and errors. It runs an event loop in a thread."""

    @known_options
    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy = "two-level",
        *,
        pair: Pair | str | None = None,
        judges: JudgeSpecs | None = None,
    ) -> None:
        self._spec = StepSpec(target, draft, policy, pair=pair, judges=judges)
        self._loop = LoopThread("stepspec")
        self._closed = False

    def __enter__(self) -> "SyncStepSpec":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread, and free the models if this session loaded them."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._spec.aclose())
            self._loop.close()

    def _opened(self) -> LoopThread:
        check_open(closed=self._closed)  # the thread has ended
        return self._loop

    @known_options
    def generate(
        self, question: str | Sequence[Message], options: RequestOptions | None = None, **changes: Any
    ) -> Result:
        """Answer a question and return the result, see `StepSpec.stream`."""
        return self._opened().run(self._spec.generate(question, options, **changes))

    @known_options
    def batch(
        self,
        questions: Sequence[str | Sequence[Message]],
        options: RequestOptions | None = None,
        **changes: Any,
    ) -> list[Result]:
        """Answer questions concurrently, see `StepSpec.batch`."""
        return self._opened().run(self._spec.batch(questions, options, **changes))

    @known_options
    def stream(
        self, question: str | Sequence[Message], options: RequestOptions | None = None, **changes: Any
    ) -> Generator[Event]:
        """Answer a question and yield its events, see `StepSpec.stream`. Closing the iterator cancels the request."""
        return self._opened().iterate(self._spec.stream(question, options, **changes))

"""An event loop in its own thread. Any thread or event loop can submit work to it."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stepspec.errors import EngineError, UsageError

T = TypeVar("T")


WOULD_DEADLOCK = (
    "A synchronous call from the thread that runs the event loop would deadlock. "
    "Use the asynchronous method instead: ainvoke, astream, or StepSpec.generate."
)


@dataclass(frozen=True)
class _StreamItem(Generic[T]):
    """One item of an iterator. No item marks its end; `error` is set if it failed."""

    items: tuple[T, ...] = ()
    error: Exception | None = None


class LoopThread:
    """A thread that runs an event loop until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop. Cancelling the returned future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result. An interrupt while waiting cancels it.

        Raises:
            UsageError: the caller runs in the thread of the loop and would deadlock.
        """
        if self._is_here:
            work.close()
            raise UsageError(WOULD_DEADLOCK)
        running = self.start(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    @property
    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T]:
        """Iterate over an asynchronous generator in the loop. Closing the iterator cancels the generator.

        Raises:
            UsageError: see `run`.
        """
        if self._is_here:
            raise UsageError(WOULD_DEADLOCK)
        messages: queue.SimpleQueue[_StreamItem[T]] = queue.SimpleQueue()

        async def pump() -> None:
            end = _StreamItem[T](error=EngineError("The call was cancelled."))
            try:
                async with aclosing(items):
                    async for item in items:
                        messages.put(_StreamItem((item,)))
                end = _StreamItem[T]()
            except Exception as error:
                end = _StreamItem(error=error)
            finally:  # also after a cancellation, or the reader would wait forever
                messages.put(end)

        running = self.start(pump())
        try:
            while True:
                message = messages.get()
                if message.error is not None:
                    raise message.error
                if not message.items:
                    return
                yield message.items[0]
        finally:
            running.cancel()

    def close(self) -> None:
        """Stop the loop and end the thread. All work must have finished."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

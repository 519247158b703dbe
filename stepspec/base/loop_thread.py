"""An event loop in a thread of its own, for work that may be asked for from any thread and any other loop."""

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


FOR_ITSELF = (
    "A synchronous call was made from inside an asynchronous callback that runs in the same thread, and would wait for "
    "ever. Use the asynchronous method there: ainvoke, astream, generate of StepSpec."
)


@dataclass(frozen=True)
class _Told(Generic[T]):
    """What an iterator has given; nothing at its end, or because of an error."""

    items: tuple[T, ...] = ()
    error: Exception | None = None


class LoopThread:
    """The loop runs until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts something there; cancelling what is given back cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Does something there and waits for it; who is interrupted while waiting cancels it.

        Raises:
            UsageError: this is that thread, which would wait for itself.
        """
        if self._is_here:
            work.close()
            raise UsageError(FOR_ITSELF)
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
        """Goes through something there, as it comes; leaving the iterator ends it there too.

        Raises:
            UsageError: as `run`.
        """
        if self._is_here:
            raise UsageError(FOR_ITSELF)
        told: queue.SimpleQueue[_Told[T]] = queue.SimpleQueue()

        async def pump() -> None:
            end = _Told[T](error=EngineError("The call was cancelled."))
            try:
                async with aclosing(items):
                    async for item in items:
                        told.put(_Told((item,)))
                end = _Told[T]()
            except Exception as error:
                end = _Told(error=error)
            finally:  # also where it was cancelled, or its reader would wait for ever
                told.put(end)

        running = self.start(pump())
        try:
            while True:
                each = told.get()
                if each.error is not None:
                    raise each.error
                if not each.items:
                    return
                yield each.items[0]
        finally:
            running.cancel()

    def close(self) -> None:
        """Ends the thread; nothing may run there any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

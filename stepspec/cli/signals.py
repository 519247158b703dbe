"""Stopping long commands early: by Ctrl-C, by SIGTERM or by an error."""

import shlex
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stepspec.errors import StepSpecError, UsageError


@contextmanager
def resumable(folder: Path, *, chosen_by_us: bool) -> Generator[None]:
    """Wrap work that stores finished rows in a folder, and print how to resume it if it stops early.

    SIGTERM ends the work like Ctrl-C: it cancels requests, frees the models and keeps the stored rows.

    Args:
        folder: where the finished rows are stored.
        chosen_by_us: whether the user gave no `--output`, so that the command to resume must add it.
    """
    try:
        with _sigterm_like_interrupt():
            yield
    except (KeyboardInterrupt, StepSpecError) as error:
        if not isinstance(error, UsageError) and folder.exists() and any(folder.glob("**/*.json*")):
            words = ["stepspec", *sys.argv[1:], *(["--output", str(folder)] if chosen_by_us else [])]
            print(f"Finished rows are stored. To resume: {shlex.join(words)}", file=sys.stderr)
        raise


@contextmanager
def _sigterm_like_interrupt() -> Generator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # the shell may have disabled Ctrl-C, but SIGTERM still ends the work
            raise KeyboardInterrupt
        on_interrupt(number, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

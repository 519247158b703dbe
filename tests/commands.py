"""The commands `stepspec` and `python -m evals.bench` in this process, which has loaded the libraries already.

Those that need a process of their own start faster without PyTorch, if their engines are scripted.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from typer.main import get_command

from evals.bench.__main__ import app as benchmarks
from stepspec.cli import app
from stepspec.cli.program import run_program


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def run(
    commands: typer.Typer, *arguments: str | Path, stream: type[io.StringIO] = io.StringIO
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output, as of a process."""
    words, out, err = ["stepspec", *map(str, arguments)], stream(), stream()
    argv, ends = mock.patch.object(sys, "argv", words), pytest.raises(SystemExit)
    with argv, redirect_stdout(out), redirect_stderr(err), ends as end:
        run_program(commands, "stepspec")
    assert not isinstance(end.value.code, str)
    return subprocess.CompletedProcess(words, end.value.code or 0, out.getvalue(), err.getvalue())


def stepspec(*arguments: str | Path, stream: type[io.StringIO] = io.StringIO) -> subprocess.CompletedProcess[str]:
    """Run a command of `stepspec`."""
    return run(app, *arguments, stream=stream)


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of `python -m evals.bench`."""
    return run(benchmarks, *arguments)


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide PyTorch from the processes that start meanwhile. Loading it takes them 4 s of processor time each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("without_torch")), prepend=os.pathsep)
        yield


def command_of(*words: str) -> Any:
    """Return a command or group of `stepspec`, as it is when it runs."""
    command: Any = get_command(app)
    for word in words:
        _, command, _ = command.resolve_command(typer.Context(command), [word])
    return command

"""The `stepspec` command in this process, which has loaded the libraries already."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from stepspec.cli import main


def stepspec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output, as of a process."""
    words, out, err = ["stepspec", *map(str, arguments)], io.StringIO(), io.StringIO()
    argv, ends = mock.patch.object(sys, "argv", words), pytest.raises(SystemExit)
    with argv, redirect_stdout(out), redirect_stderr(err), ends as end:
        main()
    assert not isinstance(end.value.code, str)
    return subprocess.CompletedProcess(words, end.value.code or 0, out.getvalue(), err.getvalue())

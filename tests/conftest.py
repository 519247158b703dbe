"""How the tests are dealt to pytest-xdist's workers, and how many threads each of them takes."""

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch, and for child processes: two threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class ByFile(LoadScopeScheduling):
    """A file goes to one worker, for the sake of its fixtures, and tests/serving as a whole: it shares servers."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the files with most tests are by no means the longest

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "serving" if "serving/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)

"""Distribute the tests to pytest-xdist workers, limit the threads of each worker, and choose Hypothesis's examples."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Set before torch is imported, and inherited by child processes. On a busy machine, two threads are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # without a GPU, Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every run has the same examples, so that a change is not blamed for a failure that chance has found. `make soak` looks
# for others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("others", deadline=None)
settings.load_profile("same")


class ByFile(LoadScopeScheduling):
    """Sends each test file to one worker, so that its fixtures run once, and tests/serving, which shares servers."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the files with the most tests do not take the longest

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "serving" if "serving/" in file else file


LONG = ("serving/", "test_ray.py", "test_eval_on_ray.py", "test_bench", "test_end_to_end.py", "test_tracing.py")
"""Files that take the longest. They come first, so that no worker has one of them left at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; each group stays in its order."""
    items.sort(key=lambda item: not any(part in item.nodeid.partition("::")[0] for part in LONG))


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the level of stepspec's log, which `stepspec run --quiet` sets for its process."""
    logger = logging.getLogger("stepspec")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide what was calibrated on this machine, which would change what policies do. Models called `target` and
    `draft`, as scripted ones are, have thresholds."""
    (shipped,) = Path(__file__).parents[1].glob("policies/thresholds/*/two-level-t0.json")
    about = {"policy_sha256": json.loads(shipped.read_text("utf-8"))["policy_sha256"], "pair": "a scripted pair"}
    setting = {**about, "temperature": 2.0, "thresholds": {"likelihood.min": -2.9942}, "min_logprob": -4.0}
    pair = hashlib.sha256(repr(["target", "draft"]).encode()).hexdigest()[:16]
    config = tmp_path_factory.mktemp("config")
    file = config / "stepspec" / "thresholds" / pair / "two-level-t2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(setting), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(config))
        yield


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)

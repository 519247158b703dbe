"""Each model gets its number of threads, whichever models started before it, and holds none while it waits."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from stepspec.engines.torch_engine import threads
from stepspec.engines.torch_engine.threads import (
    SMALL_MODEL,
    default_threads,
    end_workers,
    run_in_thread,
    use_threads,
)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def _threads_of(num_parameters: int) -> int:
    def work() -> int:
        use_threads(default_threads(num_parameters))
        return torch.get_num_threads()

    return run_in_thread(work)


@pytest.mark.parametrize(("cores", "large"), [(1, 1), (2, 1), (3, 2), (4, 3), (64, 3)])
def test_a_small_model_gets_one_thread_and_a_large_one_leaves_a_core(
    cores: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_num_cores", lambda: cores)
    assert [_threads_of(size) for size in (SMALL_MODEL - 1, SMALL_MODEL, SMALL_MODEL - 1)] == [1, large, 1]
    assert torch.get_num_threads() == run_in_thread(torch.get_num_threads) == 3


def test_run_in_thread_returns_and_raises() -> None:
    assert run_in_thread(lambda: 3) == 3
    with pytest.raises(ValueError, match="wrong"):
        run_in_thread(lambda: int("wrong"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_ended_workers_are_started_again_by_the_next_operation() -> None:
    def running() -> int:
        return len(os.listdir("/proc/self/task"))

    def work() -> None:
        before = running()
        use_threads(3)
        for _ in range(2):
            assert torch.zeros(1_000_000).exp()[-1] == 1
            assert running() == before + 2
            end_workers()
            deadline = time.monotonic() + 10
            while running() > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert running() == before

    run_in_thread(work)

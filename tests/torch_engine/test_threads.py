"""Each model gets its number of threads, whichever models started before it, and holds none while it waits."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tiny_models import llama_config, make_model, make_network, make_tokenizer

from stepspec.engines.torch_engine import TorchEngine, engine, threads
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


@pytest.mark.parametrize(
    ("cores", "seconds", "chosen"),
    [
        (3, {2: 0.1, 3: 0.05}, 3),
        (3, {2: 0.05, 3: 0.05}, 2),
        (3, {2: 0.05, 3: 0.1}, 2),
        (2, {1: 0.1, 2: 0.05}, 2),
        (64, {}, 3),  # PyTorch's number, which leaves cores
    ],
)
def test_a_large_model_uses_the_last_core_if_a_trial_shows_a_clear_gain(
    cores: int, seconds: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_num_cores", lambda: cores)
    monkeypatch.setattr(threads, "TRIAL_S", 0.0)
    tried: list[int] = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        if tried.count(tried[-1]) > 1:  # a first slow pass does not count
            time.sleep(seconds[tried[-1]])

    assert default_threads(SMALL_MODEL, work) == chosen
    assert set(tried) == set(seconds)
    assert torch.get_num_threads() == run_in_thread(torch.get_num_threads) == 3
    tried.clear()
    assert default_threads(SMALL_MODEL - 1, work) == 1
    assert not tried


def test_run_in_thread_returns_and_raises() -> None:
    assert run_in_thread(lambda: 3) == 3
    with pytest.raises(ValueError, match="wrong"):
        run_in_thread(lambda: int("wrong"))


@pytest.mark.skipif(threads._pause is None, reason="PyTorch runs without GNU OpenMP here")
@pytest.mark.parametrize(("cores", "left"), [(2, 0), (100_000, 2)])
def test_workers_end_if_all_models_have_more_threads_than_there_are_cores(
    cores: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_num_cores", lambda: cores)

    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def work() -> None:
        use_threads(3)
        for _ in range(2):
            before = tasks()
            assert torch.zeros(1_000_000).exp()[-1] == 1
            workers = tasks() - before
            assert len(workers) == 2
            end_workers()
            deadline = time.monotonic() + 10
            while len(workers & tasks()) > left and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(workers & tasks()) == left
            if left:
                break

    run_in_thread(work)


@pytest.mark.anyio
async def test_a_model_ends_its_workers_when_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_in: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(engine, "end_workers", lambda: ended_in.put(threading.get_ident()))
    made = TorchEngine(make_model(make_network(llama_config())), make_tokenizer(), threads=2)
    await made.forget()
    assert await asyncio.to_thread(ended_in.get, timeout=10) != threading.get_ident()
    await made.aclose()

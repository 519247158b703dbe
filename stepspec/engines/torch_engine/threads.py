"""CPU threads of models that run beside each other in one process."""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

T = TypeVar("T")

SMALL_MODEL = 100_000_000
"""Number of parameters below which a CPU runs a model faster on one thread, because synchronizing threads costs more
than the arithmetic."""

TRIAL_S, MIN_TRIALS = 0.8, 2
"""Seconds after which a trial of two numbers of threads ends, and how often it tries both at least."""

LAST_CORE_GAIN = 1.2
"""Speedup that a thread on the last core must reach. Draft and event loop have to share that core with it."""

OMP_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0: end the workers, and keep all settings."""

_lock = threading.Lock()
_used: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()
"""Number of CPU threads of the models that run in each thread."""


def _find_pause() -> Callable[[int], int] | None:
    """Return `omp_pause_resource_all` of GNU OpenMP; None if PyTorch runs with another library or a hidden one."""
    if os.name != "posix":
        return None
    loaded = ctypes.CDLL(None)
    is_gnu = hasattr(loaded, "GOMP_parallel") and not hasattr(loaded, "__kmpc_fork_call")
    return getattr(loaded, "omp_pause_resource_all", None) if is_gnu else None


_pause = _find_pause()


@contextmanager
def one_thread() -> Generator[None]:
    """Run the block on one CPU thread."""
    with _lock:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def default_threads(num_parameters: int, work: Callable[[], object] | None = None) -> int:
    """Return the number of CPU threads for a model.

    A small model gets one. A larger one gets PyTorch's number, but leaves a core to the draft and the event loop,
    unless `work` is clearly faster on all cores: with a busy neighbor on the last core, every product of several
    threads waits for the one that shares its core.

    Args:
        num_parameters: of the model.
        work: a pass of the model, for a trial of at most about a second; None for no trial.
    """
    if num_parameters < SMALL_MODEL:
        return 1
    most = min(torch.get_num_threads(), _num_cores())
    fewer = max(1, min(most, _num_cores() - 1))
    if work is None or most < LAST_CORE_GAIN * fewer:
        return fewer
    with _lock:
        default = torch.get_num_threads()
        try:
            return run_in_thread(lambda: _faster(work, fewer, most))
        finally:
            run_in_thread(lambda: torch.set_num_threads(default))


def _faster(work: Callable[[], object], fewer: int, most: int) -> int:
    """Return `most` if `work` reaches `LAST_CORE_GAIN` with that many threads, by medians of turns; else `fewer`."""
    seconds: dict[int, list[float]] = {fewer: [], most: []}
    started = time.perf_counter()
    while len(seconds[most]) <= MIN_TRIALS or time.perf_counter() - started < TRIAL_S:
        for count, times in seconds.items():
            torch.set_num_threads(count)
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
    first, second = (median(times[1:]) for times in seconds.values())  # the first turn warms up
    return most if first > LAST_CORE_GAIN * second else fewer


def use_threads(count: int) -> None:
    """Set the number of CPU threads of models that run in the calling thread, which nothing else should use."""
    with _lock:
        default = torch.get_num_threads()
        torch.set_num_threads(count)
        _used[threading.current_thread()] = count
        # The call above also changes the default of all threads that start later. A thread of its own changes it back.
        run_in_thread(lambda: torch.set_num_threads(default))


def end_workers() -> None:
    """End the OpenMP workers of the calling thread if all models together use more threads than there are cores. The
    thread's next parallel operation starts them again.

    With more workers than cores GNU OpenMP lets all of them sleep after every operation. The workers of a draft that
    waits for its target, and of a target that waits for its draft, would do that to each other: on two cores the passes
    of a pair with two threads each took 1.2 to 1.5 times as long. Other OpenMP libraries share their workers among
    threads, so nothing happens with them.
    """
    with _lock:
        used = dict(_used)
    if _pause is not None and used.get(threading.current_thread(), 1) > 1 and sum(used.values()) > _num_cores():
        _pause(OMP_PAUSE_SOFT)


def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that ends with it, and return its result.

    The thread's OpenMP workers end too. Of workers that outlive a load, the model's own would be too many for the
    cores, and OpenMP lets threads sleep between operations then.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

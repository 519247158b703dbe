"""Killing any process of a run, at any time, loses no finished row and duplicates none."""

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from run_part import make_expansions
from scripted_runs import POLICIES

from stepspec.evaluation.run import merge
from stepspec.evaluation.runs import iter_rows, iter_traces, part_files

NUM_PARTS = 2


class Size(NamedTuple):
    """How large a run is, and how many of its evaluations and of its graders are killed."""

    num_problems: int
    min_kills: int
    max_kills: int


SMALL, LARGE = Size(120, 2, 3), Size(200, 3, 5)


class Cluster:
    """Processes that run the parts of a run, each in its own folder, and are restarted when they die."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size = size
        self.folders = [folder / f"part-{number}" for number in range(1, NUM_PARTS + 1)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.num_killed: Counter[str] = Counter()

    def restart_dead(self) -> bool:
        """Start the parts that have not finished, and return whether any is running.

        Each process is polled once: one that was just killed may die between two polls, and would never be restarted.
        """
        is_running = False
        for index, folder in enumerate(self.folders):
            process = self._processes.get(index)
            status = -1 if process is None else process.poll()
            if status not in (None, 0):
                command = [sys.executable, str(Path(__file__).with_name("run_part.py")), str(folder)]
                self._processes[index] = subprocess.Popen(
                    [*command, f"{index + 1}/{NUM_PARTS}", str(self.size.num_problems)]
                )
            is_running |= status != 0
        return is_running

    def kill_one(self, rng: random.Random) -> None:
        """Kill an evaluation or a grader at random, alternating between the two kinds where possible."""
        evaluations = [psutil.Process(process.pid) for process in self._processes.values() if process.poll() is None]
        graders = [grader for each in evaluations for grader in each.children(recursive=True)]
        kinds = {"grader": graders, "evaluation": evaluations}
        alive = [kind for kind, processes in kinds.items() if processes and self.num_killed[kind] < self.size.max_kills]
        if alive:
            kind = min(alive, key=lambda each: self.num_killed[each])
            rng.choice(kinds[kind]).kill()
            self.num_killed[kind] += 1

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def finished(folders: list[Path]) -> Counter[tuple[str, str, int]]:
    """Count each complete row on disk; a row that is still being written does not count."""
    return Counter(row.key for folder in folders if folder.exists() for row in iter_rows(folder))


def run_while_killing(folder: Path, size: Size, seed: int) -> Cluster:
    """Run the parts to their ends, and kill a process every now and then."""
    rng, cluster = random.Random(seed), Cluster(folder, size)
    seen = set[tuple[str, str, int]]()
    try:
        while cluster.restart_dead():
            # A start takes a second or two, so most of the killed processes have done some work and some have not.
            time.sleep(rng.uniform(0.1, 1.8))
            cluster.kill_one(rng)
            rows = finished(cluster.folders)
            assert seen <= set(rows), "a finished row is gone"
            seen = set(rows)
    finally:
        cluster.end()
    return cluster


def check(folder: Path, size: Size, seed: int) -> None:
    cluster = run_while_killing(folder, size, seed)
    assert min(cluster.num_killed["evaluation"], cluster.num_killed["grader"]) >= size.min_kills
    expected = {(problem.id, policy, 0) for problem in make_expansions(size.num_problems) for policy in POLICIES}
    lines = sum(len(file.read_bytes().splitlines()) for part in cluster.folders for file in part_files(part, "rows"))
    assert lines == len(expected)
    summary = merge(cluster.folders, folder / "all")
    rows = list(iter_rows(folder / "all"))
    assert Counter(row.key for row in rows) == Counter(expected)
    assert {row.status for row in rows} == {"correct"}
    assert {row.decided_by for row in rows} == {"symbolic"}
    assert Counter(trace.key for trace in iter_traces(folder / "all")) == Counter(expected)
    assert (summary.n, summary.policies["target"].accuracy) == (size.num_problems, 1.0)


def test_killing_parts_and_graders_loses_no_row_and_duplicates_none(tmp_path: Path) -> None:
    check(tmp_path, SMALL, 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 22))
def test_killing_parts_and_graders_twenty_times_over(tmp_path: Path, seed: int) -> None:
    check(tmp_path, LARGE, seed)

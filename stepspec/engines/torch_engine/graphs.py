"""CUDA graphs of passes that read the cache by slot.

A CUDA device replays a captured pass faster than the host can launch one, but only a pass of exactly the same shape. So
`SlotPasses` pads small passes to a few numbers of ids and of rows, and captures each of these when a model is loaded.
Larger passes take the device longer than their launch takes the host, and run as they come. What follows the layers,
such as sampling, is launched while they run.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_IDS = 128
"""Ids of the largest captured pass."""

ROWS = (1, 4, 16, 64)
"""Numbers of rows of captured passes."""

_CAPTURING = threading.Lock()
"""A capture begins with a synchronization, which breaks another one."""

Run = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class GraphRecorder:
    """Captures passes for the current thread. They share memory: the replay of one may overwrite another's result."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, run: Run, *inputs: Any) -> tuple[Callable[[], object], Tensor]:
        """Return a function that replays `run` on what the inputs then hold, and its result."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # warm up: allocations of the first run must not happen inside the graph
                run(*inputs)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        # A capture that fails does not restore the stream by itself.
        with _CAPTURING, torch.cuda.stream(current), capture:
            result = run(*inputs)
        return graph.replay, result


class _Graph(NamedTuple):
    """A captured pass, and its inputs and output."""

    replay: Callable[[], object]
    ids: Tensor
    table: Tensor
    branches: Tensor
    hidden: Tensor


class SlotPasses:
    """Passes of one model that read the cache by slot, from captured graphs where there are any.

    `run` runs a pass on the ids of all rows, one row after the other, [N]; the rows' slots, positions of their first
    ids and lengths, [3, R]; what `model.branch_columns` returns, [3, N]; and at least the length of the longest row. It
    returns hidden states [N, W].
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def read(self, run: Run, ids: Tensor, table: Tensor, branches: Tensor | None, longest: int) -> Tensor:
        """Run a pass. The next one may overwrite what this one returns.

        The arguments are those of `run`; without branches their table is None.
        """
        count, num_rows = len(ids), table.shape[1]
        padded_rows = next((size for size in ROWS if size >= num_rows), 0)
        found = self._graphs.get((max(bucket(count), padded_rows), padded_rows))
        if found is None:
            return run(ids, table, ids.new_zeros(3, count) if branches is None else branches, longest)
        found.ids[:count].copy_(ids)
        found.table[:, :num_rows].copy_(table)
        found.table[2, num_rows:].zero_()
        if branches is None:
            found.branches.zero_()
        else:
            found.branches[:, :count].copy_(branches)
        found.replay()
        return found.hidden[:count]

    @property
    def num_captured(self) -> int:
        """Number of captured passes."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, run: Run, max_rows: int, device: torch.device, report: Callable[[int, int], None]) -> None:
        """Capture passes of up to `max_rows` rows, largest first, so that all of them share memory.

        Call it in the thread that runs the passes. `report` is called with the number of captured passes and of all.
        """
        most = next((size for size in ROWS if size >= max_rows), ROWS[-1])
        counts = [1 << power for power in reversed(range(MAX_IDS.bit_length()))]
        kinds = [(count, rows) for count in counts for rows in reversed(ROWS) if rows <= min(count, most)]
        recorder = GraphRecorder()
        for number, (count, num_rows) in enumerate(kinds, 1):
            sizes = (count,), (3, num_rows), (3, count)
            ids, table, branches = (torch.zeros(size, dtype=torch.long, device=device) for size in sizes)
            table[2, 0] = count
            try:
                replay, hidden = recorder.record(run, ids, table, branches, count)
            except Exception:
                self._graphs.clear()  # the memory of a failed capture cannot be used again
                raise
            self._graphs[count, num_rows] = _Graph(replay, ids, table, branches, hidden)
            report(number, len(kinds))


def bucket(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()

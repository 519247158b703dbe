"""CUDA graphs: captured passes, and inputs padded to the few shapes that graphs are captured for.

A CUDA device replays a captured pass faster than the host can launch one, but only a pass of exactly the same shape. So
the rows of a round are padded to a power of two with a dummy row, its drafted tokens likewise, and passes that do not
read by slot read a whole bucket of positions, with the mask hiding the rest. On a CPU passes run in their own shapes,
because neither would pay there.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepspec.engines.torch_engine.model import CausalModel, Positions
from stepspec.engines.torch_engine.transfer import upload

MIN_SPAN = 256
Result = TypeVar("Result")


def graph_inputs(model: CausalModel, rows: Sequence[Sequence[int]], beyond: int) -> tuple[Positions, Tensor]:
    """Copy the positions of the rows and further numbers to the device, in one copy.

    Args:
        model: the model whose cache holds the rows.
        rows: for each row, its slot, the position of the first id to read, and F further numbers.
        beyond: how many ids to read from that position on, in this pass and the following ones.

    Returns:
        The positions of a pass that reads the first id, and the further numbers, [F, B].
    """
    top = max(row[1] for row in rows) + 1
    table = upload(rows, model.device)
    if not model.uses_graphs:
        runs = model.runs_of([row[1] for row in rows])
        return Positions([row[0] for row in rows], table[:, 1], top, runs), table[:, 2:].T
    end = top + beyond - 1
    model.cache.reserve(max(row[0] for row in rows) + 1, end)
    span = model.cache.capacity if model.reads_slots else min(max(MIN_SPAN, bucket(end)), model.cache.capacity)
    return Positions(table[:, 0], table[:, 1], span), table[:, 2:].T


def bucket(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def captured(function: Callable[..., Result], model: CausalModel) -> Callable[..., Result]:
    """Return the function, captured if the model `uses_graphs` and is on a CUDA device.

    The thread's next call of any captured function may then overwrite its results.
    """
    return Captured(function) if model.uses_graphs and model.device.type == "cuda" else function


class Captured:
    """A function of tensors that is captured once for each shape of its arguments, then replayed.

    The graphs of a thread share memory, so the thread's next call of any captured function may overwrite the results.
    """

    num_captures = 0
    """Number of graphs captured by all threads. A capture takes many times as long as a replay."""
    _capturing = threading.Lock()
    _thread = threading.local()

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = structure, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if key not in self._graphs:
            self._graphs[key] = self._capture(leaves, structure)
        graph, inputs, results = self._graphs[key]
        for graph_input, tensor in zip(inputs, tensors, strict=True):
            graph_input.copy_(tensor)
        graph.replay()
        return results

    def _capture(self, leaves: list[Any], structure: Any) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        stream, pool = self._of_thread()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm up: allocations of the first run must not happen inside the graph
                self._function(*tree_unflatten(fixed, structure))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A capture begins with a synchronization, which breaks another one. Allocations of other threads do not.
        try:
            with self._capturing, torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                results = self._function(*tree_unflatten(fixed, structure))
        except Exception:
            vars(self._thread).clear()  # the pool of a failed capture cannot be used again
            raise
        Captured.num_captures += 1
        return graph, [leaf for leaf in fixed if isinstance(leaf, Tensor)], results

    @classmethod
    def _of_thread(cls) -> tuple[torch.cuda.Stream, Any]:
        """Return this thread's stream for captures, and the pool of its graphs."""
        own = cls._thread
        if not hasattr(own, "stream"):
            own.stream, own.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return own.stream, own.pool

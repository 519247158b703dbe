"""The shapes in which rounds run: as they come where every pass is launched by itself, in steps where it is captured.

A CUDA device replays a captured pass faster than a host can launch one, but only a pass of just the same shape. So the
rows of a round are filled up to a power of two with a row that nobody waits for, and passes see a whole bucket of
positions, the rest behind the mask. On a CPU neither would pay.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepspec.engines.torch_engine.model import CausalModel, Positions

LEAST_SPAN = 256
Result = TypeVar("Result")


def graph_inputs(model: CausalModel, rows: Sequence[Sequence[int]], beyond: int) -> tuple[Positions, Tensor]:
    """Where rows stand, and what else a device is told about them, in one copy.

    Args:
        model: whose cache the rows are in.
        rows: of each its slot, the position of the first id that is read, and further numbers.
        beyond: ids that are read from there on, by this pass or by those that follow.

    Returns:
        The positions of a pass that reads the first id, and the further numbers, [F, B].
    """
    top = max(row[1] for row in rows) + 1
    table = torch.tensor(rows)
    if not model.uses_graphs:
        table = table.to(model.device)
        runs = model.runs_of([row[1] for row in rows])
        return Positions([row[0] for row in rows], table[:, 1], top, runs), table[:, 2:].T
    if model.device.type == "cuda":
        table = table.pin_memory().to(model.device, non_blocking=True)
    end = top + beyond - 1
    model.cache.reserve(max(row[0] for row in rows) + 1, end)
    span = min(max(LEAST_SPAN, bucket(end)), model.cache.capacity)
    return Positions(table[:, 0], table[:, 1], span), table[:, 2:].T


def bucket(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def captured(function: Callable[..., Result], device: torch.device) -> Callable[..., Result]:
    """The function, on a CUDA device captured; what it gives then lies where its next call puts it."""
    return Captured(function) if device.type == "cuda" else function


class Captured:
    """A function of tensors that is captured once for every shape of its arguments, and replayed from then on.

    Results lie where the next call of the same shape overwrites them.
    """

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
        for place, tensor in zip(inputs, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        return results

    def _capture(self, leaves: list[Any], structure: Any) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is made at the first run must not be made inside the graph
                self._function(*tree_unflatten(fixed, structure))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self._function(*tree_unflatten(fixed, structure))
        return graph, [leaf for leaf in fixed if isinstance(leaf, Tensor)], results

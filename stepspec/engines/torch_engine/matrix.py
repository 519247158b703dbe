"""Products of rows with a weight, by whichever of PyTorch's libraries is the faster one on this machine.

On a CPU in float32 PyTorch multiplies with MKL, which takes its slower paths on processors that are not Intel's: five
rows by 192 x 1,024 numbers 69 microseconds on an AMD EPYC, where oneDNN takes 19 with the weight in a layout of its
own. So where a trial shows that this pays, small models hold their weights in that layout as well.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SMALL_MODEL = 100_000_000
"""Parameters below which weights may be held twice, and below which a CPU runs faster on one thread: the threads'
meetings cost more than the arithmetic."""

FEW_PRODUCTS = 300_000
"""Multiplications below which calling oneDNN takes longer than MKL takes for them."""

GAIN = 1.5
"""A clear one, so that a machine does not take one way today and the other tomorrow: they round differently."""


class Matrix:
    """A weight [in, out], and perhaps a bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._packed = _packed(weight) if packed else None

    def product(self, x: Tensor) -> Tensor:
        """Of rows [N, in]; [N, out]."""
        if self._packed is not None and len(x) * self._weight.numel() >= FEW_PRODUCTS:
            return _packed_product(x, self._packed, self._bias)
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """Adds it to a total [N, out] in its place."""
        if self._packed is not None and len(x) * self._weight.numel() >= FEW_PRODUCTS:
            total += _packed_product(x, self._packed, self._bias)
            return
        total.addmm_(x, self._weight)
        if self._bias is not None:
            total += self._bias


def packing_pays(weight: Tensor, num_parameters: int) -> bool:
    """Whether weights like this one, of a model of that size, had better be held in oneDNN's layout too."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or num_parameters >= SMALL_MODEL:
        return False
    return _onednn_is_faster()


@lru_cache(maxsize=1)
@torch.inference_mode()
def _onednn_is_faster() -> bool:
    """Tried once, on one thread, with 16 rows."""
    operations: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, weight = torch.ones(16, 192), torch.ones(192, 1024)
        packed = _packed(weight)
        return _seconds(lambda: torch.mm(rows, weight)) > GAIN * _seconds(lambda: _packed_product(rows, packed, None))
    finally:
        torch.set_num_threads(threads)


def _packed(weight: Tensor) -> Tensor:
    """A weight [in, out] in oneDNN's layout; 16 rows, of which the layout may depend, are as good a guess as any."""
    operations: Any = torch.ops.mkldnn
    return operations._reorder_linear_weight(weight.T, 16)


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    operations: Any = torch.ops.mkldnn
    return operations._linear_pointwise(x, packed, bias, "none", [], "")


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of several times."""
    times: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)

"""Products of rows with a weight, computed by PyTorch or oneDNN, whichever is faster on this machine.

On a CPU in float32 PyTorch multiplies with MKL, which takes slower paths on processors from other makers than Intel.
Five rows times 192 x 1,024 numbers take 69 microseconds on an AMD EPYC; oneDNN takes 19 with the weight in its own
layout. In bfloat16 PyTorch calls oneDNN, which changes the layout of the weight again for every product: the products
of a pass of SmolLM2-135M over five rows take 20 ms on two threads, and 9 ms with weights in that layout. If a trial
shows a clear gain, models store their weights in it as well, up to `MAX_PACKED` parameters.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stepspec.engines.torch_engine.threads import one_thread

DTYPES = torch.float32, torch.bfloat16
"""Data types that oneDNN has a layout of its own for."""

MAX_PACKED = 500_000_000
"""Number of parameters up to which weights may be stored twice, in float32 2 GB each time."""

FEW_PRODUCTS = 300_000
"""Multiplications below which a call of oneDNN takes longer than PyTorch's own product, measured in float32."""

TRIAL_ROWS, MAX_SIDE = 5, 4096
"""Number of rows of the trial, as in a pass that verifies drafted tokens, and the longest side of its weight."""

GAIN = 1.3
"""Speedup that oneDNN must reach. It is well above 1 so that a machine always chooses the same library, because the two
round differently."""


class Matrix:
    """A weight [in, out] with an optional bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._packed = _packed(weight) if packed else None

    def product(self, x: Tensor) -> Tensor:
        """Return the product of rows [N, in], [N, out]."""
        if self._packed is not None and len(x) * self._weight.numel() >= FEW_PRODUCTS:
            return _packed_product(x, self._packed, self._bias)
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def add_product(self, total: Tensor, x: Tensor) -> None:
        """Add the product of rows [N, in] to `total` [N, out], in place."""
        if self._packed is not None and len(x) * self._weight.numel() >= FEW_PRODUCTS:
            total += _packed_product(x, self._packed, self._bias)
            return
        total.addmm_(x, self._weight)
        if self._bias is not None:
            total += self._bias


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this PyTorch multiplies with weights in oneDNN's layout, in a data type of `DTYPES`."""
    operations: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return False
    is_supported = getattr(operations, "_is_mkldnn_bf16_supported", None)
    return dtype == torch.float32 or (is_supported is not None and is_supported())


def packing_pays(weight: Tensor, num_parameters: int) -> bool:
    """Return whether to store weights like this one in oneDNN's layout too, for a model of `num_parameters`."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or num_parameters > MAX_PACKED:
        return False
    columns, inputs = (min(side, MAX_SIDE) for side in weight.shape)
    return _onednn_is_faster(inputs, columns, weight.dtype)


@lru_cache
@torch.inference_mode()
def _onednn_is_faster(inputs: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies a few rows with a weight [inputs, columns] faster, by a trial on one thread."""
    if not can_pack(dtype):
        return False
    with one_thread():
        rows, weight = torch.ones(TRIAL_ROWS, inputs, dtype=dtype), torch.ones(inputs, columns, dtype=dtype)
        packed = _packed(weight)
        return _seconds(lambda: torch.mm(rows, weight)) > GAIN * _seconds(lambda: _packed_product(rows, packed, None))


def _packed(weight: Tensor) -> Tensor:
    """Return a weight [in, out] in oneDNN's layout. The layout may depend on the number of rows; 16 is a guess."""
    operations: Any = torch.ops.mkldnn
    return operations._reorder_linear_weight(weight.T, 16)


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    operations: Any = torch.ops.mkldnn
    return operations._linear_pointwise(x, packed, bias, "none", [], "")


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of 20 runs, in seconds."""
    times: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)

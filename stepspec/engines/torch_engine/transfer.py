"""Copies between the host and a device that wait for as little as possible."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on a device; see `moved`."""
    return moved(torch.tensor(numbers, dtype=dtype), device)


def moved(table: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; itself if that is the CPU.

    A copy of pageable memory to a GPU would wait for all passes before it. Pinned memory is copied when they are done,
    and PyTorch uses it again after that.
    """
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def download(*parts: Tensor) -> list[list[float]]:
    """Return the numbers of several tensors, each flat. It waits for the device once.

    Whole numbers up to 2**53 are exact.
    """
    joined: list[float] = torch.cat([part.flatten().double() for part in parts]).tolist()
    ends = iter(joined)
    return [[next(ends) for _ in range(part.numel())] for part in parts]

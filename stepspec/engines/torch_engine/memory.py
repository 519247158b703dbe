"""How many texts of which length a device has room for."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stepspec.engines.torch_engine.model import CausalModel
from stepspec.errors import ModelError

SHARE = 0.85
"""Of what is free beside the weights that caches may take; the rest is for passes and graphs."""

LEAST_CONTEXT = 2048
LEAST_SLOTS = 2
"""One for a text, and one for rows that only fill a batch up."""

GIB = 1 << 30


class Room(NamedTuple):
    """What caches are made for."""

    num_slots: int
    max_context: int


def free_bytes(device: torch.device) -> int | None:
    """What is free on a CUDA device; None elsewhere, where caches grow as they are used."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def room_for(models: Sequence[CausalModel], max_slots: int, budget: int | None) -> Room:
    """Room for the caches of models that work together; the budget defaults to most of what is free.

    Raises:
        ModelError: not even a short text fits.
    """
    max_context = min(model.max_context for model in models)
    free = free_bytes(models[0].device)
    if free is None:
        return Room(max_slots, max_context)
    usable = int(SHARE * free) if budget is None else budget
    return fitting(usable, sum(model.position_bytes for model in models), max_slots, max_context, models[0].name)


def fitting(usable: int, position_bytes: int, max_slots: int, max_context: int, name: str) -> Room:
    """As many slots as fit; if fewer than two of the whole context do, two of a shorter one.

    Raises:
        ModelError: two slots of `LEAST_CONTEXT` positions, or of the model's context if that is shorter, do not fit.
    """
    num_slots = min(max_slots, usable // (position_bytes * max_context))
    if num_slots >= LEAST_SLOTS:
        return Room(num_slots, max_context)
    context = usable // (position_bytes * LEAST_SLOTS)
    least = min(LEAST_CONTEXT, max_context)
    if context < least:
        needed = LEAST_SLOTS * least * position_bytes
        raise ModelError(
            f"The cache of {name} needs {needed / GIB:.1f} GiB of device memory for texts of {least} tokens, and "
            f"{usable / GIB:.1f} GiB are free. Free more, or choose a smaller model or draft."
        )
    return Room(LEAST_SLOTS, context)

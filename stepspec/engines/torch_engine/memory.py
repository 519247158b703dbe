"""How many slots of what length fit into a device's memory."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from stepspec.engines.torch_engine.model import CausalModel
from stepspec.errors import ModelError

SHARE = 0.85
"""Share of the memory left by the weights that the caches may use. The rest is for passes and graphs."""

HOST_SHARE = 0.5
"""Share of a machine's free memory that counts as free. The rest is for other programs."""

MIN_CONTEXT = 2048
MIN_SLOTS = 2
"""So that a short call does not wait for the end of a long text."""

GIB = 1 << 30


class CacheSize(NamedTuple):
    """Size of the caches."""

    num_slots: int
    max_context: int
    """Positions of a slot."""
    max_positions: int | None = None
    """Positions of all slots together, where caches grow on demand; None without a limit."""


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device, or those of the machine that caches may use; None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = free_host_bytes() if device.type == "cpu" else None
    return None if free is None else int(HOST_SHARE * free)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that Linux can give to this process, within the limit of its control group."""
    with suppress(OSError, KeyError, IndexError, ValueError):
        free = 1024 * _table(root / "proc/meminfo")["MemAvailable"]
        with suppress(OSError, KeyError, IndexError, ValueError):  # there is no control group, or it has no limit
            own = (root / "proc/self/cgroup").read_text("ascii").split("0::/")[1].splitlines()[0]
            group = root / "sys/fs/cgroup" / own
            limit, used = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
            free = min(free, max(0, limit - used + _table(group / "memory.stat")["inactive_file"]))
        return free
    return None


def _table(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    return {line.split()[0].rstrip(":"): int(line.split()[1]) for line in file.read_text("ascii").splitlines()}


def room_for(models: Sequence[CausalModel], max_slots: int, budget: int | None) -> CacheSize:
    """Return the size of the caches for models that run together.

    Args:
        models: the target, and its draft model if there is one.
        max_slots: upper limit on the slots.
        budget: bytes for the caches; None is most of the free memory.

    Raises:
        ModelError: not even two short texts fit.
    """
    max_context = min(model.max_context for model in models)
    free = free_bytes(models[0].device)
    if free is None:
        return CacheSize(max_slots, max_context)
    usable = int(SHARE * free) if budget is None else budget
    position_bytes = sum(model.position_bytes for model in models)
    if models[0].device.type == "cpu":
        return CacheSize(max_slots, max_context, usable // position_bytes)
    return fitting(usable, position_bytes, max_slots, max_context, models[0].name)


def fitting(usable: int, position_bytes: int, max_slots: int, max_context: int, name: str) -> CacheSize:
    """Return as many slots of the full context as fit; if fewer than two fit, two slots of a shorter context.

    Args:
        usable: bytes for the caches.
        position_bytes: bytes of one position of a slot, over all models.
        max_slots: upper limit on the slots.
        max_context: the models' context, in positions.
        name: the model's name in errors.

    Raises:
        ModelError: two slots of `MIN_CONTEXT` positions, or of the model's context if that is shorter, do not fit.
    """
    num_slots = min(max_slots, usable // (position_bytes * max_context))
    if num_slots >= MIN_SLOTS:
        return CacheSize(num_slots, max_context)
    context = usable // (position_bytes * MIN_SLOTS)
    least = min(MIN_CONTEXT, max_context)
    if context < least:
        needed = MIN_SLOTS * least * position_bytes
        raise ModelError(
            f"The cache of {name} needs {needed / GIB:.1f} GiB of device memory for texts of {least} tokens, but only "
            f"{usable / GIB:.1f} GiB is available. Free device memory, or choose a smaller model or draft."
        )
    return CacheSize(MIN_SLOTS, context)

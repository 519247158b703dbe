"""Energy that the devices of this machine draw, as counted by their drivers: NVIDIA GPUs and Intel packages.

A counter includes all programs on its device. Differences describe a model only if the machine is otherwise idle.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class EnergyCounter:
    """One device's counter."""

    device: str
    read: Callable[[], float]
    """Returns joules since some time in the past."""
    wraps_at: float | None = None
    """Joules at which the counter restarts from 0."""

    def drawn(self, before: float, after: float) -> float:
        """Return the joules between two readings. The counter may have restarted once in between."""
        if after < before and self.wraps_at is not None:
            return after + self.wraps_at - before
        return after - before


class EnergyMeter:
    """All energy counters that this process can read, possibly none."""

    def __init__(self, counters: Sequence[EnergyCounter] | None = None) -> None:
        self._counters = [*gpu_counters(), *package_counters()] if counters is None else counters

    def read(self) -> Mapping[str, float]:
        """Return the readings in joules by device, without counters that fail."""
        shown: dict[str, float] = {}
        for counter in self._counters:
            with contextlib.suppress(Exception):  # a driver error must not end an evaluation
                shown[counter.device] = counter.read()
        return shown

    def drawn(self, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
        """Return the joules that all devices drew between two readings; None if any reading is missing."""
        if not self._counters or not {counter.device for counter in self._counters} <= set(before) & set(after):
            return None
        return sum(counter.drawn(before[counter.device], after[counter.device]) for counter in self._counters)


def gpu_counters() -> list[EnergyCounter]:
    """Return the counters of NVIDIA GPUs from Volta on, read with NVML; an empty list without NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the package or the driver is missing, and their errors have no common class
        return []
    counters: list[EnergyCounter] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        read = partial(_gpu_joules, nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        with contextlib.suppress(nvml.NVMLError):  # a GPU older than Volta has no counter
            read()
            counters.append(EnergyCounter(f"gpu-{index}", read))
    return counters


def _gpu_joules(nvml: Any, handle: Any) -> float:
    return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def package_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Return the counters of processor packages from Linux's power capping framework, if this user may read them."""
    counters: list[EnergyCounter] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:  # a part of a package, which the package's counter includes
            continue
        read = partial(_microjoules, zone / "energy_uj")
        with contextlib.suppress(OSError, ValueError):
            read()
            counters.append(EnergyCounter(zone.name, read, _microjoules(zone / "max_energy_range_uj")))
    return counters


def _microjoules(file: Path) -> float:
    """Return joules from a file that holds microjoules."""
    return int(file.read_text("ascii")) / 1e6

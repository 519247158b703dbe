"""Energy that the devices of this machine have drawn, where their drivers count it: NVIDIA GPUs and Intel packages.

A counter counts all programs on its device, so only differences on a machine with nothing else to
do say anything about a model.
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
    """Joules since some time in the past."""
    wraps_at: float | None = None
    """Joules at which the counter begins anew."""

    def drawn(self, before: float, after: float) -> float:
        """Joules between two readings, between which the counter may have begun anew once."""
        if after < before and self.wraps_at is not None:
            return after + self.wraps_at - before
        return after - before


class EnergyMeter:
    """All counters that can be read here; there may be none."""

    def __init__(self, counters: Sequence[EnergyCounter] | None = None) -> None:
        self._counters = [*gpu_counters(), *package_counters()] if counters is None else counters

    def read(self) -> Mapping[str, float]:
        """What the counters show, by device; a counter that fails is left out."""
        shown: dict[str, float] = {}
        for counter in self._counters:
            with contextlib.suppress(Exception):  # an evaluation does not end over what a driver cannot say just now
                shown[counter.device] = counter.read()
        return shown

    def drawn(self, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
        """Joules that all devices together have drawn between two readings; None if not all were measured, or none."""
        if not self._counters or not {counter.device for counter in self._counters} <= set(before) & set(after):
            return None
        return sum(each.drawn(before[each.device], after[each.device]) for each in self._counters)


def gpu_counters() -> list[EnergyCounter]:
    """Of NVIDIA's GPUs from Volta on, by the driver's own library; none without it."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the package is missing, or the driver is: its errors share no class with that
        return []
    counters: list[EnergyCounter] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        read = partial(_gpu_joules, nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        with contextlib.suppress(nvml.NVMLError):  # a device of before Volta does not count
            read()
            counters.append(EnergyCounter(f"gpu-{index}", read))
    return counters


def _gpu_joules(nvml: Any, handle: Any) -> float:
    return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def package_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Of processor packages, from Linux's power capping framework, where this user may read it."""
    counters: list[EnergyCounter] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:  # a part of a package, which is counted in it
            continue
        read = partial(_microjoules, zone / "energy_uj")
        with contextlib.suppress(OSError, ValueError):
            read()
            counters.append(EnergyCounter(zone.name, read, _microjoules(zone / "max_energy_range_uj")))
    return counters


def _microjoules(file: Path) -> float:
    """Joules, from a file of microjoules."""
    return int(file.read_text("ascii")) / 1e6

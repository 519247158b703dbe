"""Real vLLM servers for the embedded pair. They run in `.venv-vllm`, which `make test` prepares."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from proxy import Call, Fault, Proxy, serving

from evals.bench.service.vllm_servers import VARIABLES, plugin_folder
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


def environment() -> dict[str, str]:
    """Return the environment variables for processes that run vLLM."""
    return {**os.environ, **VARIABLES}


class VllmForks:
    """Runs commands in forks of one process that has imported vLLM."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        plugins = self._stack.enter_context(plugin_folder())
        command = [str(VLLM_PYTHON), str(Path(__file__).with_name("vllm_forks.py")), str(plugins)]
        # In a session of its own, so that a signal to the tests' group does not end it before it has killed its forks.
        self.process = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def running(self, words: list[str], log: Path) -> Iterator[Callable[[], bool]]:
        """Run a command, a module or a script of Python with its arguments, and yield whether it still runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([words, str(log)]), file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())

        def runs() -> bool:
            with suppress(ProcessLookupError):
                os.kill(pid, 0)
                return True
            return False

        try:
            yield runs
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def run(self, words: list[str], log: Path, timeout_s: float) -> None:
        """Run a command to its end, or for the longest time that it may take."""
        with self.running(words, log) as runs:
            end = time.monotonic() + timeout_s
            while runs() and time.monotonic() < end:
                time.sleep(0.2)

    def close(self) -> None:
        """Kill what still runs."""
        self.process.communicate()
        self._stack.close()


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def vllm_server(
    vllm: VllmForks, role: str, folder: Path, *options: str, weights: Path | None = None, context: int = 1024
) -> AbstractContextManager[int]:
    """Run a vLLM server on a free port, with one of the embedded models unless `weights` has another folder."""
    words = ["vllm.entrypoints.openai.api_server", "--model", str(weights or WEIGHTS / role)]
    words += ["--served-model-name", role, "--dtype", "float32", "--max-model-len", str(context)]
    words += ["--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details", *options]
    return forked_server(vllm, words, folder / f"{role}.log")


def transformers_server(vllm: VllmForks, role: str, folder: Path) -> AbstractContextManager[int]:
    """Run `transformers serve` with one of the embedded models on a free port."""
    words = ["transformers.cli.transformers", "serve", str(WEIGHTS / role), "--dtype", "float32", "--device", "cpu"]
    return forked_server(vllm, words, folder / f"{role}.log")


@contextmanager
def forked_server(vllm: VllmForks, words: list[str], log: Path) -> Iterator[int]:
    """Run a server in a fork, and yield its port once it is healthy."""
    port = free_port()
    with vllm.running([*words, "--port", str(port), "--host", "127.0.0.1"], log) as runs:
        wait_until_healthy(port, runs, log)
        yield port


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
        wait_until_healthy(port, lambda: process.poll() is None, log)
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # what is left of it, such as the server behind a wrapper


def wait_until_healthy(port: int, runs: Callable[[], bool], log: Path) -> None:
    """Wait for a server, and fail with its log if it ends first."""
    deadline = time.monotonic() + START_S
    while True:
        if not runs() or time.monotonic() > deadline:
            pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(0.5)


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

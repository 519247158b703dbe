"""The torch engine beside llama.cpp on the pair `qwen`: CPU time of a token, plain and with a draft model.

Every engine has a process of its own with one thread, and they take turns with the same greedy prompts. Times are those
of writing: a text of one token is subtracted, which is the time to read the prompt. llama.cpp's server reads the GGUF
files that the pair was built from.
"""

import asyncio
import json
import multiprocessing
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import psutil
import typer

from evals.bench.problems import BENCHMARK, questions
from evals.bench.speed import UNKNOWN, cells_table
from stepspec.api.pairs import QWEN_NAME, find_pair
from stepspec.chat.prompts import encode_request
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.errors import EngineError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, Record

CONTEXT = 2048
STARTUP_S, REQUEST_S = 120.0, 600.0
PLAIN = "plain"
OURS = {"bfloat16": ("dtype=bfloat16", "quantize=int4"), "int8": ("quantize=int8", "quantize=int4")}
"""Options of target and draft by the name of the weights."""


class EngineRow(Record):
    """An engine with one setting, over all prompts."""

    engine: str
    weights: str
    drafted: str
    """Tokens drafted in a round, or "plain"."""
    tokens: int
    cpu_ms: float
    """CPU milliseconds of a token."""
    wall_ms: float
    over_plain: float
    """Speedup in CPU time over the same engine without a draft."""
    acceptance: float | None
    """Share of the drafted tokens that were kept; those behind a rejected one count for llama.cpp alone."""
    differing: int
    """Texts that are not those of the same engine without a draft."""


class Engines(Conditions):
    """The file that `python -m evals.bench engines --json` writes."""

    version: Literal[1] = 1
    benchmark: str
    problems: int
    max_tokens: int
    instructions: str
    """The line in which llama.cpp says for which instructions it was compiled."""
    results: list[EngineRow]


@dataclass(frozen=True)
class Written:
    """What an engine wrote after a prompt."""

    ids: Sequence[int]
    drafted: int
    accepted: int


@dataclass
class Contender:
    """An engine with one setting, and its sums over the prompts so far."""

    weights: str
    drafted: str
    engine: str = "stepspec"
    process: "OurProcess | LlamaProcess | None" = None
    texts: list[Sequence[int]] = field(default_factory=list[Sequence[int]])
    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    def take_turn(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Continue a prompt, and add what writing took."""
        assert self.process is not None
        for count, sign in ((1, -1), (max_tokens, 1)):
            cpu_s, since = cpu_seconds(self.process.pid), time.perf_counter()
            written = self.process.write(prompt, count, self.drafted)
            self.wall_s += sign * (time.perf_counter() - since)
            self.cpu_s += sign * (cpu_seconds(self.process.pid) - cpu_s)
        self.texts.append(written.ids)
        self.num_drafted += written.drafted
        self.num_accepted += written.accepted

    def row(self, plain: "Contender") -> EngineRow:
        """Return the figures, with those of the same engine without a draft."""
        tokens = sum(len(text) - 1 for text in self.texts)
        cpu_ms, plain_ms = (
            1000 * each.cpu_s / sum(len(text) - 1 for text in each.texts) for each in (self, plain)
        )
        return EngineRow(
            engine=self.engine,
            weights=self.weights,
            drafted=self.drafted,
            tokens=tokens,
            cpu_ms=cpu_ms,
            wall_ms=1000 * self.wall_s / tokens,
            over_plain=plain_ms / cpu_ms,
            acceptance=self.num_accepted / self.num_drafted if self.num_drafted else None,
            differing=sum(text != other for text, other in zip(self.texts, plain.texts, strict=True)),
        )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


class OurProcess:
    """The torch engine with a draft, in a process of its own."""

    def __init__(self, target: str, draft: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, target, draft), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._connection.recv()

    def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        """Continue a prompt greedily. `drafted` is `PLAIN`, "auto" or a number."""
        self._connection.send((prompt, max_tokens, drafted))
        return self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, target: str, draft: str) -> None:
    """Load an engine, and continue the prompts that come."""
    from stepspec.engines.torch_engine.engine import TorchEngine

    engine = TorchEngine.load(target).drafted_by(TorchEngine.load(draft))
    connection.send(None)

    async def write(prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        number = None if drafted == "auto" or drafted == PLAIN else int(drafted)
        drafting = Drafting() if drafted == PLAIN else Drafting("draft-model", number)
        await engine.forget()
        before, stop = engine.metrics(), Stop(max_tokens, token_ids=engine.tokenizer.end_ids)
        text = await collect(engine.generate(Generate(TokenBuffer(prompt), Sampling(), stop, drafting)))
        done = engine.metrics() - before
        return Written(list(text.ids), done.drafted, done.accepted)

    with asyncio.Runner() as runner:
        while True:
            connection.send(runner.run(write(*connection.recv())))


class LlamaProcess:
    """llama.cpp's server with one thread."""

    def __init__(self, command: Path, target: Path, draft: Path | None, drafted: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--threads", "1", "--ctx-size", str(CONTEXT), "--parallel", "1", "--no-warmup", "-lv", "4"]
        if draft is not None:
            options += ["--spec-type", "draft-simple", "--spec-draft-model", str(draft), "--spec-draft-threads", "1"]
            options += ["--spec-draft-n-max", drafted]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [command, "--model", target, "--port", str(port), *options], stdout=output, stderr=output
            )
        self.pid, self._client = self._process.pid, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_S)
        since = time.perf_counter()
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - since > STARTUP_S:
                raise EngineError(f"llama.cpp's server did not start: {log.read_text('utf-8')[-500:]}")
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            return self._client.get("/health").is_success
        except httpx.TransportError:
            return False

    @property
    def instructions(self) -> str:
        """The instructions that it was compiled for."""
        found = re.search(r"system_info: .*?\| (.*)", self._log.read_text("utf-8", "replace"))
        return found[1].strip(" |") if found else "unknown"

    def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        """Continue a prompt greedily."""
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
        answer: Any = json.loads(self._client.post("/completion", json=body | {"return_tokens": True}).text)
        timings = answer["timings"]
        return Written(answer["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))

    def close(self) -> None:
        """End the server."""
        self._client.close()
        self._process.terminate()
        self._process.wait()


HEADS = ("engine", "weights", "drafted", "CPU ms a token", "tokens per CPU second", "over plain", "accepted", "other texts")


def rows_of(found: Engines) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.engine,
            each.weights,
            each.drafted,
            f"{each.cpu_ms:.1f}",
            f"{1000 / each.cpu_ms:.1f}",
            f"{each.over_plain:.2f}",
            UNKNOWN if each.acceptance is None else f"{each.acceptance:.0%}",
            f"{each.differing} of {found.problems}",
        ]
        for each in found.results
    ]


def in_words(found: Engines) -> str:
    """Return what was measured."""
    return (
        f"pair `{QWEN_NAME}`, one thread each, greedy, {found.problems} problems of {found.benchmark} with at most "
        f"{found.max_tokens} tokens; llama.cpp: {found.instructions}"
    )

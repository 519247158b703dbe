"""The torch engine beside llama.cpp on the pair `qwen`: CPU time of a token, plain and with a draft model.

Every engine has a process of its own with one thread. They continue the same prompts greedily and take turns, each
prompt in another order. The figures are those of writing: the time in which the same engine without a draft reads the
prompt and writes one token is subtracted, so that what a draft takes to read the prompt counts.

llama.cpp's server reads the GGUF files that the pair was built from, which `make qwen` leaves in `build/qwen`. Their
weights have 4 bits, and the torch engine has them in more. Compile the server for the processor that it runs on.
"""

import asyncio
import json
import multiprocessing
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import httpx
import typer

from evals.bench.problems import BENCHMARK, questions
from evals.bench.service.process import free_port
from evals.bench.speed import UNKNOWN, cells_table
from evals.pairs.qwen import FOLDER
from stepspec.api.pairs import QWEN, QWEN_NAME, find_pair
from stepspec.capacity.process import cpu_s
from stepspec.chat.prompts import encode_request
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.errors import EngineError, ModelError, UsageError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, Record

CONTEXT = 2048
WARM_UP = 16
"""Tokens that every contender writes first, which do not count."""
STARTUP_S, REQUEST_S = 120.0, 600.0
PLAIN = "plain"
OURS = {"bfloat16": "dtype=bfloat16&threads=1", "int8": "quantize=int8&threads=1"}
"""Options of the torch engine's target by the name of its weights."""
DRAFT = "quantize=int4&threads=1"
DRAFTED = ("4", "8")
"""Tokens drafted in a round, for both engines. The torch engine also chooses the number by itself."""


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
    """Share of all drafted tokens that were accepted; None without a draft."""
    differing: int
    """Texts that are not those of the same engine without a draft."""


class Engines(Conditions):
    """The file that `python -m evals.bench engines --json` writes."""

    version: Literal[1] = 1
    benchmark: str
    problems: int
    max_tokens: int
    llama_cpp: str
    """llama.cpp's version, and the instructions that it uses."""
    results: list[EngineRow]


@dataclass(frozen=True)
class Written:
    """What an engine wrote after a prompt, with what it took to read the prompt and to write."""

    ids: Sequence[int]
    drafted: int
    accepted: int
    cpu_s: float = 0.0
    wall_s: float = 0.0


class EngineProcess(Protocol):
    """An engine in a process of its own."""

    pid: int

    def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        """Continue a prompt greedily. `drafted` is `PLAIN`, "auto" or a number."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass
class Contender:
    """An engine with one setting, and what it has written so far."""

    engine: str
    weights: str
    drafted: str
    process: EngineProcess
    texts: list[Written] = field(default_factory=list[Written])
    readings: list[Written] = field(default_factory=list[Written])
    """Texts of one token after the same prompts, without a draft."""

    def take_turn(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Continue a prompt."""
        if self.drafted == PLAIN:
            self.readings.append(self._write(prompt, 1))
        self.texts.append(self._write(prompt, max_tokens))

    def _write(self, prompt: Sequence[int], max_tokens: int) -> Written:
        begun_s, since = cpu_s(self.process.pid), time.perf_counter()
        found = self.process.write(prompt, max_tokens, self.drafted)
        wall_s = time.perf_counter() - since
        return Written(found.ids, found.drafted, found.accepted, cpu_s(self.process.pid) - begun_s, wall_s)

    def row(self, plain: "Contender") -> EngineRow:
        """Return the figures. `plain` is the same engine without a draft."""
        drafted = sum(each.drafted for each in self.texts)
        cpu_ms, plain_ms = (_ms_of_token(each.texts, plain.readings, "cpu_s") for each in (self, plain))
        return EngineRow(
            engine=self.engine,
            weights=self.weights,
            drafted=self.drafted,
            tokens=_num_written(self.texts),
            cpu_ms=cpu_ms,
            wall_ms=_ms_of_token(self.texts, plain.readings, "wall_s"),
            over_plain=plain_ms / cpu_ms,
            acceptance=sum(each.accepted for each in self.texts) / drafted if drafted else None,
            differing=sum(each.ids != other.ids for each, other in zip(self.texts, plain.texts, strict=True)),
        )


def _num_written(texts: Sequence[Written]) -> int:
    """Return the number of tokens behind the first one of each text."""
    return sum(len(each.ids) - 1 for each in texts)


def _ms_of_token(texts: Sequence[Written], readings: Sequence[Written], clock: Literal["cpu_s", "wall_s"]) -> float:
    seconds, reading_s = (sum(getattr(each, clock) for each in some) for some in (texts, readings))
    return 1000 * (seconds - reading_s) / _num_written(texts)


class TorchProcess:
    """The torch engine with a draft, in a process of its own."""

    def __init__(self, target: str, draft: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, target, draft), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._received()

    def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        """Continue a prompt greedily."""
        self._connection.send((prompt, max_tokens, drafted))
        return self._received()

    def _received(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise EngineError("The process of the torch engine ended. Its output says why.") from None

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _serve(connection: Any, target: str, draft: str) -> None:
    """Load an engine and continue the prompts that come."""
    from stepspec.engines.torch_engine.engine import TorchEngine

    engine = TorchEngine.load(target).drafted_by(TorchEngine.load(draft))
    connection.send(None)

    async def write(prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        number = int(drafted) if drafted.isdecimal() else None
        drafting = Drafting() if drafted == PLAIN else Drafting("draft-model", number)
        stop = Stop(max_tokens, token_ids=engine.tokenizer.end_ids)
        await engine.forget()
        text = await collect(engine.generate(Generate(TokenBuffer(prompt), Sampling(), stop, drafting)))
        return Written(text.ids, text.drafted, text.accepted)

    with asyncio.Runner() as runner:
        while True:
            connection.send(runner.run(write(*connection.recv())))


class LlamaProcess:
    """llama.cpp's server with one thread. It drafts the same number of tokens in every call."""

    def __init__(self, command: Path, target: Path, draft: Path, drafted: str, log: Path) -> None:
        port = free_port()
        options = ["--threads", "1", "--ctx-size", str(CONTEXT), "--parallel", "1", "--cache-ram", "0", "-lv", "5"]
        if drafted != PLAIN:
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
                self.close()
                raise EngineError(f"llama.cpp's server did not start: {log.read_text('utf-8', 'replace')[-500:]}")
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            return self._client.get("/health").is_success
        except httpx.TransportError:
            return False

    def about(self) -> str:
        """Return the server's version and the instructions that it uses."""
        build = self._client.get("/props").json()["build_info"]
        return f"{build}, {instructions(self._log.read_text('utf-8', 'replace'))}"

    def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
        """Continue a prompt greedily. `drafted` is the number that it was started with."""
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
        answer = self._client.post("/completion", json=body | {"return_tokens": True})
        if answer.is_error:
            raise EngineError(f"llama.cpp's server answers: {answer.text}")
        found: Any = json.loads(answer.text)
        timings = found["timings"]
        return Written(found["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))

    def close(self) -> None:
        """End the server."""
        self._client.close()
        self._process.terminate()
        self._process.wait()


def instructions(log: str) -> str:
    """Return the instructions that llama.cpp's log names in its line `system_info`."""
    line = re.search(r"system_info: (.*)", log)
    return ", ".join(re.findall(r"(\w+) = 1\b", line[1].partition("CPU :")[2])) if line else "unknown instructions"


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Callable[[str, int, int], None],
) -> None:
    """Let contenders continue the same prompts in turns.

    Args:
        contenders: the contenders, in the order of the first prompt.
        prompts: ids of the prompts.
        max_tokens: most tokens of a text.
        progress: called with what runs now, and the numbers of finished and of all turns.
    """
    for each in contenders:
        each.process.write(prompts[0], WARM_UP, each.drafted)
    total = len(prompts) * len(contenders)
    for number, prompt in enumerate(prompts):
        start = number % len(contenders)
        for turn, each in enumerate([*contenders[start:], *contenders[:start]]):
            progress(f"{each.engine} {each.weights} {each.drafted}", number * len(contenders) + turn, total)
            each.take_turn(prompt, max_tokens)


def compare(contenders: Sequence[Contender]) -> list[EngineRow]:
    """Return the figures. Of each engine and its weights, the first contender has no draft."""
    plain: dict[tuple[str, str], Contender] = {}
    return [each.row(plain.setdefault((each.engine, each.weights), each)) for each in contenders]


def start(stack: ExitStack, command: Path) -> tuple[list[Contender], str]:
    """Start all engines, one after the other. Return the contenders, and what llama.cpp says about itself.

    Args:
        stack: ends the processes.
        command: llama.cpp's server.

    Raises:
        ModelError: the pair or one of its GGUF files is missing.
        EngineError: an engine does not start.
    """
    pair, files = find_pair(QWEN_NAME), {role: FOLDER / source.name for role, source in QWEN.items()}
    for file in files.values():
        if not file.exists():
            raise ModelError(f"{file} is missing. Get it with: make qwen")
    found: list[Contender] = []
    for weights, options in OURS.items():
        ours = TorchProcess(f"{pair / 'target'}?{options}", f"{pair / 'draft'}?{DRAFT}")
        stack.callback(ours.close)
        found += [Contender("torch engine", weights, drafted, ours) for drafted in (PLAIN, *DRAFTED, "auto")]
    logs, about = Path(stack.enter_context(tempfile.TemporaryDirectory())), ""
    for drafted in (PLAIN, *DRAFTED):
        server = LlamaProcess(command, files["target"], files["draft"], drafted, logs / drafted)
        stack.callback(server.close)
        found.append(Contender("llama.cpp", "Q4_K_M", drafted, server))
        about = about or server.about()
    return found, about


HEADS = (
    "engine",
    "weights",
    "drafted",
    "CPU ms a token",
    "wall ms",
    "tokens/s",
    "over plain",
    "accepted",
    "other texts",
)


def rows_of(found: Engines) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.engine,
            each.weights,
            each.drafted,
            *(f"{value:.1f}" for value in (each.cpu_ms, each.wall_ms, 1000 / each.wall_ms)),
            f"{each.over_plain:.2f}",
            UNKNOWN if each.acceptance is None else f"{each.acceptance:.0%}",
            UNKNOWN if each.drafted == PLAIN else f"{each.differing} of {found.problems}",
        ]
        for each in found.results
    ]


def in_words(found: Engines) -> str:
    """Return what was measured. The instructions that llama.cpp uses are in the file alone."""
    llama_cpp = found.llama_cpp.partition(",")[0]
    return (
        f"pair `{QWEN_NAME}`, the torch engine's draft in int4, one thread each; greedy, {found.problems} problems of "
        f"{found.benchmark} with at most {found.max_tokens} tokens; llama.cpp {llama_cpp}"
    )


def main(
    server: Annotated[
        Path | None, typer.Option(help="llama.cpp's server; by default, llama-server is searched in PATH.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 20,
    max_tokens: Annotated[int, typer.Option("--tokens", min=2, help="Most tokens of a text.")] = 200,
    json_file: JsonOption = None,
) -> None:
    """Compare the torch engine with llama.cpp on the pair `qwen`, both plain and with a draft model."""
    command = server or shutil.which("llama-server")
    if command is None:
        raise UsageError("llama-server is not in PATH. Give its path with --server.")
    about = conditions()
    with ExitStack() as stack:
        contenders, llama_cpp = start(stack, Path(command))
        tokenizer = load_tokenizer(str(find_pair(QWEN_NAME) / "target"))
        prompts = [encode_request(tokenizer, question) for question in questions(problems)]
        with make_meter() as meter:
            meter.begin("turns")
            measure(contenders, prompts, max_tokens, meter.show)
    about |= {"benchmark": BENCHMARK, "problems": len(prompts), "max_tokens": max_tokens, "llama_cpp": llama_cpp}
    found = Engines.model_validate({**about, "results": compare(contenders)})
    finish([cells_table(in_words(found), HEADS, rows_of(found))], found, json_file)

"""The torch engine: an unmodified Hugging Face model behind the `Engine` protocol.

One thread owns the model and the caches. `TorchEngine` is its interface to any number of event loops. The engine works
on token ids; it does not know steps, judges or policies.
"""

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self
from urllib.parse import parse_qsl

import torch
from pydantic import Field, ValidationError, model_validator

from stepspec.base.file_model import FileModel
from stepspec.base.file_problems import first_problem
from stepspec.engines.draft_vocabulary import load_draft_vocabulary
from stepspec.engines.gguf_file import model_folder
from stepspec.engines.hugging_face import HuggingFaceTokenizer, default_sampling, load_tokenizer, weights_hash
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    EVERYTHING,
    MAX_DRAFTED,
    DrafterName,
    Drafting,
    Generate,
    TokenChunk,
    Verification,
    Verify,
    check_ids,
    check_room,
)
from stepspec.engines.stops import StopMatcher
from stepspec.engines.torch_engine.calls import EngineCall, GenerateCall, Scoring, engine_error
from stepspec.engines.torch_engine.constraint import Grammars
from stepspec.engines.torch_engine.drafters import Drafters, Parts
from stepspec.engines.torch_engine.matrix import Quantization, can_quantize
from stepspec.engines.torch_engine.memory import free_bytes, room_for
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.network import load_network
from stepspec.engines.torch_engine.relaxation import token_kinds
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.scheduler import Scheduler
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.engines.torch_engine.threads import default_threads, end_workers, run_in_thread, use_threads
from stepspec.errors import EngineError, StepSpecError, UsageError, reason_of

logger = logging.getLogger(__name__)

MAX_SLOTS = 64

EXIT_S = 10.0
"""Longest wait for the engine's thread when the program exits, in seconds."""


class TorchOptions(FileModel):
    """Options of a model in its spec string, such as `torch:FOLDER?dtype=bfloat16&threads=2`."""

    device: str | None = None
    """A torch device, such as `cuda:1`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights."""
    quantize: Quantization | None = None
    """How to quantize the weights, see `stepspec.engines.torch_engine.matrix`: "int8" on a CPU, "int4" for its drafts,
    "fp8" on a GPU."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of a model on a CPU."""
    max_model_len: int | None = Field(default=None, ge=64)
    """Longest text, in tokens; None for the model's context. On a GPU, shorter texts leave room for more of them."""
    thinking: str | None = None
    """Format of the model's thinking, see `stepspec.engines.thinking.find_tags`."""

    @model_validator(mode="after")
    def _one_type(self) -> Self:
        if self.quantize and self.dtype:
            raise ValueError(f"quantize={self.quantize} is a data type of its own. Leave out dtype={self.dtype}")
        return self

    @classmethod
    def parsed(cls, query: str) -> "TorchOptions":
        """Parse the part of a spec string after the question mark.

        Raises:
            UsageError: an option is unknown or has an invalid value.
        """
        try:
            return cls.model_validate_strings(dict(parse_qsl(query, keep_blank_values=True)))
        except ValidationError as error:
            raise UsageError(f"Options of the torch engine: {first_problem(error, cls)}") from error


Task = EngineCall | Callable[[Scheduler], None]
"""Input of the engine's thread: a call to serve, or a function to run between two turns."""

TARGET_SHARE, DRAFT_SHARE = 0.6, 0.25
"""Shares of the free device memory: for the caches of target and drafter, and for the draft's own engine."""


class TorchEngine:
    """An engine that serves one model. With a `drafter`, `generate` can speculate on tokens, exactly."""

    abilities = EVERYTHING
    own_speculation = "none"

    def __init__(
        self,
        model: CausalModel,
        tokenizer: HuggingFaceTokenizer,
        drafter: CausalModel | None = None,
        weights: str | None = None,
        budget: int | None = None,
        threads: int | None = None,
        default_sampling: Mapping[str, float] | None = None,
        drafter_tokenizer: HuggingFaceTokenizer | None = None,
    ) -> None:
        """Start the engine's thread.

        Args:
            model: the model to serve.
            tokenizer: its tokenizer.
            drafter: a draft model, for token-level speculation.
            weights: hash of the model's weights, for results.
            budget: bytes of device memory for the caches; None uses most of the free memory.
            threads: CPU threads of the model and its drafter; see `default_threads` for None.
            default_sampling: the sampling that the model's files recommend.
            drafter_tokenizer: the drafter's tokenizer, if it has another vocabulary.

        Raises:
            ModelError: the budget is too small.
        """
        self.name = model.name
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling or {}
        self.model = model
        self._drafter = drafter
        self._drafter_tokenizer = drafter_tokenizer
        self._weights = weights
        self._threads = threads or default_threads(
            model.num_parameters, model.make_trial() if model.device.type == "cpu" else None
        )
        self._kinds: torch.Tensor | None = None
        self._grammars = Grammars(tokenizer, model.vocab_size)
        self.make_room(budget)
        self._metrics = EngineMetrics()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"torch engine {self.name}", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end_thread, self._tasks, self._thread)

    @staticmethod
    def check_options(spec: str) -> None:
        """Check the options of a model, see `load`, without loading it.

        Raises:
            UsageError: an option is unknown or has an invalid value.
        """
        TorchOptions.parsed(spec.partition("?")[2])

    @classmethod
    def load(
        cls, spec: str, device: str | None = None, dtype: torch.dtype | None = None, title: str | None = None
    ) -> "TorchEngine":
        """Load a model and start an engine for it.

        Args:
            spec: hub name, folder or GGUF file. After a question mark, it may have `TorchOptions`, which override the
                arguments.
            device: a torch device; the default is CUDA if there is a GPU, else the CPU.
            dtype: of weights that are not quantized; the default is float32 on a CPU, else bfloat16.
            title: the model's name in results; the default is the hub name or the folder's name.

        Raises:
            UsageError: an option is unknown or has an invalid value.
            ModelError: the model cannot be loaded, or the engine does not support it.
        """
        name, _, query = spec.partition("?")
        options = TorchOptions.parsed(query)
        device = options.device or device or ("cuda" if torch.cuda.is_available() else "cpu")
        quantize, chosen = options.quantize, dtype if options.dtype is None else getattr(torch, options.dtype)
        if quantize is not None:
            chosen = torch.bfloat16  # what is not quantized, such as embeddings
            if quantize != "fp8" and not can_quantize(torch.device(device)):
                logger.warning("%s runs in bfloat16: quantize=%s needs a CPU with VNNI instructions", name, quantize)
                quantize = None
        title = title or (Path(name).resolve().name if Path(name).exists() else name)
        name = model_folder(name)

        def load() -> tuple[CausalModel, HuggingFaceTokenizer]:
            network = load_network(name, device, chosen)
            tokenizer = load_tokenizer(name, network.config, options.thinking)
            vocabulary = load_draft_vocabulary(Path(name), int(network.config.get_text_config().vocab_size))
            model = checked_model(network, title, vocabulary, quantize)
            model.shorten(options.max_model_len)
            return model, tokenizer

        model, tokenizer = run_in_thread(load)
        weights, sampling = weights_hash(name), default_sampling(name)
        return cls(model, tokenizer, None, weights, threads=options.threads, default_sampling=sampling)

    def drafted_by(self, draft: "TorchEngine") -> "TorchEngine":
        """Return an engine for the same model with `draft`'s model as its token-level drafter.

        A draft with another vocabulary drafts text. This engine is closed; `draft` keeps running.
        """
        same = self.tokenizer.same_vocabulary(draft.tokenizer)
        self._close()
        self._thread.join()
        drafter, budget = draft.model.with_own_cache(), None
        if (free := free_bytes(self.model.device)) is not None:
            budget = int(TARGET_SHARE * free)
            draft.make_room(int(DRAFT_SHARE * free))
        return TorchEngine(
            self.model,
            self.tokenizer,
            drafter,
            self._weights,
            budget,
            self._threads,
            self.default_sampling,
            None if same else draft.tokenizer,
        )

    def make_room(self, budget: int | None) -> None:
        """Choose the number and the size of slots by the free memory. Call it before the first call."""
        models = [self.model] if self._drafter is None else [self.model, self._drafter]
        room = room_for(models, MAX_SLOTS, budget)
        self.max_context = room.max_context
        if self._drafter is not None:
            self._drafter.max_context = min(self._drafter.max_context, room.max_context)
        self._num_slots = room.num_slots
        for model in models:
            if model.device.type == "cuda":
                model.replace_cache()  # an earlier choice may have reserved more
                model.cache.reserve(room.num_slots, room.max_context + MAX_DRAFTED + 1)  # one for padding
            elif not model.reads_slots:
                model.cache.max_positions = room.max_positions
        other = self._drafter_tokenizer
        tokenizers = None if other is None else (other, self.tokenizer)
        self._drafters = Drafters(Parts(self.model, self._drafter, self._num_slots, tokenizers))

    def capture(self) -> None:
        """Capture the small passes of the models on a GPU, which takes some seconds. Call it before the first call.

        Passes that cannot be captured are launched one operation at a time.
        """
        models = [model for model in (self.model, self._drafter) if model is not None and model.can_capture]
        for model in models:
            try:
                self._between_turns(lambda _, model=model: self._capture(model)).result()
            except Exception as error:
                logger.warning("%s runs slower, without CUDA graphs: %s", model.name, reason_of(error))

    def _capture(self, model: CausalModel) -> None:
        def report(done: int, count: int) -> None:
            if done in (count // 2, count):
                logger.info("%s: captured %d of %d passes", model.name, done, count)

        model.capture(self._num_slots, report)

    def describe(self) -> dict[str, str | int | None]:
        """See `Engine.describe`."""
        device = self.model.device
        return {
            "name": self.name,
            "weights": self._weights,
            "dtype": self.model.quantize or str(self.model.dtype).removeprefix("torch."),
            "device": str(device),
            "threads": self._threads if device.type == "cpu" else None,
        }

    @property
    def position_bytes(self) -> int:
        """Bytes of the target's keys and values of one token."""
        return self.model.position_bytes

    @property
    def drafters(self) -> list[DrafterName]:
        """Names of the drafters that this engine can use."""
        return self._drafters.available()

    def metrics(self) -> EngineMetrics:
        """Return the metrics of all calls so far."""
        memory = {"weights": self.model.weight_bytes, "cache": self.model.cache.num_bytes}
        if self._drafter is not None:
            memory |= {"draft weights": self._drafter.weight_bytes, "draft cache": self._drafter.cache.num_bytes}
        return replace(self._metrics.copied(), memory_bytes=memory)

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`."""
        prompt, drafting = call.prompt, call.drafting
        prompt_length, length = len(prompt), len(prompt) + len(call.after)
        check_room(self, length, 1)
        check_ids(self.name, self.model.vocab_size, prompt, call.after, call.sampling.named_ids)
        if drafting.drafter == "engine":
            drafting = Drafting()  # this engine has no speculation of its own
        self._drafters.check(drafting.drafter)
        constraint = kinds = None
        if not drafting.acceptance.is_exact:
            kinds = await asyncio.to_thread(self._token_kinds)
        if call.json_schema is not None:
            constraint = await asyncio.to_thread(self._grammars.constraint, call.json_schema)
        stop = replace(call.stop, max_tokens=min(call.stop.max_tokens, self.max_context - length))
        generation = GenerateCall(
            prompt=prompt,
            prompt_length=prompt_length,
            loop=asyncio.get_running_loop(),
            asked_at=time.perf_counter(),
            row=BatchRow(
                prompt,
                prompt_length,
                call.sampling,
                drafting,
                StopMatcher(stop, self.tokenizer.piece, self.tokenizer.end_ids),
                constraint,
                beyond=[*call.after],
                num_after=len(call.after),
                details=[] if call.logprobs else None,
                kinds=kinds,
            ),
            chunks=asyncio.Queue(),
        )
        self._submit(generation)
        try:
            while True:
                message = await generation.chunks.get()
                if isinstance(message, StepSpecError):
                    raise message
                yield message
                if message.end is not None:
                    return
        finally:
            generation.cancelled = True

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`. If only probes are asked, what the cache holds of the continuation is not read again."""
        prompt, continuation, probes = call.prompt, call.continuation, call.probes
        check_room(self, len(prompt), len(continuation) + sum(len(probe.ids) for probe in probes))
        probe_ids = (ids for probe in probes for ids in (probe.ids, probe.labels))
        named = () if call.sampling is None else call.sampling.named_ids
        check_ids(self.name, self.model.vocab_size, prompt, continuation, named, *probe_ids)
        loop = asyncio.get_running_loop()
        scoring = Scoring(
            prompt=prompt,
            prompt_length=len(prompt),
            loop=loop,
            asked_at=time.perf_counter(),
            continuation=continuation,
            probes=probes,
            scores=call.scores,
            sampling=call.sampling,
            top=min(call.top, self.model.vocab_size),
            outcome=loop.create_future(),
        )
        self._submit(scoring)
        try:
            return await scoring.outcome
        finally:
            scoring.cancelled = True

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`. The first call takes about a second."""
        await asyncio.to_thread(self._grammars.grammar, json_schema)

    async def forget(self) -> None:
        """See `Engine.forget`."""
        await asyncio.shield(asyncio.wrap_future(self._between_turns(Scheduler.forget)))

    async def aclose(self) -> None:
        """Stop the engine's thread. Calls in progress fail."""
        self._close()
        await asyncio.to_thread(self._thread.join)

    def _token_kinds(self) -> torch.Tensor:
        """Return the kinds of all tokens. The first call takes up to a second."""
        if self._kinds is None:
            self._kinds = token_kinds(self.tokenizer, self.model.vocab_size, self.model.device)
        return self._kinds

    def _between_turns(self, work: Callable[[Scheduler], None]) -> "concurrent.futures.Future[None]":
        """Have the engine's thread run a function, and return its outcome."""
        outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run(scheduler: Scheduler) -> None:
            try:
                work(scheduler)
            except Exception as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        self._submit(run)
        return outcome

    def _submit(self, task: Task) -> None:
        with self._closing:
            if self._closed:
                raise self._closed_error()
            self._tasks.put(task)

    def _close(self) -> None:
        """Reject further calls. The thread ends after its current turn."""
        with self._closing:
            self._closed = True
            self._tasks.put(None)

    def _closed_error(self) -> EngineError:
        return EngineError(f"The engine of {self.name} was closed.")

    # The methods below run in the engine's thread.

    @torch.inference_mode()
    def _work(self) -> None:
        if self.model.device.type == "cpu":
            use_threads(self._threads)
        elif self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        first = self._tasks.get()  # `make_room` may still change the slots until the first task arrives
        scheduler = Scheduler(self.model, self._drafters, self._num_slots, self._metrics)
        failure = self._closed_error()
        try:
            if first is not None:
                _dispatch(first, scheduler)
                while self._take_tasks(scheduler):
                    scheduler.turn()
        except Exception as error:  # a bug in the engine: fail all calls, so that no caller waits forever
            failure = engine_error(self.name, error)
        self._close()
        while self._take_tasks(scheduler):
            pass
        scheduler.fail_all(failure)

    def _take_tasks(self, scheduler: Scheduler) -> bool:
        """Pass new tasks to the scheduler; block while it is idle. Return False once the engine is closed."""
        while True:
            if scheduler.idle and self._tasks.empty():
                end_workers()
            try:
                task = self._tasks.get(block=scheduler.idle)
            except queue.Empty:
                return True
            if task is None:
                return False
            _dispatch(task, scheduler)


def _end_thread(tasks: "queue.SimpleQueue[Task | None]", thread: threading.Thread) -> None:
    """End an engine's thread when the program exits.

    Python ends daemon threads by unwinding their stack, and PyTorch aborts the process if that happens inside of it.
    """
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_S)


def _dispatch(task: Task, scheduler: Scheduler) -> None:
    if isinstance(task, EngineCall):
        scheduler.add(task)
    else:
        task(scheduler)

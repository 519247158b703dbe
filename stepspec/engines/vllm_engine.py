# pyright: basic, reportMissingImports=false
"""The vLLM engine: AsyncLLM in the same process, with prompts as token ids and vLLM's prefix cache.

vLLM drafts tokens as set by its own `speculative_config` when the model is loaded:

    vllm:Qwen/Qwen3-32B?speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}

Arguments of vLLM's engine follow the name like the query of a URL. vLLM runs in its own event loop in a thread, so
calls can come from any loop. The engine tests once which features the installed vLLM version has.
"""

import asyncio
import dataclasses
import importlib
import json
import os
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from stepspec.base.extras import from_extra
from stepspec.base.loop_thread import LoopThread
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    Ability,
    DrafterName,
    Generate,
    Sampling,
    Stop,
    TokenChunk,
    Verification,
    Verify,
    check_acceptance,
    check_ids,
    check_room,
    hash_of,
    merged,
    read_prompt_logprobs,
    side_by_side,
)
from stepspec.engines.stops import StopMatcher
from stepspec.engines.vllm_plugin.fields import KEY, fields_of
from stepspec.errors import EngineError, ModelError, UsageError, reason_of, unknown_name

with from_extra("vllm", "The vLLM engine"):
    import torch
    from vllm import SamplingParams, exceptions
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from stepspec.engines.hugging_face import HuggingFaceTokenizer, default_sampling, load_tokenizer, weights_hash

VllmError: Any = getattr(exceptions, "VLLMError", ValueError)
"""Base class of vLLM's errors; older versions raise built-in errors."""

DEVICES, VISIBLE = "devices", "CUDA_VISIBLE_DEVICES"
"""An argument that stepspec adds to those of vLLM: `devices=0,1` sets the CUDA devices of this engine."""

THINKING = "thinking"
"""A further one: the format of the model's thinking, see `stepspec.engines.thinking.find_tags`."""

TRIAL_IDS = [5, 6, 7]
NUM_LOGPROBS = 20
"""vLLM's default maximum. The ten digits of a rating are usually among the top 20 tokens.

With speculation, vLLM returns no log-probabilities of named tokens in a pass that verifies drafted ones. Over HTTP they
are not requested either: in runner V1, a request for named tokens spoils the top tokens of all others in its pass.
"""

RELAXED_BLOCK = 32
"""Fewest tokens after which the workers are asked which of them are relaxed. They answer between two rounds."""

JUDGING_FIRST = -1
"""Priority of a judgment. It is one short pass, so it runs before text generation, which has priority 0."""

DEVICE_SHARE = 0.45
"""Share of the free CUDA memory for one engine's weights and cache. It leaves memory for a second engine."""

ScoreRoute = Literal["fixed ids", "prompt logprobs"]
"""How a continuation is scored.

`fixed ids` reads only the part of the prompt that is not cached, but does not return the argmax tokens.
`prompt logprobs` reads the whole prompt again, because vLLM stores no log-probabilities with cached prefixes.
"""


class VllmEngine:
    """One model in vLLM."""

    drafters: tuple[DrafterName, ...] = ("engine",)

    def __init__(
        self,
        llm: AsyncLLM,
        loop: LoopThread,
        name: str,
        folder: str,
        tokenizer: HuggingFaceTokenizer,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        config: Any = llm.model_config
        self.max_context = int(config.max_model_len)
        self._vocab_size = int(config.get_vocab_size())
        self._served = config.served_model_name
        self._dtype = ", ".join(
            filter(None, (str(config.dtype).removeprefix("torch."), getattr(config, "quantization", None)))
        )
        self._folder = folder
        self._llm = llm
        self._loop = loop
        self._metrics = EngineMetrics()
        self._closed = False
        speculative: Any = llm.vllm_config.speculative_config
        self.own_speculation: str = (
            f"{speculative.method}, {speculative.num_speculative_tokens} tokens" if speculative else "none"
        )
        self.default_sampling = default_sampling(folder)
        self._cache_salt: str | None = None
        self._device = str(llm.vllm_config.device_config.device_type)
        self._names_labels = speculative is None and hasattr(SamplingParams, "logprob_token_ids")
        self._relaxes = speculative is not None and loop.run(self._relaxed_positions("")) is not None
        self._samples = speculative is None or self._relaxes or self._device != "cpu" or expands()
        self._route: ScoreRoute = loop.run(self._find_route())

    @property
    def abilities(self) -> frozenset[Ability]:
        """See `Engine.abilities`."""
        by_route: list[Ability] = ["choices"] if self._route == "prompt logprobs" else ["cached scores"]
        # Suffix decoding stores past outputs of all requests, which a cache salt does not separate.
        forgets: list[Ability] = [] if self.own_speculation.startswith("suffix") else ["forget"]
        relaxes: list[Ability] = ["relaxed acceptance"] if self._relaxes else []
        return frozenset(["scores", "label logprobs", "logprobs", "json schema", *by_route, *forgets, *relaxes])

    @staticmethod
    def check_options(spec: str) -> None:
        """Check the options of a model, see `load`, without loading it.

        Raises:
            UsageError: an argument is unknown.
        """
        _arguments(spec.partition("?")[2])

    @classmethod
    def load(cls, spec: str, title: str | None = None) -> "VllmEngine":
        """Load a model.

        Args:
            spec: Hub name or folder, and arguments of vLLM's engine after a question mark.
            title: the model's name in results; None uses the last part of the Hub name or folder.

        Raises:
            UsageError: an argument is unknown.
            ModelError: vLLM cannot load or serve the model.
        """
        folder, _, query = spec.partition("?")
        arguments = _arguments(query)
        devices = arguments.pop(DEVICES, None)
        tokenizer = load_tokenizer(folder, thinking=arguments.pop(THINKING, None))
        loop = LoopThread(f"vllm {folder}")
        try:
            settings = {"model": folder, "disable_log_stats": False, **_memory_default(arguments), **arguments}
            with _only(devices):
                llm = loop.run(_started(AsyncEngineArgs(**settings)))
            return cls(llm, loop, title or Path(folder).name, folder, tokenizer)
        except (VllmError, ValueError, RuntimeError, OSError, TypeError) as error:
            loop.close()
            raise ModelError(f"vLLM cannot serve {folder!r}: {reason_of(error)}.") from error

    def describe(self) -> dict[str, str | None]:
        """See `Engine.describe`."""
        return {
            "name": self.name,
            "weights": weights_hash(self._folder),
            "dtype": self._dtype,
            "device": f"vLLM on {self._device}",
        }

    def metrics(self) -> EngineMetrics:
        """Return the totals so far. Speculation metrics come from vLLM's own counters."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found = self._metrics.copied()
        names = {"num_drafts": "drafts", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}
        for metric in get_metrics_snapshot():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if metric.labels.get("model_name") != self._served or name == metric.name:
                continue
            if name in names:
                setattr(found, names[name], int(metric.value))  # type: ignore[attr-defined]
            elif name == "num_accepted_tokens_per_pos":
                found.accepted_at.update(dict(enumerate(metric.values)))  # type: ignore[attr-defined]
        return found

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`. vLLM drafts as configured when it was loaded; of `drafting`, it uses `acceptance`.

        A text with relaxed tokens comes in blocks, of `RELAXED_BLOCK` tokens and more.
        """
        length, rule = len(call.prompt) + len(call.after), call.drafting.acceptance
        check_acceptance(self, rule)
        if call.sampling.temperature > 0 and not self._samples:
            raise UsageError(
                "This CPU build of vLLM loses temperature, top_k and top_p of drafted tokens. Set temperature to 0, "
                "load it without speculative_config, or let it load stepspec's plugin, which repairs it."
            )
        check_room(self, length, 1)
        check_ids(self.name, self._vocab_size, call.prompt, call.after, call.sampling.named_ids)
        stop = replace(call.stop, max_tokens=min(call.stop.max_tokens, self.max_context - length))
        watch = StopMatcher(stop, self.tokenizer.piece, self.tokenizer.end_ids)
        params = _params(call.sampling, stop, call)
        if rule.is_exact:
            async with aclosing(self._chunks(call, params, watch)) as chunks:
                async for chunk in chunks:
                    yield chunk
        else:
            key = uuid.uuid4().hex
            params.extra_args = {**fields_of(rule), KEY: key}
            places, num_sent = list[int](), 0
            async with aclosing(merged(self._chunks(call, params, watch), RELAXED_BLOCK)) as chunks:
                async for chunk in chunks:
                    found = await asyncio.wrap_future(self._loop.start(self._relaxed_positions(key)))
                    if found is None:
                        raise EngineError("vLLM no longer says which tokens are relaxed.")
                    count = len(chunk.ids)
                    places += (place - num_sent for place in found)
                    yield replace(chunk, relaxed=tuple(place for place in places if place < count))
                    places, num_sent = [place - count for place in places if place >= count], num_sent + count

    async def _chunks(
        self, call: Generate, params: SamplingParams, watch: StopMatcher
    ) -> AsyncGenerator[TokenChunk, None]:
        length, num_passes = len(call.prompt) + len(call.after), 0
        ids, salt = [*call.prompt.since(0), *call.after], hash_of(call.prompt.group, self._cache_salt)
        async with aclosing(self._outputs(ids, salt, params)) as outputs:
            async for output in outputs:
                delta = output.outputs[0]
                num_passes += 1
                end, count = watch.feed_all(delta.token_ids)
                ids = list(delta.token_ids[:count])
                logprobs = _logprobs(delta, ids) if call.logprobs else None
                self._metrics.generated += len(ids)
                if end is None and delta.finish_reason is not None:
                    end = self._check_finish(delta.finish_reason)
                cached = output.num_cached_tokens or 0
                costs = _queued(output), num_passes, *_speculated(delta), cached
                if end is not None:
                    self._note(length, cached)
                yield TokenChunk(tuple(ids), end, *costs, logprobs=logprobs)
                if end is not None:
                    return
        raise EngineError(f"vLLM ended a generation of {self.name} without a finish reason.")

    async def _relaxed_positions(self, key: str) -> list[int] | None:
        """Ask the workers for what `hooks.relaxed_positions` returns; None if they do not have the plugin."""
        try:
            found = await self._llm.collective_rpc("stepspec_relaxed", args=(key,))
        except Exception:  # of the worker, in another process
            return None
        return max((each for each in found if each is not None), key=len, default=None)

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`. It runs the check that vLLM otherwise runs when a request arrives."""
        config: Any = self._llm.vllm_config
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=json_schema))
        settings = (config.model_config, config.speculative_config, config.structured_outputs_config)
        try:
            await asyncio.to_thread(params.verify, *settings, self.tokenizer.own)
        except (VllmError, ValueError) as error:
            raise UsageError(f"The JSON schema is not supported: {reason_of(error)}.") from error

    def _check_finish(self, reason: str) -> Literal["length"]:
        if reason != "length":
            raise EngineError(f"vLLM ended a generation of {self.name} with the unexpected finish reason {reason!r}.")
        return "length"

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`. It sends one call for the continuation and one for every probe, concurrently."""
        prompt, continuation, probes = call.prompt, call.continuation, call.probes
        check_room(self, len(prompt), len(continuation) + max((len(probe.ids) for probe in probes), default=0) + 1)
        probe_ids = (ids for probe in probes for ids in (probe.ids, probe.labels))
        check_ids(self.name, self._vocab_size, prompt, continuation, *probe_ids)
        before = prompt.since(0)
        ids, salt = [*before, *continuation], hash_of(prompt.group, self._cache_salt)
        scored = self._scored(ids, salt, len(prompt), call.top) if call.scores else self._next(ids, salt)
        own, *labelled = await side_by_side(
            scored, *(self._probed([*before, *probe.after(continuation)], salt, probe.labels) for probe in probes)
        )
        return replace(
            own,
            probe_choices=tuple(choice for choice, _ in labelled),
            probe_logprobs=tuple(logprobs for _, logprobs in labelled),
            passes=1 + len(probes),
        )

    async def _next(self, ids: list[int], salt: str | None) -> Verification:
        output = await self._one_token(ids, salt)
        return Verification(None, None, _token(output), cached=output.num_cached_tokens or 0)

    async def _scored(self, ids: list[int], salt: str | None, start: int, top: int = 0) -> Verification:
        """Score the ids from position `start` on, by the route that works with the installed vLLM version."""
        if self._route == "fixed ids" and not top:
            return await self._scored_by_ids(ids, salt, start)
        output = await self._one_token(ids, salt, prompt_logprobs=max(1, top))
        logprobs, choices, found = read_prompt_logprobs(output.prompt_logprobs[start:], ids[start:], top)
        return Verification(logprobs, choices, _token(output), cached=output.num_cached_tokens or 0, top=found)

    async def _scored_by_ids(self, ids: list[int], salt: str | None, start: int) -> Verification:
        settings = {"prompt_logprob_token_ids": [[id] for id in ids[start:]], "prompt_logprob_start": start - 1}
        output = await self._one_token(ids, salt, **settings, skip_reading_prefix_cache=False)
        if output.prompt_token_id_logprobs is None:  # the continuation is cached too, but without log-probs
            output = await self._one_token(ids, salt, **settings, skip_reading_prefix_cache=True)
        rows: Any = output.prompt_token_id_logprobs
        logprobs = tuple(float(row[0]) for row in rows)
        return Verification(logprobs, None, _token(output), cached=output.num_cached_tokens or 0)

    async def _probed(self, ids: list[int], salt: str | None, labels: Sequence[int]) -> tuple[int, tuple[float, ...]]:
        """Return the argmax token after the ids and the log-probabilities of the labels."""
        wanted = {"logprob_token_ids": [*labels]} if self._names_labels else {"logprobs": NUM_LOGPROBS}
        output = await self._one_token(ids, salt, **wanted)
        logprobs: Mapping[int, Any] = output.outputs[0].logprobs[0]
        return _token(output), tuple(
            logprobs[label].logprob if label in logprobs else float("-inf") for label in labels
        )

    async def _one_token(self, ids: list[int], salt: str | None, **settings: Any) -> Any:
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **settings,
        )
        async with aclosing(self._outputs(ids, salt, params, JUDGING_FIRST)) as outputs:
            async for output in outputs:
                if output.finished:
                    self._note(len(ids), output.num_cached_tokens or 0)
                    return output
        raise EngineError(f"vLLM ended a call to {self.name} without output.")

    async def _find_route(self) -> ScoreRoute:
        """Return `fixed ids` if vLLM supports it with the same scores, else `prompt logprobs`."""
        self._route = "prompt logprobs"
        reference = await self._scored(TRIAL_IDS, None, 1)
        try:
            found = await self._scored_by_ids(TRIAL_IDS, None, 1)
        except (ValueError, TypeError, EngineError, AttributeError):
            return "prompt logprobs"
        pairs = zip(found.logprobs or (), reference.logprobs or (), strict=True)
        return "fixed ids" if all(abs(one - other) < 0.1 for one, other in pairs) else "prompt logprobs"

    async def _outputs(
        self, ids: list[int], salt: str | None, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of one request. Closing the iterator aborts the request.

        Prompts share cached prefixes only if they have the same salt.
        """
        if self._closed:
            raise EngineError(f"The engine of {self.name} was closed.")
        prompt: Any = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        here, messages = asyncio.get_running_loop(), asyncio.Queue[Any]()

        async def pump() -> None:
            message: Any = None
            try:
                request = self._llm.generate(prompt, params, uuid.uuid4().hex, priority=priority)
                async for output in request:
                    here.call_soon_threadsafe(messages.put_nowait, output)
            except Exception as error:
                message = error
            here.call_soon_threadsafe(messages.put_nowait, message)

        running = self._loop.start(pump())
        try:
            while (message := await messages.get()) is not None:
                if isinstance(message, Exception):
                    raise EngineError(f"vLLM failed with {self.name}: {reason_of(message)}.") from message
                yield message
        finally:
            running.cancel()

    async def forget(self) -> None:
        """See `Engine.forget`. Later calls have a new cache salt, so they do not match earlier prefixes."""
        if self._closed:
            raise EngineError(f"The engine of {self.name} was closed.")
        self._cache_salt = uuid.uuid4().hex

    def _note(self, num_prompt: int, num_cached: int) -> None:
        self._metrics.prompt_tokens += num_prompt
        self._metrics.cached_tokens += num_cached

    async def aclose(self) -> None:
        """Shut down vLLM and its processes. Running calls fail."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown)
            self._loop.close()
            del self._llm  # otherwise it would shut down again during interpreter exit


async def _started(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def expands() -> bool:
    """Return whether the CPU build gives each drafted token the temperature, top-k and top-p of its request.

    In 0.32.0 it writes them into a copy. Drafted tokens are then sampled with unwritten memory.
    """
    try:
        importlib.import_module("vllm._C")
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl

        found = torch.zeros(2)
        _expand_kernel_impl(found, torch.tensor([0.5]), torch.tensor([2], dtype=torch.int32), 0, 1)
        return found.tolist() == [0.5, 0.5]
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return True  # not the kernel that is known to be wrong


def _arguments(query: str) -> dict[str, Any]:
    """Parse arguments of vLLM's engine. Values are parsed as JSON if possible, else used as text."""
    known = {DEVICES, THINKING, *(field.name for field in dataclasses.fields(AsyncEngineArgs))}
    arguments: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise UsageError(unknown_name("argument of vLLM's engine", name, known))
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return {"enable_prefix_caching": True, "scheduling_policy": "priority", **arguments}


@contextmanager
def _only(devices: Any) -> Generator[None]:
    """Restrict processes started in this context to the given CUDA devices; None changes nothing."""
    before = os.environ.get(VISIBLE)
    if devices is not None:
        os.environ[VISIBLE] = str(devices)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif devices is not None:
            del os.environ[VISIBLE]


def _memory_default(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default memory setting for CUDA. vLLM's own default leaves no memory for a second engine."""
    if not torch.cuda.is_available() or {"gpu_memory_utilization", "kv_cache_memory_bytes"} & arguments.keys():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": round(DEVICE_SHARE * free / total, 3)}


def _params(sampling: Sampling, stop: Stop, call: Generate) -> SamplingParams:
    return SamplingParams(
        logprobs=0 if call.logprobs else None,  # of the chosen ids alone
        max_tokens=stop.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=sorted(sampling.allowed) if sampling.allowed is not None else None,
        seed=sampling.seed_at(len(call.prompt) + len(call.after)) if sampling.temperature > 0 else None,
        stop=list(stop.delimiters),
        include_stop_str_in_output=True,
        stop_token_ids=sorted(stop.token_ids),
        detokenize=bool(stop.delimiters),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=None if call.json_schema is None else StructuredOutputsParams(json=call.json_schema),
    )


def _token(output: Any) -> int:
    return int(output.outputs[0].token_ids[0])


def _logprobs(delta: Any, ids: Sequence[int]) -> tuple[float, ...]:
    found = (delta.logprobs or [])[: len(ids)]
    if len(found) != len(ids):
        raise EngineError("vLLM returned no log-probabilities.")
    return tuple(entry[id].logprob for id, entry in zip(ids, found, strict=True))


def _queued(output: Any) -> float:
    """Return the seconds that a request waited for its first pass; 0 if vLLM does not report them."""
    stats = output.metrics
    queued, scheduled = getattr(stats, "queued_ts", 0.0), getattr(stats, "scheduled_ts", 0.0)
    return max(0.0, scheduled - queued) if queued and scheduled else 0.0


def _speculated(delta: Any) -> tuple[int, int]:
    """Return the numbers of drafted and accepted tokens; 0 if vLLM does not count them per request."""
    found = getattr(delta, "spec_decode_metrics", None)
    return getattr(found, "num_draft_tokens", 0) or 0, getattr(found, "num_accepted_draft_tokens", 0) or 0

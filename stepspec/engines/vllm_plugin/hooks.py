# pyright: basic, reportMissingImports=false
"""What the plugin changes in vLLM: the check of a request, the sampling of a round, and a method of the workers.

Modules of vLLM are patched when they are imported, so that a process without a model loads nothing for it.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from stepspec.engines.vllm_plugin.fields import KEY, PREFIX, acceptance_in
from stepspec.errors import UsageError

MAX_KEYS = 1 << 14
"""Requests whose relaxed tokens are stored until a client reads them."""


def install() -> None:
    """Patch the modules that are loaded, and the others when they are. Further calls do nothing."""
    if any(isinstance(each, _Patcher) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, _Patcher())
    for name, patch in PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


class _Patcher(MetaPathFinder):
    """Finds the modules of `PATCHES` as Python does, and patches them after they ran."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patch = PATCHES.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if patch else None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchedModule(spec, patch)
        return spec


class _PatchedModule(Loader):
    def __init__(self, spec: ModuleSpec, patch: Any) -> None:
        self._loader, self._patch = spec.loader, patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[union-attr]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        self._loader.exec_module(module)  # type: ignore[union-attr]
        self._patch(module)


def on_cpu() -> bool:
    """Return whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def unavailable(config: Any, window: int | None = None) -> str | None:
    """Return why no rule but the exact one works with a configuration of vLLM; None if they work."""
    speculative = config.speculative_config
    if speculative is None:
        return "vLLM was started without speculation"
    if config.use_v2_model_runner:
        return "they need vLLM's runner V1, so start it with VLLM_USE_V2_MODEL_RUNNER=0"
    if speculative.rejection_sample_method != "standard":
        return f"vLLM was started with rejection_sample_method {speculative.rejection_sample_method!r}"
    if window is not None and speculative.num_speculative_tokens <= window:
        return f"a window of {window} needs more than {speculative.num_speculative_tokens} drafted tokens"
    return None


def _patch_input(module: Any) -> None:
    """Refuse invalid rules, and rules where they do not work, when a request arrives."""
    error_of, original = module.VLLMValidationError, module.InputProcessor._validate_params

    @wraps(original)
    def checked(self: Any, params: Any, *rest: Any, **further: Any) -> Any:
        extra_args = getattr(params, "extra_args", None)
        if extra_args and any(name.startswith(PREFIX) for name in extra_args):
            try:
                why = unavailable(self.vllm_config)
                rule = None if why else acceptance_in(extra_args)
                why = why or unavailable(self.vllm_config, rule and rule.window)
            except UsageError as error:
                raise error_of(str(error)) from None
            if why:
                raise error_of(f"Relaxed rules of acceptance are not available: {why}.")
        return original(self, params, *rest, **further)

    module.InputProcessor._validate_params = checked


def _patch_worker(module: Any) -> None:
    module.WorkerBase.stepspec_relaxed = relaxed_positions


def relaxed_positions(worker: Any, key: str) -> list[int] | None:
    """Return which output tokens of the request with a key are relaxed, without those that were returned before.

    It is None if the worker relaxes no tokens, or does not know where.
    """
    config = worker.vllm_config
    # Where the next round begins before the last one is known, so are no positions. Of several engines that share the
    # requests, only one is asked.
    if unavailable(config) or config.scheduler_config.async_scheduling or config.parallel_config.data_parallel_size > 1:
        return None
    return RELAXED.pop(key, [])


RELAXED: OrderedDict[str, list[int]] = OrderedDict()
"""Positions of relaxed tokens by the key of their request."""


def note_relaxed(key: str, positions: Sequence[int]) -> None:
    """Store positions of relaxed tokens of the request with a key."""
    RELAXED.setdefault(key, []).extend(positions)
    while len(RELAXED) > MAX_KEYS:
        RELAXED.popitem(last=False)


def _patch_runner(module: Any) -> None:
    """Let a round with relaxed requests know their rules."""
    runner = module.GPUModelRunner
    original, bookkeeping, cpu = runner._sample, runner._bookkeeping_sync, on_cpu()

    @wraps(original)
    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is None or logits is None:
            return original(self, logits, spec_decode_metadata)
        if cpu and not any(spec_decode_metadata.num_draft_tokens):
            return original(self, logits, None)  # top-k of no drafted token fails there and ends the engine
        states = [self.requests[id] for id in self.input_batch.req_ids]
        arguments = [state.sampling_params and state.sampling_params.extra_args for state in states]
        rules = [acceptance_in(each) for each in arguments]
        if all(rule.is_exact for rule in rules):
            return original(self, logits, spec_decode_metadata)
        from stepspec.engines.vllm_plugin.rounds import RelaxedRound, kinds_of

        kinds = kinds_of(self, logits.shape[-1], logits.device)
        if kinds is None:
            return original(self, logits, spec_decode_metadata)
        with RelaxedRound(rules, kinds) as current:
            output = original(self, logits, spec_decode_metadata)
        if not self.use_async_scheduling:
            starts = [len(state.output_token_ids) for state in states]
            for each, start, places in zip(arguments, starts, current.relaxed_places(), strict=True):
                if each and KEY in each:
                    note_relaxed(each[KEY], [start + place for place in places])
        return output

    @wraps(bookkeeping)
    def rewinding(self: Any, *given: Any, **further: Any) -> Any:
        """Keep the generators of unfinished prompts from being rewound, which fails on a CPU and ends the engine."""
        generators, unfinished = self.input_batch.generators, self.discard_request_mask.np.nonzero()[0].tolist()
        held = {row: generators.pop(row) for row in unfinished if row in generators}
        for generator in held.values():
            generator.manual_seed(generator.initial_seed())  # it has written no token yet
        try:
            return bookkeeping(self, *given, **further)
        finally:
            generators.update(held)

    runner._sample = sample
    if cpu:
        runner._bookkeeping_sync = rewinding


def _patch_sampler(module: Any) -> None:
    """Keep the logits from before temperature and top-k, and decide relaxed rounds by `rounds.RelaxedRound`."""
    edited_by, original = module.RejectionSampler.apply_logits_processors, module.rejection_sample

    def current() -> Any:
        loaded = sys.modules.get("stepspec.engines.vllm_plugin.rounds")
        return loaded and loaded.current_round()

    @wraps(edited_by)
    def edited(self: Any, *given: Any, **further: Any) -> Any:
        logits = edited_by(self, *given, **further)
        if (round := current()) is not None:
            round.edited = logits.clone()  # vLLM divides it by the temperature in place
        return logits

    @wraps(original)
    def decided(*given: Any, **further: Any) -> Any:
        round = current()
        return original(*given, **further) if round is None else round.decide(module, *given, **further)

    module.RejectionSampler.apply_logits_processors = edited
    module.rejection_sample = decided
    if on_cpu():
        module.expand_batch_to_tokens = expanded


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Return vLLM's `expand_batch_to_tokens`: a request's value for each of its tokens.

    The kernel of the CPU build of 0.32.0 writes into a copy. So drafted tokens are sampled with temperature, top-k and
    top-p of memory that nobody has written.
    """
    import torch

    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, x.new_tensor(replace_to), x).repeat_interleave(counts, output_size=num_tokens)


PATCHES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.engine.input_processor": _patch_input,
    "vllm.v1.worker.worker_base": _patch_worker,
    "vllm.v1.worker.gpu_model_runner": _patch_runner,
    "vllm.v1.sample.rejection_sampler": _patch_sampler,
}

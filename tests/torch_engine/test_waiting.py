"""What the passes of a GPU ask of the host, counted on a CPU: reads of the device, launches, captures, events."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    FakeRecorder,
    attend_slowly,
    generate,
    generate_all,
    make_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepspec.engines.protocol import Drafting, Probe, Sampling, TokenBuffer, Verify
from stepspec.engines.torch_engine import decode, graphs, sampling
from stepspec.engines.torch_engine.attention import SlotRows
from stepspec.engines.torch_engine.graphs import SlotPasses
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.stopwatch import Stopwatch

pytestmark = pytest.mark.anyio

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy")
"""Methods of tensors that wait for a GPU."""


class CountedReads:
    """Counts the reads of tensors on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *arguments: Any) -> Any:
            self.count += 1
            return read(tensor, *arguments)

        return counted


class FakeEvent:
    """A CUDA event on a machine without one."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 1.0


@pytest.mark.parametrize(
    "how", [Sampling(), Sampling(presence_penalty=0.5, repetition_penalty=1.1)], ids=["greedy", "penalties"]
)
async def test_a_round_is_read_once(monkeypatch: pytest.MonkeyPatch, how: Sampling) -> None:
    network = make_network(make_config("llama"))
    target, drafter = (make_model(each, by_slot=True) for each in (network, noisy_copy(network, 0.05)))
    async with serving(target, drafter) as engine:
        drafting = Drafting("draft-model", 3)
        prompts = [random_ids(12, seed) for seed in range(2)]
        await generate(engine, prompts[0], 4, sampling=how, drafting=drafting)
        reads, before = CountedReads(monkeypatch), engine.metrics().passes["verify"]
        await generate(engine, prompts[1], 24, sampling=how, drafting=drafting)
        rounds = engine.metrics().passes["verify"] - before
        assert 5 < rounds < 24
        assert reads.count == rounds + 1, "a round, or the first token"


async def test_samplers_with_penalties_are_built_once_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    built, samplers = list[object](), sampling.samplers
    monkeypatch.setattr(sampling, "samplers", lambda *arguments: built.append(arguments) or samplers(*arguments))
    async with serving(make_model(make_network(make_config("llama")))) as engine:
        await generate(engine, random_ids(12, 1), 24, sampling=Sampling(frequency_penalty=0.3))
    assert len(built) == 1


async def test_a_judged_step_is_read_once_and_leaves_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [Probe(tuple(random_ids(4, 3)), (0, 7, 21)), Probe(tuple(random_ids(2, 4)), (5,), 4)]
    watches = list[Stopwatch]()

    class CudaStopwatch(Stopwatch):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._cuda = True
            watches.append(self)

    monkeypatch.setattr(decode, "Stopwatch", CudaStopwatch)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    async with serving(make_model(make_network(make_config("llama")), by_slot=True)) as engine:
        buffer, steps = TokenBuffer(random_ids(40, 1)), [tuple(random_ids(9, seed)) for seed in range(3)]
        reads = CountedReads(monkeypatch)
        for step in steps:
            await engine.verify(Verify(buffer, step, probes, top=2))
        assert reads.count == 3
        (watch,) = watches
        assert not watch._pending  # pyright: ignore[reportPrivateUsage]
        assert engine.metrics().seconds["read"] == pytest.approx(engine.metrics().passes["read"] / 1000)


class CountedLaunches(TorchDispatchMode):
    """Counts the operations that compute something. A view of a tensor launches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        outputs = {each.untyped_storage().data_ptr() for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
        self.count += function._schema.is_mutable or not outputs <= inputs
        return result


@pytest.mark.parametrize(("family", "expected"), [("llama", 15), ("qwen3", 17)])
@torch.inference_mode()
def test_a_layer_has_few_launches(family: str, expected: int) -> None:
    def attention(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: SlotRows, **__: Any
    ) -> torch.Tensor:
        return (query + keys.sum()) + values.sum()  # as many launches as a kernel's two, and two sums

    counts = list[int]()
    for num_layers in (2, 3):
        network = make_network(make_config(family, num_hidden_layers=num_layers)).to(torch.bfloat16)
        model = CausalModel(network, "tiny")
        model.attend_in_slots_by(attention)
        model.extend([0], [[1, 2]])
        with CountedLaunches() as launches:
            positions, _ = model.pass_inputs([(0, 2)], 3)
            model.read(positions, torch.tensor([[3, 4, 5]]))
        counts.append(launches.count)
    assert counts[1] - counts[0] - 2 == expected


async def test_where_a_capture_fails_passes_are_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(FakeRecorder):
        def record(self, run: Callable[..., Any], *inputs: Any) -> Any:
            if len(inputs[0]) < 32:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(run, *inputs)

    monkeypatch.setattr(graphs, "GraphRecorder", Failing)
    network, prompt = make_network(make_config("llama")), random_ids(12, 1)
    model = make_model(network)
    model.attend_in_slots_by(attend_slowly)
    model.cache.reserve(1, 64)
    monkeypatch.setattr(model, "_is_capturable", True)
    async with serving(model) as engine:
        assert "tiny runs slower, without CUDA graphs: operation not permitted" in caplog.text
        assert list((await generate(engine, prompt, 8)).ids) == slow_greedy(network, prompt, 8)
    assert model.slot_passes.num_captured == 0


def test_the_cache_of_captured_passes_does_not_move() -> None:
    model = make_model(make_network(make_config("llama")), by_slot=True)
    with pytest.raises(RuntimeError, match="but the cache has 64 slots of"):
        model.extend([0], [random_ids(model.cache.capacity, 1)])


def replays_alone(read: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Return `SlotPasses.read` that refuses to run a pass which is not captured."""
    return lambda passes, _, *rest: read(passes, refuse, *rest)


async def test_after_loading_small_passes_are_replays_and_none_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network(make_config("llama"))
    models = [make_model(each, by_slot=True) for each in (network, noisy_copy(network, 0.05))]
    captured = [model.slot_passes.num_captured for model in models]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pass is launched, or attention is PyTorch's")

    monkeypatch.setattr(SlotPasses, "read", replays_alone(SlotPasses.read, refuse))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    async with serving(*models) as engine:
        for drafting in (Drafting(), Drafting("draft-model", 5)):
            prompts = [random_ids(12, seed) for seed in range(3)]
            chunks = await generate_all(engine, prompts, 12, drafting)
            assert all(len(chunk.ids) == 12 for chunk in chunks)
        await engine.verify(Verify(TokenBuffer(random_ids(40, 1)), random_ids(24, 2), [Probe((3, 4), (0, 1))]))
    assert [model.slot_passes.num_captured for model in models] == captured == [14, 14]

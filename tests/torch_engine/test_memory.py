"""The size of the caches for a given amount of device memory."""

from pathlib import Path

import pytest
import torch
from tiny_models import (
    CONTEXT,
    EXPERTS,
    GROUPED,
    generate_all,
    make_config,
    make_model,
    make_network,
    random_ids,
    serving,
)

from stepspec.engines.protocol import Drafting
from stepspec.engines.torch_engine.memory import CacheSize, fitting, free_bytes, free_host_bytes
from stepspec.errors import ModelError, UsageError

POSITION = 100_000


@pytest.mark.parametrize(
    ("usable", "room"),
    [
        (10**12, CacheSize(64, 8192)),
        (10 * 8192 * POSITION, CacheSize(10, 8192)),
        (2 * 5000 * POSITION, CacheSize(2, 5000)),
    ],
    ids=["plenty", "some texts of the whole context", "two shorter ones"],
)
def test_the_memory_limits_the_slots_and_then_the_context(usable: int, room: CacheSize) -> None:
    assert fitting(usable, POSITION, max_slots=64, max_context=8192, name="big") == room


def test_too_little_memory_is_an_error_that_names_the_required_memory() -> None:
    with pytest.raises(ModelError, match=r"big needs 0\.4 GiB .* 2048 tokens, but only 0\.1 GiB"):
        fitting(10**8, POSITION, max_slots=64, max_context=8192, name="big")


def test_the_free_memory_is_that_of_the_machine_or_of_the_control_group(tmp_path: Path) -> None:
    """The memory of files that were read, such as weights, can be taken back."""
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  4000 kB\n",
        "proc/self/cgroup": "0::/system.slice/stepspec.service\n",
        "sys/fs/cgroup/system.slice/stepspec.service/memory.max": "3000000\n",
        "sys/fs/cgroup/system.slice/stepspec.service/memory.current": "2500000\n",
        "sys/fs/cgroup/system.slice/stepspec.service/memory.stat": "anon 1000000\ninactive_file 1500000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path) == 2_000_000
    (tmp_path / "sys/fs/cgroup/system.slice/stepspec.service/memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")
    assert free_host_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "proc/meminfo").unlink()
    assert free_host_bytes(tmp_path) is None
    assert free_bytes(torch.device("meta")) is None


@pytest.mark.anyio
async def test_calls_that_do_not_fit_wait_and_get_the_same_text() -> None:
    network = make_network(make_config("llama"))
    prompts = [random_ids(20 + 60 * number, seed=number) for number in range(6)]

    async def texts(budget: int | None) -> list[tuple[int, ...]]:
        model, drafter = make_model(network), make_model(network)
        async with serving(model, drafter) as engine:
            if budget is not None:
                engine.make_room(budget * (model.position_bytes + drafter.position_bytes))
            found = [each.ids for each in await generate_all(engine, prompts, 40, Drafting("draft-model", 3))]
            if budget is not None:
                assert model.cache.num_slots * model.cache.capacity <= 2 * budget
        return found

    assert await texts(600) == await texts(None)


@pytest.mark.parametrize("family", ["llama", *EXPERTS])
@torch.inference_mode()
def test_position_bytes_equal_the_size_of_the_cache(family: str) -> None:
    model = make_model(make_network(make_config(family)))
    model.extend([0], [[1, 2, 3]])
    assert model.cache.num_bytes == model.position_bytes * model.cache.capacity
    if family == "llama":
        assert model.position_bytes == 2 * GROUPED["num_hidden_layers"] * GROUPED["num_key_value_heads"] * 8 * 4


@pytest.mark.anyio
async def test_a_model_can_serve_shorter_texts_but_not_longer_ones() -> None:
    model = make_model(make_network(make_config("llama")))
    with pytest.raises(
        UsageError, match=f"max_model_len={CONTEXT + 1} exceeds the context of tiny, which is {CONTEXT} "
    ):
        model.shorten(CONTEXT + 1)
    model.shorten(100)
    async with serving(model) as engine:
        assert engine.max_context == 100

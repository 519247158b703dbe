"""The size of the caches for a given amount of device memory."""

import pytest
import torch
from tiny_models import CONTEXT, EXPERTS, GROUPED, make_config, make_model, make_network, serving

from stepspec.engines.torch_engine.memory import CacheSize, fitting
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

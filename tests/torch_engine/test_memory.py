"""How much of a device's memory caches are given."""

import pytest
from tiny_models import EXPERTS, GROUPED, make_config, make_model, make_network

from stepspec.engines.torch_engine.memory import Room, fitting
from stepspec.errors import ModelError

POSITION = 100_000


@pytest.mark.parametrize(
    ("usable", "room"),
    [(10**12, Room(64, 8192)), (10 * 8192 * POSITION, Room(10, 8192)), (2 * 5000 * POSITION, Room(2, 5000))],
    ids=["plenty", "some texts of the whole context", "two shorter ones"],
)
def test_as_many_texts_fit_as_there_is_memory_for(usable: int, room: Room) -> None:
    assert fitting(usable, POSITION, max_slots=64, max_context=8192, name="big") == room


def test_too_little_memory_is_refused_with_how_much_would_be_needed() -> None:
    with pytest.raises(ModelError, match=r"big needs 0\.4 GiB .* 2048 tokens, but only 0\.1 GiB"):
        fitting(10**8, POSITION, max_slots=64, max_context=8192, name="big")


@pytest.mark.parametrize("family", ["llama", *EXPERTS])
def test_a_positions_bytes_are_those_that_the_cache_takes(family: str) -> None:
    model = make_model(make_network(make_config(family)))
    model.extend([0], [[1, 2, 3]])
    assert model.cache.num_bytes == model.position_bytes * model.cache.capacity
    if family == "llama":
        assert model.position_bytes == 2 * GROUPED["num_hidden_layers"] * GROUPED["num_key_value_heads"] * 8 * 4

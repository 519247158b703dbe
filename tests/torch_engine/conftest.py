"""The tests of the torch engine run tiny random models on one thread. At this size, more threads are slower."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

"""Server fixtures that all tests in this folder share."""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from proxy import Proxy, ServerFixture, serving
from servers import NGRAM, VllmForks, vllm_server


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmForks]:
    """A process that has imported vLLM, for all servers."""
    forks = VllmForks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def target_port(vllm: VllmForks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a vLLM server with the embedded target and n-gram drafting."""
    folder = tmp_path_factory.mktemp("target")
    metrics = ["--per-request-spec-decode-metrics", "summary", "--enable-per-request-metrics"]
    with vllm_server(vllm, "target", folder, "--speculative-config", json.dumps(NGRAM), *metrics) as port:
        yield port


@pytest.fixture(scope="session")
def draft_port(vllm: VllmForks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a vLLM server with the embedded draft model."""
    with vllm_server(vllm, "draft", tmp_path_factory.mktemp("draft")) as port:
        yield port


@pytest.fixture
def server() -> Iterator[ServerFixture]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(serving(Proxy(None, script)))

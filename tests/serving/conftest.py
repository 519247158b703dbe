"""Servers that all tests of this folder share."""

import json
from collections.abc import Iterator

import pytest
from servers import NGRAM, vllm_server


@pytest.fixture(scope="session")
def target_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The embedded target, drafting by n-grams of its prompt."""
    folder = tmp_path_factory.mktemp("target")
    metrics = ["--per-request-spec-decode-metrics", "summary", "--enable-per-request-metrics"]
    with vllm_server("target", folder, "--speculative-config", json.dumps(NGRAM), *metrics) as port:
        yield port


@pytest.fixture(scope="session")
def draft_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The embedded draft."""
    with vllm_server("draft", tmp_path_factory.mktemp("draft")) as port:
        yield port

"""The measurement `service.affinity`: its load, the counters it reads, and hit rates that its limits must find."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evals.bench.documents import scenario_block
from evals.bench.service.affinity import (
    POLICIES,
    SETTINGS,
    Affinity,
    cache_counts,
    conversations_of,
    service_command,
    turns_of,
)
from evals.bench.service.client import Address
from evals.bench.service.process import healthy
from evals.bench.service.vllm_servers import vllm_versions
from stepspec.errors import EngineError, UsageError

CONDITIONS: Mapping[str, Any] = {"versions": {}, "commit": None, "hardware": {}, "started": ""}
METRICS = """# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
vllm:prefix_cache_queries_total{engine="0",model_name="target"} 1.5e+06
vllm:prefix_cache_queries_created{engine="0",model_name="target"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="target"} 900.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="target"} 7.0
"""
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def body_of(request: bytes) -> dict[str, Any]:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_each_prompt_has_the_earlier_turns_and_the_order_of_conversations_changes() -> None:
    talks = conversations_of(4, 3)["target"]
    turns = [*turns_of(talks, "target", sends_session=True)]
    first = [[body_of(request)["messages"] for request in requests] for requests in turns]
    for earlier, later in pairwise(first):
        for messages in later:
            assert messages[:-2] in earlier
            assert messages[-2]["role"] == "assistant"
    orders = [[messages[0]["content"] for messages in prompts] for prompts in first]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1


def test_requests_of_a_conversation_have_its_session_or_none() -> None:
    talks = conversations_of(2, 2)
    sessions: dict[str, set[bytes]] = {}
    for policy in POLICIES:
        for requests in turns_of(talks[policy], policy, sends_session=True):
            for request in requests:
                (line,) = [line for line in request.split(b"\r\n") if line.startswith(b"X-Session-ID: ")]
                sessions.setdefault(body_of(request)["messages"][0]["content"], set()).add(line)
                assert body_of(request)["stepspec"] == {"policy": policy}
    assert len(sessions) == 4, "policies have no conversation in common"
    assert sorted(map(len, sessions.values())) == [1, 1, 1, 1]
    (requests, _) = turns_of(talks["target"], "target", sends_session=False)
    assert not any(b"X-Session-ID" in request for request in requests)


def test_a_service_has_the_addresses_of_all_servers() -> None:
    command = service_command([Address("127.0.0.1", 1), Address("127.0.0.1", 2)])
    assert command[command.index("--target") + 1] == "http://127.0.0.1:1/v1 http://127.0.0.1:2/v1"


def test_counters_are_those_of_the_prefix_cache() -> None:
    async def counts() -> tuple[int, int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(METRICS)}\r\n\r\n{METRICS}".encode())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await cache_counts(Address(*server.sockets[0].getsockname()))

    assert asyncio.run(counts()) == (1_500_000, 900)


def affinity(hits: Sequence[int], failed: int = 0) -> Affinity:
    """Return a measurement with these hits by setting, of 1,000 tokens each."""
    results = [
        {
            "setting": setting.name,
            "policy": policy,
            "requests": 10,
            "failed": failed,
            "prompt_tokens": 1000,
            "reported_tokens": 0,
            "queried_tokens": [400, 600],
            "hit_tokens": [0, number],
        }
        for policy in POLICIES
        for setting, number in zip(SETTINGS, hits, strict=True)
    ]
    return Affinity.model_validate({**CONDITIONS, "conversations": 2, "turns": 5, "results": results})


@pytest.mark.parametrize(
    ("hits", "failed", "holds"),
    [
        ((500, 450, 500, 10), 0, True),
        ((500, 449, 500, 10), 0, False),
        ((500, 500, 449, 10), 0, False),
        ((500, 500, 500, 10), 1, False),
    ],
)
def test_limits_are_for_settings_with_affinity(hits: Sequence[int], failed: int, holds: bool) -> None:
    found = affinity(hits, failed)
    assert found.holds is holds
    heads, rows = found.details
    assert {len(row) for row in rows} == {len(heads)}
    assert rows[1][3:6] == [f"{hits[1] / 10:.1f}%", f"{hits[1] / 500:.3f}", f"{(1000 - hits[1]) / 10:.0f}"]


def test_servers_start_and_end_together_and_one_that_fails_is_reported() -> None:
    command = [sys.executable, "-c", SERVER]
    with healthy([command, command], {}) as addresses:
        assert len({address.port for address in addresses}) == 2
    failing = [sys.executable, "-c", "raise SystemExit('no model')"]
    with pytest.raises(EngineError, match=r"ended with exit code 1.*no model"), healthy([command, failing], {}):
        pass


def test_a_python_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot run .*nothing"):
        vllm_versions(tmp_path / "nothing")
    with pytest.raises(UsageError, match="needs vLLM and vllm-router"):
        vllm_versions(Path(sys.executable))


def test_a_page_shows_the_share_in_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "affinity.json"
    file.write_text(affinity((500, 450, 500, 10)).model_dump_json(), "utf-8")
    lines = scenario_block(file).splitlines()
    assert lines[0] == "| setting | target | specreason |"
    assert lines[2:4] == ["| one server | 50.0% | 50.0% |", "| affinity, addresses | 45.0% | 45.0% |"]
    assert lines[-1].startswith("Two services and two vLLM servers")

"""The router of the vLLM project, as `python -m evals.bench service.affinity` starts it, in front of small servers."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
from proxy import Call, Fault, Proxy, serving
from servers import VLLM_PYTHON, needs_router

from evals.bench.service.client import Address
from evals.bench.service.process import healthy
from evals.bench.service.vllm_servers import Routing, router_command

pytestmark = needs_router

ASKED = {"messages": [{"role": "user", "content": "How many?"}]}
EVENT = b'data: {"choices": [{"delta": {"content": "1"}}]}\n\n'


def answers(call: Call) -> Fault:
    """Answer everything. A stream does not end."""
    if call.body and call.fields.get("stream"):
        return Fault(status=200, body=EVENT, content_type="text/event-stream", forever=EVENT, every_s=0.05)
    return Fault(status=200, body=json.dumps({"choices": [{"message": {"content": "12"}}]}).encode())


class Routed:
    """Two servers behind a router."""

    def __init__(self, stack: ExitStack, routing: Routing) -> None:
        self.running = [stack.enter_context(ExitStack()) for _ in range(2)]
        self.servers = [each.enter_context(serving(Proxy(None, answers))) for each in self.running]
        behind = [Address("127.0.0.1", server.port) for server in self.servers]
        ((host, port),) = stack.enter_context(healthy([router_command(VLLM_PYTHON, routing, behind)], {}))
        self.url = f"http://{host}:{port}/v1/chat/completions"

    def served(self) -> list[int]:
        """Return the number of requests that each server has answered."""
        return [sum(call.method == "POST" for call in server.calls) for server in self.servers]

    def ask(self, session: str) -> int:
        """Return the status of a request."""
        return httpx.post(self.url, json=ASKED, headers={"X-Session-ID": session}, timeout=30).status_code

    def place(self, session: str) -> int:
        """Send two requests of a session and return the server that has answered both."""
        before = self.served()
        assert [self.ask(session), self.ask(session)] == [200, 200]
        return [new - old for new, old in zip(self.served(), before, strict=True)].index(2)


@contextmanager
def routed(routing: Routing) -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Routed(stack, routing)


def test_sessions_stay_on_their_server_and_go_to_another_one_when_it_dies() -> None:
    with routed("consistent_hash") as found:
        places = {session: found.place(session) for session in map(str, range(16))}
        assert {*places.values()} == {0, 1}
        found.running[0].close()
        assert {found.ask(session) for session, place in places.items() if place == 1} == {200}
        (lost, *_) = (session for session, place in places.items() if place == 0)
        assert 200 in [found.ask(lost) for _ in range(4)], "after some failures it leaves the server out"
        found.running[1].close()
        assert found.ask(lost) == 500


def test_requests_go_in_turn_whatever_their_session_and_streams_pass_through() -> None:
    with routed("round_robin") as found:
        for number in range(1, 5):
            assert [found.ask("one"), found.ask("one")] == [200, 200]
            assert found.served() == [number, number]
        with httpx.stream("POST", found.url, json=ASKED | {"stream": True}, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [EVENT.decode().strip()] * 3, "before the stream has ended"

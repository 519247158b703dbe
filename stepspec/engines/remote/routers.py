"""Headers by which routers keep a conversation on one replica, by the names of the routers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Router:
    """What a router reads, and what it wants back.

    Attributes:
        header: request header with the id of the conversation.
        replayed: response headers to send back with the next call of the request.
        headers: further headers of every call.
        hints: whether calls have the expected number of tokens in the field `nvext.agent_hints.osl`.
    """

    header: str = "X-Session-ID"
    replayed: Sequence[str] = ("x-session-token", "x-session-id")
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    hints: bool = False


ROUTERS: Mapping[str, Router] = {
    "vllm": Router(replayed=()),
    "ray": Router(header="x-session-id", replayed=()),
    "production-stack": Router(header="x-user-id", replayed=()),
    "llm-d": Router(replayed=("x-session-token",)),
    "aibrix": Router(
        header="x-aibrix-session-key", replayed=("x-session-id",), headers={"routing-strategy": "session-affinity"}
    ),
    "sglang": Router(header="X-SMG-Routing-Key", replayed=()),
    "dynamo": Router(header="X-Dynamo-Session-ID", replayed=(), hints=True),
}
"""By name: vLLM's own server, Ray Serve LLM, vLLM's production stack (started with `--routing-logic session` and
`--session-key x-user-id`), llm-d, AIBrix, the SGLang model gateway, and NVIDIA Dynamo."""

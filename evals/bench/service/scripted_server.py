"""A service whose engines play a script.

It is the service of `stepspec serve`, with the path `/tasks` added, which returns its number of asyncio tasks.
"""

import asyncio
import socket
import sys
from typing import Annotated

import typer

from evals.bench.service.script import POLICY, Script, scripted_pair
from stepspec.serve import ServiceLimits, Settings, create_app
from stepspec.serve.log import configure_logs
from stepspec.serve.server import Serving

BACKLOG = 2048
SWITCH_S = 0.001
"""Thread switch interval, as in `stepspec serve`."""


async def tasks() -> int:
    """Return the number of asyncio tasks."""
    return len(asyncio.all_tasks())


def main(
    port: int = 0,
    policy: str = POLICY,
    steps: Annotated[int, typer.Option(help="Steps before the answer.")] = Script.num_steps,
    delay: Annotated[float, typer.Option(help="Seconds before the first step.")] = Script.first_s,
    step_delay: Annotated[float, typer.Option(help="Seconds before each further step.")] = Script.step_s,
    max_running: int = ServiceLimits.max_running,
    max_queued: int = ServiceLimits.max_queued,
    max_queued_tokens: int | None = ServiceLimits.max_queued_tokens,
    max_wait: float | None = ServiceLimits.max_wait_s,
    max_body_bytes: int = Settings.max_body_bytes,
    drain: float = Settings.drain_s,
) -> None:
    """Serve until a signal ends the process."""
    sys.setswitchinterval(SWITCH_S)
    limits = ServiceLimits(max_running, max_queued, max_queued_tokens, max_wait)
    settings = Settings(limits=limits, max_body_bytes=max_body_bytes, drain_s=drain)
    app = create_app(scripted_pair(Script(steps, delay, step_delay)), policy, settings)
    app.add_api_route("/tasks", tasks)
    with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
        configure_logs(as_json=False)
        Serving(settings, tls_cert=None, tls_key=None, trusted_proxies=()).run(app, [listening])

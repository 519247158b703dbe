"""A service whose engines play a script: `python -m evals.bench.service.scripted_server`.

It is the service of `stepspec serve`, with the path `/tasks` added, which returns its number of asyncio tasks.
"""

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence

from evals.bench.service.script import POLICY, Script, scripted_pair
from stepspec.serve import Limits, Settings, create_app
from stepspec.serve.log import configure_logs
from stepspec.serve.server import Serving

BACKLOG = 2048
SWITCH_S = 0.001
"""Thread switch interval, as in `stepspec serve`."""


async def tasks() -> int:
    """Return the number of asyncio tasks."""
    return len(asyncio.all_tasks())


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal ends the process. `arguments` are those of the command line by default."""
    given = _parser().parse_args(arguments)
    sys.setswitchinterval(SWITCH_S)
    settings = Settings(
        limits=Limits(given.max_running, given.max_queued, given.max_queued_tokens, given.max_wait),
        max_body_bytes=given.max_body_bytes,
        drain_s=given.drain,
    )
    script = Script(given.steps, given.delay, given.step_delay)
    app = create_app(scripted_pair(script), given.policy, settings)
    app.add_api_route("/tasks", tasks)
    with socket.create_server(("127.0.0.1", given.port), backlog=BACKLOG) as listening:
        configure_logs(as_json=False)
        Serving(settings, tls_cert=None, tls_key=None, trusted_proxies=()).run(app, [listening])


def _parser() -> argparse.ArgumentParser:
    limits, settings, script = Limits(), Settings(), Script()
    parser = argparse.ArgumentParser(prog="python -m evals.bench.service.scripted_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--steps", type=int, default=script.num_steps, help="steps before the answer")
    parser.add_argument("--delay", type=float, default=script.first_s, help="seconds before the first step")
    parser.add_argument("--step-delay", type=float, default=script.step_s, help="seconds before each further step")
    parser.add_argument("--max-running", type=int, default=limits.max_running)
    parser.add_argument("--max-queued", type=int, default=limits.max_queued)
    parser.add_argument("--max-queued-tokens", type=int, default=limits.max_queued_tokens)
    parser.add_argument("--max-wait", type=float, default=limits.max_wait_s)
    parser.add_argument("--max-body-bytes", type=int, default=settings.max_body_bytes)
    parser.add_argument("--drain", type=float, default=settings.drain_s)
    return parser


if __name__ == "__main__":
    main()

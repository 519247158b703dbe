"""A Ray cluster on this machine with the service on it.

The engines play a script. SIGTERM ends the cluster.
"""

# pyright: reportUnknownMemberType=false
# Ray's functions are typed in part only.
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import ray
import typer
from ray import serve

from evals.bench.service.process import free_port
from evals.bench.service.script import POLICY, Script, scripted_pair
from stepspec.api.models import Pair
from stepspec.serve.ray import Arguments, application

CPUS = 8
"""Processors that the cluster assumes. Replicas of scripted engines need hardly any."""
PROXY_START_S = 60
"""Ray Serve gives up on a proxy that is not ready in time. Its default of 5 s is too short for a busy machine."""


def scripted(script: Script) -> Mapping[str, Pair]:
    """Return the pair that a replica serves."""
    return {"scripted": scripted_pair(script)}


def main(
    replicas: Annotated[int, typer.Option(min=1, help="Replicas at the start.")] = 1,
    most_replicas: Annotated[int | None, typer.Option(help="By default as many as --replicas.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds of a request.")] = 0.2,
    steps: Annotated[int, typer.Option(help="Steps of a request, each with this delay.")] = 1,
    varies: Annotated[bool, typer.Option("--varies", help="Sample delays, with these means.")] = False,
    slowdown: Annotated[float, typer.Option(help="Share by which a further request slows the others.")] = 0.0,
    max_running: int = 4,
    requests_per_replica: float = 4.0,
) -> None:
    """Serve until SIGTERM."""
    port = free_port()
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_START_S))  # the cluster inherits it
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    wanted = Arguments(
        policy=POLICY,
        max_running=max_running,
        min_replicas=replicas,
        max_replicas=most_replicas or replicas,
        requests_per_replica=requests_per_replica,
        upscale_delay=1.0,
        downscale_delay=1.0,
        cpus=0.1,
    )
    script = Script(steps, delay, delay, varies, slowdown)
    serve.run(application(wanted, partial(scripted, script)))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Serving at http://127.0.0.1:{port}/v1", file=sys.stderr, flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        ray.shutdown()

"""A Ray cluster on this machine with the service on it: `python -m evals.bench.service.ray_server`.

The engines play a script. SIGTERM ends the cluster.
"""

# pyright: reportUnknownMemberType=false
# Ray's functions are typed in part only.

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import ray
from ray import serve

from evals.bench.service.process import free_port
from evals.bench.service.script import POLICY, Script, scripted_pair
from stepspec.api.loading import Pair
from stepspec.serve.ray import Arguments, application

CPUS = 8
"""Processors that the cluster assumes. Replicas of scripted engines need hardly any."""
PROXY_START_S = 60
"""Ray Serve gives up on a proxy that is not ready in time. Its default of 5 s is too short for a busy machine."""


def scripted(script: Script) -> Mapping[str, Pair]:
    """Return the pair that a replica serves."""
    return {"scripted": scripted_pair(script)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM. `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(prog="python -m evals.bench.service.ray_server", description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--most-replicas", type=int, help="by default as many as --replicas")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds of a request")
    parser.add_argument("--steps", type=int, default=1, help="steps of a request, each with this delay")
    parser.add_argument("--varies", action="store_true", help="sample delays, with these means")
    parser.add_argument("--slowdown", type=float, default=0.0, help="share by which a further request slows the others")
    parser.add_argument("--max-running", type=int, default=4)
    parser.add_argument("--requests-per-replica", type=float, default=4.0)
    given = parser.parse_args(arguments)
    port = free_port()
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_START_S))  # the cluster inherits it
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    wanted = Arguments(
        policy=POLICY,
        max_running=given.max_running,
        min_replicas=given.replicas,
        max_replicas=given.most_replicas or given.replicas,
        requests_per_replica=given.requests_per_replica,
        upscale_delay=1.0,
        downscale_delay=1.0,
        cpus=0.1,
    )
    script = Script(given.steps, given.delay, given.delay, given.varies, given.slowdown)
    serve.run(application(wanted, partial(scripted, script)))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Serving at http://127.0.0.1:{port}/v1", file=sys.stderr, flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

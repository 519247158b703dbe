"""A stepspec service on loopback, in a thread."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from stepspec.api.models import Pair
from stepspec.cli.sockets import listening_sockets
from stepspec.serve import Settings, create_app
from stepspec.serve.server import Server, Serving


@contextmanager
def serving(
    pairs: Pair | Mapping[str, Pair], policy: str = "two-level", settings: Settings | None = None
) -> Iterator[str]:
    """Serve pairs and yield the base URL, which ends in `/v1`."""
    with serving_app(create_app(pairs, policy, settings)) as address:
        yield address


@contextmanager
def serving_app(app: FastAPI) -> Iterator[str]:
    """Serve an application and yield the base URL of its API."""
    config = uvicorn.Config(app, port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def running(pair: Pair, settings: Settings, **options: Any) -> Iterator[tuple[Server, int]]:
    """Run the server in a thread. Yield it and its port."""
    serving = Serving(settings, options.get("cert"), options.get("key"), options.get("proxies", ()))
    server = serving.server(create_app(pair, "target", settings))
    sockets = listening_sockets("127.0.0.1", 0)

    def run() -> None:
        with asyncio.Runner(loop_factory=options.get("loop_factory")) as runner:
            runner.run(server.serve(sockets=sockets))

    thread = threading.Thread(target=run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, sockets[0].getsockname()[1]
    finally:
        if not server.is_draining:
            server.handle_exit(signal.SIGTERM, None)
        thread.join(30)
        assert not thread.is_alive()

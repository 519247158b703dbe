"""A stepspec service on loopback, in a thread."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from stepspec.api.loading import Pair
from stepspec.serve import Settings, create_app


@contextmanager
def serving(
    pairs: Pair | Mapping[str, Pair], policy: str = "stepspec", settings: Settings | None = None
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

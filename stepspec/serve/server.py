"""Runs the service in uvicorn: signals, draining, TLS and logs."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from stepspec.base.printable import printable
from stepspec.serve.connections import Connection
from stepspec.serve.service import Service
from stepspec.serve.settings import Settings

logger = logging.getLogger("stepspec.serve")

CLOSING_S = 5
"""Seconds for responses to be sent after all requests were ended."""
POLL_S = 0.05
GC_THRESHOLDS = (10_000, 50, 100)
"""See `gc.set_threshold`. With Python's defaults, full collections stop the event loop for half a second when a
thousand streams are open."""


class Server(uvicorn.Server):
    """A server that drains at the first SIGTERM or Ctrl-C, and exits at the second. SIGHUP reads the keys again.

    While it drains it still listens, so that further requests get status 503 and `/ready` says so.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and log the addresses."""
        self._loop = asyncio.get_running_loop()
        if self.config.ssl is not None:  # uvicorn would count a connection only after the handshake
            self.config.http_protocol_class = cast("Any", partial(Connection, tls=self.config.ssl))
            self.config.ssl = None
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            keys = self._service.settings.keys
            self._loop.add_signal_handler(signal.SIGHUP, keys.reload)
            if keys.file is not None:
                keys.reload("Loaded")  # it may have changed while the models were loaded
        for line in self._service.models.in_words:
            logger.info("Model %s.", printable(line))
        scheme = "https" if self.config.is_ssl else "http"
        for each in sockets or []:
            name, number = each.getsockname()[:2]
            shown = f"[{name}]" if ":" in name else name
            logger.info(
                "Serving at %s://%s:%d/v1. Press Ctrl-C to stop, twice to stop immediately.", scheme, shown, number
            )
        notify_systemd("READY=1")

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server`. Runs ten times a second."""
        if counter % 10 == 0:
            now = time.monotonic()
            for each in cast("set[Connection]", set(self.server_state.connections)):
                try:
                    each.check(now)
                except Exception:  # one connection must not end the service
                    logger.exception("A connection failed.")
                    each.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or exit immediately if that has begun."""
        if self.is_draining:
            os._exit(128 + sig)
        self.is_draining = True
        if self._loop is None:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._drain, sig)

    def _drain(self, sig: int) -> None:
        admission, drain_s = self._service.admission, self._service.settings.drain_s
        logger.info("Shutting down. Running requests have %g s to end.", drain_s)
        notify_systemd("STOPPING=1")
        admission.drain(drain_s)
        self._draining = asyncio.ensure_future(self._exit_when_idle(sig, time.monotonic() + drain_s))

    async def _exit_when_idle(self, sig: int, end: float) -> None:
        while self._service.admission.is_busy and time.monotonic() < end:  # noqa: ASYNC110, it ends in many places
            await asyncio.sleep(POLL_S)
        super().handle_exit(sig, None)


def notify_systemd(state: str) -> None:
    """Notify systemd of a unit with `Type=notify`, see sd_notify(3)."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            wire.sendto(state.encode(), path.replace("@", "\0", 1) if path.startswith("@") else path)


@dataclass(frozen=True)
class Serving:
    """How the service is served."""

    settings: Settings
    tls_cert: Path | None
    tls_key: Path | None
    trusted_proxies: Sequence[str]

    def run(self, app: FastAPI, sockets: list[socket.socket]) -> None:
        """Serve until a signal ends it. Changes the garbage collection of the process."""
        gc.collect()
        gc.freeze()  # models and modules stay, so no collection need look at them
        gc.set_threshold(*GC_THRESHOLDS)
        with suppress(KeyboardInterrupt):  # the server raises it again after shutdown
            self.server(app).run(sockets=sockets)

    def server(self, app: FastAPI) -> Server:
        """Return the server of an application."""
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",  # a handshake is answered as any other request
            access_log=False,
            log_config=None,  # see `configure_logs`
            timeout_graceful_shutdown=int(self.settings.drain_s) + CLOSING_S,
            proxy_headers=bool(self.trusted_proxies),
            forwarded_allow_ips=list(self.trusted_proxies),
            server_header=False,
            ssl_certfile=self.tls_cert,
            ssl_keyfile=self.tls_key,
        )
        return Server(config, app.state.service)

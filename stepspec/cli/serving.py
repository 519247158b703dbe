"""`stepspec serve`: the models behind OpenAI's chat completions."""

import copy
import logging
import os
import socket
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any

import typer

from stepspec.cli.options import DraftOption, PolicyOption, TargetOption
from stepspec.errors import StepSpecError, UsageError
from stepspec.strict_json import MAX_BODY_BYTES

logger = logging.getLogger("stepspec.serve")


def serve_models(
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = "stepspec",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets everybody in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Most bytes of a request's body; larger ones are refused.")
    ] = MAX_BODY_BYTES,
) -> None:
    """Serve chat completions over HTTP, until stopped."""
    try:
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        from stepspec.serve import create_app
    except ModuleNotFoundError as error:
        raise StepSpecError(
            f"The service needs {error.name}, which is not installed: pip install 'stepspec[serve]'."
        ) from error
    from stepspec.policy import load_policy
    from stepspec.session import load_pair

    class Server(uvicorn.Server):
        """Tells its address, and ends at once at the second Ctrl-C, whatever is still running."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or []:
                name, number = each.getsockname()[:2]
                shown = f"[{name}]" if ":" in name else name
                logger.info("Serving at http://%s:%d/v1. Ctrl-C stops it, a second one at once.", shown, number)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

    needs_draft = load_policy(policy)[0].needs_draft
    with bound_socket(host, port) as address:
        pair = load_pair(target, draft, needs_draft=needs_draft)
        app = create_app(pair, policy, max_body_bytes=max_body_bytes)
        config = uvicorn.Config(app, access_log=False, log_config=_with_requests(LOGGING_CONFIG))
        with suppress(KeyboardInterrupt):  # which the server raises again when it has ended
            Server(config).run(sockets=[address])


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet.

    Raises:
        UsageError: the address is another program's, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise UsageError(
            f"Cannot listen at {host}, port {port}: {error.strerror or error}. Choose another with --port or --host."
        ) from error
    return bound


def _with_requests(config: dict[str, Any]) -> dict[str, Any]:
    """Uvicorn's settings of logs, with the lines of requests among its own."""
    whole = copy.deepcopy(config)
    whole["loggers"]["stepspec"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return whole

"""`stepspec serve`: serve the models through the OpenAI chat completions API."""

import copy
import logging
import os
import socket
import sys
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from stepspec.base.extras import from_extra
from stepspec.base.strict_json import MAX_BODY_BYTES
from stepspec.cli.options import DraftOption, JudgeOption, PairOption, PolicyOption, TargetOption, judge_specs
from stepspec.errors import UsageError

logger = logging.getLogger("stepspec.serve")

BACKLOG = 2048
"""Maximum number of connections waiting to be accepted. This is uvicorn's default."""

SWITCH_S = 0.001
"""Thread switch interval of the interpreter. The event loop shares the interpreter with threads that parse long
messages. With Python's default of 5 ms, `/health` took 109 ms at p99 while many such messages arrived."""


def serve_models(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "stepspec",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from everywhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")] = 8000,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest request body in bytes; larger ones return 413.")
    ] = MAX_BODY_BYTES,
) -> None:
    """Serve chat completions over HTTP until stopped."""
    with from_extra("serve", "stepspec serve"):
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        from stepspec.serve import create_app
    from stepspec.api.loading import load_pair
    from stepspec.loop.policy import load_policy

    class Server(uvicorn.Server):
        """A server that logs its addresses and exits at the second Ctrl-C without waiting for requests."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or []:
                name, number = each.getsockname()[:2]
                shown = f"[{name}]" if ":" in name else name
                logger.info(
                    "Serving at http://%s:%d/v1. Press Ctrl-C to stop, twice to stop immediately.", shown, number
                )

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

    sys.setswitchinterval(SWITCH_S)
    wanted, specs = load_policy(policy)[0], judge_specs(judge)
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in listening_sockets(host, port)]
        models = load_pair(
            target, draft, pair=pair, needs_draft=wanted.needs_draft, judges=specs, judge_names=wanted.judge_models
        )
        app = create_app(models, policy, max_body_bytes=max_body_bytes)
        config = uvicorn.Config(app, access_log=False, log_config=_with_requests(LOGGING_CONFIG))
        with suppress(KeyboardInterrupt):  # the server raises it again after shutdown
            Server(config).run(sockets=sockets)


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at every address of the host, all at the same port.

    The sockets listen immediately. Two programs can bind the same address; only `listen` fails for the second one.

    Raises:
        UsageError: another program uses an address, or the address does not belong to this machine.
    """
    found: list[socket.socket] = []
    try:
        listed = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys(listed))
        for family, kind, protocol, _, address in addresses:
            number = found[0].getsockname()[1] if found else port  # reuse the free port of the first address
            bound = socket.socket(family, kind, protocol)
            found.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(addresses) > 1:  # IPv4 addresses get their own sockets
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address[0], number, *address[2:]))
            bound.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        for each in found:
            each.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"Cannot listen at {host}, port {port}: {why}. Choose another with --port or --host."
        ) from error
    return found


def _with_requests(config: dict[str, Any]) -> dict[str, Any]:
    """Return uvicorn's log settings, extended by stepspec's request log."""
    extended = copy.deepcopy(config)
    extended["loggers"]["stepspec"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return extended

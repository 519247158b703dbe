"""Checks the Host header: a web page whose name leads to this machine must not use a service without keys."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stepspec.serve.errors import HostError, error_body
from stepspec.serve.log import entry_of, header

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine. Names that end in `.localhost` are names of it, too."""


class HostCheck:
    """Middleware that turns away requests to other hosts than those allowed."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """`hosts`: names and addresses, without ports."""
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _host(scope)
        if host is not None and host not in self._hosts and not host.endswith(".localhost"):
            error = HostError(host)
            entry_of(scope).failed(error)
            await JSONResponse(error_body(error), error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(scope: Scope) -> str | None:
    """Return the Host header in lower case and without its port, "" if it is not valid; None if there is none."""
    given = header(scope, b"host") if scope["type"] == "http" else None
    try:
        return given and (urlsplit(f"//{given}").hostname or "")
    except ValueError:
        return ""

"""Middleware that both ways of starting the service share: which hosts it answers to, and which clients.

A web page whose name leads to this machine must not use a service without keys, nor may another machine.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from stepspec.serve.errors import ExposedError, HostError, RefusedError, error_response
from stepspec.serve.log import KEY, entry_of, header

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine. Names that end in `.localhost` are names of it, too."""


def answered_hosts(own: Sequence[str], allowed: Sequence[str], *, is_open: bool) -> Sequence[str]:
    """Return the hosts that a service answers to; none for all.

    Keys protect from web pages whose host name leads to this machine. Without any, the host is checked.

    Args:
        own: names and addresses of this machine.
        allowed: further ones that the operator names.
        is_open: whether the service has keys, or needs none to answer to everybody.
    """
    return () if is_open and not allowed else (*own, *allowed)


class HostCheck:
    """Middleware that turns away websockets, and requests that come to or from where they must not."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], *, is_local: bool = False) -> None:
        """Args:
        app: the application.
        hosts: names and addresses, without ports; none for all.
        is_local: whether only clients of this machine are answered.
        """
        self._app, self._hosts, self._is_local = app, {host.lower() for host in hosts}, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        elif scope["type"] != "http" or (error := self._error(scope)) is None:
            await self._app(scope, receive, send)
        else:
            if KEY in scope:
                entry_of(scope).failed(error)
            await error_response(scope["path"], error)(scope, receive, send)

    def _error(self, scope: Scope) -> RefusedError | None:
        if self._is_local and not _is_loopback(scope):
            return ExposedError()
        host = _host(scope) if self._hosts else None
        if host is None or host in self._hosts or host.endswith(".localhost"):
            return None
        return HostError(host)


def _is_loopback(scope: Scope) -> bool:
    """Whether a request comes from this machine."""
    if not scope.get("client"):
        return False
    try:
        address = ipaddress.ip_address(str(scope["client"][0]).partition("%")[0])
    except ValueError:  # what a proxy has put there
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _host(scope: Scope) -> str | None:
    """Return the Host header in lower case and without its port, "" if it is not valid; None if there is none."""
    given = header(scope, b"host")
    try:
        return given and (urlsplit(f"//{given}").hostname or "")
    except ValueError:
        return ""

"""Where a service listens: its sockets, and checks of what that exposes."""

import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from stepspec.errors import UsageError

BACKLOG = 2048
"""Maximum number of connections waiting to be accepted. This is uvicorn's default."""
SEND_BYTES = 128 * 1024
"""Bytes of a response that the system holds for a client that does not read. Its default is up to 4 MB a connection."""


def check_exposure(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Check that a service without keys is reachable from this machine alone.

    Raises:
        UsageError: it is reachable from elsewhere.
    """
    if has_keys or insecure:
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return  # listening fails with a better error
    addresses = {str(each[4][0]).partition("%")[0] for each in found}
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return
    raise UsageError(
        f"Without API keys, everybody who reaches {host} could use the service. Set --api-keys or the environment "
        "variable STEPSPEC_API_KEYS, listen on 127.0.0.1, or allow it with --insecure."
    )


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Check the files for HTTPS.

    Raises:
        UsageError: one is missing or invalid, or they do not belong together.
    """
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise UsageError("HTTPS needs both --tls-cert and --tls-key.")
    asked: list[bool] = []

    def password() -> str:
        asked.append(True)
        return ""

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        if asked:
            why = "the key is encrypted; write it without a password"
        elif isinstance(error, ssl.SSLError):
            why = f"the files are not a certificate and its key, in this order ({why})"
        raise UsageError(f"HTTPS is not possible with {cert} and {key}: {why}.") from error


def check_origins(origins: Sequence[str]) -> None:
    """Check web origins.

    Raises:
        UsageError: one is none.
    """
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise UsageError(f"--cors-origin {origin!r} is not a web origin, such as https://example.org, or '*'.")


def check_proxies(addresses: Sequence[str]) -> None:
    """Check addresses of proxies.

    Raises:
        UsageError: one is neither an address nor a network.
    """
    for address in addresses:
        try:
            if address != "*":
                ipaddress.ip_network(address, strict=False)
        except ValueError:
            raise UsageError(f"--trusted-proxy {address!r} is not an IP address or network, or '*'.") from None


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
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
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

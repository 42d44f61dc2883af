"""Addresses of the TCP planes: `tcp://HOST:PORT` to listen, with `/INCARNATION` to call."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import ConfigError, InstanceGone

_ADDRESS_HINT = "write tcp://127.0.0.1:0"


class Address(msgspec.Struct, frozen=True):
    """A process's listening address. `incarnation` is unique to the process."""

    host: str
    port: int
    incarnation: str

    def __str__(self) -> str:
        return f"tcp://{bracket_ipv6(self.host)}:{self.port}/{self.incarnation}"


_HOST_HEADER = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def url_for_browser(url: str, host_header: str) -> str:
    """Return the URL of another server of this host for a client that called this one by
    `host_header`. "": the client cannot reach a server that listens on loopback only."""
    parts, called = urlsplit(url), _HOST_HEADER.fullmatch(host_header.lower())
    host = parts.hostname or ""
    if called is None:
        return ""
    if is_loopback(host):
        return url if is_loopback(called[1].strip("[]")) else ""
    is_any = host in ("0.0.0.0", "::")
    return f"{parts.scheme}://{called[1]}:{parts.port}" if is_any else url


def new_incarnation() -> str:
    """Return a random identifier (16 hex digits) for this process."""
    return secrets.token_hex(8)


def parse_listen_url(url: str) -> tuple[str, int]:
    """Return host and port of a URL. `tcp:` alone is any loopback port. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an address: {error}", hint=_ADDRESS_HINT) from error
    if ":" in url and parts.path and not parts.netloc:
        reason = f"no // stands before {parts.path!r}"
        raise ConfigError(f"{url!r} is not an address: {reason}", hint=_ADDRESS_HINT)
    return host, port


def advertised_host(listen_host: str, configured: str = "") -> str:
    """Return the host under which a process is published.

    A configured host comes first, then the host that it listens on. For 0.0.0.0 and :: the result
    is the address from which this machine sends.
    """
    if configured:
        return configured
    try:
        if not ipaddress.ip_address(listen_host).is_unspecified:
            return listen_host
    except ValueError:
        return listen_host
    family, probe_target = (
        (socket.AF_INET6, "2001:db8::1") if ":" in listen_host else (socket.AF_INET, "192.0.2.1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((probe_target, 9))  # sends no packet: only the route is looked up
        return str(probe.getsockname()[0])
    return "::1" if ":" in listen_host else "127.0.0.1"


def parse_address(text: str) -> Address:
    """Parse a published address. Raises `InstanceGone` if it is not one."""
    try:
        parts = urlsplit(text)
        host, port, incarnation = parts.hostname, parts.port, parts.path[1:]
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "tcp" or not incarnation:
        raise InstanceGone(f"{text!r} is not the address of an instance")
    return Address(host, port, incarnation)


def bracket_ipv6(host: str) -> str:
    """Add brackets to an IPv6 address; other hosts stay as they are."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Return True if `host` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

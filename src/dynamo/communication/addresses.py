"""Addresses of the socket planes: `tcp://HOST:PORT` to listen, with `/INCARNATION` to call."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import ConfigError, InstanceGone


class Address(msgspec.Struct, frozen=True):
    """Where a process listens; `incarnation` is new for every process."""

    host: str
    port: int
    incarnation: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.incarnation}"


def new_incarnation() -> str:
    """A name that no earlier process had."""
    return secrets.token_hex(8)


def parse_listen_url(url: str) -> tuple[str, int]:
    """Host and port of a URL; `tcp:` alone is any port on loopback. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}", hint="tcp://127.0.0.1:0") from error
    return host, port


def advertised_host(listens: str, given: str = "") -> str:
    """The host that others are told: `given`, else the one that is listened on, else (for every
    address: 0.0.0.0, ::) the one by which this machine sends."""
    if given:
        return given
    try:
        if not ipaddress.ip_address(listens).is_unspecified:
            return listens
    except ValueError:
        return listens
    family, far = (
        (socket.AF_INET6, "2001:db8::1") if ":" in listens else (socket.AF_INET, "192.0.2.1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((far, 9))  # sends nothing: it only asks the routes
        return str(probe.getsockname()[0])
    return "::1" if ":" in listens else "127.0.0.1"


def parse_address(text: str) -> Address:
    """The parts of a published address. Raises `InstanceGone`: nobody can be reached there."""
    try:
        parts = urlsplit(text)
        host, port, incarnation = parts.hostname, parts.port, parts.path[1:]
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "tcp" or not incarnation:
        raise InstanceGone(f"{text!r} is no address of an instance")
    return Address(host, port, incarnation)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

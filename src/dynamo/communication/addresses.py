"""Addresses of the socket planes: `tcp://HOST:PORT` to listen, with `/INCARNATION` to call."""

from __future__ import annotations

import ipaddress
import secrets
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


def parse_listen(url: str) -> tuple[str, int]:
    """Host and port of a plane's URL; `tcp:` alone is any port on loopback.

    Raises `ConfigError`, also for an address beyond loopback: that needs a secret.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}", hint="tcp://127.0.0.1:0") from error
    if not is_loopback(host):
        raise ConfigError(
            f"{url!r} listens beyond this machine, which needs a secret",
            hint="planes between machines are not supported yet; use tcp://127.0.0.1:0",
        )
    return host, port


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

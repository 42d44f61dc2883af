"""Who holds a port, and whether it is free."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.communication.http.errors import PortInUse
from dynamo.core.errors import ConfigError
from dynamo.runtime.deployment import ProcessRecord, live_processes
from dynamo.runtime.pids import command_line

TCP_LISTEN = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


class PortOwner(NamedTuple):
    """The process that listens on a port."""

    pid: int
    command: str


def port_owner(port: int) -> PortOwner | None:
    """Who listens on TCP `port` of this host; None where nobody does or it is not ours to see."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes & set(_process_sockets(entry)):
            pid = int(entry.name)
            return PortOwner(pid, command_line(pid))
    return None


def add_port_owner(error: PortInUse) -> PortInUse:
    """The same error, which says who has the port, where that can be seen."""
    owner = port_owner(error.port)
    ours = _find_process(error.port, owner)
    if ours is not None:
        error.message += f": deployment {ours.deployment} (process {ours.pid}) serves there"
        hint = f"choose another with --http-port, or end that one: `dynamo stop {ours.deployment}`"
        error.hint = hint
    elif owner is not None:
        error.message += f": process {owner.pid} ({owner.command}) listens there"
    error.args = (error.message,)
    return error


def _find_process(port: int, owner: PortOwner | None) -> ProcessRecord | None:
    """The process of a deployment that is `owner`; the supervisor that holds the port where nobody
    listens yet."""
    for one in live_processes():
        holds = owner is None and one.address.endswith(f":{port}")
        if holds or (owner is not None and one.pid == owner.pid):
            return one
    return None


def check_port_free(host: str, port: int) -> int:
    """Check that nobody, sharing or not, has `host:port`, and answer the port; a free one for 0.
    Raises `PortInUse`, which names the owner, or `ConfigError`."""
    with reserve_port(host, port) as held:
        bound: int = held.getsockname()[1]
        return bound


def reserve_port(host: str, port: int) -> socket.socket:
    """Hold `host:port` (a free one for 0) without listening: as long as the socket is open, only
    who binds with SO_REUSEPORT, our own children, can listen there, and no outgoing connection or
    ephemeral listener of this host gets it. Raises as `claim_port`. Blocks where `host` is a name.
    """
    try:
        found = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        try:
            return _bind_exclusively(family, address, reuse=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return _bind_exclusively(
                family, address, reuse=True
            )  # of old connections in TIME_WAIT only
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise add_port_owner(PortInUse(host, port)) from None
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="ports below 1024 need privileges" if error.errno == errno.EACCES else "",
            param="server.http_port",
        ) from None


def _bind_exclusively(family: int, address: Any, *, reuse: bool) -> socket.socket:
    """Bound alone, then opened to sharers. Raises OSError."""
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        held.bind(address)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, True)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, False)
    except OSError:
        held.close()
        raise
    return held


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == TCP_LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _process_sockets(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                target = Path(descriptor.path).readlink()
                yield str(target)

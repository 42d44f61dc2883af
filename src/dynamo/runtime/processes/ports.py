"""Reserves TCP ports and finds the process that listens on a port."""

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
from dynamo.core.host.pids import command_line
from dynamo.runtime.deployment import ProcessRecord, live_processes

TCP_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


class PortOwner(NamedTuple):
    """The process that listens on a port."""

    pid: int
    command: str


def port_owner(port: int) -> PortOwner | None:
    """The process that listens on TCP `port` of this host; None if there is none visible."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes & set(_process_sockets(entry)):
            pid = int(entry.name)
            return PortOwner(pid, command_line(pid))
    return None


def add_port_owner(error: PortInUse) -> PortInUse:
    """Add the owner of the port, if it is visible, to the message of `error`; returns `error`."""
    owner = port_owner(error.port)
    record = find_process(error.port, owner)
    if record is not None:
        error.reason += f": deployment {record.deployment} (process {record.pid}) serves there"
        stop = f"`dynamo stop {record.deployment}`"
        error.hint = f"choose another port with --http-port, or stop that deployment: {stop}"
    elif owner is not None:
        error.reason += f": process {owner.pid} ({owner.command}) listens there"
    return error


def find_process(port: int, owner: PortOwner | None) -> ProcessRecord | None:
    """The record of `owner` if a deployment runs it. Without an owner, the record of the process
    that has reserved the port and does not listen yet."""
    for record in live_processes():
        reserves = owner is None and record.address.endswith(f":{port}")
        if reserves or (owner is not None and record.pid == owner.pid):
            return record
    return None


def check_port_free(host: str, port: int) -> int:
    """Check that no process uses `host:port`, and return the port; a free port for 0. Raises
    `PortInUse`, which names the owner, or `ConfigError`."""
    with reserve_port(host, port) as reservation:
        bound: int = reservation.getsockname()[1]
        return bound


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind `host:port` (a free port for 0) without listening. While the returned socket is open,
    only processes that bind with SO_REUSEPORT, our children, can listen there. Outgoing connections
    and ephemeral listeners of this host do not get the port. Raises like `check_port_free`. Blocks
    if `host` is a name."""
    try:
        addresses = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
        try:
            return _bind_exclusively(family, address, reuse=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Only old connections in TIME_WAIT may use the port.
            return _bind_exclusively(family, address, reuse=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise add_port_owner(PortInUse(host, port)) from None
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        hint = "ports below 1024 need privileges" if error.errno == errno.EACCES else ""
        raise ConfigError(message, hint=hint, param="server.http_port") from None


def _bind_exclusively(family: int, address: Any, *, reuse: bool) -> socket.socket:
    """Bind alone, then permit sharing by SO_REUSEPORT. Raises `OSError`."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        bound.bind(address)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, True)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, False)
    except OSError:
        bound.close()
        raise
    return bound


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
                yield str(Path(descriptor.path).readlink())

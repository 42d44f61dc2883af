"""The event plane within one process: that of `tcp:` without sockets."""

from __future__ import annotations

from typing import Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.memory_transport import MemoryPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions


class MemoryEvents(TcpEvents):
    """The backend `memory:`. Each object stands for one process; `network` cuts it off."""

    def __init__(self, network: MemoryPlaneTransport, directory: Directory) -> None:
        super().__init__(network, directory)
        self.network = network

    @classmethod
    async def open(
        cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
    ) -> Self:
        """Create a plane. All `memory:` planes with one directory share their events."""
        del url, options
        return cls(MemoryPlaneTransport(), directory)

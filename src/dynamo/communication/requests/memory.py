"""The request plane within one process: that of `tcp:` without sockets."""

from __future__ import annotations

from typing import Self

from dynamo.communication.memory_transport import MemoryPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests.tcp import TcpRequests


class MemoryRequests(TcpRequests):
    """The backend `memory:`. Each object stands for one process; `network` cuts it off."""

    def __init__(self, network: MemoryPlaneTransport) -> None:
        super().__init__(network)
        self.network = network

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Create a plane. All `memory:` planes of this process can call each other."""
        del url, options
        return cls(MemoryPlaneTransport())

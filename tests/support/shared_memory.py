"""Processes of one test that share memory, each with a channel of its own to the broker."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

from dynamo.core.clock import SystemClock
from dynamo.runtime.shared_memory import SharedMemoryBroker, SharedMemoryClient


def descriptors(name: str = "") -> int:
    """Count the open files of this process, or those with a name in their path."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(os.path.lexists(link) and name in str(link.readlink()) for link in links)


class MemoryUsers:
    """Clients of one broker. `changed` is set when the size of its memory changes."""

    def __init__(self, keep_s: float = 60.0) -> None:
        self.changed = asyncio.Event()
        self.broker = SharedMemoryBroker(SystemClock(), self.changed.set, keep_s)
        self._channels: dict[SharedMemoryClient, ExitStack] = {}

    def start(self) -> SharedMemoryClient:
        """Return the client of one more process."""
        stack = ExitStack()
        child_end = stack.enter_context(self.broker.channel())
        assert child_end is not None
        client = SharedMemoryClient(child_end.detach())
        self._channels[client] = stack
        return client

    def die(self, client: SharedMemoryClient) -> None:
        """End the process of a client, whose calls then fail."""
        client.close()
        self._channels.pop(client).close()

    def close(self) -> None:
        """End all processes, the broker last."""
        for client in list(self._channels):
            self.die(client)
        self.broker.close()

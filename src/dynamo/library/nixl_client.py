"""`NIXLClient`: one-sided writes between registered memory of processes, as a library."""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Event
from typing import Any

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.transfer.nixl_agent import (
    NIXL_ERRORS,
    Agent,
    AgentThread,
    Steps,
    finish_transfer,
)
from dynamo.communication.transfer.threads import wait_for_job
from dynamo.core.errors import ConfigError, TransferFailed


class NIXLClient:
    """Registers memory of this process, and writes into that of connected ones.

    `metadata` is the key to the registered memory: give it only to processes that may write there.
    Workers do not use this: they pull, so that the reader can verify what arrived.
    """

    def __init__(self, nixl_config: Any = None) -> None:
        """`nixl_config` may have `enable_rdma`."""
        rdma = bool(getattr(nixl_config, "enable_rdma", False))
        self._thread = AgentThread(new_incarnation(), rdma=rdma)
        self._peers: list[str] = []
        self._metadata = b""

    async def register(self, address: int, size: int, memory_type: str = "DRAM") -> bytes:
        """Register memory and return the metadata by which others `connect`."""

        def work(agent: Agent) -> Steps:
            agent.register_memory([(address, size, 0, "")], memory_type)
            self._metadata = agent.get_agent_metadata()
            yield

        await self._run(work)
        self._thread.count_readers(1)  # writers need answers of this process
        return self._metadata

    async def connect(self, metadata: bytes) -> str:
        """Let writes go to the process that gave `metadata`. Returns its name."""

        def work(agent: Agent) -> Steps:
            name = agent.add_remote_agent(metadata)
            self._peers.append(name.decode() if isinstance(name, bytes) else name)
            yield

        await self._run(work)
        return self._peers[-1]

    async def rdma_write_async(
        self, source_addr: int, target_addr: int, size: int, target_device: int | str = 0
    ) -> None:
        """Write `size` bytes into a connected process. Both ends lie in registered memory.

        `target_device` is the name of a process from `connect`, or the number of a device of the
        process that was connected last. Raises `TransferFailed`.
        """
        if not self._peers:
            raise ConfigError("no process is connected", hint="await connect(metadata) first")
        peer = target_device if isinstance(target_device, str) else self._peers[-1]
        device = target_device if isinstance(target_device, int) else 0
        await self._run(partial(_write, peer, (source_addr, size, 0), (target_addr, size, device)))

    async def close(self) -> None:
        """End the agent, after the writes in flight."""
        self._thread.close()
        await asyncio.to_thread(self._thread.join)

    async def _run(self, work: Any) -> None:
        try:
            await wait_for_job(self._thread.run(work))
        except NIXL_ERRORS as error:
            raise TransferFailed.of("gone", f"NIXL: {error}") from None


def _write(
    peer: str, source: tuple[int, int, int], target: tuple[int, int, int], agent: Agent
) -> Steps:
    local, remote = (agent.get_xfer_descs([piece], "DRAM") for piece in (source, target))
    handle = agent.initialize_xfer("WRITE", local, remote, peer, b"")
    yield from finish_transfer(agent, peer, handle, Event())

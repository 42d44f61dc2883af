"""Memory that NIXL serves within a host is out of reach of the host's other users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("nixl_cu12")

OWNER = """
import asyncio, os, sys
from dynamo.communication.transfer import MemoryRegion, open_transfer

def listening():
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    own = {os.readlink(name) for name in names if os.path.lexists(name)}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/net/{kind}")]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]

async def main():
    plane = await open_transfer("nixl://127.0.0.1:0")
    region = MemoryRegion.allocate(4, 4096)
    region.slot(1)[:] = b"original" * 512
    await plane.expose(region, "test")
    agents = await plane.agents()
    metadata = agents[0].memory.agent
    print(len(listening()), metadata.hex(), agents[0].memory.slots_address, flush=True)
    agents[0].count_readers(1)  # the agent answers the network
    await asyncio.to_thread(sys.stdin.readline)
    print(bytes(region.slot(1)[:8]).decode(), flush=True)
    os._exit(0)

asyncio.run(main())
"""
OTHER_USER = """
import asyncio, os, sys
from dynamo.communication.transfer import MemoryRegion, NIXLClient
import dynamo.communication.transfer.nixl_agent, encodings.idna
metadata, address = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setgid(65534); os.setuid(65534)

async def main():
    own = MemoryRegion.allocate(1, 4096)
    own.slot(0)[:] = b"attacked" * 512
    client = NIXLClient()
    await client.register(own.address, 4096)
    await client.connect(metadata)
    await asyncio.wait_for(client.rdma_write_async(own.address, address + 4096, 4096), 10)
    print("written", flush=True)

try:
    asyncio.run(main())
finally:
    os._exit(1)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that serves four slots of memory on loopback."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as process:
        yield process
        process.kill()


def read_words(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_ucx_listens_on_no_port(owner: subprocess.Popen[str]) -> None:
    assert read_words(owner)[0] == "1"  # the plane's own, where a peer must prove itself


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_cannot_write_memory_whose_description_leaked(
    owner: subprocess.Popen[str],
) -> None:
    _, metadata, address = read_words(owner)
    attack = subprocess.run(
        [sys.executable, "-c", OTHER_USER, metadata, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=30,
    )
    assert attack.stdout == b""
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert read_words(owner) == ["original"]

"""The discovery suite over every backend without a server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.conformance.planes import join_discovery

from dynamo.communication.discovery import open_discovery
from dynamo_conformance.discovery import DiscoveryConformance, JoinDiscovery, read_until


class TestMemory(DiscoveryConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinDiscovery]:
        async for join in join_discovery(f"memory:{request.node.name}"):
            yield join


class TestFile(DiscoveryConformance):
    @pytest.fixture
    async def join(self, tmp_path: Path) -> AsyncIterator[JoinDiscovery]:
        async for join in join_discovery(f"file:{tmp_path / 'records'}"):
            yield join


OWNER = """
import asyncio, sys
from dynamo.communication.discovery import open_discovery

async def main():
    plane = await open_discovery(sys.argv[1])
    await plane.put("/w/child", b"here")
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_records_of_a_killed_process_disappear(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'records'}"
    plane = await open_discovery(url)
    async with plane.watch("/w/") as changes:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, url)
        await read_until(changes, "/w/child", b"here")
        os.kill(child.pid, signal.SIGKILL)
        await read_until(changes, "/w/child", None)
        await child.wait()
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["secret"]
    await plane.close()

"""Fixtures for tests of KV tiers."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import S3Process
from tests.unit.inference_tiers.blocks import ManualClock, Memory, OpenDisk, OpenRemote

from dynamo.inference.tiers.disk import DiskTier
from dynamo.inference.tiers.remote import RemoteTier
from dynamo.inference.tiers.slot_file import PAGE_BYTES, pad_to_pages


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def open_tier(tmp_path: Path, clock: ManualClock) -> AsyncIterator[OpenDisk]:
    """`await open_tier(memory, slots=10)` opens a tier in the same folder each time."""
    tiers: list[DiskTier] = []

    async def open_one(memory: Memory, slots: int = 32, **options: Any) -> DiskTier:
        options.setdefault("path", tmp_path / "kv")
        options.setdefault("layout", "layout")
        capacity = slots * (PAGE_BYTES + pad_to_pages(memory.block_bytes))
        tier = await DiskTier.open(
            region=memory.region, capacity_bytes=capacity, clock=clock, **options
        )
        tiers.append(tier)
        return tier

    yield open_one
    for tier in tiers:
        await tier.close()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A volume of 1 MiB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount volumes")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
async def open_remote(
    s3_server: S3Process,
    request: pytest.FixtureRequest,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[OpenRemote]:
    """`await open_remote(memory)` opens a tier in the same place of the bucket each time, and waits
    until it knows what is there."""
    tiers: list[RemoteTier] = []
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)

    async def open_one(memory: Memory, layout: str = "layout", **options: Any) -> RemoteTier:
        url = f"s3://{s3_server.bucket}/{request.node.name}"
        tier = await RemoteTier.open(
            options.pop("url", url), memory.region, layout, clock, **options
        )
        tiers.append(tier)
        if not tier.problem:
            await tier._refresh()
        return tier

    yield open_one
    for tier in tiers:
        await tier.close()

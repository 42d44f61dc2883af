"""Descriptions of KV memory that no worker writes, as a forged instance record may hold them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.communication.transfer import MemoryRegion, RegionDescriptor, open_transfer
from dynamo.core.errors import TransferFailed

SHM = "shm://{host}/"
ENDPOINTS = [
    "",
    "tcp:",
    "tcp://host:99999",
    "tcp://host:port",
    "tcp://[::1",
    f"tcp://{'a' * 300}:1",
    "tcp://127.0.0.1:1",
    f"{SHM}{'x' * 200}",
    f"{SHM}\ud800",
    SHM,
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("url", ["auto:", "shm:"])
async def test_a_forged_endpoint_is_a_failed_transfer(url: str, endpoint: str) -> None:
    plane, region = await open_transfer(url), MemoryRegion.allocate(2, 64)
    own = await plane.expose(region, "layout")
    host = own.endpoints[0].split("/")[2]
    forged = RegionDescriptor(2, 64, "layout", (endpoint.format(host=host),), "other")
    with pytest.raises(TransferFailed):
        await plane.connect(forged)
    await plane.close()
    region.close()


@pytest.mark.parametrize("slots", [-(2**70), -512, -1, 0, 3, 2**40])
async def test_a_region_of_another_size_is_not_mapped(slots: int) -> None:
    regions = [MemoryRegion.allocate(2, 1 << 16) for _ in range(2)]
    owner, reader = await open_transfer("shm:"), await open_transfer("shm:")
    descriptor = await owner.expose(regions[0], "layout")
    await reader.expose(regions[1], "layout")
    with pytest.raises(TransferFailed):
        await reader.connect(msgspec.structs.replace(descriptor, slots=slots))
    await reader.close()
    await owner.close()
    for region in regions:
        region.close()


@pytest.mark.parametrize("fields", [{"slots": -1}, {"slots": 2**70}, {"slot_bytes": 0}])
def test_impossible_sizes_in_a_record_are_refused(fields: dict[str, Any]) -> None:
    record = msgspec.to_builtins(RegionDescriptor(2, 64, "layout", (), "other"))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(record | fields, RegionDescriptor)

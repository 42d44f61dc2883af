"""Addresses on which the transfer plane cannot listen, and peers on other hosts."""

from __future__ import annotations

import socket

import msgspec
import pytest

from dynamo.communication.options import PlaneOptions
from dynamo.communication.transfer import MemoryRegion, TransferMetrics, open_transfer
from dynamo.core.errors import ConfigError
from dynamo.telemetry import Registry

SECRET = PlaneOptions(secret="0123456789abcdef-secret")


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "127.0.0.1"])
@pytest.mark.parametrize("scheme", ["tcp", "auto"])
async def test_an_address_that_cannot_be_used_is_named(scheme: str, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        region = MemoryRegion.allocate(2, 64)
        plane = await open_transfer(f"{scheme}://{host}:{port}", SECRET)
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://{host}:{port}: ") as caught:
            await plane.expose(region, "layout")
        assert "port 0" in caught.value.hint
        await plane.close()
        region.close()


async def test_a_peer_on_another_host_is_no_failure_of_shm() -> None:
    registry, region = Registry(), MemoryRegion.allocate(2, 64)
    owner, reader = [
        await open_transfer(url, metrics=TransferMetrics(registry)) for url in ("tcp:", "auto:")
    ]
    descriptor = await owner.expose(region, "layout")
    await reader.expose(region, "layout")
    away = ("shm://another-host/x", *descriptor.endpoints)
    for _ in range(4):
        peer = await reader.connect(msgspec.structs.replace(descriptor, endpoints=away))
        assert peer.backend == "tcp"
    await reader.close()
    await owner.close()
    region.close()
    lines = registry.render().splitlines()
    failures = [line for line in lines if line.startswith("dynamo_transfer_failures_total{")]
    assert failures
    assert all(line.endswith(" 0") for line in failures)

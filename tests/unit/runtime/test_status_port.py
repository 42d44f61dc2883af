"""Where the status port is: anywhere, or where whoever scrapes it expects it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from tests.conftest import free_port

from dynamo.core.clock import SystemClock
from dynamo.core.settings import Settings
from dynamo.runtime.processes.status import StatusServer
from dynamo.telemetry import Registry


def nothing() -> Mapping[str, str]:
    return {}


def server(port: int) -> StatusServer:
    base = Settings()
    settings = replace(base, runtime=replace(base.runtime, status_port=port))
    return StatusServer(settings, SystemClock(), Registry(), reasons=nothing, details=nothing)


async def test_processes_of_a_host_take_one_port_after_the_other() -> None:
    first = free_port()
    servers = [server(first) for _ in range(3)]
    for one in servers:
        await one.start()
    ports = [int(one.url.rpartition(":")[2]) for one in servers]
    for one in servers:
        await one.stop()
    assert ports == sorted(set(ports))
    assert first <= ports[0]


async def test_any_port_unless_told() -> None:
    one, other = server(0), server(0)
    await one.start()
    await other.start()
    assert one.url != other.url
    await one.stop()
    await other.stop()

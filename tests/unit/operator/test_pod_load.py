"""The load of a pod, by the status port of its supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.settings import Settings
from dynamo.runtime.processes.status import StatusServer
from dynamo.runtime.processes.supervisor_metrics import ScrapedProcess
from dynamo.services.operator import pod_load
from dynamo.telemetry import Registry


def status_server(running: float | None) -> StatusServer:
    """Return the status server of a process with so many running requests."""
    registry = Registry()
    if running is not None:
        registry.gauge("dynamo_worker_running_requests", "running", callback=lambda: running)

    def no_fields() -> Mapping[str, str]:
        return {}

    base = Settings()
    settings = replace(base, runtime=replace(base.runtime, status_port=0))
    return StatusServer(
        settings, SystemClock(), registry, reasons=no_fields, details=no_fields, ready=str
    )


async def test_requests_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, *workers = servers = [status_server(each) for each in (None, 3, 5)]
    for server in servers:
        await server.start()
    port = int(supervisor.url.rpartition(":")[2])
    monkeypatch.setattr(pod_load, "STATUS_PORT", port)
    pod: dict[str, Any] = {"status": {"podIP": "127.0.0.1"}}
    assert await pod_load.read_pod_load(pod) is None
    supervisor.list_processes = lambda: [ScrapedProcess("w", "worker", w.url) for w in workers]
    assert await pod_load.read_pod_load(pod) == 8
    await workers[0].stop()
    assert await pod_load.read_pod_load(pod) == 5
    await workers[1].stop()
    await supervisor.stop()
    assert await pod_load.read_pod_load(pod) is None
    assert await pod_load.read_pod_load({"status": {}}) is None

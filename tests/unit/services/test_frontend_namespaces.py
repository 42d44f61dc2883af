"""A worker says that frontends follow other namespaces than its own."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from tests.unit.processes import Open

from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process_record import process_key
from dynamo.services.frontend_namespaces import FrontendNamespaces


async def announce_frontend(runtime: DistributedRuntime, namespace: str) -> str:
    record = ProcessRecord(
        deployment="d",
        role="frontend",
        name="frontend",
        pid=1,
        namespace=namespace,
        instance=f"frontend-{namespace}",
    )
    await runtime.discovery.put(process_key(record), msgspec.json.encode(record))
    return process_key(record)


async def test_frontends_of_other_namespaces_are_named(
    open_runtime: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    runtime = await open_runtime()
    await announce_frontend(runtime, "dynamo-prod")
    await announce_frontend(runtime, "test")
    runtime.tasks.start(FrontendNamespaces(runtime).run())

    async def limitation(present: bool) -> str:
        async with asyncio.timeout(10):
            while bool(runtime.health.limitations) is not present:
                await asyncio.sleep(0)
        return runtime.health.limitations.get("namespace", "")

    text = await limitation(present=True)
    assert text.startswith("no frontend follows namespace dynamo;")
    assert "dynamo-prod, test" in text
    assert caplog.messages == [text]
    key = await announce_frontend(runtime, "dynamo")
    await limitation(present=False)
    await runtime.discovery.delete(key)
    assert await limitation(present=True) == text

"""Prometheus' targets: which processes are listed, under which address and labels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.host.pids import start_ticks
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.processes.process_record import PROCESSES_PREFIX
from dynamo.services.scrape_targets import ScrapeTargets


def published(name: str, url: str, **fields: Any) -> ProcessRecord:
    record = ProcessRecord(
        deployment="http-8000",
        role=name.rpartition("-")[0],
        name=name,
        pid=1,
        instance=name,
        status_url=url,
        namespace="dynamo",
    )
    return msgspec.structs.replace(record, **fields)


async def list_targets(*records: ProcessRecord | bytes) -> dict[str, Mapping[str, str]]:
    """Return the labels by address of what a frontend lists that finds the records."""
    values = [
        record if isinstance(record, bytes) else msgspec.json.encode(record) for record in records
    ]

    async def get(prefix: str) -> Mapping[str, bytes]:
        assert prefix == PROCESSES_PREFIX
        return {f"{prefix}worker/{number}": value for number, value in enumerate(values)}

    runtime: Any = SimpleNamespace(
        settings=Settings(), clock=SystemClock(), discovery=SimpleNamespace(get=get)
    )
    groups = msgspec.json.decode(msgspec.json.encode(await ScrapeTargets(runtime).list_targets()))
    assert all(set(group) == {"targets", "labels"} for group in groups)
    return {address: group["labels"] for group in groups for address in group["targets"]}


async def test_processes_of_all_hosts_are_listed() -> None:
    targets = await list_targets(
        published("worker-1", "http://10.0.0.2:9102"),
        published("worker-1", "http://10.0.0.3:9102"),
        published("frontend-1", "http://[2001:db8::1]:9102", deployment="front"),
    )
    assert targets == {
        "10.0.0.2:9102": {"role": "worker", "process": "worker-1", "deployment": "http-8000"},
        "10.0.0.3:9102": {"role": "worker", "process": "worker-1", "deployment": "http-8000"},
        "[2001:db8::1]:9102": {"role": "frontend", "process": "frontend-1", "deployment": "front"},
    }


async def test_other_namespaces_and_unusable_records_are_left_out() -> None:
    targets = await list_targets(
        published("worker-1", "http://10.0.0.2:9102", namespace="other"),
        published("worker-2", ""),
        published("worker-3", "http://[10.0.0.2:1"),
        published("worker-4", "http://10.0.0.3:9102"),
        b"{",
    )
    assert list(targets) == ["10.0.0.3:9102"]


async def test_loopback_is_listed_for_processes_of_this_host_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ticks = start_ticks(os.getpid())
    targets = await list_targets(
        published("worker-1", "http://127.0.0.1:40001", pid=os.getpid(), start_ticks=ticks),
        published("worker-2", "http://127.0.0.1:40002", pid=os.getpid(), start_ticks=ticks + 1),
    )
    assert list(targets) == ["127.0.0.1:40001"]
    assert "set runtime.status_host" in caplog.text

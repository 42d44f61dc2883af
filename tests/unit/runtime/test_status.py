"""The port of the status server: configured, the next free one, or any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.conftest import free_port

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import SystemClock
from dynamo.core.settings import Settings
from dynamo.runtime.processes.status import StatusServer, unready_reason
from dynamo.runtime.processes.supervisor_metrics import ScrapedProcess
from dynamo.telemetry import Registry


def no_fields() -> Mapping[str, str]:
    return {}


def server(port: int, **runtime: str) -> StatusServer:
    base = Settings()
    settings = replace(base, runtime=replace(base.runtime, status_port=port, **runtime))
    return StatusServer(
        settings, SystemClock(), Registry(), reasons=no_fields, details=no_fields, ready=str
    )


async def test_processes_of_a_host_use_consecutive_ports() -> None:
    first = free_port()
    servers = [server(first) for _ in range(3)]
    for status in servers:
        await status.start()
    ports = [int(status.url.rpartition(":")[2]) for status in servers]
    for status in servers:
        await status.stop()
    assert ports == sorted(set(ports))
    assert first <= ports[0]


async def test_port_0_is_any_free_port() -> None:
    first, second = server(0), server(0)
    await first.start()
    await second.start()
    assert first.url != second.url
    await first.stop()
    await second.stop()


async def test_other_hosts_get_an_address_that_they_can_reach() -> None:
    hosts = []
    for settings in (
        {},
        {"public_host": "llm-1"},
        {"status_host": "0.0.0.0"},
        {"status_host": "0.0.0.0", "public_host": "llm-1"},
    ):
        status = server(0, **settings)
        await status.start()
        await status.stop()
        port = status.url.rpartition(":")[2]
        assert status.public_url.endswith(f":{port}")
        hosts.append(status.public_url.removeprefix("http://").removesuffix(f":{port}"))
    assert (hosts[0], hosts[1], hosts[3]) == ("127.0.0.1", "127.0.0.1", "llm-1")
    assert hosts[2] != "0.0.0.0"


@pytest.mark.parametrize(
    ("states", "reasons", "expected"),
    [
        ((True, False), {"worker-2": "it restarts"}, ""),
        ((False, False), {"worker-1": "it starts", "worker-2": "it dies"}, "it starts; it dies"),
        ((), {}, "no process serves"),
        ((True,), {"stopping": "the deployment is draining"}, "the deployment is draining"),
    ],
)
def test_one_process_that_serves_makes_a_deployment_ready(
    states: tuple[bool, ...], reasons: dict[str, str], expected: str
) -> None:
    children: Any = [SimpleNamespace(ready=ready, sleeping=False) for ready in states]
    assert unready_reason(children, reasons) == expected


async def test_ready_is_asked_at_the_status_port() -> None:
    reasons = ["it starts"]
    settings = Settings()
    status = StatusServer(
        settings, SystemClock(), Registry(), reasons=no_fields, details=no_fields,
        ready=lambda: reasons[-1],
    )  # fmt: skip
    await status.start()
    client = HttpClient(status.url, {}, None)
    answer = await client.send("GET", "/ready")
    assert (answer.status, answer.body) == (503, b'{"status":"not ready","reason":"it starts"}')
    reasons.append("")
    assert (await client.send("GET", "/ready")).status == 200
    client.close()
    await status.stop()


async def test_the_status_port_of_a_supervisor_has_the_metrics_of_all_processes() -> None:
    supervisor, worker = server(0), server(0)
    await supervisor.start()
    await worker.start()
    supervisor.list_processes = lambda: [ScrapedProcess("worker-1", "worker", worker.url)]
    texts = []
    for path in ("/metrics", "/metrics/all"):
        with closing(HttpClient(supervisor.url, {}, None)) as client:
            texts.append((await client.send("GET", path)).body.decode())
    await supervisor.stop()
    await worker.stop()
    counts = [re.search(r"^process_threads (\d+)$", text, re.MULTILINE) for text in texts]
    own, merged = (int(match[1]) for match in counts if match)
    assert merged == 2 * own

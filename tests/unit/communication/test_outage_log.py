"""Processes that wait for etcd or NATS say so every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.servers import free_port

from dynamo.communication import outage_log
from dynamo.communication.discovery import open_discovery
from dynamo.communication.options import PlaneOptions
from dynamo.communication.outage_log import OutageLog
from dynamo.communication.requests import open_requests


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return the text and the fields of each line about an outage."""
    return [
        (record.getMessage(), record.__dict__["fields"])
        for record in caplog.records
        if record.name == outage_log.__name__
    ]


@pytest.mark.parametrize(
    ("open_plane", "scheme"), [(open_discovery, "etcd"), (open_requests, "nats")]
)
async def test_an_absent_server_is_named_again_and_again(
    open_plane: Callable[..., Awaitable[Any]],
    scheme: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage_log, "INTERVAL_S", 0.05)
    port = free_port()
    plane = await open_plane(f"{scheme}://127.0.0.1:{port}", PlaneOptions(reconnect_wait_s=0.1))
    async with asyncio.timeout(20):
        while len(lines(caplog)) < 3:
            await asyncio.sleep(0.01)
    await plane.close()
    assert {text for text, _ in lines(caplog)} == {f"waiting for {scheme}, which cannot be reached"}
    (fields,) = {(fields["server"], fields["since"]) for _, fields in lines(caplog)}
    assert str(port) in fields[0]


def test_lines_of_one_outage_are_apart_and_its_start_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reported_at = []
    server = OutageLog("etcd", "host:1")
    for _ in range(300):
        before = len(lines(caplog))
        server.report("refused")
        if len(lines(caplog)) > before:
            reported_at.append(now - 100.0)
        now += 1.0
    assert reported_at[:3] == [0, 5, 10]
    assert reported_at[-3:] == [175, 235, 295]
    assert len({fields["since"] for _, fields in lines(caplog)}) == 1
    server.end()
    server.begin()  # a lost connection is logged by its owner
    count = len(lines(caplog))
    server.report("refused")
    assert len(lines(caplog)) == count
    now += 5.0
    server.report("refused")
    assert len(lines(caplog)) == count + 1

"""The log of a stream in the background: slow clients, and a store that cannot be used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.application.test_replies import FakeConnection

from dynamo.application.exchange import Exchange
from dynamo.application.responses import event_log
from dynamo.application.responses.event_log import EventLog
from dynamo.application.responses.store import StreamEvents
from dynamo.communication.http.response import Response
from dynamo.core.errors import SlowReader


async def test_a_slow_client_is_left_behind() -> None:
    log, connection = EventLog(), FakeConnection()
    client = Response(connection, "POST", "1.1", keep_alive=True, backlog_limit=10)
    request: Any = None

    exchange = Exchange(request, client, "1", "1", ())
    serving = asyncio.create_task(log.serve(exchange, b"data: start\n\n"))
    await asyncio.sleep(0)
    for number in range(3):
        log.write(b"data: number %d\n\n" % number)
    log.end(b"data: end\n\n")
    with pytest.raises(SlowReader):
        await serving
    assert log.take_batch() == StreamEvents(
        2, b"data: number 0\n\ndata: number 1\n\ndata: number 2\n\n"
    )
    assert client.on_silence is None


def test_events_wait_for_a_store_that_cannot_be_used(monkeypatch: Any) -> None:
    log = EventLog()
    log.write(b"a\n\nb\n\n")
    batch = log.take_batch()
    assert batch == StreamEvents(1, b"a\n\nb\n\n")
    log.put_back(batch)
    log.write(b"c\n\n")
    whole = log.take_batch(b"d\n\n")
    assert whole == StreamEvents(3, b"a\n\nb\n\nc\n\nd\n\n")
    monkeypatch.setattr(event_log, "MAX_UNSAVED_BYTES", 10)
    log.put_back(whole)
    assert log.take_batch() is None

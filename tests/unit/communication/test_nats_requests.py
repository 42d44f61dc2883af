"""Tests of NatsRequests without a server: which way a call takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats")

from dynamo.communication.requests import nats
from dynamo.communication.requests.nats import NatsRequests


class FakeWay:
    """A request plane that connects after `delay_s`, or not at all."""

    def __init__(self, delay_s: float, *, works: bool) -> None:
        self.connected = False
        self._delay_s = delay_s
        self._works = works

    def on_connection_broken(self, callback: Any) -> None: ...

    async def ensure_connected(self, address: str) -> None:
        await asyncio.sleep(self._delay_s)
        self.connected = self._works

    def is_connected(self, address: str) -> bool:
        return self.connected


@pytest.mark.parametrize(
    ("direct", "via_nats"), [(FakeWay(0.0, works=False), True), (FakeWay(0.0, works=True), False)]
)
async def test_a_refused_direct_connection_does_not_win_against_slow_nats(
    monkeypatch: pytest.MonkeyPatch, direct: FakeWay, via_nats: bool
) -> None:
    monkeypatch.setattr(nats, "DIRECT_DIAL_AFTER_S", 0.01)
    monkeypatch.setattr(nats, "TcpRequests", lambda transport, _: transport)
    first_attempt_done = asyncio.Event()
    first_attempt_done.set()
    client: Any = SimpleNamespace(connected=True, first_attempt_done=first_attempt_done)
    slow: Any = FakeWay(0.1, works=True)
    fast: Any = direct
    requests = NatsRequests(client, slow, fast)
    assert await requests._prefers_nats("nats://a", "tcp://127.0.0.1:1/b") is via_nats

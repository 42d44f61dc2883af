"""Dialling a NATS that is not there."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("nats")

from dynamo.communication.nats_client import NatsClient


class Counted(NatsClient):
    """Counts what the library complains of: once a dial."""

    complaints = 0

    async def _on_library_error(self, error: Exception) -> None:
        self.complaints += 1
        await super()._on_library_error(error)


async def test_a_server_that_is_not_there_is_not_dialled_without_a_pause() -> None:
    """Left to itself the library dials 61 times at a stretch, and is cut off amid looking up a name
    that it cannot find."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = await Counted.open(f"nats://127.0.0.1:{port}")
    async with asyncio.timeout(30):
        await link.first_attempt_done.wait()
    await link.close()
    assert "Connect call failed" in link.connection_error
    assert 1 <= link.complaints <= 2

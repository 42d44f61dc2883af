"""Tests of NatsClient without a server."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("nats")

from dynamo.communication.nats_client import NatsClient


class CountingClient(NatsClient):
    """Counts the errors that the NATS library reports: one per attempt to connect."""

    error_count = 0

    async def _on_library_error(self, error: Exception) -> None:
        self.error_count += 1
        await super()._on_library_error(error)


async def test_attempts_to_connect_are_spaced() -> None:
    """By default the library makes 61 attempts without a pause and may be cancelled in one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    client = await CountingClient.open(f"nats://127.0.0.1:{port}")
    async with asyncio.timeout(30):
        await client.first_attempt_done.wait()
    await client.close()
    assert "Connect call failed" in client.connection_error
    assert 1 <= client.error_count <= 2

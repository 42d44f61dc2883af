"""Conformance tests of payloads that several calls share."""
# ruff: noqa: S101

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import TooLarge, WorkerFailed
from dynamo.core.shared_payload import ReceivedPayload, SharedPayload
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo_conformance.request_handlers import (
    CALL_CONTEXT,
    CollectingSink,
    JoinRequests,
    echo_handler,
    join_pair,
)


class SharingHandler:
    """A handler that records the payloads of its calls and ends when `go_on` is set."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, ReceivedPayload | None]] = []
        self.go_on = asyncio.Event()

    async def __call__(self, payload: bytes, writer: ResponseWriter) -> None:
        self.seen.append((payload, writer.shared))
        writer.send(payload)
        await self.go_on.wait()

    @property
    def received(self) -> list[ReceivedPayload]:
        """The different shared payloads of all calls."""
        payloads = [shared for _, shared in self.seen if shared is not None]
        return [shared for at, shared in enumerate(payloads) if shared not in payloads[:at]]


class SharedPayloadsConformance:
    """Tests of payloads that several calls share. `connections`: by so many connections a plane may
    reach one instance at a time; each of them transports a shared payload once."""

    connections = 1

    async def test_calls_share_a_payload(self, join: JoinRequests) -> None:
        handler, shared = SharingHandler(), SharedPayload(bytes(3_000_000))
        server, client = await join_pair(join, handler)
        handler.go_on.set()
        calls = (
            client.call(
                server.address, "e", b"%d" % number, CALL_CONTEXT, CollectingSink(), shared=shared
            )
            for number in range(30)
        )
        await run_all(*calls)
        assert sorted(payload for payload, _ in handler.seen) == sorted(
            b"%d" % number for number in range(30)
        )
        assert {received.payload for received in handler.received} == {shared.payload}
        assert len(handler.received) <= self.connections

    async def test_a_payload_is_dropped_with_its_last_call(self, join: JoinRequests) -> None:
        handler, shared = SharingHandler(), SharedPayload(b"common")
        server, client = await join_pair(join, handler)
        handler.go_on.set()
        for number in range(3):
            await client.call(
                server.address, "e", b"%d" % number, CALL_CONTEXT, CollectingSink(), shared=shared
            )
        assert [received.payload for received in handler.received] == [b"common"] * 3

    async def test_a_cancelled_call_leaves_the_payload_to_others(self, join: JoinRequests) -> None:
        handler, shared = SharingHandler(), SharedPayload(b"common")
        server, client = await join_pair(join, handler)
        async with BackgroundTasks() as tasks:
            sinks = [CollectingSink() for _ in range(3)]
            calls = [
                tasks.start(
                    client.call(server.address, "e", b"x", CALL_CONTEXT, sink, shared=shared)
                )
                for sink in sinks[:2]
            ]
            for sink in sinks[:2]:
                await sink.first_item.wait()
            calls[0].cancel()
            third = client.call(server.address, "e", b"y", CALL_CONTEXT, sinks[2], shared=shared)
            calls.append(tasks.start(third))
            await sinks[2].first_item.wait()  # before the second call ends with its payload
            handler.go_on.set()
            for call in calls[1:]:
                await call
        assert 1 <= len(handler.received) <= self.connections

    async def test_calls_with_and_without_a_payload_do_not_mix(self, join: JoinRequests) -> None:
        handler = SharingHandler()
        server, client = await join_pair(join, handler)
        handler.go_on.set()
        payloads = [SharedPayload(b"one"), SharedPayload(b"two"), None] * 5
        calls = (
            client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink(), shared=shared)
            for shared in payloads
        )
        await run_all(*calls)
        seen = [b"" if shared is None else shared.payload for _, shared in handler.seen]
        assert sorted(seen) == [b""] * 5 + [b"one"] * 5 + [b"two"] * 5

    async def test_a_lost_connection_drops_the_payload(self, join: JoinRequests) -> None:
        handler, shared, sink = SharingHandler(), SharedPayload(b"common"), CollectingSink()
        server, client = await join_pair(join, handler)
        async with BackgroundTasks() as tasks:
            call = tasks.start(
                client.call(server.address, "e", b"", CALL_CONTEXT, sink, shared=shared)
            )
            await sink.first_item.wait()
            client.disconnect(server.address)
            with pytest.raises(WorkerFailed):
                await call
        handler.go_on.set()
        await client.call(server.address, "e", b"", CALL_CONTEXT, sink, shared=shared)
        assert [received.payload for received in handler.received] == [b"common"] * 2

    async def test_a_large_call_on_a_connection_just_aborted_fails_like_others(
        self, join: JoinRequests
    ) -> None:
        handler, sink = SharingHandler(), CollectingSink()
        server, client = await join_pair(join, handler)
        handler.go_on.set()
        await client.call(server.address, "e", b"", CALL_CONTEXT, sink)
        client.disconnect(server.address)
        for shared in (None, SharedPayload(bytes(1 << 20))):
            with suppress(WorkerFailed):
                payload = bytes(1 << 20)
                await client.call(server.address, "e", payload, CALL_CONTEXT, sink, shared=shared)

    async def test_a_shared_payload_over_the_limit_is_refused_alone(
        self, join: JoinRequests
    ) -> None:
        server, client = await join_pair(join, echo_handler)
        sink, shared = CollectingSink(), SharedPayload(bytes((64 << 20) + 1))
        with pytest.raises(TooLarge):
            await client.call(server.address, "e", b"", CALL_CONTEXT, sink, shared=shared)
        await client.call(
            server.address, "e", b"fine", CALL_CONTEXT, sink, shared=SharedPayload(b"common")
        )
        assert sink.items == [b"fine"]

"""Conformance tests for every request backend."""
# ruff: noqa: S101, ARG001

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from dynamo.communication.requests import FlowWindow, ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import (
    InstanceGone,
    InternalError,
    NotFound,
    Overloaded,
    TooLarge,
    WorkerFailed,
)
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo_conformance.request_handlers import (
    CALL_CONTEXT,
    CollectingSink,
    EndlessHandler,
    JoinRequests,
    echo_handler,
    join_pair,
    open_endless_call,
)
from dynamo_conformance.shared_payloads import SharedPayloadsConformance

__all__ = ["JoinRequests", "RequestsConformance", "echo_handler"]


class CallsConformance:
    """Tests of calls that end by themselves. The fixture `join` opens one more plane."""

    @pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
    async def test_a_payload_comes_back_whole(self, join: JoinRequests, size: int) -> None:
        server, client = await join_pair(join, echo_handler)
        sink = CollectingSink()
        await client.call(server.address, "e", b"x" * size, CALL_CONTEXT, sink)
        assert sink.items == [b"x" * size]

    async def test_a_stream_arrives_in_order_and_whole(self, join: JoinRequests) -> None:
        async def count(payload: bytes, writer: ResponseWriter) -> None:
            for number in range(20_000):
                writer.send(b"%d" % number)
                if not number % 100:
                    await asyncio.sleep(0)

        (server, client), sink = await join_pair(join, count), CollectingSink()
        await client.call(server.address, "e", b"", CALL_CONTEXT, sink)
        assert sink.items == [b"%d" % number for number in range(20_000)]

    async def test_the_context_crosses(self, join: JoinRequests) -> None:
        seen: list[Context] = []

        async def record_context(payload: bytes, writer: ResponseWriter) -> None:
            seen.append(writer.context)

        server, client = await join_pair(join, record_context)
        await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
        assert seen == [CALL_CONTEXT]

    async def test_concurrent_calls_do_not_mix(self, join: JoinRequests) -> None:
        async def thrice(payload: bytes, writer: ResponseWriter) -> None:
            for number in b"123":
                writer.send(payload + bytes([number]))
                await asyncio.sleep(0)

        server, client = await join_pair(join, thrice)
        sinks = [CollectingSink() for _ in range(100)]
        await run_all(
            *(
                client.call(server.address, "e", b"%d/" % index, CALL_CONTEXT, sink)
                for index, sink in enumerate(sinks)
            )
        )
        for index, sink in enumerate(sinks):
            assert sink.items == [b"%d/%c" % (index, number) for number in b"123"]

    async def test_both_ends_can_call(self, join: JoinRequests) -> None:
        (first, second), sink = await join_pair(join, echo_handler), CollectingSink()
        await second.serve("e", echo_handler)
        await run_all(
            first.call(second.address, "e", b"a", CALL_CONTEXT, sink),
            second.call(first.address, "e", b"b", CALL_CONTEXT, sink),
            first.call(first.address, "e", b"c", CALL_CONTEXT, sink),
        )
        assert sorted(sink.items) == [b"a", b"b", b"c"]

    async def test_a_typed_error_crosses(self, join: JoinRequests) -> None:
        async def refuse(payload: bytes, writer: ResponseWriter) -> None:
            writer.send(b"before")
            raise Overloaded("full", hint="wait", retry_after_s=1.5)

        (server, client), sink = await join_pair(join, refuse), CollectingSink()
        with pytest.raises(Overloaded, match="full") as caught:
            await client.call(server.address, "e", b"", CALL_CONTEXT, sink)
        assert (caught.value.hint, caught.value.retry_after_s) == ("wait", 1.5)
        assert sink.items == [b"before"]

    async def test_a_bug_is_an_internal_error_and_logged(
        self, join: JoinRequests, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def wrong(payload: bytes, writer: ResponseWriter) -> None:
            raise KeyError("secret detail")

        server, client = await join_pair(join, wrong)
        with pytest.raises(InternalError) as caught:
            await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
        assert "secret" not in caught.value.message
        assert "secret detail" in caplog.text

    async def test_an_unknown_endpoint_is_not_found(self, join: JoinRequests) -> None:
        server, client = await join_pair(join, echo_handler)
        with pytest.raises(NotFound):
            await client.call(server.address, "other", b"", CALL_CONTEXT, CollectingSink())

    async def test_a_payload_over_the_limit_is_refused_alone(self, join: JoinRequests) -> None:
        server, client = await join_pair(join, echo_handler)
        sink = CollectingSink()
        with pytest.raises(TooLarge):
            await client.call(server.address, "e", bytes((64 << 20) + 1), CALL_CONTEXT, sink)
        await client.call(server.address, "e", b"fine", CALL_CONTEXT, sink)
        assert sink.items == [b"fine"]

    async def test_flow_window_limits_the_handler(self, join: JoinRequests) -> None:
        sent = 0

        async def pour(payload: bytes, writer: ResponseWriter) -> None:
            nonlocal sent
            for _ in range(50):
                await writer.wait_for_window()
                writer.send(bytes(100))
                sent += 1

        (server, client), sink = await join_pair(join, pour), CollectingSink()
        window = FlowWindow(1000)
        async with BackgroundTasks() as tasks:
            call = tasks.start(
                client.call(server.address, "e", b"", CALL_CONTEXT, sink, window=window)
            )
            taken = 0
            while taken < 50:
                await sink.first_item.wait()
                sink.first_item.clear()
                assert sent <= taken + 10 + 3  # credit comes back in steps of a quarter
                while taken < len(sink.items):
                    taken += 1
                    window.release(100)
            await call
        assert len(sink.items) == 50


class InterruptedCallsConformance:
    """Tests of interrupted calls. Planes from the fixture `join` have `abort()`, a crash."""

    async def test_a_cancelled_caller_cancels_the_handler(self, join: JoinRequests) -> None:
        async with open_endless_call(join) as (_, _, handler, _, call):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await handler.cancelled.wait()

    async def test_sink_that_returns_false_cancels_the_handler(self, join: JoinRequests) -> None:
        handler, sink = EndlessHandler(), CollectingSink(item_limit=1)
        server, client = await join_pair(join, handler)
        await client.call(server.address, "e", b"", CALL_CONTEXT, sink)
        await handler.cancelled.wait()
        assert sink.items == [b"first"]

    async def test_items_after_cancellation_are_dropped(self, join: JoinRequests) -> None:
        answers: list[bool] = []
        stubborn_done = asyncio.Event()

        async def stubborn(payload: bytes, writer: ResponseWriter) -> None:
            for _ in range(10):
                writer.send(b"x")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            answers.append(writer.send(b"late"))
            stubborn_done.set()

        server, client = await join_pair(join, stubborn)
        sink = CollectingSink(item_limit=1)
        await server.serve("echo", echo_handler)
        await client.call(server.address, "e", b"", CALL_CONTEXT, sink)
        await stubborn_done.wait()
        await client.call(server.address, "echo", b"alive", CALL_CONTEXT, sink)
        assert answers == [False]
        assert sink.items == [b"x", b"alive"]

    async def test_a_failing_sink_fails_its_own_call_only(self, join: JoinRequests) -> None:
        def broken(payload: bytes) -> bool:
            raise ValueError("sink")

        handler, sink = EndlessHandler(), CollectingSink()
        server, client = await join_pair(join, handler)
        await server.serve("echo", echo_handler)
        with pytest.raises(ValueError, match="sink"):
            await client.call(server.address, "e", b"", CALL_CONTEXT, broken)
        await handler.cancelled.wait()
        await client.call(server.address, "echo", b"ok", CALL_CONTEXT, sink)
        assert sink.items == [b"ok"]

    async def test_a_withdrawn_endpoint_finishes_its_calls_and_takes_no_more(
        self, join: JoinRequests
    ) -> None:
        go_on = asyncio.Event()

        async def slow(payload: bytes, writer: ResponseWriter) -> None:
            writer.send(b"begun")
            await go_on.wait()
            writer.send(b"done")

        (server, client), sink = await join_pair(join, slow), CollectingSink()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, sink))
            await sink.first_item.wait()
            withdrawn = tasks.start(server.withdraw("e", None))
            await asyncio.sleep(0)
            with pytest.raises(InstanceGone):
                await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
            go_on.set()
            await withdrawn
            await call
        assert sink.items == [b"begun", b"done"]
        await server.serve("e", echo_handler)
        await client.call(server.address, "e", b"again", CALL_CONTEXT, sink)
        assert sink.items[-1] == b"again"

    async def test_withdrawing_at_once_fails_the_calls_in_hand(self, join: JoinRequests) -> None:
        async with open_endless_call(join) as (server, _, handler, _, call):
            await server.withdraw("e")
            with pytest.raises(WorkerFailed):
                await call
        assert handler.cancelled.is_set()

    async def test_handler_that_cancels_itself_fails_the_call(self, join: JoinRequests) -> None:
        async def gives_up(payload: bytes, writer: ResponseWriter) -> None:
            raise asyncio.CancelledError

        server, client = await join_pair(join, gives_up)
        with pytest.raises(WorkerFailed):
            await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())

    @pytest.mark.parametrize("method", ["abort", "close"])
    async def test_dead_instance_fails_its_calls_and_is_reported(
        self, join: JoinRequests, method: str
    ) -> None:
        handler, sink, broken = EndlessHandler(), CollectingSink(), asyncio.Event()
        server, client = await join_pair(join, handler)
        broken_addresses: list[str] = []

        def on_broken(address: str) -> None:
            broken_addresses.append(address)
            broken.set()

        client.on_connection_broken(on_broken)
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, sink))
            await sink.first_item.wait()
            if method == "close":
                await server.close()
            else:
                getattr(server, method)()
            with pytest.raises(WorkerFailed) as caught:
                await call
            assert not isinstance(caught.value, InstanceGone)
        await handler.cancelled.wait()
        await broken.wait()
        assert set(broken_addresses) == {server.address}
        with pytest.raises(InstanceGone):
            await client.call(server.address, "e", b"", CALL_CONTEXT, sink)

    async def test_a_client_that_dies_cancels_its_handlers(self, join: JoinRequests) -> None:
        async with open_endless_call(join) as (_, client, handler, _, call):
            await client.close()
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()

    async def test_broken_off_connection_fails_its_calls_and_reconnects(
        self, join: JoinRequests
    ) -> None:
        async with open_endless_call(join) as (server, client, handler, sink, call):
            assert client.count_received_frames(server.address) > 0
            client.disconnect(server.address)
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()
        await server.serve("again", echo_handler)
        await client.call(server.address, "again", b"hello", CALL_CONTEXT, sink)
        assert sink.items[-1] == b"hello"

    async def test_call_to_closed_instance_raises_instance_gone(self, join: JoinRequests) -> None:
        closed_server, client = await join_pair(join, echo_handler)
        broken_addresses: list[str] = []
        await closed_server.close()
        client.on_connection_broken(broken_addresses.append)
        with pytest.raises(InstanceGone):
            await client.call(closed_server.address, "e", b"", CALL_CONTEXT, CollectingSink())
        with pytest.raises(InstanceGone):
            await client.call("nonsense", "e", b"", CALL_CONTEXT, CollectingSink())
        assert closed_server.address in broken_addresses


class RequestsConformance(CallsConformance, InterruptedCallsConformance, SharedPayloadsConformance):
    """All tests of a request backend. The fixture `join` opens one more plane."""

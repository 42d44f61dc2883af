"""What every request plane promises."""
# ruff: noqa: S101, ARG001, ARG002

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from dynamo.communication.requests import FlowWindow, Requests, ResponseWriter
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

JoinRequests = Callable[[], Awaitable[Requests]]
CALL_CONTEXT = Context("request-1", attempt=2, timeout_s=9.0, metadata={"k": "v"})


class CollectingSink:
    """A sink that keeps what it gets; `enough`: says stop after so many."""

    def __init__(self, item_limit: int | None = None) -> None:
        self.items: list[bytes] = []
        self.first_item = asyncio.Event()
        self._item_limit = item_limit

    def __call__(self, payload: bytes) -> bool:
        self.items.append(payload)
        self.first_item.set()
        return len(self.items) != self._item_limit


async def echo_handler(payload: bytes, out: ResponseWriter) -> None:
    """A handler that answers with what it got."""
    out.send(payload)


class EndlessHandler:
    """A handler that sends one item and waits to be cancelled."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, payload: bytes, out: ResponseWriter) -> None:
        out.send(b"first")
        self.running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def join_serving(
    join: JoinRequests, handler: Callable[[bytes, ResponseWriter], Awaitable[None]]
) -> Requests:
    """A member that serves `handler` as "e"."""
    server = await join()
    await server.serve("e", handler)
    return server


class CallsConformance:
    """Calls that end by themselves. Fixture: `join`."""

    @pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
    async def test_a_payload_comes_back_whole(self, join: JoinRequests, size: int) -> None:
        server, client, got = await join_serving(join, echo_handler), await join(), CollectingSink()
        await client.call(server.address, "e", b"x" * size, CALL_CONTEXT, got)
        assert got.items == [b"x" * size]

    async def test_a_stream_arrives_in_order_and_whole(self, join: JoinRequests) -> None:
        async def count(payload: bytes, out: ResponseWriter) -> None:
            for number in range(20_000):
                out.send(b"%d" % number)
                if not number % 100:
                    await asyncio.sleep(0)

        server, client, got = await join_serving(join, count), await join(), CollectingSink()
        await client.call(server.address, "e", b"", CALL_CONTEXT, got)
        assert got.items == [b"%d" % number for number in range(20_000)]

    async def test_the_context_crosses(self, join: JoinRequests) -> None:
        seen: list[Context] = []

        async def look(payload: bytes, out: ResponseWriter) -> None:
            seen.append(out.context)

        server, client = await join_serving(join, look), await join()
        await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
        assert seen == [CALL_CONTEXT]

    async def test_concurrent_calls_do_not_mix(self, join: JoinRequests) -> None:
        async def thrice(payload: bytes, out: ResponseWriter) -> None:
            for number in b"123":
                out.send(payload + bytes([number]))
                await asyncio.sleep(0)

        server, client = await join_serving(join, thrice), await join()
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
        one, other = await join_serving(join, echo_handler), await join_serving(join, echo_handler)
        got = CollectingSink()
        await run_all(
            one.call(other.address, "e", b"a", CALL_CONTEXT, got),
            other.call(one.address, "e", b"b", CALL_CONTEXT, got),
            one.call(one.address, "e", b"c", CALL_CONTEXT, got),
        )
        assert sorted(got.items) == [b"a", b"b", b"c"]

    async def test_a_typed_error_crosses(self, join: JoinRequests) -> None:
        async def refuse(payload: bytes, out: ResponseWriter) -> None:
            out.send(b"before")
            raise Overloaded("full", hint="wait", retry_after_s=1.5)

        server, client, got = await join_serving(join, refuse), await join(), CollectingSink()
        with pytest.raises(Overloaded, match="full") as caught:
            await client.call(server.address, "e", b"", CALL_CONTEXT, got)
        assert (caught.value.hint, caught.value.retry_after_s) == ("wait", 1.5)
        assert got.items == [b"before"]

    async def test_a_bug_is_an_internal_error_and_logged(
        self, join: JoinRequests, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def wrong(payload: bytes, out: ResponseWriter) -> None:
            raise KeyError("secret detail")

        server, client = await join_serving(join, wrong), await join()
        with pytest.raises(InternalError) as caught:
            await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
        assert "secret" not in caught.value.message
        assert "secret detail" in caplog.text

    async def test_an_unknown_endpoint_is_not_found(self, join: JoinRequests) -> None:
        server, client = await join_serving(join, echo_handler), await join()
        with pytest.raises(NotFound):
            await client.call(server.address, "other", b"", CALL_CONTEXT, CollectingSink())

    async def test_a_payload_over_the_limit_is_refused_alone(self, join: JoinRequests) -> None:
        server, client, got = await join_serving(join, echo_handler), await join(), CollectingSink()
        with pytest.raises(TooLarge):
            await client.call(server.address, "e", bytes((64 << 20) + 1), CALL_CONTEXT, got)
        await client.call(server.address, "e", b"fine", CALL_CONTEXT, got)
        assert got.items == [b"fine"]

    async def test_flow_window_limits_the_handler(self, join: JoinRequests) -> None:
        sent = 0

        async def pour(payload: bytes, out: ResponseWriter) -> None:
            nonlocal sent
            for _ in range(50):
                await out.wait_for_window()
                out.send(bytes(100))
                sent += 1

        server, client, got = await join_serving(join, pour), await join(), CollectingSink()
        window = FlowWindow(1000)
        async with BackgroundTasks() as tasks:
            call = tasks.start(
                client.call(server.address, "e", b"", CALL_CONTEXT, got, window=window)
            )
            taken = 0
            while taken < 50:
                await got.first_item.wait()
                got.first_item.clear()
                assert sent <= taken + 10 + 3  # credit comes back in steps of a quarter
                while taken < len(got.items):
                    taken += 1
                    window.release(100)
            await call
        assert len(got.items) == 50


class InterruptedCallsConformance:
    """Calls that are cut short. Fixture: `join`; members have `abort()`, a crash."""

    async def test_a_cancelled_caller_cancels_the_handler(self, join: JoinRequests) -> None:
        handler, got = EndlessHandler(), CollectingSink()
        server, client = await join_serving(join, handler), await join()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await handler.cancelled.wait()

    async def test_sink_that_returns_false_cancels_the_handler(self, join: JoinRequests) -> None:
        handler, got = EndlessHandler(), CollectingSink(item_limit=1)
        server, client = await join_serving(join, handler), await join()
        await client.call(server.address, "e", b"", CALL_CONTEXT, got)
        await handler.cancelled.wait()
        assert got.items == [b"first"]

    async def test_items_after_cancellation_are_dropped(self, join: JoinRequests) -> None:
        answers: list[bool] = []
        stubborn_done = asyncio.Event()

        async def stubborn(payload: bytes, out: ResponseWriter) -> None:
            for _ in range(10):
                out.send(b"x")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            answers.append(out.send(b"late"))
            stubborn_done.set()

        server, client, got = (
            await join_serving(join, stubborn),
            await join(),
            CollectingSink(item_limit=1),
        )
        await server.serve("echo", echo_handler)
        await client.call(server.address, "e", b"", CALL_CONTEXT, got)
        await stubborn_done.wait()
        await client.call(server.address, "echo", b"alive", CALL_CONTEXT, got)
        assert answers == [False]
        assert got.items == [b"x", b"alive"]

    async def test_a_failing_sink_fails_its_own_call_only(self, join: JoinRequests) -> None:
        def broken(payload: bytes) -> bool:
            raise ValueError("sink")

        handler, got = EndlessHandler(), CollectingSink()
        server, client = await join_serving(join, handler), await join()
        await server.serve("echo", echo_handler)
        with pytest.raises(ValueError, match="sink"):
            await client.call(server.address, "e", b"", CALL_CONTEXT, broken)
        await handler.cancelled.wait()
        await client.call(server.address, "echo", b"ok", CALL_CONTEXT, got)
        assert got.items == [b"ok"]

    async def test_a_withdrawn_endpoint_finishes_its_calls_and_takes_no_more(
        self, join: JoinRequests
    ) -> None:
        go_on = asyncio.Event()

        async def slow(payload: bytes, out: ResponseWriter) -> None:
            out.send(b"begun")
            await go_on.wait()
            out.send(b"done")

        server, client, got = await join_serving(join, slow), await join(), CollectingSink()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            withdrawn = tasks.start(server.withdraw("e", None))
            await asyncio.sleep(0)
            with pytest.raises(InstanceGone):
                await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())
            go_on.set()
            await withdrawn
            await call
        assert got.items == [b"begun", b"done"]
        await server.serve("e", echo_handler)
        await client.call(server.address, "e", b"again", CALL_CONTEXT, got)
        assert got.items[-1] == b"again"

    async def test_withdrawing_at_once_fails_the_calls_in_hand(self, join: JoinRequests) -> None:
        handler, got = EndlessHandler(), CollectingSink()
        server, client = await join_serving(join, handler), await join()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            await server.withdraw("e")
            with pytest.raises(WorkerFailed):
                await call
        assert handler.cancelled.is_set()

    async def test_handler_that_cancels_itself_fails_the_call(self, join: JoinRequests) -> None:
        async def gives_up(payload: bytes, out: ResponseWriter) -> None:
            raise asyncio.CancelledError

        server, client = await join_serving(join, gives_up), await join()
        with pytest.raises(WorkerFailed):
            await client.call(server.address, "e", b"", CALL_CONTEXT, CollectingSink())

    @pytest.mark.parametrize("how", ["abort", "close"])
    async def test_dead_instance_fails_its_calls_and_is_reported(
        self, join: JoinRequests, how: str
    ) -> None:
        handler, got, broken = EndlessHandler(), CollectingSink(), asyncio.Event()
        server, client = await join_serving(join, handler), await join()
        told: list[str] = []

        def tell(address: str) -> None:
            told.append(address)
            broken.set()

        client.on_connection_broken(tell)
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            if how == "close":
                await server.close()
            else:
                getattr(server, how)()
            with pytest.raises(WorkerFailed) as caught:
                await call
            assert not isinstance(caught.value, InstanceGone)
        await handler.cancelled.wait()
        await broken.wait()
        assert set(told) == {server.address}
        with pytest.raises(InstanceGone):
            await client.call(server.address, "e", b"", CALL_CONTEXT, got)

    async def test_a_client_that_dies_cancels_its_handlers(self, join: JoinRequests) -> None:
        handler, got = EndlessHandler(), CollectingSink()
        server, client = await join_serving(join, handler), await join()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            await client.close()
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()

    async def test_broken_off_connection_fails_its_calls_and_reconnects(
        self, join: JoinRequests
    ) -> None:
        handler, got = EndlessHandler(), CollectingSink()
        server, client = await join_serving(join, handler), await join()
        async with BackgroundTasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, got))
            await got.first_item.wait()
            assert client.count_received_frames(server.address) > 0
            client.disconnect(server.address)
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()
        await server.serve("again", echo_handler)
        await client.call(server.address, "again", b"hello", CALL_CONTEXT, got)
        assert got.items[-1] == b"hello"

    async def test_call_to_closed_instance_raises_instance_gone(self, join: JoinRequests) -> None:
        gone, client, told = await join_serving(join, echo_handler), await join(), list[str]()
        await gone.close()
        client.on_connection_broken(told.append)
        with pytest.raises(InstanceGone):
            await client.call(gone.address, "e", b"", CALL_CONTEXT, CollectingSink())
        with pytest.raises(InstanceGone):
            await client.call("nonsense", "e", b"", CALL_CONTEXT, CollectingSink())
        assert gone.address in told


class RequestsConformance(CallsConformance, InterruptedCallsConformance):
    """All of it. Fixture: `join`."""

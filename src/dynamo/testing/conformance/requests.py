"""What every request plane promises."""
# ruff: noqa: S101, ARG001, ARG002

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from dynamo.communication.requests import Outgoing, Requests, Window
from dynamo.core.context import Context
from dynamo.core.errors import (
    InstanceGone,
    InternalError,
    NotFound,
    Overloaded,
    TooLarge,
    WorkerFailed,
)
from dynamo.core.tasks import Tasks, run_all

Join = Callable[[], Awaitable[Requests]]
HERE = Context("request-1", attempt=2, timeout_s=9.0, metadata={"k": "v"})


class Collected:
    """A sink that keeps what it gets; `enough`: says stop after so many."""

    def __init__(self, enough: int | None = None) -> None:
        self.items: list[bytes] = []
        self.first = asyncio.Event()
        self._enough = enough

    def __call__(self, payload: bytes) -> bool:
        self.items.append(payload)
        self.first.set()
        return len(self.items) != self._enough


async def echo(payload: bytes, out: Outgoing) -> None:
    """A handler that answers with what it got."""
    out.send(payload)


class Endless:
    """A handler that sends one item and waits to be cancelled."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, payload: bytes, out: Outgoing) -> None:
        out.send(b"first")
        self.running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def served(join: Join, handler: Callable[[bytes, Outgoing], Awaitable[None]]) -> Requests:
    """A member that serves `handler` as "e"."""
    server = await join()
    await server.serve("e", handler)
    return server


class CallsConformance:
    """Calls that end by themselves. Fixture: `join`."""

    @pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
    async def test_a_payload_comes_back_whole(self, join: Join, size: int) -> None:
        server, client, got = await served(join, echo), await join(), Collected()
        await client.call(server.address, "e", b"x" * size, HERE, got)
        assert got.items == [b"x" * size]

    async def test_a_stream_arrives_in_order_and_whole(self, join: Join) -> None:
        async def count(payload: bytes, out: Outgoing) -> None:
            for number in range(20_000):
                out.send(b"%d" % number)
                if not number % 100:
                    await asyncio.sleep(0)

        server, client, got = await served(join, count), await join(), Collected()
        await client.call(server.address, "e", b"", HERE, got)
        assert got.items == [b"%d" % number for number in range(20_000)]

    async def test_the_context_crosses(self, join: Join) -> None:
        seen: list[Context] = []

        async def look(payload: bytes, out: Outgoing) -> None:
            seen.append(out.context)

        server, client = await served(join, look), await join()
        await client.call(server.address, "e", b"", HERE, Collected())
        assert seen == [HERE]

    async def test_calls_side_by_side_do_not_mix(self, join: Join) -> None:
        async def thrice(payload: bytes, out: Outgoing) -> None:
            for number in b"123":
                out.send(payload + bytes([number]))
                await asyncio.sleep(0)

        server, client = await served(join, thrice), await join()
        sinks = [Collected() for _ in range(100)]
        await run_all(
            *(
                client.call(server.address, "e", b"%d/" % index, HERE, sink)
                for index, sink in enumerate(sinks)
            )
        )
        for index, sink in enumerate(sinks):
            assert sink.items == [b"%d/%c" % (index, number) for number in b"123"]

    async def test_both_ends_can_call(self, join: Join) -> None:
        one, other = await served(join, echo), await served(join, echo)
        got = Collected()
        await run_all(
            one.call(other.address, "e", b"a", HERE, got),
            other.call(one.address, "e", b"b", HERE, got),
            one.call(one.address, "e", b"c", HERE, got),
        )
        assert sorted(got.items) == [b"a", b"b", b"c"]

    async def test_a_typed_error_crosses(self, join: Join) -> None:
        async def refuse(payload: bytes, out: Outgoing) -> None:
            out.send(b"before")
            raise Overloaded("full", hint="wait", retry_after_s=1.5)

        server, client, got = await served(join, refuse), await join(), Collected()
        with pytest.raises(Overloaded, match="full") as caught:
            await client.call(server.address, "e", b"", HERE, got)
        assert (caught.value.hint, caught.value.retry_after_s) == ("wait", 1.5)
        assert got.items == [b"before"]

    async def test_a_bug_is_an_internal_error_and_logged(
        self, join: Join, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def wrong(payload: bytes, out: Outgoing) -> None:
            raise KeyError("secret detail")

        server, client = await served(join, wrong), await join()
        with pytest.raises(InternalError) as caught:
            await client.call(server.address, "e", b"", HERE, Collected())
        assert "secret" not in caught.value.message
        assert "secret detail" in caplog.text

    async def test_an_unknown_endpoint_is_not_found(self, join: Join) -> None:
        server, client = await served(join, echo), await join()
        with pytest.raises(NotFound):
            await client.call(server.address, "other", b"", HERE, Collected())

    async def test_a_payload_over_the_limit_is_refused_alone(self, join: Join) -> None:
        server, client, got = await served(join, echo), await join(), Collected()
        with pytest.raises(TooLarge):
            await client.call(server.address, "e", bytes((64 << 20) + 1), HERE, got)
        await client.call(server.address, "e", b"fine", HERE, got)
        assert got.items == [b"fine"]

    async def test_a_window_holds_the_handler_back(self, join: Join) -> None:
        sent = 0

        async def pour(payload: bytes, out: Outgoing) -> None:
            nonlocal sent
            for _ in range(50):
                await out.credit()
                out.send(bytes(100))
                sent += 1

        server, client, got = await served(join, pour), await join(), Collected()
        window = Window(1000)
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got, window=window))
            taken = 0
            while taken < 50:
                await got.first.wait()
                got.first.clear()
                assert sent <= taken + 10 + 3  # credit comes back in steps of a quarter
                while taken < len(got.items):
                    taken += 1
                    window.release(100)
            await call
        assert len(got.items) == 50


class EndsConformance:
    """Calls that are cut short. Fixture: `join`; members have `abort()`, a crash."""

    async def test_a_cancelled_caller_cancels_the_handler(self, join: Join) -> None:
        handler, got = Endless(), Collected()
        server, client = await served(join, handler), await join()
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await handler.cancelled.wait()

    async def test_enough_ends_the_call_and_cancels_the_handler(self, join: Join) -> None:
        handler, got = Endless(), Collected(enough=1)
        server, client = await served(join, handler), await join()
        await client.call(server.address, "e", b"", HERE, got)
        await handler.cancelled.wait()
        assert got.items == [b"first"]

    async def test_what_comes_late_is_dropped(self, join: Join) -> None:
        answers: list[bool] = []
        stubborn_done = asyncio.Event()

        async def stubborn(payload: bytes, out: Outgoing) -> None:
            for _ in range(10):
                out.send(b"x")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            answers.append(out.send(b"late"))
            stubborn_done.set()

        server, client, got = await served(join, stubborn), await join(), Collected(enough=1)
        await server.serve("echo", echo)
        await client.call(server.address, "e", b"", HERE, got)
        await stubborn_done.wait()
        await client.call(server.address, "echo", b"alive", HERE, got)
        assert answers == [False]
        assert got.items == [b"x", b"alive"]

    async def test_a_failing_sink_fails_its_own_call_only(self, join: Join) -> None:
        def broken(payload: bytes) -> bool:
            raise ValueError("sink")

        handler, got = Endless(), Collected()
        server, client = await served(join, handler), await join()
        await server.serve("echo", echo)
        with pytest.raises(ValueError, match="sink"):
            await client.call(server.address, "e", b"", HERE, broken)
        await handler.cancelled.wait()
        await client.call(server.address, "echo", b"ok", HERE, got)
        assert got.items == [b"ok"]

    async def test_a_withdrawn_endpoint_finishes_its_calls_and_takes_no_more(
        self, join: Join
    ) -> None:
        go_on = asyncio.Event()

        async def slow(payload: bytes, out: Outgoing) -> None:
            out.send(b"begun")
            await go_on.wait()
            out.send(b"done")

        server, client, got = await served(join, slow), await join(), Collected()
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
            withdrawn = tasks.start(server.withdraw("e", None))
            await asyncio.sleep(0)
            with pytest.raises(InstanceGone):
                await client.call(server.address, "e", b"", HERE, Collected())
            go_on.set()
            await withdrawn
            await call
        assert got.items == [b"begun", b"done"]
        await server.serve("e", echo)
        await client.call(server.address, "e", b"again", HERE, got)
        assert got.items[-1] == b"again"

    async def test_withdrawing_at_once_fails_the_calls_in_hand(self, join: Join) -> None:
        handler, got = Endless(), Collected()
        server, client = await served(join, handler), await join()
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
            await server.withdraw("e")
            with pytest.raises(WorkerFailed):
                await call
        assert handler.cancelled.is_set()

    async def test_a_handler_that_gives_up_fails_the_call(self, join: Join) -> None:
        async def gives_up(payload: bytes, out: Outgoing) -> None:
            raise asyncio.CancelledError

        server, client = await served(join, gives_up), await join()
        with pytest.raises(WorkerFailed):
            await client.call(server.address, "e", b"", HERE, Collected())

    @pytest.mark.parametrize("how", ["abort", "close"])
    async def test_a_dead_instance_fails_its_calls_and_is_told(self, join: Join, how: str) -> None:
        handler, got, broken = Endless(), Collected(), asyncio.Event()
        server, client = await served(join, handler), await join()
        told: list[str] = []

        def tell(address: str) -> None:
            told.append(address)
            broken.set()

        client.on_broken(tell)
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
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
            await client.call(server.address, "e", b"", HERE, got)

    async def test_a_client_that_dies_cancels_its_handlers(self, join: Join) -> None:
        handler, got = Endless(), Collected()
        server, client = await served(join, handler), await join()
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
            await client.close()
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()

    async def test_a_connection_that_is_given_up_fails_its_calls_and_is_made_anew(
        self, join: Join
    ) -> None:
        handler, got = Endless(), Collected()
        server, client = await served(join, handler), await join()
        async with Tasks() as tasks:
            call = tasks.start(client.call(server.address, "e", b"", HERE, got))
            await got.first.wait()
            assert client.heard(server.address) > 0
            client.break_off(server.address)
            with pytest.raises(WorkerFailed):
                await call
        await handler.cancelled.wait()
        await server.serve("again", echo)
        await client.call(server.address, "again", b"hello", HERE, got)
        assert got.items[-1] == b"hello"

    async def test_nobody_there_is_instance_gone(self, join: Join) -> None:
        gone, client, told = await served(join, echo), await join(), list[str]()
        await gone.close()
        client.on_broken(told.append)
        with pytest.raises(InstanceGone):
            await client.call(gone.address, "e", b"", HERE, Collected())
        with pytest.raises(InstanceGone):
            await client.call("nonsense", "e", b"", HERE, Collected())
        assert gone.address in told


class RequestsConformance(CallsConformance, EndsConformance):
    """All of it. Fixture: `join`."""

"""Both ends of a request connection without the wire between them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.communication.frames import MAX_PAYLOAD_BYTES, Item
from dynamo.communication.requests.client_streams import CallSender, ClientStreams
from dynamo.communication.requests.plane import FlowWindow
from dynamo.communication.requests.server_streams import SendQueue, ServerStream
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, TooLarge, WorkerFailed, decode_error
from dynamo.core.tasks import BackgroundTasks

HERE = Context("r")
END = 1 << 31


class Told(CallSender):
    """What the handlers' end is told."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.credits: list[tuple[int, int]] = []

    def send_open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        self.opened.append((stream, window_bytes))

    def send_cancel(self, stream: int) -> None:
        self.cancelled.append(stream)

    def send_credit(self, stream: int, size_bytes: int) -> None:
        self.credits.append((stream, size_bytes))


class Side:
    """The callers' end, and what each call heard."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.tasks = tasks
        self.told = Told()
        self.calls = ClientStreams(self.told)
        self.heard: dict[int, list[bytes]] = {}

    async def call(self, window: FlowWindow | None = None) -> asyncio.Task[None]:
        heard = self.heard[len(self.heard) + 1] = []

        def sink(payload: bytes) -> bool:
            heard.append(payload)
            if payload == b"bug":
                raise ZeroDivisionError
            return payload != b"enough"

        call = self.tasks.start(self.calls.call("e", b"", HERE, sink, window))
        await asyncio.sleep(0)
        return call

    def item(self, stream: int, payload: bytes = b"x", flags: int = 0) -> None:
        items: list[Item] = [(stream, flags, payload)]
        self.calls.deliver(items)


@pytest.fixture
async def side() -> Any:
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        yield Side(tasks)


async def test_each_call_has_a_stream_of_its_own_never_used_again(side: Side) -> None:
    first = await side.call()
    side.item(1, b"", END)
    await first
    await side.call()
    assert side.told.opened == [(1, 0), (2, 0)]
    side.item(1, b"late")
    assert side.heard == {1: [], 2: []}


async def test_after_a_loss_nothing_is_opened(side: Side) -> None:
    call = await side.call()
    side.calls.fail(WorkerFailed("cut off"))
    with pytest.raises(WorkerFailed, match="cut off"):
        await call
    with pytest.raises(InstanceGone, match="cut off"):
        await (await side.call())
    assert side.told.opened == [(1, 0)]


async def test_silent_is_who_brought_nothing_since_the_last_look(side: Side) -> None:
    for _ in range(3):
        await side.call()
    assert side.calls.find_silent_streams() == []
    side.item(2)
    assert side.calls.find_silent_streams() == [1, 3]
    side.item(1)
    side.item(1)
    assert side.calls.find_silent_streams() == [2, 3]
    assert side.calls.find_silent_streams() == [1, 2, 3]
    side.item(3, b"", END)
    assert side.calls.find_silent_streams() == [1, 2]
    assert side.heard == {1: [b"x", b"x"], 2: [b"x"], 3: []}


async def test_who_was_silent_may_say_that_it_is_enough(side: Side) -> None:
    call = await side.call()
    side.calls.find_silent_streams()
    side.item(1, b"enough")
    await call
    assert (side.told.cancelled, side.calls.find_silent_streams(), len(side.calls)) == ([1], [], 0)


async def test_a_window_of_nothing_is_a_window(side: Side) -> None:
    await side.call(FlowWindow(0))
    await side.call()
    assert side.told.opened == [(1, 1), (2, 0)]


async def test_what_was_taken_is_told_in_steps_until_the_end(side: Side) -> None:
    window = FlowWindow(100)
    call = await side.call(window)
    for _ in range(6):
        window.release(10)
    assert side.told.credits == [(1, 30), (1, 30)]
    side.item(1, b"", END)
    await call
    window.release(90)
    assert side.told.credits == [(1, 30), (1, 30)]


async def test_a_bug_of_a_sink_ends_its_own_call_alone(side: Side) -> None:
    call, _ = await side.call(), await side.call()
    side.calls.deliver([(1, 0, b"bug"), (1, 0, b"late"), (2, 0, b"x")])
    with pytest.raises(ZeroDivisionError):
        await call
    assert side.heard == {1: [b"bug"], 2: [b"x"]}
    assert (side.told.cancelled, len(side.calls), side.calls.frames_received) == ([1], 1, 1)


async def test_a_caller_that_leaves_is_told_once(side: Side) -> None:
    call = await side.call()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    side.item(1)
    assert (side.told.cancelled, side.heard[1], len(side.calls)) == ([1], [], 0)


class Handling:
    """One stream at the handlers' end, with a handler that works for ever."""

    def __init__(self, tasks: BackgroundTasks, window_bytes: int = 0) -> None:
        self.armed = 0
        self.outbox = SendQueue(self._arm)
        self.stream = ServerStream(self.outbox, 7, HERE, window_bytes)
        self.stream.task = tasks.start(asyncio.Event().wait())

    def _arm(self) -> None:
        self.armed += 1


@pytest.fixture
async def handling() -> Any:
    async with BackgroundTasks() as tasks:
        yield Handling(tasks)


async def test_an_item_over_the_limit_is_refused_alone(handling: Handling) -> None:
    with pytest.raises(TooLarge):
        handling.stream.send(bytes(MAX_PAYLOAD_BYTES + 1))
    assert not handling.outbox.payloads
    assert handling.stream.send(b"x")
    assert (handling.outbox.streams, handling.outbox.payloads) == ([7], [b"x"])
    assert handling.armed == 1


async def test_asked_after_who_works_on_says_nothing(handling: Handling) -> None:
    stream = handling.stream
    stream.on_silence_query()
    stream.is_alive = lambda: True
    stream.on_silence_query()
    assert stream.send(b"x")
    assert handling.outbox.ends == []
    assert stream.task is not None
    assert not stream.task.cancelling()


async def test_asked_after_who_forgot_the_call_ends_it(handling: Handling) -> None:
    stream = handling.stream
    stream.is_alive = lambda: False
    stream.send(b"x")
    stream.on_silence_query()
    assert handling.outbox.ends == [1]
    told = decode_error(handling.outbox.payloads[1])
    assert isinstance(told, WorkerFailed)
    assert "lost this call" in told.message
    assert stream.task is not None
    assert stream.task.cancelling()
    assert not stream.send(b"y")
    stream.end()
    assert (handling.outbox.ends, handling.outbox.open_streams) == ([1], {})


async def test_who_has_no_window_never_waits(handling: Handling) -> None:
    handling.stream.send(bytes(1 << 20))
    await handling.stream.wait_for_window()


async def test_a_full_window_waits_for_what_is_taken_or_for_the_end() -> None:
    async with BackgroundTasks() as tasks:
        stream = Handling(tasks, window_bytes=10).stream
        stream.send(bytes(9))
        await stream.wait_for_window()
        stream.send(bytes(6))
        waiting = tasks.start(stream.wait_for_window())
        await asyncio.sleep(0)
        stream.release(5)
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.release(1)
        await waiting
        stream.send(bytes(10))
        waiting = tasks.start(stream.wait_for_window())
        await asyncio.sleep(0)
        stream.cancel()
        await waiting

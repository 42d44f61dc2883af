"""Tests of ClientStreams and ServerStream without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.communication.frames import MAX_PAYLOAD_BYTES, Item
from dynamo.communication.requests.client_connection import ClientConnection, ClientStreams
from dynamo.communication.requests.plane import FlowWindow
from dynamo.communication.requests.server_streams import SendQueue, ServerStream
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, Overloaded, TooLarge, WorkerFailed, decode_error
from dynamo.core.shared_payload import SharedPayload
from dynamo.core.tasks import BackgroundTasks

CONTEXT = Context("r")
END = 1 << 31


class RecordingSender(ClientConnection):
    """Records the frames that the caller sends."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, Any]] = []
        self.opened: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.credits: list[tuple[int, int]] = []

    def send_open(
        self,
        stream: int,
        endpoint: str,
        context: Context,
        window_bytes: int,
        payload: bytes,
        shared: int = 0,
    ) -> None:
        self.opened.append((stream, window_bytes))
        self.frames.append(("open", (payload, shared)))

    def send_share(self, number: int, payload: bytes) -> None:
        self.frames.append(("share", (number, payload)))

    def send_release(self, number: int) -> None:
        self.frames.append(("release", number))

    def send_cancel(self, stream: int) -> None:
        self.cancelled.append(stream)
        self.frames.append(("cancel", stream))

    def send_credit(self, stream: int, size_bytes: int) -> None:
        self.credits.append((stream, size_bytes))


class ClientRecorder:
    """The caller's streams, their sent frames and the payloads of each call."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.tasks = tasks
        self.sender = RecordingSender()
        self.streams = ClientStreams(self.sender)
        self.received: dict[int, list[bytes]] = {}

    async def call(self, window: FlowWindow | None = None) -> asyncio.Task[None]:
        received = self.received[len(self.received) + 1] = []

        def sink(payload: bytes) -> bool:
            received.append(payload)
            if payload == b"bug":
                raise ZeroDivisionError
            return payload != b"enough"

        call = self.tasks.start(self.streams.call("e", b"", CONTEXT, sink, window))
        await asyncio.sleep(0)
        return call

    def item(self, stream: int, payload: bytes = b"x", flags: int = 0) -> None:
        items: list[Item] = [(stream, flags, payload)]
        self.streams.deliver(items)


@pytest.fixture
async def client() -> Any:
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        yield ClientRecorder(tasks)


async def test_stream_ids_are_not_reused(client: ClientRecorder) -> None:
    first = await client.call()
    client.item(1, b"", END)
    await first
    await client.call()
    assert client.sender.opened == [(1, 0), (2, 0)]
    client.item(1, b"late")
    assert client.received == {1: [], 2: []}


async def test_no_call_is_opened_after_a_failure(client: ClientRecorder) -> None:
    call = await client.call()
    client.streams.fail(WorkerFailed("cut off"))
    with pytest.raises(WorkerFailed, match="cut off"):
        await call
    with pytest.raises(InstanceGone, match="cut off"):
        await (await client.call())
    assert client.sender.opened == [(1, 0)]


async def test_silent_streams_have_no_item_since_the_last_check(client: ClientRecorder) -> None:
    for _ in range(3):
        await client.call()
    assert client.streams.find_silent_streams() == []
    client.item(2)
    assert client.streams.find_silent_streams() == [1, 3]
    client.item(1)
    client.item(1)
    assert client.streams.find_silent_streams() == [2, 3]
    assert client.streams.find_silent_streams() == [1, 2, 3]
    client.item(3, b"", END)
    assert client.streams.find_silent_streams() == [1, 2]
    assert client.received == {1: [b"x", b"x"], 2: [b"x"], 3: []}


async def test_a_silent_stream_can_be_cancelled_by_its_sink(client: ClientRecorder) -> None:
    call = await client.call()
    client.streams.find_silent_streams()
    client.item(1, b"enough")
    await call
    assert (client.sender.cancelled, client.streams.find_silent_streams(), len(client.streams)) == (
        [1],
        [],
        0,
    )


async def test_a_window_of_zero_bytes_is_a_window(client: ClientRecorder) -> None:
    await client.call(FlowWindow(0))
    await client.call()
    assert client.sender.opened == [(1, 1), (2, 0)]


async def test_credit_is_sent_in_steps_until_the_end(client: ClientRecorder) -> None:
    window = FlowWindow(100)
    call = await client.call(window)
    for _ in range(6):
        window.release(10)
    assert client.sender.credits == [(1, 30), (1, 30)]
    client.item(1, b"", END)
    await call
    window.release(90)
    assert client.sender.credits == [(1, 30), (1, 30)]


async def test_an_error_of_a_sink_ends_only_its_call(client: ClientRecorder) -> None:
    call, _ = await client.call(), await client.call()
    client.streams.deliver([(1, 0, b"bug"), (1, 0, b"late"), (2, 0, b"x")])
    with pytest.raises(ZeroDivisionError):
        await call
    assert client.received == {1: [b"bug"], 2: [b"x"]}
    assert (client.sender.cancelled, len(client.streams), client.streams.frames_received) == (
        [1],
        1,
        1,
    )


async def test_a_cancelled_call_sends_one_cancel(client: ClientRecorder) -> None:
    call = await client.call()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    client.item(1)
    assert (client.sender.cancelled, client.received[1], len(client.streams)) == ([1], [], 0)


class ServerRecorder:
    """A stream at the handler's end with a handler that never ends."""

    def __init__(self, tasks: BackgroundTasks, window_bytes: int = 0) -> None:
        self.flushes = 0
        self.queue = SendQueue(self._schedule_flush)
        self.stream = ServerStream(self.queue, 7, CONTEXT, window_bytes)
        self.stream.task = tasks.start(asyncio.Event().wait())

    def _schedule_flush(self) -> None:
        self.flushes += 1


@pytest.fixture
async def server() -> Any:
    async with BackgroundTasks() as tasks:
        yield ServerRecorder(tasks)


async def test_an_item_over_the_limit_is_refused(server: ServerRecorder) -> None:
    with pytest.raises(TooLarge):
        server.stream.send(bytes(MAX_PAYLOAD_BYTES + 1))
    assert not server.queue.payloads
    assert server.stream.send(b"x")
    assert (server.queue.streams, server.queue.payloads) == ([7], [b"x"])
    assert server.flushes == 1


async def test_a_silence_query_for_a_live_call_changes_nothing(server: ServerRecorder) -> None:
    stream = server.stream
    stream.on_silence_query()
    stream.is_alive = lambda: True
    stream.on_silence_query()
    assert stream.send(b"x")
    assert server.queue.ends == []
    assert stream.task is not None
    assert not stream.task.cancelling()


async def test_a_silence_query_for_a_lost_call_fails_it(server: ServerRecorder) -> None:
    stream = server.stream
    stream.is_alive = lambda: False
    stream.send(b"x")
    stream.on_silence_query()
    assert server.queue.ends == [1]
    error = decode_error(server.queue.payloads[1])
    assert isinstance(error, WorkerFailed)
    assert "no longer has the request" in error.message
    assert stream.task is not None
    assert stream.task.cancelling()
    assert not stream.send(b"y")
    stream.end()
    assert (server.queue.ends, server.queue.open_streams) == ([1], {})


async def test_a_stream_without_a_window_never_waits(server: ServerRecorder) -> None:
    server.stream.send(bytes(1 << 20))
    await server.stream.wait_for_window()


async def test_a_full_window_waits_for_credit_or_the_end() -> None:
    async with BackgroundTasks() as tasks:
        stream = ServerRecorder(tasks, window_bytes=10).stream
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


async def start_call(recorder: ClientRecorder, shared: SharedPayload) -> asyncio.Task[None]:
    call = recorder.tasks.start(
        recorder.streams.call("e", b"own", CONTEXT, lambda _: True, None, shared)
    )
    await asyncio.sleep(0)
    return call


async def test_a_shared_payload_is_sent_before_its_first_call_and_released_after_the_last() -> None:
    async with BackgroundTasks() as tasks:
        recorder, shared = ClientRecorder(tasks), SharedPayload(b"common")
        number = shared.number
        calls = [await start_call(recorder, shared) for _ in range(2)]
        assert recorder.sender.frames == [
            ("share", (number, b"common")),
            ("open", (b"own", number)),
            ("open", (b"own", number)),
        ]
        recorder.streams.deliver([(1, END, b"")])
        await calls[0]
        assert ("release", number) not in recorder.sender.frames
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert recorder.sender.frames[-2:] == [("cancel", 2), ("release", number)]
        await start_call(recorder, shared)
        assert recorder.sender.frames[-2:] == [
            ("share", (number, b"common")),
            ("open", (b"own", number)),
        ]


async def test_a_refused_call_releases_its_shared_payload() -> None:
    def refuse(*_: Any) -> None:
        raise Overloaded("too many bytes are unsent")

    async with BackgroundTasks() as tasks:
        recorder, shared = ClientRecorder(tasks), SharedPayload(b"common")
        recorder.sender.send_open = refuse  # type: ignore[method-assign]
        with pytest.raises(Overloaded):
            await (await start_call(recorder, shared))
        assert recorder.sender.frames == [
            ("share", (shared.number, b"common")),
            ("release", shared.number),
        ]
        assert len(recorder.streams) == 0

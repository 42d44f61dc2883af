"""Reads the KV events that a foreign engine publishes over ZMQ (vLLM, SGLang).

A message has the frames topic, sequence number (8 bytes, big-endian) and msgpack payload. The
publisher repeats its last messages on a second socket. The question is `["", number]`. The answer
has `["", (topic,) number, payload]` for each message from that number on, and ends with number -1.
"""

from __future__ import annotations

import logging
import socket
from asyncio import Lock, sleep, timeout
from collections import Counter
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.hashing import checksum
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.engine_events import decode_batch

if TYPE_CHECKING:
    from zmq import Socket as SyncSocket
    from zmq.asyncio import Socket

log = logging.getLogger(__name__)

PORT_RANGE: Final = (12_000, 32_000)
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_QUEUED_MESSAGES: Final = 1000
MAX_REPLAYED_MESSAGES: Final = 100_000
REPLAY_SILENCE_S: Final = 5.0
"""A replay without a message for so long has failed."""
_SEQUENCE_BYTES: Final = 8
_END_OF_REPLAY: Final = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)

COUNTS: Final = (
    *("messages", "restarts", "repeated", "reconnections", "gaps", "repaired", "cleared"),
    *("replays", "replay_failures", "malformed", "damaged"),
)


class KvEventEndpoint(msgspec.Struct, frozen=True):
    """Where an engine publishes. With `bind` the reader listens and the publisher connects, which
    vLLM and SGLang do unless the address has a "*" or "::". `replay` is "" if there is none."""

    address: str
    replay: str = ""
    bind: bool = False

    def of_rank(self, rank: int) -> KvEventEndpoint:
        """Return the endpoint of a data-parallel rank: its ports are higher by `rank`."""
        replay = _add_to_port(self.replay, rank) if self.replay else ""
        return KvEventEndpoint(_add_to_port(self.address, rank), replay, self.bind)

    def publisher_config(self) -> dict[str, Any]:
        """Return the fields by which vLLM and SGLang publish here."""
        addresses = {"endpoint": self.address, "replay_endpoint": self.replay}
        return {"publisher": "zmq", "topic": "kv", **addresses}


def choose_loopback_endpoint(ranks: int) -> KvEventEndpoint:
    """Return an endpoint for an engine that is still to start. The publisher connects to this
    process: one that binds listens on every interface."""
    port = find_loopback_ports(2 * ranks)
    host = "tcp://127.0.0.1"
    return KvEventEndpoint(f"{host}:{port}", f"{host}:{port + ranks}", bind=True)


class _Message(NamedTuple):
    number: int
    payload: bytes


class KvEventReader:
    """Keeps an `EngineBlocks` equal to the prefix cache of one rank.

    A gap in the numbers is filled by a replay. If the replay does not begin with the last message
    that was applied, or there is none, the view is emptied and continues from what can be had: it
    then knows too few blocks, and never too many. `counts` counts messages and repairs by kind.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        endpoint: KvEventEndpoint,
    ) -> None:
        self.blocks = blocks
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self._endpoint = endpoint
        self._tasks = BackgroundTasks()
        self._lock = Lock()
        self._socket: Socket | None = None
        self._monitor: SyncSocket[bytes] | None = None
        self._next = 0
        self._heard = -1
        self._applied = 0

    def open(self) -> None:
        """Bind or connect, and start reading. With `bind`, call it before the engine starts. Raises
        `ConfigError` without pyzmq, or if the address cannot be used."""
        zmq = import_zmq()
        reading = zmq.asyncio.Context.instance().socket(zmq.SUB)
        reading.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        reading.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        reading.setsockopt(zmq.SUBSCRIBE, b"")
        address = self._endpoint.address
        try:
            (reading.bind if self._endpoint.bind else reading.connect)(address)
        except zmq.ZMQError as error:
            reading.close(linger=0)
            raise ConfigError(
                f"KV events of the engine cannot be read from {address}: {error}",
                hint="use tcp://HOST:PORT, with a port that is free",
            ) from error
        self._socket, self._monitor = reading, _monitor_disconnections(reading)
        self._tasks.start(self._run(reading), "KV events of an engine")
        if not self._endpoint.bind and self._endpoint.replay:
            self.rebuild()

    async def close(self) -> None:
        """Stop reading."""
        await self._tasks.close()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None

    def rebuild(self) -> None:
        """Empty the view, and build it again from all messages that the publisher still has."""
        self._tasks.start(self._rebuild_alone(), "rebuild of KV events")

    async def _run(self, reading: Socket) -> None:
        while True:
            message = self._parse(await reading.recv_multipart())
            if message is not None:
                async with self._lock:
                    await self._on_message(message)
            await sleep(0)  # a received message alone does not give way to other tasks

    async def _rebuild_alone(self) -> None:
        async with self._lock:
            await self._rebuild()

    async def _on_message(self, message: _Message) -> None:
        self.counts["messages"] += 1
        restarted, reconnected = message.number <= self._heard, self._has_reconnected()
        self._heard = message.number
        if restarted:
            self.counts["restarts"] += 1
            log.warning(
                "the numbers of an engine's KV events begin again; the view of its cache is rebuilt"
            )
            await self._rebuild(message)
        elif message.number < self._next:
            self.counts["repeated"] += 1  # was part of a replay
        elif message.number == self._next and not reconnected:
            self._apply(message)
        else:
            self.counts["reconnections" if reconnected else "gaps"] += 1
            if await self._fill_gap() and self._next > message.number:
                self.counts["repaired"] += 1
            else:
                await self._rebuild(message)

    async def _fill_gap(self) -> bool:
        """Apply what was missed, up to the last message of the publisher. The replay begins with
        the message that was applied last, so that another publisher with higher numbers is noticed:
        then, or without a replay, return False."""
        first = max(self._next - 1, 0)
        if not self._next:
            return await self._replay(0, self._apply_next)

        def apply(message: _Message) -> bool:
            if message.number == first:
                return checksum(message.payload) == self._applied
            return self._apply_next(message)

        return await self._replay(first, apply)

    def _has_reconnected(self) -> bool:
        """Whether a connection was lost since the last call, so that the publisher may be another
        one, whose message numbers begin again."""
        reconnected, zmq = False, import_zmq()
        while self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            reconnected = True
        return reconnected

    async def _rebuild(self, message: _Message | None = None) -> None:
        """Empty the view and apply a replay of everything, or `message` alone."""
        self.counts["cleared"] += 1
        self.blocks.clear()
        started = False

        def apply(replayed: _Message) -> bool:
            nonlocal started
            if not started:
                started, self._next = True, replayed.number
            return self._apply_next(replayed)

        await self._replay(0, apply)
        if message is None or (started and self._next > message.number):
            return
        if self._next != message.number:
            self.blocks.clear()
        self._apply(message)

    async def _replay(self, first: int, apply: Callable[[_Message], bool]) -> bool:
        """Ask for the messages from number `first` on and `apply` them until that returns False.
        Return whether all could be applied. A publisher drops messages of long replays, so that it
        is asked again for the rest."""
        while self._endpoint.replay:
            before = self._next
            if await self._replay_once(first, apply):
                return True
            if self._next == before:
                break
            first = self._next
        return False

    async def _replay_once(self, first: int, apply: Callable[[_Message], bool]) -> bool:
        zmq = import_zmq()
        self.counts["replays"] += 1
        asking = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        asking.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        asking.setsockopt(zmq.RCVHWM, MAX_REPLAYED_MESSAGES)
        try:
            asking.connect(self._endpoint.replay)
            await asking.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
            for _ in range(MAX_REPLAYED_MESSAGES):
                async with timeout(REPLAY_SILENCE_S):
                    frames = await asking.recv_multipart()
                if len(frames) > 1 and frames[-2] == _END_OF_REPLAY:
                    return True
                message = self._parse(frames)
                if message is not None and not apply(message):
                    return False
                await sleep(0)
            return False
        except (TimeoutError, zmq.ZMQError):
            self.counts["replay_failures"] += 1
            fields = {"replay": self._endpoint.replay}
            log.warning("an engine does not repeat its KV events", extra={"fields": fields})
            return False
        finally:
            asking.close(linger=0)

    def _parse(self, frames: Sequence[bytes]) -> _Message | None:
        if len(frames) > 1 and len(frames[-2]) == _SEQUENCE_BYTES:
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number >= 0:
                return _Message(number, frames[-1])
        self.counts["malformed"] += 1
        return None

    def _apply_next(self, message: _Message) -> bool:
        """Apply a replayed message. False: messages before it are missing."""
        if message.number != self._next:
            return False
        self._apply(message)
        return True

    def _apply(self, message: _Message) -> None:
        self._next = message.number + 1
        self._applied = checksum(message.payload)
        batch = decode_batch(message.payload)
        if batch.damaged:
            self.counts["damaged"] += 1
        self.blocks.apply_batch(batch)


def import_zmq() -> Any:
    """Import pyzmq. Raises `ConfigError` where it is not installed."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError as error:
        raise ConfigError(
            "KV events of an engine need the package pyzmq",
            hint="pip install 'dynamo-python[vllm]'",
        ) from error
    return zmq


def _monitor_disconnections(reading: Socket) -> SyncSocket[bytes]:
    """Return a socket with a message for each connection of `reading` that was lost."""
    zmq = import_zmq()
    address = f"inproc://monitor-{uuid4()}"
    reading.monitor(address, zmq.EVENT_DISCONNECTED)
    monitor: SyncSocket[bytes] = zmq.Context.shadow(reading.context).socket(zmq.PAIR)
    monitor.connect(address)
    return monitor


def find_loopback_ports(count: int) -> int:
    """Return the first of `count` consecutive TCP ports on loopback that are free now. Ports below
    those of connections are chosen, since an engine binds its own a minute later."""
    while True:
        first = SystemRandom().randrange(*PORT_RANGE)
        try:
            for port in range(first, first + count):
                _bind(port).close()
        except OSError:
            continue
        return first


def _bind(port: int) -> socket.socket:
    listening = socket.socket()
    try:
        listening.bind(("127.0.0.1", port))
    except BaseException:
        listening.close()
        raise
    return listening


def _add_to_port(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank else address

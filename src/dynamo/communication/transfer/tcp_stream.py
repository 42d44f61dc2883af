"""The bytes of `tcp:` on a proven connection, sent and received by threads.

The reader sends READ: batch size and (slot, generation) of each slot, all u64. The owner answers
with the batches, each a status, the xxh3-64 of each slot, and the slots, and with a last status. A
status tells whether all generations up to there were right; any but GOOD ends the connection, so
that a reader may wait for a status and its batch together.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from ssl import SSLSocket
from threading import Event
from typing import Final, TypeAlias

from dynamo.communication.frames import HEADER
from dynamo.communication.transfer.region import MemoryRegion, SlotRead
from dynamo.communication.transfer.runs import merge_pairs
from dynamo.core.errors import ProtocolError, TransferFailed
from dynamo.core.hashing import checksum

READ: Final = 4
GOOD: Final = 0
STALE: Final = 1
REFUSED: Final = 2

BATCH_BYTES: Final = 1 << 20
"""Bytes between two checks. Their checksum is computed while they are in the cache of a core."""
MAX_BATCH_SLOTS: Final = 512
"""Below the 1,024 pieces of a system call."""
MAX_READS: Final = 16_384
STALL_S: Final = 10.0
"""Time without progress after which the owner gives up a reader."""
WORD_BYTES: Final = 8
_TIMEVAL: Final = struct.Struct("ll")

Buffer: TypeAlias = "memoryview | bytearray | bytes | array[int]"


class SlotChannel(ABC):
    """A blocking connection whose calls move everything or raise `OSError`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @abstractmethod
    def send(self, buffers: Iterable[Buffer]) -> None:
        """Send all buffers."""

    @abstractmethod
    def receive(self, buffers: Iterable[Buffer]) -> None:
        """Fill all buffers. Raises `EOFError` at the end of the connection."""

    @abstractmethod
    def block(self) -> None:
        """Let calls wait again, after an event loop watched the socket: uvloop changes its mode."""

    def shut_down(self) -> None:
        """End the connection, so that a thread that waits for it goes on."""
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the socket. No thread may use it any more."""
        self.sock.close()


class PlainChannel(SlotChannel):
    """Scatters and gathers by system calls. Each waits in the kernel, without the GIL."""

    def __init__(self, sock: socket.socket, stall_s: float = 0.0) -> None:
        super().__init__(sock)
        self.block()
        limit = _TIMEVAL.pack(int(stall_s), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def block(self) -> None:
        self.sock.setblocking(True)

    def send(self, buffers: Iterable[Buffer]) -> None:
        views = _views(buffers)
        while views:
            views = _advance(views, self.sock.sendmsg(views))

    def receive(self, buffers: Iterable[Buffer]) -> None:
        views = _views(buffers)
        while views:
            size, _, _, _ = self.sock.recvmsg_into(views)
            if not size:
                raise EOFError
            views = _advance(views, size)


class TlsChannel(SlotChannel):
    """TLS, which encrypts buffer by buffer."""

    def __init__(self, sock: SSLSocket, stall_s: float = 0.0) -> None:
        super().__init__(sock)
        sock.settimeout(stall_s or None)

    def block(self) -> None:
        """Do nothing: Python's own time limit works in either mode."""

    def send(self, buffers: Iterable[Buffer]) -> None:
        for view in _views(buffers):
            self.sock.sendall(view)

    def receive(self, buffers: Iterable[Buffer]) -> None:
        for view in _views(buffers):
            while view:
                size = self.sock.recv_into(view)
                if not size:
                    raise EOFError
                view = view[size:]  # noqa: PLW2901


def open_channel(sock: socket.socket, stall_s: float = 0.0) -> SlotChannel:
    """Return the channel over a proven socket. `stall_s` 0: its calls wait without limit."""
    if isinstance(sock, SSLSocket):
        return TlsChannel(sock, stall_s)
    return PlainChannel(sock, stall_s)


def receive_slots(
    channel: SlotChannel, region: MemoryRegion, reads: Sequence[SlotRead], stop: Event
) -> None:
    """Pull slots into `region`. Raises `TransferFailed`, `EOFError` and `OSError`.

    After an error the channel cannot be used again.
    """
    batch = batch_slots(region.slot_bytes)
    numbers = array("Q", [batch])
    for read in reads:
        numbers.extend((read.source, read.generation))
    body = numbers.tobytes()
    channel.send([HEADER.pack(len(body), READ, 0, 0), body])
    for start in range(0, len(reads), batch):
        if stop.is_set():
            raise EOFError
        targets = [read.target for read in reads[start : start + batch]]
        sums = _receive_batch(channel, len(targets), _payload(region, targets))
        for target, expected in zip(targets, sums, strict=True):
            if checksum(region.slot(target)) != expected:
                text = f"the bytes for block {target} were altered on their way"
                raise TransferFailed.of("checksum", text)
    _receive_batch(channel, 0, ())


def serve_read(channel: SlotChannel, region: MemoryRegion) -> bool:
    """Answer one READ. False: the connection has to be closed. Raises `OSError` and
    `ProtocolError`."""
    header = bytearray(HEADER.size)
    channel.block()
    try:
        channel.receive([header])
    except EOFError:
        return False
    length, kind, _, _ = HEADER.unpack(header)
    if kind != READ or length % WORD_BYTES or length > WORD_BYTES * (2 * MAX_READS + 1):
        raise ProtocolError(f"a frame of kind {kind} with {length} bytes instead of a read")
    numbers = array("Q", bytes(length))
    channel.receive([numbers])
    batch, sources, generations = numbers[0], numbers[1::2], numbers[2::2]
    known = len(sources) == len(generations) and all(slot < region.slots for slot in sources)
    if not (known and sources and 0 < batch <= MAX_BATCH_SLOTS):
        channel.send([array("Q", [REFUSED])])
        return False
    return _send_slots(channel, region, batch, sources.tolist(), generations.tolist())


def _send_slots(
    channel: SlotChannel,
    region: MemoryRegion,
    batch: int,
    sources: list[int],
    generations: list[int],
) -> bool:
    """Send batches. A generation is compared before its batch and, after the kernel took the bytes,
    again. False: one was wrong."""
    present = region.generations

    def status(first: int, end: int) -> int:
        pairs = zip(sources[first:end], generations[first:end], strict=True)
        return GOOD if all(present[slot] == expected for slot, expected in pairs) else STALE

    for start in range(0, len(sources), batch):
        slots = sources[start : start + batch]
        sums = [checksum(region.slot(slot)) for slot in slots]
        words = array("Q", [status(max(0, start - batch), start + batch), *sums])
        if words[0] != GOOD:
            channel.send([words[:1]])
            return False
        channel.send([words, *_payload(region, slots)])
    last_status = status(len(sources) - len(slots), len(sources))
    channel.send([array("Q", [last_status])])
    return last_status == GOOD


def batch_slots(slot_bytes: int) -> int:
    """Return how many slots are sent between two checks."""
    return max(1, min(MAX_BATCH_SLOTS, BATCH_BYTES // slot_bytes))


def _payload(region: MemoryRegion, slots: Sequence[int]) -> list[memoryview]:
    size = region.slot_bytes
    runs = merge_pairs(slots, slots, len(slots))
    return [region.memory[first * size : (first + count) * size] for first, _, count in runs]


def _receive_batch(channel: SlotChannel, count: int, payload: Sequence[memoryview]) -> array[int]:
    """Receive a status, then the checksums and the bytes of `count` slots. Raises `TransferFailed`,
    `EOFError`."""
    words = array("Q", [GOOD, *[0] * count])
    try:
        channel.receive([words, *payload])
    finally:
        if words[0] == STALE:
            raise TransferFailed.of("stale", "the peer uses a block for something else now")
        if words[0] == REFUSED:
            raise TransferFailed.of("refused", "the peer knows no such blocks")
        if words[0] != GOOD:
            raise TransferFailed.of("checksum", "the peer's status was altered on its way")
    return words[1:]


def _views(buffers: Iterable[Buffer]) -> list[memoryview]:
    return [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]


def _advance(views: list[memoryview], size: int) -> list[memoryview]:
    """The rest of `views` after `size` bytes."""
    for index, view in enumerate(views):
        if size < len(view):
            return [view[size:], *views[index + 1 :]]
        size -= len(view)
    return []

"""The bytes of `tcp:` on a proven connection, sent and received by threads.

The reader sends READ: batch size and (slot, generation) of each slot, all u64. The upper half of
the batch size is the encoding. The owner answers with the batches, each a status, the xxh3-64 of
each slot, and the slots, and with a last status. Encoded slots have their sizes before them. A
status tells whether all generations up to there were right; any but GOOD ends the connection, so
that a reader may wait for a status and its batch together.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from ssl import SSLSocket
from threading import Event
from typing import Final

from dynamo.communication.frames import HEADER
from dynamo.communication.transfer.compression import ZSTD, compress, decompress
from dynamo.communication.transfer.region import ANY_GENERATION, MAX_READS, MemoryRegion, SlotRead
from dynamo.core.errors import ProtocolError, TransferFailed
from dynamo.core.hashing import checksum

READ: Final = 4
GOOD: Final = 0
STALE: Final = 1
REFUSED: Final = 2

BATCH_BYTES: Final = 1 << 20
"""Bytes between two checks. Their checksum is computed while they are in the cache of a core."""
ENCODING_SHIFT: Final = 32
MAX_BATCH: Final = (1 << ENCODING_SHIFT) - 1
MAX_BATCH_SLOTS: Final = 512
"""Below the 1,024 pieces of a system call."""
STALL_S: Final = 10.0
"""Time without progress after which the owner gives up a reader."""
WORD_BYTES: Final = 8
_TIMEVAL: Final = struct.Struct("ll")


class SlotChannel(ABC):
    """A blocking connection whose calls move everything or raise `OSError`. Views are of bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @abstractmethod
    def send(self, views: list[memoryview]) -> None:
        """Send all views."""

    @abstractmethod
    def receive(self, views: list[memoryview]) -> None:
        """Fill all views. Raises `EOFError` at the end of the connection."""

    @abstractmethod
    def block(self) -> None:
        """Let calls wait again, after an event loop watched the socket: uvloop changes its mode."""

    def shut_down(self) -> None:
        """End the connection, so that a thread that waits for it continues."""
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

    def send(self, views: list[memoryview]) -> None:
        while views:
            views = _advance(views, self.sock.sendmsg(views))

    def receive(self, views: list[memoryview]) -> None:
        while views:
            size, _, _, _ = self.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)
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

    def send(self, views: list[memoryview]) -> None:
        for view in views:
            self.sock.sendall(view)

    def receive(self, views: list[memoryview]) -> None:
        while views:
            size = self.sock.recv_into(views[0])
            if not size:
                raise EOFError
            views = _advance(views, size)


def open_channel(sock: socket.socket, stall_s: float = 0.0) -> SlotChannel:
    """Return the channel over a proven socket. `stall_s` 0: its calls wait without limit."""
    if isinstance(sock, SSLSocket):
        return TlsChannel(sock, stall_s)
    return PlainChannel(sock, stall_s)


def receive_slots(
    channel: SlotChannel,
    region: MemoryRegion,
    reads: Sequence[SlotRead],
    stop: Event,
    encoding: int = 0,
) -> int:
    """Pull slots into `region`. Returns the bytes that came for them. Raises `TransferFailed`,
    `EOFError` and `OSError`.

    After an error the channel cannot be used again.
    """
    batch = max(1, min(MAX_BATCH_SLOTS, BATCH_BYTES // region.slot_bytes))
    receive = _receive_encoded if encoding else _receive_batch
    received = 0
    numbers = array("Q", [encoding << ENCODING_SHIFT | batch])
    for read in reads:
        numbers.extend((read.source, read.generation))
    header = HEADER.pack(len(numbers) * WORD_BYTES, READ, 0, 0)
    channel.send([memoryview(header), _bytes_of(numbers)])
    for start in range(0, len(reads), batch):
        if stop.is_set():
            raise EOFError
        part = reads[start : start + batch]
        with region.writing([read.target for read in part]) as slots:
            checksums, size = receive(channel, slots)
            received += size
            if checksums != [checksum(slot) for slot in slots]:
                text = f"the bytes of blocks {part} were altered on their way"
                raise TransferFailed.of("checksum", text)
    _receive_batch(channel, [])
    return received


def serve_read(channel: SlotChannel, region: MemoryRegion) -> bool:
    """Answer one READ. False: the connection has to be closed. Raises `OSError` and
    `ProtocolError`."""
    header = bytearray(HEADER.size)
    channel.block()
    try:
        channel.receive([memoryview(header)])
    except EOFError:
        return False
    length, kind, _, _ = HEADER.unpack(header)
    if kind != READ or length % WORD_BYTES or length > WORD_BYTES * (2 * MAX_READS + 1):
        raise ProtocolError(f"a frame of kind {kind} with {length} bytes instead of a read")
    numbers = array("Q", bytes(length))
    channel.receive([_bytes_of(numbers)] if length else [])
    order, *pairs = numbers or [0]
    encoding, batch = order >> ENCODING_SHIFT, order & MAX_BATCH
    sources, generations = pairs[::2], pairs[1::2]
    known = len(sources) == len(generations) and all(slot < region.peer_slots for slot in sources)
    readable = encoding == 0 or (encoding == ZSTD and find_spec("zstandard") is not None)
    if not (known and readable and sources and 0 < batch <= MAX_BATCH_SLOTS):
        channel.send([_bytes_of(array("Q", [REFUSED]))])
        return False
    return _send_slots(channel, region, batch, sources, generations, encoding)


def _send_slots(
    channel: SlotChannel,
    region: MemoryRegion,
    batch: int,
    sources: list[int],
    generations: list[int],
    encoding: int,
) -> bool:
    """Send batches. A generation is compared before its batch and, after the kernel took the bytes,
    again. False: one was wrong."""
    present = region.generations
    end = len(sources)
    for start in range(0, end + batch, batch):  # the last one is a status alone
        with region.reading(sources[start : start + batch]) as slots:
            words = array("Q", [GOOD, *map(checksum, slots)])
            parts: list[memoryview] = slots
            if encoding:
                parts = [memoryview(compress(slot)) for slot in slots]
                words.extend(map(len, parts))
            checked = slice(max(0, start - batch), start + batch)
            expected = generations[checked]
            is_same = [present[slot] for slot in sources[checked]] == expected
            if not is_same and ANY_GENERATION not in expected:
                channel.send([_bytes_of(array("Q", [STALE]))])
                return False
            channel.send([_bytes_of(words), *parts])
    return True


def _receive_batch(channel: SlotChannel, slots: Sequence[memoryview]) -> tuple[list[int], int]:
    """Receive a status, then checksums and bytes of `slots`. Raises `TransferFailed`, `EOFError`.

    Returns the checksums and the bytes of the slots.
    """
    words = _receive_words(channel, 1 + len(slots), slots)
    return words[1:], sum(map(len, slots))


def _receive_encoded(channel: SlotChannel, slots: Sequence[memoryview]) -> tuple[list[int], int]:
    """As `_receive_batch`, with slots in zstd."""
    words = _receive_words(channel, 1 + 2 * len(slots), ())
    checksums, sizes = words[1 : 1 + len(slots)], words[1 + len(slots) :]
    if any(size > len(slot) for size, slot in zip(sizes, slots, strict=True)):
        raise TransferFailed.of("checksum", "an encoded block is larger than its slot")
    parts = [memoryview(bytearray(size)) for size in sizes]
    channel.receive(parts)
    for part, slot in zip(parts, slots, strict=True):
        decompress(part, slot)
    return checksums, sum(sizes)


def _receive_words(channel: SlotChannel, count: int, slots: Sequence[memoryview]) -> list[int]:
    """Receive words, of which the first is a status, and slots behind them."""
    words = array("Q", bytes(WORD_BYTES * count))
    try:
        channel.receive([_bytes_of(words), *slots])
    finally:
        if words[0] == STALE:
            raise TransferFailed.of("stale", "the peer uses a block for something else now")
        if words[0] == REFUSED:
            raise TransferFailed.of("refused", "the peer knows no such blocks")
        if words[0] != GOOD:
            raise TransferFailed.of("checksum", "the peer's status was altered on its way")
    return words.tolist()


def _bytes_of(words: array[int]) -> memoryview:
    return memoryview(words).cast("B")


def _advance(views: list[memoryview], size: int) -> list[memoryview]:
    """The rest of `views` after `size` bytes."""
    for index, view in enumerate(views):
        if size < len(view):
            return [view[size:], *views[index + 1 :]]
        size -= len(view)
    return []

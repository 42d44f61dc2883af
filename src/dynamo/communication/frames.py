"""Frames: the bytes of our own wire. Pure functions: bytes in, frames out.

A frame is `body length u32 | kind u8 | flags u8 (0) | count u16`, little-endian, then the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack
from typing import Final

from dynamo.core.errors import ProtocolError

HEADER: Final = Struct("<IBBH")
UINT32: Final = Struct("<I")
_ITEM_HEADER: Final = Struct("<II")

HELLO: Final = 1

MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_FRAME_BYTES: Final = MAX_PAYLOAD_BYTES + (2 << 20)
MAX_HELLO_BYTES: Final = 16 << 10
MAX_BATCH_ITEMS: Final = 8192
MAX_BATCH_BYTES: Final = 1 << 20

END_STREAM: Final = 1 << 31
"""An item's flag: the stream is over; a payload is an encoded error."""
_SIZE_MASK: Final = END_STREAM - 1

Frame = tuple[int, int, bytes]
"""Kind, count, body."""
Item = tuple[int, int, bytes]
"""Stream, flags (0 or END), payload."""


class FrameSplitter:
    """Cuts a byte stream into frames, however it is chopped. Holds at most one partial frame."""

    __slots__ = ("_needed_bytes", "_partial", "limit_bytes")

    def __init__(self, limit_bytes: int = MAX_HELLO_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._partial = bytearray()
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises `ProtocolError` for one over the limit."""
        held = self._partial
        if held:
            held += data
            if len(held) < self._needed_bytes:
                return []
            data = bytes(held)
            held.clear()
        frames: list[Frame] = []
        offset, size, header = 0, len(data), HEADER.size
        self._needed_bytes = header
        while size - offset >= header:
            length, kind, _, count = HEADER.unpack_from(data, offset)
            if length > self.limit_bytes:
                raise ProtocolError(f"a frame of {length} bytes, limit {self.limit_bytes}")
            end = offset + header + length
            if end > size:
                self._needed_bytes = end - offset
                break
            frames.append((kind, count, data[offset + header : end]))
            offset = end
        if offset < size:
            held += data[offset:] if offset else data
        return frames


def pack_frame(kind: int, body: bytes = b"", count: int = 0) -> bytes:
    """One frame."""
    return HEADER.pack(len(body), kind, 0, count) + body


def pack_items(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes],
    ends: Sequence[int] = (),
) -> bytes:
    """One frame of many streams: (stream u32, flag and length u32) an item, then the payloads.

    `ends`: indices of the items that end their stream. At most 65,535 items.
    """
    count = len(payloads)
    heads = [0] * (2 * count)
    heads[::2] = streams
    sizes = list(map(len, payloads))
    length = 8 * count + sum(sizes)
    heads[1::2] = sizes
    for index in ends:
        heads[2 * index + 1] |= END_STREAM
    head = pack(f"<{2 * count}I", *heads)
    return b"".join((HEADER.pack(length, kind, 0, count), head, *payloads))


def unpack_items(body: bytes, count: int) -> list[Item]:
    """The items of a frame. Raises `ProtocolError` where lengths and body disagree."""
    offset, total = 8 * count, len(body)
    if offset > total:
        raise ProtocolError("a frame shorter than its table")
    items = []
    for stream, word in _ITEM_HEADER.iter_unpack(body[:offset]):
        start = offset
        offset += word & _SIZE_MASK
        items.append((stream, word & END_STREAM, body[start:offset]))
    if offset != total:
        raise ProtocolError("a frame and its items disagree in length")
    return items


def pack_batches(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes],
    ends: Sequence[int] = (),
) -> list[bytes]:
    """Like `pack_items`, in as many frames as the limits ask for (nearly always one)."""
    if len(payloads) <= MAX_BATCH_ITEMS and sum(map(len, payloads)) <= MAX_BATCH_BYTES:
        return [pack_items(kind, streams, payloads, ends)]
    frames: list[bytes] = []
    marked = set(ends)
    start = size = 0
    for index, payload in enumerate(payloads):
        if index > start and (
            size + len(payload) > MAX_BATCH_BYTES or index - start >= MAX_BATCH_ITEMS
        ):
            frames.append(_pack_slice(kind, streams, payloads, marked, start, index))
            start, size = index, 0
        size += len(payload)
    frames.append(_pack_slice(kind, streams, payloads, marked, start, len(payloads)))
    return frames


def _pack_slice(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes],
    marked: set[int],
    start: int,
    stop: int,
) -> bytes:
    ends = [index - start for index in range(start, stop) if index in marked]
    return pack_items(kind, streams[start:stop], payloads[start:stop], ends)

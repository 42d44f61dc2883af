"""The frame format of the TCP and NATS planes, as pure functions of bytes.

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
MAX_BATCH_ITEMS: Final = 1024
MAX_BATCH_BYTES: Final = 1 << 20

END_STREAM: Final = 1 << 31
"""Flag of an item that ends its stream. A payload with it is an encoded error."""
_SIZE_MASK: Final = END_STREAM - 1

Frame = tuple[int, int, bytes]
"""(kind, count, body)."""
Item = tuple[int, int, bytes]
"""(stream id, flags: 0 or END_STREAM, payload)."""


class FrameSplitter:
    """Splits a byte stream into frames. Keeps at most one partial frame between calls, in the parts
    in which it came: a large one is copied once."""

    __slots__ = ("_needed_bytes", "_partial", "limit_bytes")

    def __init__(self, limit_bytes: int = MAX_HELLO_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._partial: list[bytes] = []
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises `ProtocolError` if the first of them is
        above the limit; `feed(b"")` continues at a later one."""
        partial = self._partial
        if partial:
            partial.append(data)
            self._needed_bytes -= len(data)
            if self._needed_bytes > 0:
                return []
            data = b"".join(partial)
            partial.clear()
        frames: list[Frame] = []
        offset, size, header = 0, len(data), HEADER.size
        needed = header
        while size - offset >= header:
            length, kind, _, count = HEADER.unpack_from(data, offset)
            if length > self.limit_bytes:
                if frames:  # which may raise the limit: the last one of a handshake does
                    break
                raise ProtocolError(f"a frame of {length} bytes, limit {self.limit_bytes}")
            end = offset + header + length
            if end > size:
                needed = end - offset
                break
            frames.append((kind, count, data[offset + header : end]))
            offset = end
        if offset < size:
            partial.append(data[offset:] if offset else data)
            self._needed_bytes = needed - (size - offset)
        return frames


def pack_frame(kind: int, body: bytes = b"", count: int = 0) -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(body), kind, 0, count) + body


def pack_number(kind: int, number: int) -> bytes:
    """Encode a frame whose body is one u32."""
    return pack_frame(kind, UINT32.pack(number))


def unpack_number(body: bytes) -> int:
    """Return the u32 that is the whole body. Raises `ProtocolError`."""
    if len(body) != UINT32.size:
        raise ProtocolError(f"the body of the frame has {len(body)} bytes, not {UINT32.size}")
    return int(UINT32.unpack(body)[0])


def pack_items(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes | memoryview],
    ends: Sequence[int] = (),
) -> bytes:
    """Encode items of many streams as one frame.

    The body is a table of (stream u32, flag and length u32) per item, then the payloads. `ends`
    holds the indices of items that end their stream. At most 65,535 items fit.
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
    """Decode the items of a frame. Raises `ProtocolError` if lengths and body disagree."""
    offset, total = 8 * count, len(body)
    if offset > total:
        raise ProtocolError("a frame is shorter than its item table")
    items = []
    for stream, flag_and_size in _ITEM_HEADER.iter_unpack(body[:offset]):
        start = offset
        offset += flag_and_size & _SIZE_MASK
        items.append((stream, flag_and_size & END_STREAM, body[start:offset]))
    if offset != total:
        raise ProtocolError("the lengths of a frame and its items disagree")
    return items


def pack_batches(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes | memoryview],
    ends: Sequence[int] = (),
) -> list[bytes]:
    """Encode items like `pack_items`, split into several frames above the batch limits."""
    if len(payloads) <= MAX_BATCH_ITEMS and sum(map(len, payloads)) <= MAX_BATCH_BYTES:
        return [pack_items(kind, streams, payloads, ends)]
    frames: list[bytes] = []
    end_indices = set(ends)
    start = size = 0
    for index, payload in enumerate(payloads):
        if index > start and (
            size + len(payload) > MAX_BATCH_BYTES or index - start >= MAX_BATCH_ITEMS
        ):
            frames.append(_pack_slice(kind, streams, payloads, end_indices, start, index))
            start, size = index, 0
        size += len(payload)
    frames.append(_pack_slice(kind, streams, payloads, end_indices, start, len(payloads)))
    return frames


def _pack_slice(
    kind: int,
    streams: Sequence[int],
    payloads: Sequence[bytes | memoryview],
    end_indices: set[int],
    start: int,
    stop: int,
) -> bytes:
    ends = [index - start for index in range(start, stop) if index in end_indices]
    return pack_items(kind, streams[start:stop], payloads[start:stop], ends)

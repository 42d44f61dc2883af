"""The frames of the event plane. A frame names a source by the number in its discovery record.

subscriber -> publisher: HELLO, FOLLOW
publisher -> subscriber: HELLO, EVENTS, SKIPPED, GONE
answer to FOLLOW:        REPLAY or DUMP frames, then CAUGHT_UP
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, unpack_from
from typing import Final

from dynamo.communication.frames import HEADER, MAX_BATCH_BYTES, MAX_BATCH_ITEMS, pack_frame
from dynamo.core.errors import ProtocolError

PLANE: Final = "events"
FOLLOW: Final = 2
EVENTS: Final = 3
REPLAY: Final = 4
DUMP: Final = 5
CAUGHT_UP: Final = 6
GONE: Final = 7
SKIPPED: Final = 8

_POSITION: Final = Struct("<Iq")


def pack_position(kind: int, number: int, sequence: int) -> bytes:
    """Encode a frame that holds a source and a sequence.

    FOLLOW requests what came after `sequence` (-1: everything). CAUGHT_UP ends the answer, which is
    complete up to `sequence`. SKIPPED says that events up to `sequence` were withheld.
    """
    return pack_frame(kind, _POSITION.pack(number, sequence))


def unpack_position(body: bytes) -> tuple[int, int]:
    """Return source number and sequence. Raises `ProtocolError`."""
    if len(body) != _POSITION.size:
        raise ProtocolError("a position frame has the wrong size")
    number, sequence = _POSITION.unpack(body)
    return number, sequence


def pack_events(kind: int, number: int, first: int, payloads: Sequence[bytes]) -> list[bytes]:
    """Encode consecutive events as frames: number u32, first sequence i64, lengths u32, payloads.

    Every frame of a DUMP holds the sequence of the state.
    """
    sizes = list(map(len, payloads))
    if len(sizes) <= MAX_BATCH_ITEMS and sum(sizes) <= MAX_BATCH_BYTES:
        return [_pack_events_frame(kind, number, first, sizes, payloads)]
    frames: list[bytes] = []
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and stop - start < MAX_BATCH_ITEMS and total <= MAX_BATCH_BYTES:
            total += sizes[stop]
            stop += 1
        at = first if kind == DUMP else first + start
        frames.append(_pack_events_frame(kind, number, at, sizes[start:stop], payloads[start:stop]))
        start = stop
    return frames


def unpack_events(body: bytes, count: int) -> tuple[int, int, list[bytes]]:
    """Return number, first sequence and payloads. Raises `ProtocolError`."""
    offset = _POSITION.size + 4 * count
    if len(body) < offset:
        raise ProtocolError("an events frame is shorter than its table")
    number, first = _POSITION.unpack_from(body)
    payloads = []
    for size in unpack_from(f"<{count}I", body, _POSITION.size):
        payloads.append(body[offset : offset + size])
        offset += size
    if offset != len(body):
        raise ProtocolError("the lengths of an events frame and its payloads disagree")
    return number, first, payloads


def _pack_events_frame(
    kind: int, number: int, first: int, sizes: Sequence[int], payloads: Sequence[bytes]
) -> bytes:
    count = len(sizes)
    length = _POSITION.size + 4 * count + sum(sizes)
    table = Struct(f"<{count}I").pack(*sizes)
    position = _POSITION.pack(number, first)
    return b"".join((HEADER.pack(length, kind, 0, count), position, table, *payloads))

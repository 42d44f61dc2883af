"""The frames of the event plane.

subscriber -> publisher: HELLO, FOLLOW | publisher -> subscriber: HELLO, EVENTS, SKIPPED, GONE, and
in answer to FOLLOW: REPLAY or DUMP frames, then AT. A source is known by the number in its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, unpack_from
from typing import Final

from dynamo.communication.frames import BATCH_BYTES, BATCH_ITEMS, HEADER, NUMBER, pack_frame
from dynamo.core.errors import ProtocolError

PLANE: Final = "events"
FOLLOW: Final = 2
EVENTS: Final = 3
REPLAY: Final = 4
DUMP: Final = 5
AT: Final = 6
GONE: Final = 7
SKIPPED: Final = 8

_place: Final = Struct("<Iq")


def pack_place(kind: int, number: int, sequence: int) -> bytes:
    """FOLLOW: tell me what came after `sequence` (-1: I know nothing). AT: the answer is complete
    up to it. SKIPPED: events up to it were withheld."""
    return pack_frame(kind, _place.pack(number, sequence))


def unpack_place(body: bytes) -> tuple[int, int]:
    """Number and sequence."""
    if len(body) != _place.size:
        raise ProtocolError("a place of the wrong size")
    number, sequence = _place.unpack(body)
    return number, sequence


def pack_gone(number: int) -> bytes:
    """The source was closed, or never was."""
    return pack_frame(GONE, NUMBER.pack(number))


def unpack_gone(body: bytes) -> int:
    """Its number."""
    if len(body) != NUMBER.size:
        raise ProtocolError("a farewell of the wrong size")
    return int(NUMBER.unpack(body)[0])


def pack_events(kind: int, number: int, first: int, payloads: Sequence[bytes]) -> list[bytes]:
    """Frames of consecutive events: number u32, first sequence i64, lengths u32, payloads.

    In a DUMP every frame bears the sequence of the state.
    """
    sizes = list(map(len, payloads))
    if len(sizes) <= BATCH_ITEMS and sum(sizes) <= BATCH_BYTES:
        return [_pack(kind, number, first, sizes, payloads)]
    frames: list[bytes] = []
    start = 0
    while start < len(sizes):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and stop - start < BATCH_ITEMS and total <= BATCH_BYTES:
            total += sizes[stop]
            stop += 1
        at = first if kind == DUMP else first + start
        frames.append(_pack(kind, number, at, sizes[start:stop], payloads[start:stop]))
        start = stop
    return frames


def unpack_events(body: bytes, count: int) -> tuple[int, int, list[bytes]]:
    """Number, first sequence, payloads. Raises `ProtocolError`."""
    offset = _place.size + 4 * count
    if len(body) < offset:
        raise ProtocolError("events shorter than their table")
    number, first = _place.unpack_from(body)
    payloads = []
    for size in unpack_from(f"<{count}I", body, _place.size):
        payloads.append(body[offset : offset + size])
        offset += size
    if offset != len(body):
        raise ProtocolError("events and their lengths disagree")
    return number, first, payloads


def _pack(
    kind: int, number: int, first: int, sizes: Sequence[int], payloads: Sequence[bytes]
) -> bytes:
    count = len(sizes)
    length = _place.size + 4 * count + sum(sizes)
    head = Struct(f"<{count}I").pack(*sizes)
    place = _place.pack(number, first)
    return b"".join((HEADER.pack(length, kind, 0, count), place, head, *payloads))

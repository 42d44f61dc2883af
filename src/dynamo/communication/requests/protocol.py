"""The frames of the request plane.

caller -> handler: HELLO, OPEN, CANCEL, CREDIT | handler -> caller: HELLO, DATA, GOAWAY
Stream ids grow from 1 on each connection and are never used again, so that what arrives late for a
cancelled call finds nobody. A CREDIT of nothing asks whether a stream is still open: of one that is
not the end is said again, behind all that was said before.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from dynamo.communication.frames import HEADER, MAX_PAYLOAD_BYTES, UINT32, pack_frame
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError, TooLarge

PLANE: Final = "requests"
OPEN: Final = 2
DATA: Final = 3
CANCEL: Final = 4
CREDIT: Final = 5
GOAWAY: Final = 6

MAX_STREAM_ID: Final = (1 << 32) - 1
MAX_HEADER_BYTES: Final = 1 << 20

_STREAM_AND_SIZE: Final = Struct("<II")


class CallHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a call says of itself. `window_bytes` 0: no window. Further fields are ignored."""

    endpoint: str
    context: Context
    window_bytes: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CallHeader).decode


def pack_open(
    stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
) -> bytes:
    """stream u32, head length u32, head, payload. Raises `TooLarge`."""
    head = _encode(CallHeader(endpoint, context, window_bytes))
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES or len(head) > MAX_HEADER_BYTES:
        raise TooLarge(f"a request of {size + len(head)} bytes, limit {MAX_PAYLOAD_BYTES}")
    fixed = _STREAM_AND_SIZE.pack(stream, len(head))
    return b"".join((HEADER.pack(8 + len(head) + size, OPEN, 0, 0), fixed, head, payload))


def unpack_open(body: bytes) -> tuple[int, CallHeader, bytes]:
    """Stream, head, payload. Raises `ProtocolError` or `msgspec.DecodeError`."""
    if len(body) < _STREAM_AND_SIZE.size:
        raise ProtocolError("an opening without a head")
    stream, size = _STREAM_AND_SIZE.unpack_from(body)
    end = _STREAM_AND_SIZE.size + size
    if end > len(body):
        raise ProtocolError("an opening shorter than its head")
    return stream, _decode(body[_STREAM_AND_SIZE.size : end]), body[end:]


def pack_cancel(stream: int) -> bytes:
    """The caller left."""
    return pack_frame(CANCEL, UINT32.pack(stream))


def unpack_cancel(body: bytes) -> int:
    """The stream that was left."""
    if len(body) != UINT32.size:
        raise ProtocolError("a cancel of the wrong size")
    return int(UINT32.unpack(body)[0])


def pack_credit(stream: int, size_bytes: int) -> bytes:
    """The consumer took `size_bytes` more."""
    return pack_frame(CREDIT, _STREAM_AND_SIZE.pack(stream, size_bytes))


def pack_stream_query(stream: int) -> bytes:
    """Is the stream still open?"""
    return pack_credit(stream, 0)


def unpack_credit(body: bytes) -> tuple[int, int]:
    """Stream and bytes."""
    if len(body) != _STREAM_AND_SIZE.size:
        raise ProtocolError("a credit of the wrong size")
    stream, size = _STREAM_AND_SIZE.unpack(body)
    return stream, size

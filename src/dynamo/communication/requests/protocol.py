"""The frames of the request plane.

    client -> server: HELLO, OPEN, CANCEL, CREDIT, SHARE, RELEASE
    server -> client: HELLO, DATA, GOAWAY

Stream ids grow from 1 on each connection and are never reused, so that late items of a cancelled
call match no stream. A CREDIT of SILENCE_QUERY_BYTES asks whether a stream is open. If it is not,
the server sends the end of the stream again, after all earlier items.

A SHARE carries a payload that the OPENs after it name by number. The client releases the number
when the last of these streams has ended. The number may then be shared again.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from dynamo.communication.frames import HEADER, MAX_PAYLOAD_BYTES, pack_frame
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError, TooLarge

PLANE: Final = "requests"
OPEN: Final = 2
DATA: Final = 3
CANCEL: Final = 4
CREDIT: Final = 5
GOAWAY: Final = 6
SHARE: Final = 7
RELEASE: Final = 8

SILENCE_QUERY_BYTES: Final = 0
"""A CREDIT of this size asks whether the stream is open."""

MAX_STREAM_ID: Final = (1 << 32) - 1
MAX_HEADER_BYTES: Final = 1 << 20

_STREAM_AND_SIZE: Final = Struct("<II")
_SHARED_NUMBER: Final = Struct("<Q")


class CallHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a call. `window_bytes` 0 means no flow window, `shared` 0 no shared payload.

    Further fields are ignored.
    """

    endpoint: str
    context: Context
    window_bytes: int = 0
    shared: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CallHeader).decode


def pack_open(
    stream: int,
    endpoint: str,
    context: Context,
    window_bytes: int,
    payload: bytes,
    shared: int = 0,
) -> bytes:
    """Encode OPEN: stream u32, header length u32, header, payload. Raises `TooLarge`."""
    header = _encode(CallHeader(endpoint, context, window_bytes, shared))
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES or len(header) > MAX_HEADER_BYTES:
        raise TooLarge(f"a request of {size + len(header)} bytes, limit {MAX_PAYLOAD_BYTES}")
    prefix = _STREAM_AND_SIZE.pack(stream, len(header))
    return b"".join((HEADER.pack(8 + len(header) + size, OPEN, 0, 0), prefix, header, payload))


def unpack_open(body: bytes) -> tuple[int, CallHeader, bytes]:
    """Return stream, header and payload. Raises `ProtocolError` or `msgspec.DecodeError`."""
    if len(body) < _STREAM_AND_SIZE.size:
        raise ProtocolError("an OPEN frame has no header")
    stream, size = _STREAM_AND_SIZE.unpack_from(body)
    end = _STREAM_AND_SIZE.size + size
    if end > len(body):
        raise ProtocolError("an OPEN frame is shorter than its header")
    return stream, _decode(body[_STREAM_AND_SIZE.size : end]), body[end:]


def pack_share(number: int, payload: bytes) -> bytes:
    """Encode SHARE: number u64, payload. Raises `TooLarge`."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise TooLarge(f"a request of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
    return pack_frame(SHARE, _SHARED_NUMBER.pack(number) + payload)


def pack_release(number: int) -> bytes:
    """Encode that no further OPEN names the shared payload `number`."""
    return pack_frame(RELEASE, _SHARED_NUMBER.pack(number))


def unpack_share(body: bytes) -> tuple[int, bytes]:
    """Return number and payload of SHARE or RELEASE. Raises `ProtocolError`."""
    size = _SHARED_NUMBER.size
    if len(body) < size:
        raise ProtocolError("the frame has no number of a shared payload")
    return int(_SHARED_NUMBER.unpack_from(body)[0]), body[size:]


def pack_credit(stream: int, size_bytes: int) -> bytes:
    """Encode that the caller consumed `size_bytes` more, or SILENCE_QUERY_BYTES."""
    return pack_frame(CREDIT, _STREAM_AND_SIZE.pack(stream, size_bytes))


def unpack_credit(body: bytes) -> tuple[int, int]:
    """Return stream and bytes. Raises `ProtocolError`."""
    if len(body) != _STREAM_AND_SIZE.size:
        raise ProtocolError("a CREDIT frame has the wrong size")
    stream, size = _STREAM_AND_SIZE.unpack(body)
    return stream, size

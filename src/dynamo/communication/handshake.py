"""The first frame on every connection: who speaks, and which protocol. N talks to N-1."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.communication.frames import HELLO, pack_frame
from dynamo.core.errors import ProtocolError

VERSION: Final = 1
OLDEST: Final = 1
HANDSHAKE_S: Final = 5.0
MAGIC: Final = "dynamo"


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """`version` and `oldest`: the range that the speaker understands. `incarnation`: the
    listener's, new for every process. `secret` is reserved. Unknown fields are ignored."""

    plane: str
    magic: str = ""
    version: int = VERSION
    oldest: int = OLDEST
    incarnation: str = ""
    secret: str = ""


_decode = msgspec.msgpack.Decoder(Hello).decode


def pack_hello(plane: str, incarnation: str = "") -> bytes:
    """The frame that both ends send first."""
    return pack_frame(HELLO, msgspec.msgpack.encode(Hello(plane, MAGIC, incarnation=incarnation)))


def read_hello(kind: int, body: bytes, plane: str) -> tuple[Hello, int]:
    """The peer's hello and the version to speak. Raises `ProtocolError`."""
    if kind != HELLO:
        raise ProtocolError(f"the first frame is of kind {kind}, not a hello")
    try:
        hello = _decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"unreadable hello: {error}") from error
    if hello.magic != MAGIC or hello.plane != plane:
        raise ProtocolError(f"a hello of plane {hello.plane!r} at a {plane!r} port")
    agreed = min(VERSION, hello.version)
    if agreed < max(OLDEST, hello.oldest):
        raise ProtocolError(
            f"the peer speaks protocol {hello.oldest} to {hello.version}, "
            f"this process {OLDEST} to {VERSION}"
        )
    return hello, agreed

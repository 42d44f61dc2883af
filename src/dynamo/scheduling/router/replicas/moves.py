"""What routers tell each other, once a turn of the loop, in msgpack: who was sent where, whose
first token came, who left."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Routed(msgspec.Struct, frozen=True, array_like=True, tag="routed"):
    """A request was sent to a worker. `name`: unique per publisher; `hashes`: of the prompt's full
    blocks, packed u64; `emitted`: tokens so far; `first`: its first token is out."""

    name: str
    worker: str
    prompt_tokens: int
    new_tokens: int
    hashes: bytes = b""
    emitted: int = 0
    first: bool = False


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """The first token came."""

    name: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The request left its worker, answered or not."""

    name: str
    emitted: int


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How many tokens have come, of those where it changed."""

    emitted: dict[str, int]


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget all that this publisher said: the present state follows."""


Move = Routed | FirstToken | Ended | Progress | Reset

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Move]).decode


def encode_moves(moves: Sequence[Move]) -> bytes:
    """One event."""
    return _encode(moves)


def decode_moves(payload: bytes) -> list[Move]:
    """What `encode_moves` wrote; an empty payload holds none. Raises `msgspec.DecodeError`."""
    return _decode(payload) if payload else []

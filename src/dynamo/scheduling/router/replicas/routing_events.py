"""What routers tell each other, once a turn of the loop, in msgpack: who was sent where, whose
first token came, who left."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RequestRouted(msgspec.Struct, frozen=True, array_like=True, tag="routed"):
    """A request was sent to a worker. `name`: unique per publisher; `hashes`: of the prompt's full
    blocks, packed u64; `emitted`: tokens so far; `first`: its first token is out."""

    request_key: str
    worker: str
    prompt_tokens: int
    new_tokens: int
    hashes: bytes = b""
    emitted: int = 0
    first_token_emitted: bool = False


class FirstTokenEmitted(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """The first token came."""

    request_key: str


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The request left its worker, answered or not."""

    request_key: str
    emitted: int


class TokensReported(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How many tokens have come, of those where it changed."""

    emitted: dict[str, int]


class RoutingStateReset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget all that this publisher said: the present state follows."""


RoutingEvent = RequestRouted | FirstTokenEmitted | RequestEnded | TokensReported | RoutingStateReset

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RoutingEvent]).decode


def encode_routing_events(moves: Sequence[RoutingEvent]) -> bytes:
    """One event."""
    return _encode(moves)


def decode_routing_events(payload: bytes) -> list[RoutingEvent]:
    """What `encode_moves` wrote; an empty payload holds none. Raises `msgspec.DecodeError`."""
    return _decode(payload) if payload else []

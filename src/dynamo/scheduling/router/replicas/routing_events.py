"""The events that routers publish to each other, batched once per turn of the loop, in msgpack."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RequestRouted(msgspec.Struct, frozen=True, array_like=True, tag="routed"):
    """A request was sent to a worker. `request_key` is unique per publisher; `hashes` are those of
    the prompt's full blocks, packed u64; `emitted` is the number of tokens so far. `prefill`: the
    worker that computes the prompt, if another one. `load_ms`: the predicted time of its loads from
    memory tiers."""

    request_key: str
    worker: str
    prompt_tokens: int
    new_tokens: int
    hashes: bytes = b""
    emitted: int = 0
    first_token_emitted: bool = False
    prefill: str = ""
    load_ms: float = 0.0


class FirstTokenEmitted(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """A request has its first token."""

    request_key: str


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A request left its worker, answered or not."""

    request_key: str
    emitted: int


class TokensReported(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The number of emitted tokens by request key, where it changed."""

    emitted: dict[str, int]


class RoutingStateReset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """All earlier events of this publisher are void; its current state follows."""


RoutingEvent = RequestRouted | FirstTokenEmitted | RequestEnded | TokensReported | RoutingStateReset

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RoutingEvent]).decode


def encode_routing_events(events: Sequence[RoutingEvent]) -> bytes:
    """Encode a batch of events."""
    return _encode(events)


def decode_routing_events(payload: bytes) -> list[RoutingEvent]:
    """Decode a batch; an empty payload is an empty batch. Raises `msgspec.DecodeError`."""
    return _decode(payload) if payload else []

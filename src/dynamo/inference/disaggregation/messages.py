"""Messages of the endpoint `prefill`, and their form on the wire.

A call carries a `PrefillRequest` in msgpack. Its answers are one byte of kind, then msgpack:

    b"q" tokens in front | b"b" [first block, block ids, generations] | b"f" FirstToken
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ProtocolError
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import FirstToken, PrefillSink

PREFILL_ENDPOINT = "prefill"
_Count = Annotated[int, msgspec.Meta(ge=0)]
TRANSFER_KEY = "transfer"
"""Capability of an instance: the `RegionDescriptor` of each of its data-parallel ranks."""


class PrefillRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt to compute on a data-parallel rank. The caller has the first `have_blocks`."""

    request: GenerateRequest
    have_blocks: _Count = 0
    rank: _Count = 0


_encode = msgspec.msgpack.Encoder().encode
encode_prefill_request: Callable[[PrefillRequest], bytes] = _encode
decode_prefill_request = msgspec.msgpack.Decoder(PrefillRequest).decode
"""Decodes the result of `encode_prefill_request`. Raises `msgspec.DecodeError`."""
_decode_count = msgspec.msgpack.Decoder(_Count).decode
_decode_blocks = msgspec.msgpack.Decoder(tuple[_Count, list[_Count], list[_Count]]).decode
_decode_first_token = msgspec.msgpack.Decoder(FirstToken).decode


class PrefillEncoder(PrefillSink):
    """Encodes each call and passes the payload to `send`, at the prefill worker's end."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self._send = send

    def on_queued(self, tokens: int) -> None:
        self._send(b"q" + _encode(tokens))

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        return self._send(b"b" + _encode((first, block_ids, generations)))

    def on_first_token(self, first: FirstToken) -> bool:
        return self._send(b"f" + _encode(first))


def receive_prefill(sink: PrefillSink, payload: bytes) -> bool:
    """Decode a payload at the caller's end and call `sink`. Returns False when the sink has enough.
    Raises `ProtocolError`."""
    kind, body = payload[:1], payload[1:]
    try:
        if kind == b"b":
            first, block_ids, generations = _decode_blocks(body)
            if len(block_ids) == len(generations):
                return sink.on_blocks(first, block_ids, generations)
            raise ProtocolError(
                f"a prefill worker sent {len(generations)} generations of {len(block_ids)} blocks"
            )
        if kind == b"q":
            sink.on_queued(_decode_count(body))
            return True
        if kind == b"f":
            return sink.on_first_token(_decode_first_token(body))
    except DECODE_ERRORS as error:
        raise ProtocolError(f"a prefill worker sent a wrong message: {error}") from error
    raise ProtocolError(f"a prefill worker sent a message of the unknown kind {kind!r}")

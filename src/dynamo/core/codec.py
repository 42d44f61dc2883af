"""Wire format of a `Reply`: one byte of kind, then the value.

    b"b" msgpack Started | b"t" packed u32 ids | b"x" msgpack [packed ids, logprobs]
    b"s" msgpack TextPart | b"f" msgpack Finish

`ReplyEncoder` is a `Reply` that encodes each call. `ReplyDecoder` decodes payloads into calls of a
`Reply`. Both ends of every request plane therefore have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct, unpack_from

import msgspec
from msgspec.structs import replace

from dynamo.core.fast_path import FAST_PATH_AFTER_PAYLOADS, SendToken
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.shared_payload import ReceivedPayload, SharedPayload
from dynamo.core.text import TextPart
from dynamo.core.values import Finish, GenerateRequest, RequestGroup, Started, TokenLogprobs

_pack_single_token = Struct("<cI").pack
_unpack_single_token = Struct("<xI").unpack
_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(Started).decode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_part = msgspec.msgpack.Decoder(TextPart).decode
_decode_ids_with_logprobs = msgspec.msgpack.Decoder(tuple[bytes, list[TokenLogprobs]]).decode

encode_request: Callable[[GenerateRequest], bytes] = _encode
decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode
"""Decodes the result of `encode_request`. Raises `msgspec.DecodeError`."""


class ChoiceRequest(msgspec.Struct, frozen=True, array_like=True):
    """The part of a `GenerateRequest` in which the choices of one prompt differ."""

    request_id: str
    choice: int = 0
    rank: int | None = None
    priority: int = 0
    prefill: str = ""


_decode_choice = msgspec.msgpack.Decoder(ChoiceRequest).decode


def encode_choice(request: GenerateRequest) -> bytes:
    """Encode the part of `request` that its group does not share."""
    return _encode(
        ChoiceRequest(
            request.request_id, request.choice, request.rank, request.priority, request.prefill
        )
    )


def share_group(group: RequestGroup) -> SharedPayload:
    """Return the payload that the choices of `group` share. The first call encodes it."""
    payload = group.shared_payload
    if payload is None:
        payload = group.shared_payload = SharedPayload(encode_request(group.base))
    return payload


def decode_shared_request(payload: bytes, shared: ReceivedPayload) -> GenerateRequest:
    """Decode the result of `encode_choice`. The shared part is decoded for the first choice only.

    Raises `msgspec.DecodeError`.
    """
    base: GenerateRequest | None = shared.value
    if base is None:
        base = decode_request(shared.payload)
        base = shared.value = replace(base, group=RequestGroup(base))
        shared.payload = b""
    choice = _decode_choice(payload)
    return replace(
        base,
        request_id=choice.request_id,
        choice=choice.choice,
        rank=choice.rank,
        priority=choice.priority,
        prefill=choice.prefill,
    )


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    return Struct(f"<{len(ids)}I").pack(*ids)


def unpack_ids(packed: bytes | memoryview) -> tuple[int, ...]:
    """Unpack the result of `pack_ids`."""
    return unpack_from(f"<{len(packed) // 4}I", packed)


class ReplyEncoder(Reply):
    """Encodes every call and passes the payload to `send` (the worker's end).

    `send` returns False when the caller is gone. `worker` is the instance id to put into `Started`,
    since an engine does not know it.
    """

    __slots__ = ("_send", "_worker")

    def __init__(self, send: Callable[[bytes], bool], worker: str = "") -> None:
        self._send = send
        self._worker = worker

    def begin(self, started: Started) -> None:
        if self._worker:
            started = msgspec.structs.replace(started, worker=self._worker)
        self._send(b"b" + _encode(started))

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        send = self._send  # calling a slot directly is slower in CPython 3.11
        if logprobs is not None:
            return send(b"x" + _encode((pack_ids(ids), logprobs)))
        if len(ids) == 1:
            return send(_pack_single_token(b"t", ids[0]))
        return send(b"t" + pack_ids(ids))

    def text(self, part: TextPart) -> bool:
        return self._send(b"s" + _encode(part))

    def finish(self, end: Finish) -> None:
        self._send(b"f" + _encode(end))


class ReplyDecoder:
    """Decodes payloads and calls the `Reply` (the caller's end).

    `complete`: a finish came, or the reply had enough. A stream that ends earlier has failed.
    """

    __slots__ = ("_reply", "_send_token", "_token_payloads", "complete")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._token_payloads = 0
        self._send_token: SendToken | None = None
        self.complete = False

    def feed(self, payload: bytes) -> bool:
        """Decode one payload. Returns False when the reply has enough.

        Raises `ValueError` for an unknown kind.
        """
        if payload[0] == 0x74:
            send_token = self._send_token
            if send_token is not None and len(payload) == 5:
                sent = send_token(_unpack_single_token(payload)[0])
                if sent:
                    return True
                if sent is not None:
                    return self._stop()
            return self._forward_tokens(unpack_ids(memoryview(payload)[1:])) or self._stop()
        kind, body = payload[:1], payload[1:]
        if kind == b"b":
            self._reply.begin(_decode_started(body))
        elif kind == b"f":
            self._reply.finish(_decode_finish(body))
            self.complete = True
        elif kind == b"x":
            packed, logprobs = _decode_ids_with_logprobs(body)
            return self._reply.tokens(unpack_ids(packed), logprobs) or self._stop()
        elif kind == b"s":
            return self._reply.text(_decode_part(body)) or self._stop()
        else:
            raise ValueError(f"unknown reply item {kind!r}")
        return True

    def _forward_tokens(self, ids: Sequence[int]) -> bool:
        wants_more = self._reply.tokens(ids)
        self._token_payloads += 1
        if self._token_payloads == FAST_PATH_AFTER_PAYLOADS and wants_more:
            self._send_token = self._reply.open_fast_path()
        return wants_more

    def _stop(self) -> bool:
        self.complete = True
        return False

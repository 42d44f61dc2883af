"""How a Reply crosses a wire: one byte of kind, then the value.

    b"b" msgpack Started | b"t" packed u32 ids | b"x" msgpack [packed ids, logprobs]
    b"f" msgpack Finish

`ReplyWriter` is a Reply that writes; `ReplyReader` reads into a Reply. So the same contract stands
at both ends of any plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct, unpack_from

import msgspec

from dynamo.core.fast_path import FAST_PATH_AFTER_PAYLOADS, SendToken
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, GenerateRequest, Started, TokenLogprobs

_pack_single_token = Struct("<cI").pack
_unpack_single_token = Struct("<xI").unpack
_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(Started).decode
_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_decode_extra = msgspec.msgpack.Decoder(tuple[bytes, list[TokenLogprobs]]).decode
_decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return Struct(f"<{len(ids)}I").pack(*ids)


def unpack_ids(packed: bytes | memoryview) -> tuple[int, ...]:
    """The ids that `pack_ids` packed."""
    return unpack_from(f"<{len(packed) // 4}I", packed)


def encode_request(request: GenerateRequest) -> bytes:
    """A request as msgpack bytes."""
    return _encode(request)


def decode_request(payload: bytes | memoryview) -> GenerateRequest:
    """The request that `encode_request` wrote. Raises msgspec.DecodeError."""
    return _decode_request(payload)


class ReplyEncoder(Reply):
    """A Reply at the worker's end: encodes every call onto `send` (False = the caller is gone).

    `worker`: the instance that answers; an engine does not know its name.
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

    def finish(self, end: Finish) -> None:
        self._send(b"f" + _encode(end))


class ReplyDecoder:
    """The caller's end: `item` takes one payload and calls the Reply. False = enough.

    `complete`: the answer came to its end (a finish, or enough); a stream that ends before is a
    failure.
    """

    __slots__ = ("_reply", "_send_token", "_token_payloads", "complete")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._token_payloads = 0
        self._send_token: SendToken | None = None
        self.complete = False

    def feed(self, payload: bytes) -> bool:
        """Feed one payload. Raises ValueError on an unknown kind."""
        if payload[0] == 0x74:
            shortcut = self._send_token
            if shortcut is not None and len(payload) == 5:
                going_on = shortcut(_unpack_single_token(payload)[0])
                if going_on:
                    return True
                if going_on is not None:
                    return self._stop()
            return self._forward_tokens(unpack_ids(memoryview(payload)[1:])) or self._stop()
        kind, body = payload[:1], payload[1:]
        if kind == b"b":
            self._reply.begin(_decode_started(body))
        elif kind == b"f":
            self._reply.finish(_decode_finish(body))
            self.complete = True
        elif kind == b"x":
            packed, extra = _decode_extra(body)
            return self._reply.tokens(unpack_ids(packed), extra) or self._stop()
        else:
            raise ValueError(f"unknown reply item {kind!r}")
        return True

    def _forward_tokens(self, ids: Sequence[int]) -> bool:
        going_on = self._reply.tokens(ids)
        self._token_payloads += 1
        if self._token_payloads == FAST_PATH_AFTER_PAYLOADS and going_on:
            self._send_token = self._reply.open_fast_path()
        return going_on

    def _stop(self) -> bool:
        self.complete = True
        return False

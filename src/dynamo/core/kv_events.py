"""KV events as they travel: a msgpack list of KvEvent, one list a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from dynamo.core.values import BlocksStored, KvEvent

KV_EVENTS: Final = "kv_events"
"""Last part of the subject."""

DUMP_BLOCKS: Final = 4096

encode_changes = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[KvEvent, ...]).decode


def decode_changes(payload: bytes) -> Sequence[KvEvent]:
    """What `encode_changes` wrote; b"" is nothing. Raises msgspec.DecodeError."""
    return _decode(payload) if payload else ()


def dump_payloads(changes: Sequence[KvEvent]) -> Sequence[bytes]:
    """A state in payloads of some thousand blocks, so that nobody decodes it at a stretch."""
    return tuple(encode_changes(part) for part in _parts(changes))


def _parts(changes: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    part: list[KvEvent] = []
    size = 0
    for change in changes:
        part.append(change)
        size += len(change.hashes) if isinstance(change, BlocksStored) else 1
        if size >= DUMP_BLOCKS:
            yield part
            part, size = [], 0
    if part:
        yield part

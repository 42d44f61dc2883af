"""KV events as they travel: a msgpack list of KvEvent, one list a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from dynamo.core.values import BlocksCleared, KvEvent

KV_EVENTS_SUBJECT: Final = "kv_events"
"""Last part of the subject."""

MAX_BLOCKS_PER_PAYLOAD: Final = 1024

encode_kv_events = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[KvEvent, ...]).decode


def worker_name(instance: str, rank: int | None = None) -> str:
    """How publishers, indexes and routers call a worker, or a data-parallel rank of it."""
    return instance if rank is None else f"{instance}/{rank}"


def decode_kv_events(payload: bytes) -> Sequence[KvEvent]:
    """What `encode_changes` wrote; b"" is nothing. Raises msgspec.DecodeError."""
    return _decode(payload) if payload else ()


def encode_kv_event_payloads(changes: Sequence[KvEvent]) -> Sequence[bytes]:
    """The same in payloads of about a thousand blocks each, far below what a frame may hold."""
    return tuple(encode_kv_events(part) for part in _split_by_blocks(changes))


def _split_by_blocks(changes: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    part: list[KvEvent] = []
    size = 0
    for change in changes:
        part.append(change)
        size += len(change.hashes) if not isinstance(change, BlocksCleared) else 1
        if size >= MAX_BLOCKS_PER_PAYLOAD:
            yield part
            part, size = [], 0
    if part:
        yield part

"""Wire format of KV events: a msgpack list of `KvEvent` for each engine step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from dynamo.core.values import BlocksCleared, KvEvent

KV_EVENTS_SUBJECT: Final = "kv_events"
"""Last part of the event subject."""
LOAD_METRICS_SUBJECT: Final = "load_metrics"

MAX_BLOCKS_PER_PAYLOAD: Final = 1024

encode_kv_events = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[KvEvent, ...]).decode


def model_subject(component: str, kind: str, model: str = "") -> str:
    """Return the event subject of the workers of a model below `component`, which is
    "namespace.component"; without `model`, the prefix of those of all models.

    The model stands between two kinds, since former routers subscribe to the prefix and compare the
    end.
    """
    subject = f"{component}.{kind}"
    return f"{subject}/{quote(model, safe='')}/{kind}" if model else subject


def subject_model(subject: str) -> str:
    """Return the model in an event subject, "" if there is none."""
    _, slash, rest = subject.partition("/")
    return unquote(rest.rpartition("/")[0]) if slash else ""


def worker_name(instance: str, rank: int | None = None) -> str:
    """Return the name of a worker, or of one data-parallel rank of it, in indexes and routers."""
    return instance if rank is None else f"{instance}/{rank}"


def split_worker_name(name: str) -> tuple[str, int | None]:
    """Return the instance and the rank of a `worker_name`."""
    instance, _, rank = name.partition("/")
    return instance, int(rank) if rank.isdecimal() else None


def decode_kv_events(payload: bytes) -> Sequence[KvEvent]:
    """Decode the result of `encode_kv_events`; b"" is no event. Raises `msgspec.DecodeError`."""
    return _decode(payload) if payload else ()


def encode_kv_event_payloads(events: Sequence[KvEvent]) -> Sequence[bytes]:
    """Encode events in payloads of about `MAX_BLOCKS_PER_PAYLOAD` blocks, below a frame's limit."""
    return tuple(encode_kv_events(batch) for batch in _split_by_blocks(events))


def _split_by_blocks(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    batch: list[KvEvent] = []
    blocks = 0
    for event in events:
        batch.append(event)
        blocks += len(event.hashes) if not isinstance(event, BlocksCleared) else 1
        if blocks >= MAX_BLOCKS_PER_PAYLOAD:
            yield batch
            batch, blocks = [], 0
    if batch:
        yield batch

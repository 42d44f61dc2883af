"""KV events of foreign engines, read from their own formats.

- vLLM 0.20 to 0.33 and SGLang publish msgpack batches `[ts, events, rank]` or maps with these keys.
  An event is an array whose first item is its type (vLLM up to 0.23, SGLang 0.4) or a map with the
  key "type".
- TensorRT-LLM is polled for dicts `{"event_id", "window_size", "data": {"type", ...}}`.

Nothing here raises for bytes or values of a publisher: what cannot be read is counted.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.core.errors import DECODE_ERRORS

BlockKey = int | bytes
"""The engine's name of a block. SGLang's are signed, and vLLM's may be bytes."""

MAIN_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of vLLM cache groups whose blocks decide how much of a prompt is cached."""
DEVICE_MEDIA: Final = frozenset({None, "GPU"})
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")


class EngineBlocksStored(msgspec.Struct, frozen=True):
    """A chain of full blocks was stored below `parent` (None: the root).

    `tokens`: packed u32 of all blocks, `block_tokens` for each. `salt` names the root if `parent`
    is None. `foreign_from`: index of the first block whose content depends on more than salt and
    tokens (an adapter, a medium), or the number of blocks. `is_main`: whether the cache group is
    main attention, or None where the event does not tell.
    """

    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    tokens: bytes
    block_tokens: int
    salt: str = ""
    foreign_from: int = 0
    group: int | None = None
    is_main: bool | None = None


class EngineBlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks were removed from the device."""

    keys: tuple[BlockKey, ...]
    group: int | None = None


class EngineBlocksCleared(msgspec.Struct, frozen=True):
    """The engine's prefix cache was emptied."""


EngineEvent = EngineBlocksStored | EngineBlocksRemoved | EngineBlocksCleared


class EventBatch(msgspec.Struct):
    """The events of one engine step. `skipped` counts the others by reason. With `damaged` an event
    of a known type could not be read, so that blocks may be missing or be held for ever."""

    events: list[EngineEvent]
    skipped: Counter[str]
    damaged: bool = False


class _UnreadableEventError(ValueError):
    """An event of a known type has not the fields that it must have."""


def decode_batch(payload: bytes) -> EventBatch:
    """Read one payload of vLLM or SGLang."""
    try:
        content = msgspec.msgpack.decode(payload)
    except DECODE_ERRORS:
        return _damaged_batch()
    if isinstance(content, dict):
        events = content.get("events")
    else:
        events = content[1] if isinstance(content, list) and len(content) > 1 else None
    return read_events(events) if isinstance(events, list) else _damaged_batch()


def read_events(events: Sequence[Any]) -> EventBatch:
    """Read events of vLLM or SGLang: arrays or maps."""
    batch = EventBatch([], Counter())
    for event in events:
        if isinstance(event, list) and event:
            kind, values = event[0], event[1:]
            names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
            fields: Mapping[str, Any] = dict(zip(names, values, strict=False))
        elif isinstance(event, dict):
            kind, fields = event.get("type"), event
        else:
            kind, fields = None, {}
        _add_event(batch, kind, fields)
    return batch


class PolledEventReader:
    """Reads the events of TensorRT-LLM, whose blocks have `block_tokens`.

    Blocks in host memory count as held: `cached_tokens` has them, too. Windows other than the
    largest are sliding ones, and are skipped. `capacity_blocks`: blocks of a rank on the device, 0
    until an event tells.
    """

    def __init__(self, block_tokens: int) -> None:
        self.capacity_blocks = 0
        self._block_tokens = block_tokens
        self._full_window = 0
        self._next_ids: dict[int, int] = {}

    def read(self, events: Sequence[Any]) -> dict[int, EventBatch]:
        """Read the result of one poll. Returns batches by attention data-parallel rank. Missing
        event ids make a batch damaged."""
        batches: dict[int, EventBatch] = {}
        for item in events:
            event: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
            rank = event.get("attention_dp_rank") or 0
            batch = batches.setdefault(rank, EventBatch([], Counter()))
            number, window = event.get("event_id"), event.get("window_size")
            if type(number) is int:
                batch.damaged |= number != self._next_ids.get(rank, number)
                self._next_ids[rank] = number + 1
            if type(window) is int:
                self._full_window = max(self._full_window, window)
            if window is not None and window != self._full_window:
                batch.skipped["other_group"] += 1
            else:
                self._add(batch, event.get("data"))
        return batches

    def _add(self, batch: EventBatch, data: object) -> None:
        if not isinstance(data, Mapping):
            batch.skipped["malformed"] += 1
            batch.damaged = True
        elif data.get("type") == "stored":
            _add_polled_blocks(batch, data, self._block_tokens)
        elif data.get("type") == "removed":
            _add_event(batch, "BlockRemoved", data)
        elif data.get("type") == "created":
            device, *_ = data.get("num_blocks_per_cache_level") or (0,)
            self.capacity_blocks = device
        elif data.get("type") != "updated":
            batch.skipped["unknown"] += 1


def _add_event(batch: EventBatch, kind: object, fields: Mapping[str, Any]) -> None:
    try:
        if kind in {"BlockStored", "BlockRemoved"} and fields.get("medium") not in DEVICE_MEDIA:
            batch.skipped["other_medium"] += 1
        elif kind == "BlockStored":
            batch.events.append(_read_stored(fields))
        elif kind == "BlockRemoved":
            keys = _read_keys(fields.get("block_hashes"))
            batch.events.append(EngineBlocksRemoved(keys, _read_group(fields)))
        elif kind == "AllBlocksCleared":
            batch.events.append(EngineBlocksCleared())
        else:
            batch.skipped["unknown"] += 1
    except (_UnreadableEventError, OverflowError, TypeError, ValueError):
        batch.skipped["malformed"] += 1
        batch.damaged = True


def _read_stored(fields: Mapping[str, Any]) -> EngineBlocksStored:
    keys = _read_keys(fields.get("block_hashes"))
    ids, size, parent = fields.get("token_ids"), fields.get("block_size"), None
    if fields.get("parent_block_hash") is not None:
        (parent,) = _read_keys([fields["parent_block_hash"]])
    if not isinstance(ids, list) or type(size) is not int or size <= 0:
        raise _UnreadableEventError
    if len(ids) != size * len(keys):
        raise _UnreadableEventError
    salt, foreign_from = _read_namespace(fields, len(keys))
    kind = fields.get("kv_cache_spec_kind")
    return EngineBlocksStored(
        keys=keys,
        parent=parent,
        tokens=array("I", ids).tobytes(),
        block_tokens=size,
        salt=salt,
        foreign_from=foreign_from,
        group=_read_group(fields),
        is_main=None if kind is None else kind in MAIN_ATTENTION,
    )


def _read_keys(keys: object) -> tuple[BlockKey, ...]:
    if not isinstance(keys, list) or not all(type(key) in {int, bytes} for key in keys):
        raise _UnreadableEventError
    return tuple(keys)


def _read_group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    if group is not None and type(group) is not int:
        raise _UnreadableEventError
    return group


def _read_namespace(fields: Mapping[str, Any], count: int) -> tuple[str, int]:
    """Return the salt of a first block and `foreign_from`.

    SGLang has the salt in `cache_salt`. vLLM lists the adapter, pairs for media and the salt in
    `extra_keys`, untagged; the salt in the first block of a chain only.
    """
    adapter = fields.get("lora_name")
    salt = fields.get("cache_salt")
    foreign_from = count if adapter is None or salt else 0
    extra = fields.get("extra_keys")
    if not isinstance(extra, list):
        return salt if isinstance(salt, str) else "", foreign_from
    for index, block_keys in enumerate(extra[:count]):
        texts = list(block_keys or ())
        if adapter is not None and adapter in texts:
            texts.remove(adapter)
        if index == 0 and texts and isinstance(texts[-1], str):
            salt = texts[-1]
            foreign_from = count
            break
        if texts:
            foreign_from = min(foreign_from, index)
    return salt if isinstance(salt, str) else "", foreign_from


def _add_polled_blocks(batch: EventBatch, data: Mapping[str, Any], block_tokens: int) -> None:
    try:
        keys: list[Any] = []
        ids, foreign_from = array("I"), None
        for block in data["blocks"]:
            tokens = block["tokens"]
            if len(tokens) != block_tokens:
                batch.skipped["partial"] += 1
                break
            if foreign_from is None and any(token.get("token_extra_id") for token in tokens):
                foreign_from = len(keys)
            ids.extend(token["token_id"] for token in tokens)
            keys.append(block["block_hash"])
        if not keys:
            return
        parent = data.get("parent_hash")
        batch.events.append(
            EngineBlocksStored(
                keys=_read_keys(keys),
                parent=None if parent is None else _read_keys([parent])[0],
                tokens=ids.tobytes(),
                block_tokens=block_tokens,
                foreign_from=len(keys) if foreign_from is None else foreign_from,
            )
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        batch.skipped["malformed"] += 1
        batch.damaged = True


def _damaged_batch() -> EventBatch:
    return EventBatch([], Counter(malformed=1), damaged=True)

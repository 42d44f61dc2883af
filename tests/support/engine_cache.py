"""The prefix cache of a foreign engine, simplified, with the events of several engines and versions.

Blocks are physical: the same content may be in several of them. The least recently used blocks are
evicted first, tails before heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec

Stored = dict[str, Any]


class Style:
    """How an engine names blocks and writes events. `salted`: its hashes depend on the salt."""

    def __init__(
        self,
        key: Callable[[bytes], Any],
        event: Callable[[str, Stored], Any],
        batch: Callable[[list[Any]], Any] = lambda events: [time.time(), events, 0],
        removes_last_copy_only: bool = False,
    ) -> None:
        self.key, self.event, self.batch = key, event, batch
        self.removes_last_copy_only = removes_last_copy_only


def _vllm_map(kind: str, fields: Stored) -> Any:
    if kind == "BlockStored":
        fields = {
            **fields,
            "lora_id": None,
            "lora_name": None,
            "medium": "GPU",
            "extra_keys": _extra_keys(fields),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        del fields["salt"]
    elif kind == "BlockRemoved":
        fields = {**fields, "medium": "GPU", "group_idx": 0}
    return {"type": kind, **fields}


def _vllm_array(kind: str, fields: Stored) -> Any:
    named = _vllm_map(kind, fields)
    named.pop("kv_cache_spec_kind", None)
    if kind == "BlockStored":
        order = (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
            *("medium", "lora_name", "extra_keys", "group_idx"),
        )
        return [kind, *(named[name] for name in order)]
    return [kind, *(named[name] for name in ("block_hashes", "medium", "group_idx") if fields)]


def _extra_keys(fields: Stored) -> Any:
    if fields["salt"] and fields["parent_block_hash"] is None:
        return [[fields["salt"]], *[None] * (len(fields["block_hashes"]) - 1)]
    return None


def _sglang_map(kind: str, fields: Stored) -> Any:
    event = {"type": kind, **fields}
    if kind == "BlockStored":
        event["cache_salt"] = event.pop("salt") or None
        event |= {"medium": "GPU", "lora_id": None, "session_id": None, "lora_name": None}
    return event


def _sglang_array(kind: str, fields: Stored) -> Any:
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
    return [kind, *(fields[name] for name in names if name in fields), None][: 6 if fields else 1]


def _signed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


STYLES = {
    "vllm_0.20": Style(lambda digest: int.from_bytes(digest[:8], "big"), _vllm_array),
    "vllm_0.32": Style(lambda digest: digest, _vllm_map),
    "vllm_map_batch": Style(
        lambda digest: digest,
        _vllm_map,
        lambda events: {"ts": time.time(), "events": events, "data_parallel_rank": 0},
    ),
    "sglang_0.5": Style(_signed, _sglang_map),
}
"""By engine and version, as far as the formats differ."""
UNSALTED_STYLES = {"sglang_0.4": Style(_signed, _sglang_array)}


class FakeEngineCache:
    """`compute` answers a prompt and returns its cached tokens. `drain` returns the events since."""

    def __init__(self, style: Style, block_tokens: int = 32, num_blocks: int = 32) -> None:
        self.style = style
        self.block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._physical: list[bytes] = []  # least recently used first
        self.contents: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        self._events: list[Any] = []

    def compute(self, ids: Sequence[int], salt: str = "", copies: int = 1) -> int:
        """Compute a prompt. With `copies` above 1 its new blocks come to be in so many blocks."""
        digests = self._digests(ids, salt)
        hits = self.cached_tokens(ids, salt) // self.block_tokens
        for digest in reversed(digests[:hits]):
            self._physical.remove(digest)
            self._physical.append(digest)
        for _ in range(copies):
            self._store(ids, salt, digests, hits)
        return hits * self.block_tokens

    def cached_tokens(self, ids: Sequence[int], salt: str = "") -> int:
        """Return the cached tokens of a prompt, without computing it."""
        digests = self._digests(ids, salt)
        usable = (len(ids) - 1) // self.block_tokens
        hits = 0
        while hits < usable and digests[hits] in self._physical:
            hits += 1
        return hits * self.block_tokens

    def evict(self, count: int) -> None:
        """Evict the least recently used blocks."""
        for _ in range(min(count, len(self._physical))):
            digest = self._physical.pop(0)
            if digest in self._physical and self.style.removes_last_copy_only:
                continue
            if digest not in self._physical:
                del self.contents[digest]
            self._add("BlockRemoved", {"block_hashes": [self.style.key(digest)]})

    def reset(self) -> None:
        """Empty the cache."""
        self._physical.clear()
        self.contents.clear()
        self._add("AllBlocksCleared", {})

    def drain(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def drain_payload(self) -> bytes:
        """Return the events since the last call as the payload of a message."""
        return msgspec.msgpack.encode(self.style.batch(self.drain()))

    def _store(self, ids: Sequence[int], salt: str, digests: list[bytes], first: int) -> None:
        size = self.block_tokens
        new = digests[first:][: self._num_blocks]
        self.evict(len(self._physical) + len(new) - self._num_blocks)
        if not new or (first and digests[first - 1] not in self._physical):
            return
        self._physical += reversed(new)
        for index, digest in enumerate(new, first + 1):
            self.contents[digest] = salt, tuple(ids[: index * size])
        stored = {
            "block_hashes": [self.style.key(digest) for digest in new],
            "parent_block_hash": self.style.key(digests[first - 1]) if first else None,
            "token_ids": list(ids[first * size : (first + len(new)) * size]),
            "block_size": size,
            "salt": salt,
        }
        self._add("BlockStored", stored)

    def _digests(self, ids: Sequence[int], salt: str) -> list[bytes]:
        digest, digests = salt.encode(), []
        for start in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            block = repr(tuple(ids[start : start + self.block_tokens])).encode()
            digest = sha256(digest + block).digest()
            digests.append(digest)
        return digests

    def _add(self, kind: str, fields: Stored) -> None:
        self._events.append(self.style.event(kind, fields))

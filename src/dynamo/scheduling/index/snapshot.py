"""An index on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.scheduling.index.kv_index import KvIndex

VERSION = 1


class _Chain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks under `parent`; worker -> how many of them it holds."""

    parent: int
    hashes: tuple[int, ...]
    holders: dict[str, int]


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    version: int
    block_tokens: int
    chains: tuple[_Chain, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Snapshot).decode


def dump_index(index: KvIndex, block_tokens: int) -> bytes:
    """All that it knows, the coldest branches first."""
    chains = tuple(
        _Chain(parent, tuple(hashes), holders) for parent, hashes, holders in index.chains()
    )
    return _encode(_Snapshot(VERSION, block_tokens, chains))


def restore_index(index: KvIndex, packed: bytes, block_tokens: int) -> int:
    """Add what `dump_index` wrote; how many blocks. Raises `ConfigError` for another version or
    block size, and for what is no snapshot."""
    try:
        found = _decode(packed)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a saved index: {error}") from error
    if found.version != VERSION or found.block_tokens != block_tokens:
        raise ConfigError(
            f"a saved index of version {found.version} and blocks of {found.block_tokens} tokens",
            hint=f"this one has version {VERSION} and blocks of {block_tokens}; delete the file",
        )
    before = index.blocks
    for chain in found.chains:
        for worker, depth in _deepest_first(chain.holders.items()):
            index.store(worker, chain.parent, chain.hashes[:depth])
    return index.blocks - before


def save(path: Path, packed: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(packed)
    fresh.replace(path)


def _deepest_first(holders: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(holders, key=lambda one: -one[1])

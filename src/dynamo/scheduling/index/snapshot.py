"""An index on disk."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.scheduling.index.kv_index import KvIndex

VERSION = 1


class _Chain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks (packed u64) under `parent`; worker -> how many of them it holds."""

    parent: int
    hashes: bytes
    holders: dict[str, int]


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    version: int
    block_tokens: int
    chains: tuple[_Chain, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Snapshot).decode


def copy_index(index: KvIndex) -> Sequence[_Chain]:
    """All that it knows at this moment, the coldest branches first."""
    return [
        _Chain(parent, array("Q", hashes).tobytes(), dict(holders))
        for parent, hashes, holders in index.chains()
    ]


def save_index(path: str, chains: Sequence[_Chain], block_tokens: int) -> None:
    """Blocking: write a copy to a file, whole or not at all."""
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    fresh.write_bytes(_encode(_Snapshot(VERSION, block_tokens, tuple(chains))))
    fresh.replace(target)


def read_index(path: str) -> bytes | None:
    """Blocking: what `save_index` wrote; None where there is no such file."""
    source = Path(path).expanduser()
    return source.read_bytes() if source.exists() else None


def restore_index(index: KvIndex, packed: bytes, block_tokens: int) -> int:
    """Add what `save_index` wrote; how many blocks. Raises `ConfigError` for another version or
    block size, and for what is no snapshot."""
    try:
        found = _decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a saved index: {error}") from error
    if found.version != VERSION or found.block_tokens != block_tokens:
        raise ConfigError(
            f"a saved index of version {found.version} and blocks of {found.block_tokens} tokens",
            hint=f"this one has version {VERSION} and blocks of {block_tokens}; delete the file",
        )
    before = index.blocks
    for chain in found.chains:
        hashes = array("Q")
        hashes.frombytes(chain.hashes)
        for worker, depth in _deepest_first(chain.holders.items()):
            index.store(worker, chain.parent, hashes[:depth])
    return index.blocks - before


def _deepest_first(holders: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(holders, key=lambda one: -one[1])

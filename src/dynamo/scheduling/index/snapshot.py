"""Snapshots of an index as bytes, in frames.

Encoding or restoring a frame takes about a millisecond, so that a process can serve in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Final

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.scheduling.index.kv_index import Chain, KvIndex

SNAPSHOT_VERSION: Final = 2
MAX_FRAME_CHAINS: Final = 64
MAX_FRAME_BLOCKS: Final = 4_096
LENGTH_BYTES: Final = 4
"""A frame is a little-endian length and msgpack: a `_SnapshotHeader`, then `_SnapshotChain`s."""


class _SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    block_tokens: int


class _SnapshotChain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks (packed u64) below `parent`, and worker -> how many of them it holds."""

    parent: int
    hashes: bytes
    holders: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_SnapshotHeader).decode
_decode_chains = msgspec.msgpack.Decoder(list[_SnapshotChain]).decode


def encode_snapshot(index: KvIndex, block_tokens: int) -> Generator[bytes, None, None]:
    """Yield frames with the state of the index at the time of the second frame.

    The index may change between frames. Only one snapshot of an index may be open at a time. Close
    a generator that is not exhausted.
    """
    yield _encode_frame(_SnapshotHeader(SNAPSHOT_VERSION, block_tokens))
    with closing(index.copy()) as chains:
        while part := _pack_chains(chains):
            yield _encode_frame(part)


def restore_snapshot(index: KvIndex, packed: bytes, block_tokens: int) -> Iterator[None]:
    """Add a snapshot to the index, one frame for each step. Raises `ConfigError` for another
    version or block size, and for other data."""
    frames = _split_frames(packed)
    try:
        header = _decode_header(next(frames, b""))
        if header != _SnapshotHeader(SNAPSHOT_VERSION, block_tokens):
            raise ConfigError(
                f"the saved index has version {header.version} and blocks of {header.block_tokens} "
                f"tokens, not version {SNAPSHOT_VERSION} and {block_tokens} tokens",
                hint="use another file, or delete this one: the index is learnt again",
            )
        yield
        for frame in frames:
            for chain in _decode_chains(frame):
                _store_chain(index, chain)
            yield
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"not a saved index: {error}",
            hint="use another file, or delete this one: the index is learnt again",
        ) from error


def _pack_chains(chains: Iterator[Chain]) -> list[_SnapshotChain]:
    part: list[_SnapshotChain] = []
    blocks = 0
    for parent, hashes, holders in islice(chains, MAX_FRAME_CHAINS):
        part.append(_SnapshotChain(parent, array("Q", hashes).tobytes(), dict(holders)))
        blocks += len(hashes)
        if blocks >= MAX_FRAME_BLOCKS:
            break
    return part


def _encode_frame(content: object) -> bytes:
    packed = _encode(content)
    return len(packed).to_bytes(LENGTH_BYTES, "little") + packed


def _split_frames(packed: bytes) -> Iterator[memoryview]:
    view, at = memoryview(packed), 0
    while at < len(view):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(view[at:start], "little")
        if at > len(view):
            raise ValueError("the last frame is incomplete")
        yield view[start:at]


def _store_chain(index: KvIndex, chain: _SnapshotChain) -> None:
    hashes = array("Q")
    hashes.frombytes(chain.hashes)
    for worker, depth in sorted(chain.holders.items(), key=lambda item: -item[1]):
        index.store(worker, chain.parent, hashes[:depth])

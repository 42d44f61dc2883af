"""An index as bytes: frames, each made or read in about a millisecond, so that whoever saves or
restores an index serves between them."""

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
"""A frame is its length, little-endian, and msgpack: first a `_Head`, then lists of `_Chain`."""


class _SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    block_tokens: int


class _SnapshotChain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks (packed u64) under `parent`; worker -> how many of them it holds."""

    parent: int
    hashes: bytes
    holders: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_SnapshotHeader).decode
_decode_chains = msgspec.msgpack.Decoder(list[_SnapshotChain]).decode


def encode_snapshot(index: KvIndex, block_tokens: int) -> Generator[bytes, None, None]:
    """Frames that hold what the index knows when the second is taken, whatever changes between
    them. One at a time of an index; close it if it is not exhausted."""
    yield _encode_frame(_SnapshotHeader(SNAPSHOT_VERSION, block_tokens))
    with closing(index.copy()) as chains:
        while part := _pack_chains(chains):
            yield _encode_frame(part)


def restore_snapshot(index: KvIndex, packed: bytes, block_tokens: int) -> Iterator[None]:
    """Add what `snapshot` made, a frame a step. Raises `ConfigError` for another version or block
    size, and for what is no snapshot."""
    frames = _split_frames(packed)
    try:
        head = _decode_header(next(frames, b""))
        _check_header(head, block_tokens)
        yield
        for frame in frames:
            for chain in _decode_chains(frame):
                _store_chain(index, chain)
            yield
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"not a saved index: {error}",
            hint="name another file; a broken index can be deleted, it is learnt anew",
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
            raise ValueError("it ends early")
        yield view[start:at]


def _check_header(head: _SnapshotHeader, block_tokens: int) -> None:
    if head != _SnapshotHeader(SNAPSHOT_VERSION, block_tokens):
        raise ConfigError(
            f"a saved index of version {head.version} and blocks of {head.block_tokens} tokens",
            hint=f"this one has version {SNAPSHOT_VERSION} and blocks of {block_tokens}: name another file; "
            "this one can be deleted, it is learnt anew",
        )


def _store_chain(index: KvIndex, chain: _SnapshotChain) -> None:
    hashes = array("Q")
    hashes.frombytes(chain.hashes)
    for worker, depth in sorted(chain.holders.items(), key=lambda one: -one[1]):
        index.store(worker, chain.parent, hashes[:depth])

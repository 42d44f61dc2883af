"""The objects of a shared store: runs of consecutive blocks behind a header that lists them.

    head      magic, version, number of blocks, parent hash of the first block, checksum of all this
    entries   hash, identity, encoding, length and checksum of each block
    payloads  one after the other

Checksums are seeded with the layout of the blocks: an object of another layout is not valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.inference.tiers.codecs import BlockCodec, CorruptBlock, ForeignBlock
from dynamo.inference.tiers.tier import TierBlock

FORMAT: Final = "runs-1"
MAGIC: Final = b"DYNKVRUN"
VERSION: Final = 1
MAX_RUN_BLOCKS: Final = 32
_HEAD: Final = Struct("<8sHHxxxxQQ")
_CHECKSUM_AT: Final = _HEAD.size - 8
_ENTRY: Final = Struct(f"<Q{IDENTITY_BYTES}sHxxIQ")
MAX_HEADER_BYTES: Final = _HEAD.size + MAX_RUN_BLOCKS * _ENTRY.size


class RunEntry(msgspec.Struct, frozen=True):
    """A block of a run. Its encoding is `length` bytes from `offset` of the object on."""

    block_hash: int
    identity: bytes
    codec: int
    length: int
    checksum: int
    offset: int


class RunObject(msgspec.Struct, frozen=True):
    """The header of an object. `parent_hash` is that of the first block."""

    parent_hash: int
    entries: tuple[RunEntry, ...]

    @property
    def hashes(self) -> tuple[int, ...]:
        """The hashes of the blocks, in order."""
        return tuple(entry.block_hash for entry in self.entries)

    @classmethod
    def decode(cls, data: memoryview, name: int, seed: int) -> RunObject:
        """Decode the header of the object with this name. Raises `CorruptBlock`."""
        if len(data) < _HEAD.size:
            raise CorruptBlock(f"the object has {len(data)} bytes")
        magic, version, count, parent, checksum = _HEAD.unpack_from(data)
        offset = _HEAD.size + count * _ENTRY.size
        if (magic, version) != (MAGIC, VERSION) or not 0 < count <= MAX_RUN_BLOCKS:
            raise CorruptBlock("the object has another format")
        if len(data) < offset or checksum != _checksum(data[:offset], seed):
            raise CorruptBlock("the header of the object does not match its checksum")
        entries = []
        for packed in _ENTRY.iter_unpack(data[_HEAD.size : offset]):
            block_hash, identity, codec, length, block_checksum = packed
            entries.append(RunEntry(block_hash, identity, codec, length, block_checksum, offset))
            offset += length
        if entries[-1].block_hash != name:
            raise CorruptBlock("the object has the name of another one")
        return cls(parent, tuple(entries))

    def load(
        self, data: memoryview, block: TierBlock, codec: BlockCodec, seed: int, target: memoryview
    ) -> None:
        """Decode a block of the object `data` into `target`. Raises `CorruptBlock`."""
        for entry in self.entries:
            if entry.block_hash == block.block_hash:
                break
        else:
            raise CorruptBlock("the object does not contain the block")
        payload = data[entry.offset : entry.offset + entry.length]
        if entry.identity != block.tokens.ljust(IDENTITY_BYTES, b"\0"):
            raise ForeignBlock("another prompt has the same hash")
        if len(payload) != entry.length or xxh3_64_intdigest(payload, seed) != entry.checksum:
            raise CorruptBlock("a block does not match its checksum")
        codec.decode(entry.codec, payload, target)


def split_runs(blocks: Sequence[TierBlock], limit: int) -> Iterator[list[TierBlock]]:
    """Yield the blocks, in any order, as runs of up to `limit` consecutive ones."""
    pending = {block.block_hash: block for block in blocks}
    following = {block.parent_hash: block for block in blocks}
    firsts = [block for block in blocks if block.parent_hash not in pending]
    for first in (*firsts, *blocks):
        block, run = pending.pop(first.block_hash, None), []
        while block is not None:
            run.append(block)
            if len(run) == limit:
                yield run
                run = []
            after = following.get(block.block_hash)
            block = after and pending.pop(after.block_hash, None)
        if run:
            yield run


def encode_slots(
    blocks: Sequence[TierBlock], region: MemoryRegion, codec: BlockCodec, seed: int
) -> tuple[int, bytes]:
    """Return the object of the leading blocks whose slots keep their owner, and how many these
    are."""
    generations = region.generations
    entries, payloads = list[bytes](), list[bytes]()
    for block in blocks:
        if generations[block.slot] != block.generation:
            break
        with region.reading((block.slot,)) as (source,):
            kind, data = codec.encode(source)
            payload = bytes(data)
        if generations[block.slot] != block.generation:
            break
        identity = block.tokens.ljust(IDENTITY_BYTES, b"\0")
        checksum = xxh3_64_intdigest(payload, seed)
        entries.append(_ENTRY.pack(block.block_hash, identity, kind, len(payload), checksum))
        payloads.append(payload)
    if not entries:
        return 0, b""
    fields, packed = (MAGIC, VERSION, len(entries), blocks[0].parent_hash), b"".join(entries)
    checksum = _checksum(memoryview(_HEAD.pack(*fields, 0) + packed), seed)
    return len(entries), b"".join([_HEAD.pack(*fields, checksum), packed, *payloads])


def _checksum(header: memoryview, seed: int) -> int:
    head, entries = bytes(header[:_CHECKSUM_AT]), header[_HEAD.size :]
    return xxh3_64_intdigest(entries, xxh3_64_intdigest(head, seed))

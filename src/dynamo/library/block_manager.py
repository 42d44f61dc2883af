"""`KVCacheBlockManager`: KV blocks in several tiers of memory, for programs without an engine.

The device tier is the block pool of the engines, and the tiers below are theirs, too. Blocks are
found by the hash of their prefix, and move between tiers with checks of their content.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.errors import ConfigError, DynamoError, NotFound, Overloaded
from dynamo.core.hashing import TOKEN_BYTES, root_identity
from dynamo.core.tasks import run_all
from dynamo.core.values import Tier, read_field
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import TokenContent
from dynamo.inference.tiers.tier import KvTier
from dynamo.library.cache_policy import AccessPatternAnalyzer, HitPattern, LRUCachePolicy
from dynamo.library.lower_tiers import STAGING_SLOTS, HeldBlock, LowerTiers
from dynamo.library.memory_tiers import (
    DEFAULT_DISK_BYTES,
    CPUMemoryTier,
    GPUMemoryTier,
    LibraryTier,
    LibraryTierInputs,
    RemoteMemoryTier,
    SSDMemoryTier,
)
from dynamo.library.radix_tree import KVBlock, RadixTree

DEFAULT_BLOCK_TOKENS = 16
NO_TOKEN = b"\xff" * TOKEN_BYTES
"""Fills the last block of a sequence. No vocabulary has this id, so that the block differs from
every full one."""


class CacheHitInfo(msgspec.Struct, frozen=True):
    """The blocks of a prefix that some tier holds. `estimated_load_time`: predicted seconds until
    those of lower tiers are on the device."""

    hit_ratio: float
    hit_blocks: list[KVBlock]
    missing_blocks: list[KVBlock]
    hit_pattern: HitPattern
    estimated_load_time: float


class MigrationResult(msgspec.Struct, frozen=True):
    """The blocks that moved, and the error of each of the others."""

    migrated: list[KVBlock]
    failed: list[tuple[KVBlock, DynamoError]]


class KVCacheBlockManager:
    """Allocates, finds and moves blocks. `config` has `gpu_memory_size` and, for the tiers below,
    `cpu_memory_size`, `ssd_cache_path` and `remote_storage_config`. Close it with `close`."""

    def __init__(self, config: Any) -> None:
        tiers: list[LibraryTier] = [GPUMemoryTier(read_field(config, "gpu_memory_size", default=0))]
        if size := read_field(config, "cpu_memory_size", default=0):
            tiers.append(CPUMemoryTier(size))
        if path := read_field(config, "ssd_cache_path", default=""):
            tiers.append(
                SSDMemoryTier(
                    path, read_field(config, "ssd_cache_size", default=DEFAULT_DISK_BYTES)
                )
            )
        if remote := read_field(config, "remote_storage_config"):
            tiers.append(RemoteMemoryTier(remote))
        self.memory_tiers: Mapping[str, LibraryTier] = {tier.name: tier for tier in tiers}
        self.prefix_tree = RadixTree(is_cached=self._is_held)
        self.cache_policy = LRUCachePolicy(read_field(config, "cache_policy_config"))
        self.access_analyzer = AccessPatternAnalyzer()
        self.migrations: dict[str, int] = {"migrated": 0, "failed": 0}
        self._clock = SystemClock()
        self._numbers = count()
        self._held: dict[str | int, HeldBlock] = {}
        self._moving = asyncio.Lock()
        self._shape: tuple[int, int] | None = None
        self._opening = asyncio.Lock()
        self._pool: BlockPool
        self._region: MemoryRegion
        self._lower: LowerTiers

    async def allocate_kv_blocks(
        self,
        sequence_length: int,
        model_config: Any,
        token_ids: Sequence[int] | None = None,
        worker_id: str | int | None = None,
    ) -> list[KVBlock]:
        """Allocate the blocks of a sequence on the device and register them in the prefix tree.

        `model_config` has `num_layers`, `num_kv_heads`, `head_dim` and optionally `dtype_bytes` (2)
        and `block_size` (16). The blocks stay until `free`. If the device is full, the blocks that
        were unused for longest move to the tier below. Raises `Overloaded` if there is no room.
        """
        block_tokens = await self._open(model_config)
        blocks = -(-sequence_length // block_tokens)
        tokens = tuple(token_ids or ())[:sequence_length]
        if token_ids is None:  # a sequence that no other one shares
            tokens = tuple(os.urandom(sequence_length))
        packed = pack_ids(tokens) + NO_TOKEN * (blocks * block_tokens - len(tokens))
        content = TokenContent(packed, block_tokens)
        content.identity = root_identity()
        async with self._moving:
            await self._make_room(blocks)
            allocated = [
                self._hold(HeldBlock(content, index, block), tokens, worker_id)
                for index, block in enumerate(self._pool.allocate(blocks))
            ]
            for block in allocated:
                await self.prefix_tree.register_block(block)
            await self.cache_policy.on_allocation(allocated)
        return allocated

    async def query_cache_hit(
        self, prefix_hash: str, worker_id: str | int | None = None
    ) -> CacheHitInfo:
        """Return what the tiers hold of the prefix that `prefix_tree.prefix_hash` names."""
        matching = await self.prefix_tree.find_matching_blocks(prefix_hash, worker_id)
        hits = matching.cached_blocks
        self.access_analyzer.record_access(hits)
        self.cache_policy.on_access(hits)
        return CacheHitInfo(
            len(hits) / len(matching.all_blocks) if matching.all_blocks else 0.0,
            hits,
            matching.missing_blocks,
            self.access_analyzer.analyze_hit_pattern(matching),
            self._predict_load_s(hits),
        )

    async def migrate_cache_blocks(
        self, blocks: Sequence[KVBlock], target_tier: str
    ) -> MigrationResult:
        """Move blocks to the tier "gpu", "cpu", "ssd" or "remote", in parallel. A block that
        fails stays where it is. Raises `NotFound` for a tier that the manager does not have."""
        target = self.memory_tiers.get(target_tier)
        if target is None:
            known = ", ".join(self.memory_tiers)
            raise NotFound(f"there is no tier {target_tier!r}", hint=f"known: {known}")
        async with self._moving:
            errors = await self._move(blocks, target)
            moved = [self._held[each.id].kv_block for each in blocks if each.id not in errors]
        failed = [(block, errors[block.id]) for block in blocks if block.id in errors]
        self.migrations["migrated"] += len(moved)
        self.migrations["failed"] += len(failed)
        return MigrationResult(moved, failed)

    def memory(self, block: KVBlock) -> memoryview:
        """Return the memory of a block on the device. Raises `NotFound` for another block."""
        held = self._held.get(block.id)
        if held is None or held.block is None:
            raise NotFound(f"block {block.id} is not on the device", hint='migrate it to "gpu"')
        return self._region.slot(held.block.id)

    async def free(self, blocks: Iterable[KVBlock]) -> None:
        """Forget blocks on the device. Their copies in lower tiers stay until these evict them."""
        async with self._moving:
            for block in blocks:
                held = self._held.pop(block.id, None)
                if held is None:
                    continue
                self.cache_policy.on_removal((block,))
                del self.access_analyzer.access_counts[block.id]
                await self.prefix_tree.remove_block(block.id)
                self._lower.forget(held)
                self._release(held)

    async def close(self) -> None:
        """Close all tiers."""
        if self._shape is not None:
            await self._close_tiers()

    async def _open(self, model_config: Any) -> int:
        """Open the tiers at the first call. Returns the tokens of a block."""
        block_tokens = int(read_field(model_config, "block_size", default=DEFAULT_BLOCK_TOKENS))
        names = ("num_layers", "num_kv_heads", "head_dim")
        sizes = [int(read_field(model_config, name, default=0)) for name in names]
        if not all(sizes):
            missing = [name for name, size in zip(names, sizes, strict=True) if not size]
            raise ConfigError(
                f"model_config does not say {', '.join(missing)}",
                hint=f"give it {', '.join(names)} as attributes or keys",
            )
        layers, heads, width = sizes
        token_bytes = (
            2 * layers * heads * width * int(read_field(model_config, "dtype_bytes", default=2))
        )
        shape = (block_tokens, block_tokens * token_bytes)
        async with self._opening:
            if self._shape is None:
                await self._open_tiers(*shape)
                self._shape = shape
        if self._shape != shape:
            raise ConfigError(
                f"blocks of {shape[0]} tokens and {shape[1]} bytes in a manager whose blocks have "
                f"{self._shape[0]} tokens and {self._shape[1]} bytes",
                hint="use a manager for each model",
            )
        return block_tokens

    async def _open_tiers(self, block_tokens: int, block_bytes: int) -> None:
        below = [tier for tier in self.memory_tiers.values() if tier.tier != "device"]
        device, host = (
            tier.size // block_bytes if (tier := self.memory_tiers.get(name)) else 0
            for name in ("gpu", "cpu")
        )
        if not device:
            raise ConfigError(
                f"gpu_memory_size is below the {block_bytes} bytes of a block",
                hint=f"raise it to at least {block_bytes}",
                param="gpu_memory_size",
            )
        first_host = device + STAGING_SLOTS
        self._region = region = MemoryRegion.allocate(first_host + host, block_bytes)
        self._pool = BlockPool(device, block_tokens, generations=region.generations[:device])
        layout = f"library-1 {block_tokens} {block_bytes} {sys.byteorder}"
        try:
            for tier in below:
                await tier.open(LibraryTierInputs(region, first_host, layout, self._clock))
            self._lower = LowerTiers(below, region, device, self._clock, self._on_moved)
        except BaseException:
            await self._close_tiers()
            raise

    async def _close_tiers(self) -> None:
        for tier in self.memory_tiers.values():
            if tier.backend is not None:
                await tier.backend.close()
                tier.backend = None
        self._region.close()

    def _hold(
        self, held: HeldBlock, tokens: tuple[int, ...], worker_id: str | int | None
    ) -> KVBlock:
        held.kv_block = block = KVBlock(next(self._numbers), tokens, worker_id, "device")
        self._held[block.id] = held
        return block

    async def _make_room(self, blocks: int) -> None:
        """Move the blocks that were unused for longest down, to the first tier that takes them."""
        pool = self._pool
        for tier in self.memory_tiers.values():
            missing = blocks - pool.available
            if missing > 0 and tier.tier != "device":
                await self._move(self._oldest_on_device(missing), tier)
        if pool.available < blocks:
            raise Overloaded(
                f"the device has room for {pool.available} of {blocks} blocks",
                hint="free blocks, or give the manager a larger tier",
            )

    async def _on_moved(self, held: HeldBlock, tier: Tier) -> None:
        if tier != "device":
            self._release(held)
        held.kv_block = replace(held.kv_block, tier=tier)
        await self.prefix_tree.update_block_location(held.kv_block)

    def _oldest_on_device(self, count: int) -> list[KVBlock]:
        victims = self.cache_policy.select_victims(len(self._held))
        held = self._held
        return [each for each in victims if each.id in held and held[each.id].block][:count]

    async def _move(
        self, blocks: Sequence[KVBlock], target: LibraryTier
    ) -> Mapping[str | int, DynamoError]:
        """Move blocks in parallel. Returns the errors by block. The caller holds the lock."""
        errors: dict[str | int, DynamoError] = {}
        same_content: defaultdict[int, list[HeldBlock]] = defaultdict(list)
        for block in {each.id: each for each in blocks}.values():
            if (held := self._held.get(block.id)) is None:
                errors[block.id] = NotFound(f"block {block.id} was freed")
            else:
                same_content[held.hash].append(held)
        moving = [held for same in same_content.values() for held in same]
        if target.tier == "device":
            results = await run_all(*map(self._load, moving))
            errors |= {
                held.kv_block.id: error
                for held, error in zip(moving, results, strict=True)
                if error is not None
            }
        else:
            refused = await self._lower.store(same_content, target.name)
            errors |= {
                held.kv_block.id: refused[held.hash] for held in moving if held.hash in refused
            }
        return errors

    def _release(self, held: HeldBlock) -> None:
        if held.block is not None:
            self._pool.release((held.block,))
            held.block = None

    async def _load(self, held: HeldBlock) -> DynamoError | None:
        """Bring a block back to the device. Returns the error."""
        if held.block is not None:
            return None
        if not self._pool.available:
            return Overloaded("the device has no free block", hint="free or migrate some first")
        (block,) = self._pool.allocate(1)
        held.block = block
        try:
            await self._lower.load(held, block.id)
        except BaseException as error:
            self._release(held)
            if isinstance(error, DynamoError):
                return error
            raise
        self._lower.forget(held)
        await self._on_moved(held, "device")
        return None

    def _is_held(self, block: KVBlock) -> bool:
        held = self._held.get(block.id)
        return held is not None and (held.block is not None or self._lower.find(held) is not None)

    def _predict_load_s(self, blocks: Iterable[KVBlock]) -> float:
        counts: dict[KvTier, int] = {}
        for block in blocks:
            held = self._held[block.id]
            if held.block is None and (tier := self._lower.find(held)) is not None:
                counts[tier] = counts.get(tier, 0) + 1
        return sum(tier.predict_load_s(number) for tier, number in counts.items())

"""Opens the tiers that the settings name, for engines whose blocks lie in a region."""

from __future__ import annotations

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.core.hashing import HASH_SCHEME
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import ModelRunner
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.tiers.codecs import open_codec
from dynamo.inference.tiers.kv_tiers import OpenedTiers, OpenTiers
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.tier import KvTier


def tier_opener(
    cache: CacheSettings, engine: EngineSettings, clock: Clock, block_bytes: int = 0
) -> OpenTiers | None:
    """Return the function that opens the tiers of an engine; None if the settings name none.
    `block_bytes`: what a block counts, if its slot is only a stand-in. Raises `ConfigError`."""
    if not cache.tiers:
        return None
    if not engine.prefix_caching:
        raise ConfigError(
            f"engine.prefix_caching is off and KV blocks shall be kept in: "
            f"{', '.join(cache.tiers)}",
            hint="leave out --kv-host-size, --kv-disk-size and --kv-remote-url, or turn it on",
        )
    return _TierOpener(cache, engine.data_parallel_size, clock, block_bytes).open


def memory_above_host(cache: CacheSettings, ranks: int, memory_bytes: int) -> int:
    """Return what the host tier of one of `ranks` engines leaves of its memory. Raises
    `ConfigError` if that is nothing."""
    size = cache.cpu_size // ranks
    _check_host_size(ranks, size, memory_bytes - 1)
    return memory_bytes - size


def plan_host_blocks(
    cache: CacheSettings, ranks: int, num_blocks: int, block_bytes: int, free_bytes: int
) -> int:
    """Return how many blocks the host tier of one of `ranks` engines holds; 0: there is none.
    `free_bytes` is what the engine may use for it. Raises `ConfigError`."""
    if "host" not in cache.tiers:
        return 0
    size = cache.cpu_size // ranks or num_blocks * block_bytes
    _check_host_size(ranks, size, free_bytes)
    if size < block_bytes:
        raise ConfigError(
            f"cache.cpu_size is {cache.cpu_size} bytes a worker, and one KV block takes "
            f"{block_bytes}",
            hint=f"raise --kv-host-size to at least {ranks * block_bytes}",
            param="cache.cpu_size",
        )
    return size // block_bytes


def _check_host_size(ranks: int, size: int, free_bytes: int) -> None:
    if size > free_bytes:
        raise ConfigError(
            f"the host tier of each of a worker's {ranks} engines takes {size >> 20} MiB, and "
            f"{free_bytes >> 20} MiB of memory are free for it",
            hint="set --kv-host-size to less, or free memory",
            param="cache.cpu_size",
        )


class _TierOpener:
    """Opens the tiers of one of `ranks` engines of a worker."""

    def __init__(self, cache: CacheSettings, ranks: int, clock: Clock, block_bytes: int) -> None:
        self._cache = cache
        self._ranks = ranks
        self._clock = clock
        self._block_bytes = block_bytes

    async def open(self, engine: EngineCore, info: EngineInfo) -> OpenedTiers:
        """Open the tiers, the fastest first. Raises `ConfigError`."""
        runner = engine.runner
        region = runner.region
        if region is None:
            raise ConfigError(
                "tiers of KV blocks need memory that this system lacks (Linux has it)",
                hint="leave out --kv-host-size, --kv-disk-size and --kv-remote-url",
            )
        tiers: list[KvTier] = []
        if region.slots > info.num_blocks:
            tiers.append(MemoryTier.in_region(region, info.num_blocks, self._clock))
        try:
            if "disk" in self._cache.tiers:
                tiers.append(await self._open_disk(runner, region, info.num_blocks))
            if "shared" in self._cache.tiers:
                tiers.append(await self._open_shared(runner, region))
        except BaseException:
            for tier in tiers:
                await tier.close()
            raise
        return OpenedTiers(tiers, stores_all=self._cache.offload_policy == "lru")

    async def _open_disk(
        self, runner: ModelRunner, region: MemoryRegion, num_blocks: int
    ) -> KvTier:
        from dynamo.inference.tiers.disk import DiskTier
        from dynamo.inference.tiers.disk_part import disk_slot_bytes
        from dynamo.models.file_cache import cache_dir

        codec = open_codec(self._cache.ssd_compression, region.slot_bytes, runner.block_shape)
        slot_bytes = disk_slot_bytes(codec)
        counted_bytes = self._block_bytes or slot_bytes
        blocks = self._cache.ssd_size // self._ranks // counted_bytes or num_blocks
        if 0 < self._cache.ssd_size < self._ranks * counted_bytes:
            raise ConfigError(
                f"cache.ssd_size is {self._cache.ssd_size} bytes a worker, and one KV block takes "
                f"{counted_bytes}",
                hint=f"raise --kv-disk-size to at least {self._ranks * counted_bytes}",
                param="cache.ssd_size",
            )
        path = self._cache.ssd_path or cache_dir("kv")
        return await DiskTier.open(
            path, region, blocks * slot_bytes, _layout(runner), self._clock, codec
        )

    async def _open_shared(self, runner: ModelRunner, region: MemoryRegion) -> KvTier:
        from dynamo.inference.tiers.remote import RemoteTier

        name, setting = self._cache.remote_compression, "cache.remote_compression"
        codec = open_codec(name, region.slot_bytes, runner.block_shape, setting)
        url = self._cache.remote_url
        return await RemoteTier.open(
            url, region, _layout(runner), self._clock, codec, self._cache.remote_size
        )


def _layout(runner: ModelRunner) -> str:
    """Return what the blocks in a folder or a bucket must have in common."""
    return f"{runner.layout}, {HASH_SCHEME}"

"""The memory tiers of a `KVCacheBlockManager`, each over the tier that engines use."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.values import Tier, read_field
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.pins import BlockPins
from dynamo.inference.tiers.resident_blocks import SlotTier
from dynamo.inference.tiers.tier import KvTier

DEFAULT_DISK_BYTES = 1 << 30


class LibraryTierInputs(NamedTuple):
    """The arguments of every tier. `region` is the memory of all blocks. Its slots from
    `first_slot` on are below the device. Blocks on a disk or in a store must have the `layout`."""

    region: MemoryRegion
    first_slot: int
    layout: str
    clock: Clock


class LibraryTier:
    """A tier by its name in the interface. `tier` is its name in the engines and their events."""

    name: str
    tier: Tier
    backend: KvTier | None = None

    def __init__(self, size: int = 0) -> None:
        self.size = size

    async def open(self, inputs: LibraryTierInputs) -> None:
        """Open the tier. Raises `ConfigError`."""

    def pin(self, pins: BlockPins) -> None:
        """Let the open tier evict no blocks in `pins`; the device and a store evict none."""
        if isinstance(self.backend, SlotTier):
            self.backend.slots.pins = pins


class GPUMemoryTier(LibraryTier):
    """The blocks of the device: `size` bytes."""

    name, tier = "gpu", "device"


class CPUMemoryTier(LibraryTier):
    """Host memory: `size` bytes."""

    name, tier = "cpu", "host"

    async def open(self, inputs: LibraryTierInputs) -> None:
        self.backend = MemoryTier.in_region(
            inputs.region, inputs.first_slot, inputs.clock, exclusive=False
        )


class SSDMemoryTier(LibraryTier):
    """A folder on a disk, with at most `size` bytes of blocks. The blocks outlive the program."""

    name, tier = "ssd", "disk"

    def __init__(self, path: str | os.PathLike[str], size: int = DEFAULT_DISK_BYTES) -> None:
        super().__init__(size)
        self.path = path

    async def open(self, inputs: LibraryTierInputs) -> None:
        from dynamo.inference.tiers.disk import DiskTier

        path = os.fspath(self.path)
        self.backend = await DiskTier.open(
            path, inputs.region, self.size, inputs.layout, inputs.clock
        )


class RemoteMemoryTier(LibraryTier):
    """An object store that workers share. `config` is its URL or has `url`."""

    name, tier = "remote", "shared"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.url: str = (
            config if isinstance(config, str) else str(read_field(config, "url", default=""))
        )

    async def open(self, inputs: LibraryTierInputs) -> None:
        from dynamo.inference.tiers.remote import RemoteTier

        self.backend = await RemoteTier.open(self.url, inputs.region, inputs.layout, inputs.clock)

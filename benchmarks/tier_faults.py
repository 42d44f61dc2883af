"""Random faults of the KV tiers of engines in this process, for benchmarks."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import S3Process

    from dynamo.inference.engine import BatchedEngine

HOST_BYTES, DISK_BYTES = 192 << 20, 512 << 20
PAUSE_S = (3.0, 12.0)


def tier_settings(tier: str, folder: str) -> CacheSettings:
    """Return the settings of one tier, or of all if `tier` is "all"; none if it is ""."""
    if not tier:
        return NO_TIERS
    has = {name: tier in (name, "all") for name in ("host", "disk", "shared")}
    return CacheSettings(
        offload_policy="lru",
        cpu_size=HOST_BYTES * has["host"],
        ssd_size=DISK_BYTES * has["disk"],
        ssd_path=folder,
        remote_url="s3://kv-blocks/text" if has["shared"] else "",
    )


class TierFaults:
    """Breaks something of the engines' tiers every few seconds. `counts` says what was done."""

    def __init__(self, engines: Sequence[BatchedEngine], s3: S3Process | None, rng: Random) -> None:
        self._engines = engines
        self._s3 = s3
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self._faults: list[Callable[[], Any]] = [self.clear_device]
        names = {tier.name for engine in engines for tier in engine.tiers.tiers}
        if names:
            self._faults.append(self.clear_tier)
        if "disk" in names:
            self._faults += [self.flip_bits, self.fail_reads, self.fail_writes, self.fill_disk]
        if "shared" in names:
            self._faults += [self.freeze_store, self.lose_objects, self.cut_objects]

    async def run(self) -> None:
        """Break things until cancelled."""
        while True:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            fault = self._rng.choice(self._faults)
            self.counts[fault.__name__] += 1
            await fault()

    async def clear_device(self) -> None:
        """Empty the prefix cache of an engine without its tiers."""
        self._rng.choice(self._engines).scheduler.pool.clear()

    async def clear_tier(self) -> None:
        """Empty one tier of an engine."""
        engine = self._rng.choice(self._engines)
        engine.tiers.clear(self._rng.choice(engine.tiers.tiers).name)

    async def flip_bits(self) -> None:
        """Invert a byte in every second slot of a disk tier."""
        engine = self._rng.choice(self._engines)
        tier: Any = next(tier for tier in engine.tiers.tiers if tier.name == "disk")
        size = DISK_BYTES // tier.capacity_blocks
        fd = os.open(tier.folder / "blocks", os.O_RDWR)
        try:
            for slot in range(0, tier.capacity_blocks, 2):
                at = slot * size + self._rng.randrange(size)
                if byte := os.pread(fd, 1, at):
                    os.pwrite(fd, bytes([byte[0] ^ 0xFF]), at)
        finally:
            os.close(fd)

    async def fail_reads(self) -> None:
        """Let the disk's reads fail with EIO for a moment."""
        await self._fail_disk("preadv", errno.EIO)

    async def fail_writes(self) -> None:
        """Let the disk's writes fail with EIO for a moment."""
        await self._fail_disk("pwritev", errno.EIO)

    async def fill_disk(self) -> None:
        """Let the disk's writes fail with ENOSPC for a moment."""
        await self._fail_disk("pwritev", errno.ENOSPC)

    async def freeze_store(self) -> None:
        """Stop the object store for two seconds."""
        assert self._s3 is not None
        self._s3.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        self._s3.signal(signal.SIGCONT)

    async def lose_objects(self) -> None:
        """Delete a third of the objects."""
        store = self._store()
        for path in self._some_objects(store):
            store.delete(path)

    async def cut_objects(self) -> None:
        """Cut a third of the objects in half."""
        store = self._store()
        for path in self._some_objects(store):
            data = bytes(store.get(path).bytes())
            store.put(path, data[: len(data) // 2])

    async def _fail_disk(self, function: str, code: int) -> None:
        """Fail for a moment, and let the tiers try again soon: not after a minute."""
        with failing(function, code):
            await asyncio.sleep(0.5)
        for engine in self._engines:
            for tier in engine.tiers.tiers if engine.tiers else ():
                if tier.name == "disk":
                    vars(tier).update(_readable_at_s=0.0, _writable_at_s=0.0)

    def _store(self) -> Any:
        from obstore.store import S3Store

        assert self._s3 is not None
        names = {name.removeprefix("AWS_").lower(): v for name, v in self._s3.environ.items()}
        return S3Store(
            self._s3.bucket,
            endpoint=names["endpoint_url"],
            access_key_id=names["access_key_id"],
            secret_access_key=names["secret_access_key"],
            region=names["region"],
            client_options={"allow_http": True},
        )

    def _some_objects(self, store: Any) -> list[str]:
        paths = [item["path"] for part in store.list("text/") for item in part]
        return [path for path in paths if self._rng.random() < 1 / 3]


@contextmanager
def failing(name: str, code: int) -> Iterator[None]:
    """Let a function of `os` raise an `OSError`."""
    function = getattr(os, name)

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    setattr(os, name, fail)
    try:
        yield
    finally:
        setattr(os, name, function)

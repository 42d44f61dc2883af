"""`RemoteTier`: KV blocks in an object store, shared by all workers of a deployment.

    PREFIX/<digest of the layout>/<two digits>/<hash of the last block>    see `run_object`

The first writer of an object wins; nothing is changed afterwards. A worker learns of the objects of
others by listing the bucket in the background, never for a request. Routers learn of blocks from
the events of workers. Each worker deletes the oldest objects above a limit, if one is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain, islice
from typing import Final, Self

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.communication.transfer import MemoryRegion
from dynamo.communication.transfer.estimate import FAILURE_THRESHOLD, LoadEstimate, PeerBreaker
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import KvEvent, Tier
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.tiers.block_table import Listing, RunTable
from dynamo.inference.tiers.codecs import BlockCodec, CorruptBlock, ForeignBlock
from dynamo.inference.tiers.copy_pool import CopyPool
from dynamo.inference.tiers.object_store import TIMEOUT_S, ObjectMissing, ObjectStore, StoreFailure
from dynamo.inference.tiers.run_object import (
    FORMAT,
    MAX_HEADER_BYTES,
    MAX_RUN_BLOCKS,
    RunObject,
    encode_slots,
    split_runs,
)
from dynamo.inference.tiers.tier import MeasuredTier, TierBlock

log = logging.getLogger(__name__)

RUN_BYTES: Final = 4 << 20
"""An object has about this size at most: smaller ones cost throughput, larger ones latency."""
OBJECTS_AT_ONCE: Final = 4
COPY_THREADS: Final = 2
INITIAL_LATENCY_S: Final = 0.02
INITIAL_BYTES_PER_S: Final = 100e6
REFRESH_S: Final = 10.0
"""Time between two listings of the bucket."""
REFRESH_SHARE: Final = 0.01
"""Listings take at most this share of the time."""
MAX_LISTED: Final = 16_384
"""Objects of other workers that a worker learns from one listing at most: the newest ones."""
HEADERS_AT_ONCE: Final = 16
DELETED_AT_ONCE: Final = 1000  # the limit of S3


class _Piece(msgspec.Struct, frozen=True):
    """The blocks of a load, from `start` to `end`, that one object contains."""

    name: int
    start: int
    end: int


class RemoteTier(MeasuredTier):
    """Holds blocks of the layout of `region` in an object store. Its capacity is unknown: 0."""

    name: Tier = "shared"

    def __init__(
        self,
        store: ObjectStore,
        region: MemoryRegion,
        layout: str,
        clock: Clock,
        codec: BlockCodec,
        max_store_bytes: int,
    ) -> None:
        estimate = LoadEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        super().__init__(region.slot_bytes, clock, estimate)
        self.capacity_blocks = 0
        identity = f"{FORMAT} {layout} {region.slot_bytes} {codec.kind}".encode()
        self._folder = sha256(identity).hexdigest()[:16]
        self._seed = xxh3_64_intdigest(identity)
        self._run_blocks = max(1, min(MAX_RUN_BLOCKS, RUN_BYTES // region.slot_bytes))
        self._max_store_bytes = max_store_bytes
        self._max_bytes = MAX_HEADER_BYTES + MAX_RUN_BLOCKS * codec.max_bytes
        self._store = store
        self._region = region
        self._codec = codec
        self._table = RunTable()
        self._learnt: set[int] = set()
        self._storing: set[int] = set()
        self._events = KvEventBuffer("shared")
        self._breaker = PeerBreaker()
        self._failure = ""
        self._is_away = False
        self._load_pool = CopyPool("kv-shared-load", COPY_THREADS)
        self._store_pool = CopyPool("kv-shared-store", COPY_THREADS)
        self._refreshes = BackgroundTasks()
        self._deletions = BackgroundTasks()

    @classmethod
    async def open(
        cls,
        url: str,
        region: MemoryRegion,
        layout: str,
        clock: Clock,
        codec: BlockCodec | None = None,
        max_store_bytes: int = 0,
    ) -> Self:
        """Connect to the store for blocks of `layout`, and learn what it has in the background.
        Above `max_store_bytes` of them (0: no limit) the oldest objects are deleted.
        Raises `ConfigError` if the URL, the bucket or the credentials are wrong. A store that does
        not answer is tried again later."""
        store = ObjectStore(url)
        codec = codec or BlockCodec(region.slot_bytes)
        tier = cls(store, region, layout, clock, codec, max_store_bytes)
        try:
            await store.check()
        except StoreFailure as error:
            for _ in range(FAILURE_THRESHOLD):
                tier._on_failure(error, clock.now())
        tier._refreshes.start(tier._refresh_regularly(), "list KV blocks in the object store")
        return tier

    @property
    def blocks(self) -> int:
        return len(self._table.blocks)

    @property
    def problem(self) -> str:
        if not self._is_away:
            return ""
        return f"{self._store.url} does not answer: {self._failure}; check the object store"

    @property
    def is_readable(self) -> bool:
        return not self._breaker.is_open(self._clock.now())

    def holds(self, block_hash: int) -> bool:
        return self._table.name_of(block_hash) is not None

    def held_blocks(self) -> Iterator[tuple[int, int]]:
        return self._table.blocks.held_blocks()

    async def load(self, blocks: Sequence[TierBlock], on_loaded: Callable[[int], None]) -> None:
        pieces = self._plan_load(blocks)
        if not pieces:
            raise TransferFailed.of("gone", "the blocks are not in the object store any more")
        end = pieces[-1].end
        load = self.measure_load(end, on_loaded)
        if not self._breaker.start(load.started_s):
            raise TransferFailed.of("refused", self.problem)
        try:
            with load:
                await self._load_pieces(blocks, pieces, load.report)
            self._on_success()
        except StoreFailure as error:
            self._on_failure(error, load.started_s)
            raise TransferFailed.of("gone", f"the object store failed: {error}") from error
        except TransferFailed:
            self._on_success()
            raise
        except BaseException:
            if load.loaded or self._clock.now() - load.started_s < TIMEOUT_S:
                self._breaker.on_cancelled()
            else:
                self._on_failure(StoreFailure("no answer in time"), load.started_s)
            raise
        if end < len(blocks):
            raise TransferFailed.of("gone", "a block left the object store meanwhile")

    def _plan_load(self, blocks: Sequence[TierBlock]) -> list[_Piece]:
        pieces: list[_Piece] = []
        for index, block in enumerate(blocks):
            name = self._table.name_of(block.block_hash)
            if name is None:
                break
            if pieces and pieces[-1].name == name:
                pieces[-1] = _Piece(name, pieces[-1].start, index + 1)
            else:
                pieces.append(_Piece(name, index, index + 1))
        return pieces

    async def _load_pieces(
        self,
        blocks: Sequence[TierBlock],
        pieces: Sequence[_Piece],
        on_progress: Callable[[int], None],
    ) -> None:
        downloads = BackgroundTasks(on_failure=lambda _: None)  # awaited below
        running: list[asyncio.Task[memoryview]] = []
        try:
            for number, piece in enumerate(pieces):
                running += [
                    downloads.start(self._store.get(self._key(ahead.name), self._max_bytes))
                    for ahead in pieces[len(running) : number + OBJECTS_AT_ONCE]
                ]
                data = await running[number]
                await self._copy_piece(blocks, piece, data, on_progress)
        except ObjectMissing as error:
            self._forget(piece.name)
            raise TransferFailed.of("gone", "an object left the object store") from error
        except CorruptBlock as error:
            self.counters.corrupt_blocks += 1
            self._forget(piece.name)
            if not isinstance(error, ForeignBlock):  # a damaged object would stay forever
                self._deletions.start(self._delete([piece.name]), "delete a damaged object")
            raise TransferFailed.of("checksum", f"an object is void: {error}") from error
        finally:
            await downloads.close()

    async def _copy_piece(
        self,
        blocks: Sequence[TierBlock],
        piece: _Piece,
        data: memoryview,
        on_progress: Callable[[int], None],
    ) -> None:
        run = RunObject.decode(data, piece.name, self._seed)

        def copy(number: int) -> None:
            block = blocks[piece.start + number]
            with self._region.writing((block.slot,)) as (target,):
                run.load(data, block, self._codec, self._seed, target)

        await self._load_pool.run(
            piece.end - piece.start, copy, lambda done: on_progress(piece.start + done)
        )

    async def store(self, blocks: Sequence[TierBlock]) -> int:
        if self._breaker.is_open(self._clock.now()):
            return 0
        wanted = [
            block
            for block in blocks
            if not (self.holds(block.block_hash) or block.block_hash in self._storing)
        ]
        runs = list(split_runs(wanted, self._run_blocks))
        stored, clears = 0, self.clears
        for first in range(0, len(runs), OBJECTS_AT_ONCE):
            group = runs[first : first + OBJECTS_AT_ONCE]
            stored += sum(await run_all(*(self._store_run(run, clears) for run in group)))
        return stored

    async def _store_run(self, run: Sequence[TierBlock], clears: int) -> int:
        """Store an object, unless the tier was emptied after it had been so `clears` times."""
        hashes = [block.block_hash for block in run]
        self._storing.update(hashes)
        started_s = self._clock.now()
        try:
            count, data = await self._encode(run)
            if not count or clears != self.clears or not self._breaker.start(started_s):
                return 0
            name = hashes[count - 1]
            if not await self._store.create(self._key(name), data):
                await self._learn(name, clears)
            elif clears == self.clears:
                self._add(run[0].parent_hash, hashes[:count])
                self.counters.stored_blocks += count
            else:
                self._deletions.start(self._delete([name]), "delete an object stored too late")
            self._on_success()
            return sum(map(self.holds, hashes))
        except StoreFailure as error:
            self._on_failure(error, started_s)
            return 0
        except BaseException:
            self._breaker.on_cancelled()
            raise
        finally:
            self._storing.difference_update(hashes)

    async def _encode(self, run: Sequence[TierBlock]) -> tuple[int, bytes]:
        """Return the object of the leading blocks whose slots keep their owner, and how many."""
        objects: list[tuple[int, bytes]] = []

        def encode(_: int) -> None:
            objects.append(encode_slots(run, self._region, self._codec, self._seed))

        await self._store_pool.run(1, encode)
        return objects[0]

    async def _refresh_regularly(self) -> None:
        while True:
            started_s = self._clock.now()
            try:
                if self._breaker.start(started_s):
                    await self._refresh()
                    self._on_success()
            except StoreFailure as error:
                self._on_failure(error, started_s)
            took_s = self._clock.now() - started_s
            await self._clock.sleep(max(REFRESH_S, took_s / REFRESH_SHARE))

    async def _refresh(self) -> None:
        """Learn the newest objects that others stored, and forget those that are gone. The oldest
        ones are deleted, if all take more than the limit."""
        await self._deletions.join()
        clears = self.clears
        listing = Listing(self._table, self._learnt, MAX_LISTED)
        async for page in self._store.list_objects(self._folder):
            listing.add_page(page)
        if self._max_store_bytes and clears == self.clears:
            surplus = await self._clock.offload(listing.oldest_above, self._max_store_bytes)
            listing.gone.update(surplus)
            await self._delete(surplus)
        if clears != self.clears:  # the listing describes what was deleted meanwhile
            return
        newest = [name for name in listing.newest() if name not in listing.gone]
        dropped = self._learnt.difference(newest, listing.gone)
        steps = chain(map(self._forget, listing.gone), map(self._drop, dropped))
        for number, _ in enumerate(steps, 1):
            if not number % HEADERS_AT_ONCE:
                await asyncio.sleep(0)
                if clears != self.clears:
                    return
        unknown = [name for name in newest if name not in self._learnt]
        for first in range(0, len(unknown), HEADERS_AT_ONCE):
            if clears == self.clears:
                names = unknown[first : first + HEADERS_AT_ONCE]
                await run_all(*(self._learn(name, clears) for name in names))

    async def _learn(self, name: int, clears: int) -> None:
        """Read which blocks an object has, as after `clears` clears. Raises `StoreFailure`."""
        try:
            data = await self._store.get_start(self._key(name), MAX_HEADER_BYTES)
            run = RunObject.decode(data, name, self._seed)
        except (ObjectMissing, CorruptBlock):
            return
        if clears != self.clears:
            return
        self._add(run.parent_hash, run.hashes)
        if name in self._table.objects:
            self._learnt.add(name)

    async def _delete(self, names: Iterable[int]) -> None:
        """Delete objects in slices."""
        rest = iter(names)
        try:
            while batch := [self._key(name) for name in islice(rest, DELETED_AT_ONCE)]:
                await self._store.delete(batch)
        except StoreFailure as error:
            self._on_failure(error, self._clock.now())

    def _add(self, parent_hash: int, hashes: Sequence[int]) -> None:
        for parent, block_hash in self._table.add(parent_hash, hashes):
            self._events.add_stored(parent, block_hash)

    def _forget(self, name: int) -> None:
        for block_hash in self._drop(name):
            self._events.add_removed(block_hash)

    def _drop(self, name: int) -> Sequence[int]:
        self._learnt.discard(name)
        return self._table.remove(name)

    def _key(self, name: int) -> str:
        return f"{self._folder}/{name >> 56:02x}/{name:016x}"

    def _on_success(self) -> None:
        self._breaker.on_success()
        self._is_away = False

    def _on_failure(self, error: StoreFailure, started_s: float) -> None:
        self.counters.failures += 1
        self._failure = str(error)
        self._breaker.on_failure(started_s, self._clock.now())
        if self._breaker.is_open(self._clock.now()) and not self._is_away:
            self._is_away = True
            log.warning("KV tier", extra={"fields": {"problem": self.problem}})

    def _remove_all(self) -> Sequence[int]:
        table, self._table = self._table, RunTable()
        self._learnt = set()
        if len(table.blocks):
            self._deletions.start(
                self._delete(table.objects), "delete KV blocks in the object store"
            )
        return table.blocks.hashes

    def take_events(self) -> list[KvEvent]:
        return self._events.drain()

    async def close(self) -> None:
        await self._refreshes.close()
        await self._deletions.join()
        for pool in (self._load_pool, self._store_pool):
            await pool.close()

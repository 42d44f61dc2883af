"""`KvTier`: a place below device memory that holds KV blocks under their hashes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import msgspec

from dynamo.communication.transfer.estimate import LoadEstimate
from dynamo.core.clock import Clock
from dynamo.core.values import KvEvent, Tier
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.tiers.pins import BlockPins

SAMPLE_BLOCKS = 64
"""Blocks of the load by whose predicted time that of a block is known."""


class TierBlock(msgspec.Struct, frozen=True):
    """A block on its way into a tier or out of it.

    - `block_hash`, `parent_hash`: chained hashes, as in KV events.
    - `slot`: the block's slot in the engine's `MemoryRegion`.
    - `generation`: the number of the slot when the block was chosen, for a block that is stored.
    - `tokens`: identifies the salt and all tokens up to the block's end: 16 bytes of
      `core.hashing.prefix_identities`, the same in every process; empty in simulations, which have
      no ids. Clients can find other tokens with the same hash, so a tier stores these bytes and
      compares them before it reports a block as loaded. The tokens of the block alone do not
      suffice: a forged parent can have a child with the same hash and tokens.
    - `hits`: how often the block was reused, for a block that is stored.
    """

    block_hash: int
    parent_hash: int
    slot: int
    generation: int = 0
    tokens: bytes = b""
    hits: int = 0


class TierCounters(msgspec.Struct):
    """Totals of one tier since its start. `corrupt` blocks did not match their checksum or
    identity. `failures` are operations that the place below refused."""

    loaded_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    failures: int = 0
    load_s: float = 0.0


class KvTier(ABC):
    """Holds blocks of one layout. A tier has one owner and is used on its event loop. Copies run in
    threads.

    `name` is the tier in KV events. `blocks` counts the blocks it holds, `capacity_blocks` those
    for which it has room. `problem` says why the tier holds nothing at present ("" if it works).
    `pins`: the prompts whose blocks are not evicted; None: the tier cannot pin.
    `clears` counts how often it was emptied: what was on its way into the tier then is dropped.
    """

    name: Tier
    block_bytes: int
    capacity_blocks: int
    counters: TierCounters
    clears: int = 0
    pins: BlockPins | None = None

    @property
    @abstractmethod
    def blocks(self) -> int:
        """The number of blocks in the tier."""

    @property
    def problem(self) -> str:
        """The reason why the tier can load or store nothing now; empty if there is none."""
        return ""

    @property
    def is_readable(self) -> bool:
        """Whether loads may be tried now."""
        return True

    @abstractmethod
    def holds(self, block_hash: int) -> bool:
        """Whether the tier has the block, as far as its index in memory knows. Without I/O."""

    @abstractmethod
    def held_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (parent hash, hash) of all blocks. The tier may change meanwhile: events report
        what comes and goes then."""

    @abstractmethod
    async def load(self, blocks: Sequence[TierBlock], on_loaded: Callable[[int], None]) -> None:
        """Copy blocks into their slots, from the first on. `on_loaded(count)` reports that the
        first `count` are there and verified. Raises `TransferFailed`; what was reported stays
        good. After the return, the exception or a cancellation nothing writes into the slots."""

    @abstractmethod
    async def store(self, blocks: Sequence[TierBlock]) -> int:
        """Copy blocks out of their slots and return how many the tier took. A block whose slot has
        another generation after the copy is dropped. A full or failing tier takes none and sets
        `problem`; it does not raise."""

    @abstractmethod
    def predict_load_s(self, blocks: int) -> float:
        """Predict the seconds to load `blocks`, behind the loads in flight."""

    def predict_block_s(self) -> float:
        """Predict what each further block adds to the seconds of a load."""
        return (self.predict_load_s(SAMPLE_BLOCKS) - self.predict_load_s(0)) / SAMPLE_BLOCKS

    def clear(self) -> Sequence[int]:
        """Remove all blocks and return their hashes, for whose events the caller cares. A store in
        flight adds none of its blocks."""
        self.clears += 1
        return self._remove_all()

    @abstractmethod
    def _remove_all(self) -> Sequence[int]:
        """Empty the index, without events. The hashes that are returned may have others among them
        that the tier held before."""

    @abstractmethod
    def take_events(self) -> list[KvEvent]:
        """Return the changes since the last call, in order, with this tier's name."""

    def snapshot_events(self) -> list[KvEvent]:
        """Return events that rebuild the present state from an empty one."""
        return self.stored_events(self.held_blocks())

    def stored_events(self, blocks: Iterable[tuple[int, int]]) -> list[KvEvent]:
        """Return events of blocks that are stored, (parent hash, hash) each."""
        events = KvEventBuffer(self.name)
        for parent_hash, block_hash in blocks:
            events.add_stored(parent_hash, block_hash)
        return events.drain()

    @abstractmethod
    async def close(self) -> None:
        """Wait for copies in flight and release files, connections and threads."""


class MeasuredLoad:
    """A load of `blocks`, whose duration an estimate learns on exit. `loaded`: how many leading
    blocks are there."""

    def __init__(
        self,
        estimate: LoadEstimate,
        clock: Clock,
        block_bytes: int,
        blocks: int,
        on_loaded: Callable[[int], None],
    ) -> None:
        self.loaded = 0
        self.started_s = clock.now()
        self._estimate = estimate
        self._clock = clock
        self._block_bytes = block_bytes
        self._size = blocks * block_bytes
        self._on_loaded = on_loaded

    def report(self, count: int) -> None:
        """Report that the first `count` blocks are there."""
        self.loaded = count
        self._on_loaded(count)

    def __enter__(self) -> Self:
        self._estimate.start(self._size, self.started_s)
        return self

    def __exit__(self, *_: object) -> None:
        loaded_bytes = self.loaded * self._block_bytes
        self._estimate.finish_load(self._size, loaded_bytes, self.started_s, self._clock.now())


class MeasuredTier(KvTier):
    """A tier that learns the speed of its loads."""

    def __init__(self, block_bytes: int, clock: Clock, estimate: LoadEstimate) -> None:
        self.block_bytes = block_bytes
        self.counters = TierCounters()
        self._clock = clock
        self._estimate = estimate

    def predict_load_s(self, blocks: int) -> float:
        self._estimate.forget_old(self._clock.now())
        return self._estimate.predict_s(blocks * self.block_bytes)

    def measure_load(self, blocks: int, on_loaded: Callable[[int], None]) -> MeasuredLoad:
        """Return the context of a load of `blocks`, in which they are counted."""
        loaded = 0

        def count(progress: int) -> None:
            nonlocal loaded
            self.counters.loaded_blocks += progress - loaded
            loaded = progress
            on_loaded(progress)

        return MeasuredLoad(self._estimate, self._clock, self.block_bytes, blocks, count)

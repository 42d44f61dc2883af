"""The prefix cache of a foreign engine, known by its events, in blocks of the card's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from dynamo.core.hashing import TOKEN_BYTES, block_hashes, root_hash
from dynamo.core.reply import KvEventListener
from dynamo.core.values import KvEvent
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.engines.engine_events import (
    BlockKey,
    EngineBlocksCleared,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineEvent,
    EventBatch,
)

SPARE_FACTOR: Final = 2
"""The view holds at most so many times the engine's capacity. An engine holds each block once."""
UNKNOWN_CAPACITY_BLOCKS: Final = 1 << 20


class _HeldBlock:
    """A block that the engine holds. `hashes`: the blocks of the card's size that it consists of.
    `copies`: how often the engine has stored it. `salted`: its root has a salt."""

    __slots__ = ("copies", "hashes", "parent", "salted")

    def __init__(self, parent: int, hashes: Sequence[int], salted: bool) -> None:
        self.parent = parent
        self.hashes = tuple(hashes)
        self.salted = salted
        self.copies = 1


class EngineBlocks:
    """The blocks of one data-parallel rank. Not thread-safe.

    The events carry token ids, from which the hashes of `core/hashing.py` are computed: an engine's
    block of 32 tokens is two blocks of 16. Only blocks of a main attention group count. A block
    that the engine stores twice is held until it was removed twice.

    `counts` counts blocks and events that are not applied, by reason. `removals` increases whenever
    blocks leave the view. `clears` increases with each event of the engine that its cache is empty,
    and with each `clear`. `unusable` says why the view can tell nothing, and is "" while it can.
    Without `count_copies` the first removal of a block ends all its copies. `listeners` get
    what changes, which the methods also return.
    """

    def __init__(self, block_tokens: int, engine_block_tokens: int = 0) -> None:
        """`engine_block_tokens`: size of the engine's blocks; 0: that of the first event."""
        self.block_tokens = block_tokens
        self.engine_block_tokens = 0
        self.counts: Counter[str] = Counter()
        self.unusable = ""
        self.count_copies = True
        self.removals = 0
        self.clears = 0
        self._max_blocks = SPARE_FACTOR * UNKNOWN_CAPACITY_BLOCKS
        self._held: dict[BlockKey, _HeldBlock] = {}
        self._holders: Counter[int] = Counter()
        self._main_group: int | None = None
        self._was_reset = False
        self._events = KvEventBuffer()
        self.listeners: list[KvEventListener] = []
        if engine_block_tokens:
            self._set_size(engine_block_tokens)

    def set_capacity(self, blocks: int) -> None:
        """Bound the view for an engine that turns out to hold at most so many blocks."""
        self._max_blocks = SPARE_FACTOR * blocks

    def __len__(self) -> int:
        """Return the number of the engine's blocks in the view."""
        return len(self._held)

    def apply_batch(self, batch: EventBatch) -> None:
        """Apply the events of one step. After a damaged batch the view starts empty."""
        self.counts.update(batch.skipped)
        self.apply(batch.events)
        if batch.damaged:
            self.clear()

    def apply(self, events: Iterable[EngineEvent]) -> list[KvEvent]:
        """Apply events of the engine in order, and return what changed."""
        for event in events:
            if isinstance(event, EngineBlocksCleared):
                self._begin_anew()
            elif self._was_reset:
                self.counts["before_reset"] += 1
            elif isinstance(event, EngineBlocksStored):
                self._store(event)
            else:
                self._remove(event)
        return self._report()

    def clear(self) -> list[KvEvent]:
        """Forget all blocks. All later events are applied to the empty view, also after `reset`,
        whose event may be lost. Blocks below unknown ones are left out."""
        self._begin_anew()
        return self._report()

    def reset(self) -> list[KvEvent]:
        """Forget all blocks after the engine has emptied its cache. The engine's own event for it
        comes with its next step, perhaps hours later; events before that one are out of date. Do
        not call this if that event was applied already: all events until the next such one are
        dropped."""
        self._clear()
        self._was_reset = True
        return self._report()

    def distrust(self, reason: str) -> list[KvEvent]:
        """Forget all blocks and apply no more events, because of `reason`."""
        self.unusable = reason
        return self.clear()

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the view from nothing, parents first."""
        contents = {held.hashes[-1]: held for held in self._held.values()}
        buffer = KvEventBuffer()
        while contents:
            chain = []
            above: _HeldBlock | None = next(iter(contents.values()))
            while above is not None:
                chain.append(above)
                del contents[above.hashes[-1]]
                above = contents.get(above.parent)
            for held in reversed(chain):
                buffer.add_stored(held.parent, *held.hashes)
        return buffer.drain()

    def predict(self, token_ids: bytes, salt: str = "") -> int:
        """Return how many tokens of a prompt of packed u32 ids the engine will take from its cache:
        full blocks of the engine, and never the last token."""
        size = self.engine_block_tokens
        if self.unusable or not size:
            return 0
        hashes = block_hashes(token_ids[:-TOKEN_BYTES], self.block_tokens, root_hash(salt))
        each, blocks, holders = size // self.block_tokens, 0, self._holders
        for last in hashes[each - 1 :: each]:
            if last not in holders:
                break
            blocks += 1
        return blocks * size

    def _report(self) -> list[KvEvent]:
        events = self._events.drain()
        for listener in self.listeners if events else ():
            listener(events)
        return events

    def _store(self, event: EngineBlocksStored) -> None:
        count = len(event.keys)
        if not self._is_main_group(event) or not self._has_full_blocks(event):
            return
        parent = None if event.parent is None else self._held.get(event.parent)
        if event.parent is None:
            parent_hash, salted = root_hash(event.salt), bool(event.salt)
        elif parent is not None:
            parent_hash, salted = parent.hashes[-1], parent.salted
        else:
            self.counts["unknown_parent"] += count
            return
        usable = count if salted else min(count, event.foreign_from)
        self.counts["foreign"] += count - usable
        hashes = block_hashes(
            event.tokens[: usable * event.block_tokens * TOKEN_BYTES],
            self.block_tokens,
            parent_hash,
        )
        each = event.block_tokens // self.block_tokens
        for index, key in enumerate(event.keys[:usable]):
            block = hashes[index * each : (index + 1) * each]
            if len(self._held) >= self._max_blocks:
                self.counts["overflow"] += 1
                self._clear()
                return
            self._hold(key, _HeldBlock(parent_hash, block, salted))
            parent_hash = block[-1]

    def _hold(self, key: BlockKey, block: _HeldBlock) -> None:
        held = self._held.get(key)
        if held is not None:
            if held.hashes != block.hashes:
                self.counts["ambiguous"] += 1
                return
            self.counts["doubled"] += 1
            if self.count_copies:
                held.copies += 1
            return
        self._held[key] = block
        self._holders[block.hashes[-1]] += 1
        if self._holders[block.hashes[-1]] == 1:
            self._events.add_stored(block.parent, *block.hashes)

    def _remove(self, event: EngineBlocksRemoved) -> None:
        if event.group is not None and event.group != self._main_group:
            self.counts["other_group"] += len(event.keys)
            return
        for key in event.keys:
            held = self._held.get(key)
            if held is None:
                self.counts["unknown_removed"] += 1
                continue
            held.copies -= 1
            if not held.copies:
                self._release(key, held)

    def _release(self, key: BlockKey, held: _HeldBlock) -> None:
        del self._held[key]
        self.removals += 1
        last = held.hashes[-1]
        self._holders[last] -= 1
        if not self._holders[last]:
            del self._holders[last]
            self._events.add_removed(*reversed(held.hashes))

    def _begin_anew(self) -> None:
        self.clears += 1
        self._was_reset = False
        self._clear()

    def _clear(self) -> None:
        self.removals += 1
        self._held.clear()
        self._holders.clear()
        self._events.add_cleared()

    def _is_main_group(self, event: EngineBlocksStored) -> bool:
        """Whether the blocks are of the group that decides about hits: the first that calls itself
        main attention, or the only one where events do not tell."""
        if self._main_group is None and event.is_main is not False:
            self._main_group = event.group
        if event.is_main is None and event.group != self._main_group:
            self._distrust_once("its events do not tell which cache group is main attention")
        if event.is_main is False or event.group != self._main_group:
            self.counts["other_group"] += len(event.keys)
            return False
        return True

    def _has_full_blocks(self, event: EngineBlocksStored) -> bool:
        if not self.engine_block_tokens:
            self._set_size(event.block_tokens)
        if self.unusable:
            self.counts["unusable"] += len(event.keys)
        elif event.block_tokens < self.engine_block_tokens:
            self.counts["partial"] += len(event.keys)
        elif event.block_tokens > self.engine_block_tokens:
            self._distrust_once(
                f"it sent blocks of {event.block_tokens} tokens after such of "
                f"{self.engine_block_tokens}"
            )
        else:
            return True
        return False

    def _set_size(self, engine_block_tokens: int) -> None:
        self.engine_block_tokens = engine_block_tokens
        if engine_block_tokens % self.block_tokens:
            self._distrust_once(
                f"its blocks have {engine_block_tokens} tokens, which is no multiple of the "
                f"{self.block_tokens} of the model's card"
            )

    def _distrust_once(self, reason: str) -> None:
        if not self.unusable:
            self.unusable = reason
            self._clear()
